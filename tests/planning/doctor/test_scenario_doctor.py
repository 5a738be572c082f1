"""`kvbench doctor SCENARIO`: what it finds before anything is started."""

import json
import socket
from pathlib import Path

import pytest
from commands import invoke

from kvbench.core.scenario.scenario import Scenario
from kvbench.hosts.version_rules import Check
from kvbench.planning.doctor.scenario import (
    GIB,
    examine_scenario,
    gpu_memory_check,
    launcher_check,
    memory_checks,
    model_check,
    weight_bytes,
)
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import load_scenario

FREE = "deployment.base_port=0"


def scenario(*overrides: str) -> Scenario:
    return load_scenario("quickstart", overrides)[0]


def real(model: str, *overrides: str) -> Scenario:
    options = json.dumps({"model": model, "version": "0.32.0", "command": ["vllm"]})
    engine = ("deployment.engine=vllm", f"deployment.engine_options={options}")
    return scenario(*engine, "model=qwen3-8b", "workload.input_len=[32768]", *overrides)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_scenario_that_can_run() -> None:
    found = by_name(examine_scenario("quickstart", [FREE]))
    assert found["scenario quickstart"].status == "ok"
    assert (found["aggregated on emulated"].status, found["launcher local"].status) == ("ok", "ok")
    assert found["host memory"].status == "ok"
    assert "chosen at launch" in found["ports of the plan"].detail
    assert all(check.fix for check in found.values() if check.status != "ok")


def test_a_port_of_its_plan_that_is_taken() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        first = max(1024, min(port - 2, 65_000))
        found = by_name(examine_scenario("quickstart", [f"deployment.base_port={first}"]))
    assert found["ports of the plan"].status == "missing"
    assert str(port) in found["ports of the plan"].detail


def test_a_host_that_is_not_this_machine() -> None:
    check = launcher_check(scenario("deployment.host=192.0.2.1"))
    assert check.status == "missing"
    assert "192.0.2.1" in check.detail
    assert launcher_check(scenario()).status == "ok"


def test_kv_pools_that_do_not_fit_the_host() -> None:
    big = scenario("model=llama-3.1-70b", "workload.input_len=[100000]", FREE)
    (check,) = memory_checks(big, plan_of(big), [])
    assert check.status == "missing"
    assert "max_num_seqs" in check.fix


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(bytes(3000))
    (tmp_path / "b.safetensors").write_bytes(bytes(1000))
    return tmp_path


def test_model_folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert model_check(real(str(model))).status == "ok"
    assert model_check(real(str(model / "absent"))).status == "missing"
    assert "config.json" in model_check(real(str(tmp_path_factory.mktemp("empty")))).detail
    assert "cache or downloads" in model_check(real("Qwen/Qwen3-8B")).detail
    assert "needs no files" in model_check(scenario()).detail


def test_weights_are_counted_from_the_index_or_the_files(model: Path) -> None:
    assert weight_bytes(model) == 4000
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 5}}')
    assert weight_bytes(model) == 5
    (model / "model.safetensors.index.json").write_text("[]")
    assert weight_bytes(model) == 4000


def test_gpu_memory_is_computed_from_the_shape(model: Path) -> None:
    # 147,456 bytes × (32,768 + 16) tokens are 4.5 GiB; of 24 GiB vLLM takes 92 %.
    check = gpu_memory_check(real("Qwen/Qwen3-8B"), 24 * GIB)
    assert check.status == "ok"
    assert "room for 4 of them" in check.detail
    assert "not known" in check.detail
    (model / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 16381470720}}')
    weighed = gpu_memory_check(real(str(model)), 24 * GIB)
    assert "15.3 GiB of weights" in weighed.detail
    assert "room for 1 of them" in weighed.detail
    assert gpu_memory_check(real(str(model)), 16 * GIB).status == "missing"
    split = gpu_memory_check(real(str(model), "deployment.tensor_parallel_size=2"), 16 * GIB)
    assert split.status == "ok"


def test_gpus_are_counted(model: Path) -> None:
    wanted = real(str(model), "deployment.tensor_parallel_size=4", FREE)
    card = {"memory_bytes": 141 * GIB}
    found = {check.name: check for check in memory_checks(wanted, plan_of(wanted), [card] * 4)}
    assert found["gpus"].status == "missing"
    assert "needs 8 GPUs (aggregated 2 × 4), and this host has 4" in found["gpus"].detail
    assert "prefill_devices" in found["gpus"].fix
    found = {check.name: check for check in memory_checks(wanted, plan_of(wanted), [card] * 8)}
    assert found["gpus"].status == "ok"


def test_the_command_puts_the_scenario_first() -> None:
    done = invoke("doctor", "quickstart", sets=(FREE, "deployment.host=192.0.2.1")).failed(1)
    lines = done.out.splitlines()
    assert "scenario quickstart" in lines[1]
    assert any("launcher local" in line and "192.0.2.1" in line for line in lines)
    assert any(line.split()[1:2] == ["python"] for line in lines)


def test_a_vllm_that_is_not_there_is_named() -> None:
    options = json.dumps({"model": "/absent/model", "command": ["/absent/vllm"], "version": "0.32.0"})
    sets = ("deployment.engine=vllm", f"deployment.engine_options={options}", FREE)
    done = invoke("doctor", "quickstart", sets=sets).failed(1)
    assert "unknown command '/absent/vllm'" in done.out
    assert "/absent/model does not exist" in done.out


def test_a_wrong_scenario_is_told_as_everywhere() -> None:
    invoke("doctor", "quickstrt").failed(2, "did you mean quickstart?")
