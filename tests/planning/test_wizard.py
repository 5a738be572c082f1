"""`kvbench init`: asked at a real terminal, and the file that comes of it."""

import json
import os
import pty
import select
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commands import DEADLINE_S, argv, invoke

from kvbench.core.physics import MODELS
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.engines.base import Installed
from kvbench.hosts.version_rules import Check
from kvbench.planning.init import Answers, machine_lines, scenario_text, shape_of
from kvbench.planning.init_elsewhere import FoundMachine, able_connectors, look_around
from kvbench.planning.scenario_files import load_scenario, registry

CARD = {"index": "0", "name": "NVIDIA H200", "memory_bytes": 141 * 2**30}
ANSWERS = Answers("vllm", "Qwen/Qwen3-8B", MODELS["qwen3-8b"], ("aggregated",), (1024,), 128, 1000.0, 50.0)
CTRL_C = "Ctrl-C"
CONFIG = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128,
    "vocab_size": 4096, "torch_dtype": "float32",
}  # fmt: skip


def run_init(folder: Path, answers: list[str], *words: str) -> tuple[int, str]:
    """Runs init at a terminal of its own and types the answers, each when it is asked for."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        argv("init", *words), cwd=folder, stdin=slave, stdout=slave, stderr=slave, close_fds=True
    )
    os.close(slave)
    shown, left, deadline = "", list(answers), time.monotonic() + DEADLINE_S
    answered, again = 0, float("inf")
    try:
        while time.monotonic() < deadline:
            # A signal between the prompt and the read behind it interrupts nothing: one presses again.
            if time.monotonic() > again:
                process.send_signal(signal.SIGINT)
                again += 5
            if not select.select([master], [], [], 0.1)[0]:
                if process.poll() is not None:
                    break
                continue
            try:
                data = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            if not data:
                break
            shown += data.decode("utf-8", "replace")
            if left and shown[answered:].rstrip(" ").endswith("]:"):
                answered = len(shown)
                answer = left.pop(0)
                if answer == CTRL_C:
                    process.send_signal(signal.SIGINT)
                    again = time.monotonic() + 5
                else:
                    os.write(master, answer.encode() + b"\n")
        return process.wait(DEADLINE_S), shown
    finally:
        process.kill()
        process.wait()
        os.close(master)


def scenario_of(path: Path) -> Scenario:
    return load_scenario(str(path))[0]


def test_without_a_terminal_it_asks_for_yes(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    done = subprocess.run(
        argv("init", str(path)), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert not path.exists()


def test_with_yes_the_file_is_for_this_machine_and_can_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "mine.yaml"
    done = invoke("init", str(path), "--yes", env={"PATH": "/usr/bin:/bin"}).succeeded()
    assert f"kvbench sweep {path}" in done.out
    scenario = scenario_of(path)
    assert (scenario.name, scenario.deployment.engine) == ("mine", "emulated")
    assert {"aggregated", "tcp"} <= {connector.name for connector in scenario.connectors}
    assert path.read_text().count("#") > 10
    assert invoke("plan", str(path), sets=("deployment.base_port=0",)).status == 0


def test_a_file_is_replaced_only_with_force(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine\n")
    invoke("init", str(path), "--yes").failed(2, "--force")
    assert path.read_text() == "mine\n"
    assert invoke("init", str(path), "--yes", "--force").status == 0
    assert scenario_of(path).slo.ttft_ms


def test_answers_go_into_the_file_and_wrong_ones_are_asked_again(tmp_path: Path) -> None:
    engine = ["emulated"] if "vllm" in look_around().engines else []
    answers = [*engine, "tinny", "qwen3-8b", "tcp", "512, 2048", "1", "32", "-5", "300", "20"]
    status, shown = run_init(tmp_path, answers, "mine.yaml")
    assert status == 0, shown
    assert "a preset" in shown
    assert "a whole number from 2:" in shown
    assert "above 0" in shown
    scenario = scenario_of(tmp_path / "mine.yaml")
    assert scenario.model.name == "qwen3-8b"
    assert [connector.name for connector in scenario.connectors] == ["tcp"]
    assert scenario.workload.input_len == (512, 2048)
    assert scenario.workload.output_len == 32
    assert (scenario.slo.ttft_ms, scenario.slo.tpot_ms) == (300, 20)


def test_ctrl_c_leaves_no_file(tmp_path: Path) -> None:
    status, shown = run_init(tmp_path, [CTRL_C], "mine.yaml")
    assert status == 130
    assert "interrupted" in shown
    assert list(tmp_path.iterdir()) == []


# What is written for other machines
def vllm_at(command: str) -> dict[str, Installed]:
    return {"vllm": Installed(command, "0.33.0")}


def parsed(answers: Answers, machine: FoundMachine, able: list[Check] | None = None) -> Scenario:
    return parse_scenario(scenario_text(answers, machine, able or []), "mine.yaml", registry())


def test_two_gpus_are_one_for_each_role() -> None:
    machine = FoundMachine(gpus=(CARD, {**CARD, "index": "1"}), engines=vllm_at("/opt/my vllm/vllm"))
    options = parsed(ANSWERS, machine).deployment.engine_options
    assert options.command == ("/opt/my vllm/vllm",)
    assert (options.prefill_devices, options.decode_devices) == (("0",), ("1",))
    assert options.max_model_len == 1152


def test_one_gpu_is_shared() -> None:
    options = parsed(ANSWERS, FoundMachine(gpus=(CARD,), engines=vllm_at("vllm"))).deployment.engine_options
    assert options.prefill_devices == options.decode_devices == ("0",)
    assert options.gpu_memory_utilization < 0.5


def test_rdma_devices_go_into_the_connectors() -> None:
    answers = replace(ANSWERS, connectors=("mooncake", "nixl"))
    machine = FoundMachine(gpus=(CARD, CARD), nics=("mlx5_0", "mlx5_1"), engines=vllm_at("vllm"))
    mooncake, nixl = parsed(answers, machine).connectors
    assert (mooncake.options.protocol, mooncake.options.device_name) == ("rdma", "mlx5_0,mlx5_1")
    assert nixl.options.ucx_tls == ""  # UCX knows what GPU memory needs
    assert nixl.options.ucx_net_devices == "mlx5_0:1,mlx5_1:1"
    mooncake, nixl = parsed(answers, replace(machine, nics=("rdmap79s0",), efa=True)).connectors
    assert (mooncake.options.device_name, nixl.options.backends) == ("", ("LIBFABRIC",))


def test_what_cannot_run_is_a_comment() -> None:
    able = [Check("aggregated", "ok", ""), Check("nixl", "missing", "a cause\nin two lines", "a fix")]
    text = scenario_text(ANSWERS, FoundMachine(engines=vllm_at("vllm")), able)
    assert "  # nixl cannot run here: a cause in two lines\n" in text
    assert parsed(ANSWERS, FoundMachine(engines=vllm_at("vllm")), able)


def test_a_vllm_without_the_library_cannot_run_its_connector() -> None:
    vllm = Path(os.__file__)  # any file that is there
    machine = FoundMachine(engines={"vllm": Installed(str(vllm), "0.32.0", {"nixl": "1.5.1"})})
    found = {connector.name: connector.detail for connector in able_connectors("vllm", machine)}
    assert "tcp" not in found
    if not found["aggregated"]:  # there is a vllm on the PATH
        assert found["nixl"] == ""
        assert "mooncake-transfer-engine" in found["mooncake"]


def test_what_was_found_is_told() -> None:
    assert machine_lines(FoundMachine(gpus=(CARD,), nics=("mlx5_0",), engines=vllm_at("/opt/vllm"))) == [
        "GPUs      NVIDIA H200",
        "RDMA      mlx5_0",
        "vLLM      0.33.0 at /opt/vllm",
    ]


@pytest.mark.parametrize(
    ("changes", "per_token"),
    [
        ({}, 2 * 2 * 2 * 32 * 4),
        ({"head_dim": 64, "dtype": "bfloat16"}, 2 * 2 * 2 * 64 * 2),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "dtype": "bfloat16"}, 2 * 576 * 2),
    ],
)
def test_a_shape_from_config_json(tmp_path: Path, changes: dict[str, object], per_token: int) -> None:
    folder = tmp_path / "My Model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    shape = shape_of(str(folder))
    assert (shape.name, shape.kv_bytes_per_token()) == ("My-Model", per_token)
    scenario = parsed(replace(ANSWERS, engine="emulated", shape=shape), FoundMachine())
    assert scenario.model.shape.kv_bytes_per_token() == per_token


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": "x"}'])
def test_a_config_that_does_not_tell(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert shape_of(str(tmp_path)) is None
    assert shape_of(str(tmp_path / "absent")) is None
