"""Every GPU of a host is dealt out, none twice, and too few are refused with the count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hgx
import pytest
from commands import kvbench

from kvbench.core.plan.gpus import GpuNeed
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.errors import InputError
from kvbench.hosts.devices import rdma
from kvbench.planning.doctor.scenario import transport_checks
from kvbench.planning.gpu_dealing import VISIBLE, require_gpus
from kvbench.planning.kubernetes import manifests_of
from kvbench.planning.kubernetes_pods import K8sOptions
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.planning.scenario_files import load_scenario, registry

VLLM: dict[str, Any] = {"model": "m", "version": "0.33.0"}
SGLANG: dict[str, Any] = {"model": "m"}
MIB_H200 = 143_771


def write_smi(folder: Path, count: int) -> None:
    """An nvidia-smi that lists so many of the recorded node's GPUs, in the format that is asked for."""
    rows = [
        f"{card['index']}, NVIDIA H200, {MIB_H200}, 570.86, {card['pci_address'].upper()}, P0"
        for card in hgx.CARDS[:count]
    ]
    path = folder / "nvidia-smi"
    path.write_text("#!/bin/sh\ncat <<'EOF'\n" + "\n".join(rows) + "\nEOF\n")
    path.chmod(0o755)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as the recorded node of eight; the folder of its nvidia-smi."""
    write_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    return tmp_path


def scenario(
    engine: str = "vllm", options: dict[str, Any] | None = None, listed: str = "[nixl]", **deployment: Any
) -> Scenario:
    base = {"vllm": VLLM, "sglang": SGLANG}.get(engine, {})
    chosen = {
        "engine": engine,
        "base_port": 30000,
        "engine_options": {**base, **(options or {})},
        **deployment,
    }
    text = (
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: {listed}\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    return parse_scenario(text, "x.yaml", registry())


def planned(asked: Scenario, label: str = "nixl") -> DeploymentPlan:
    return next(each for each in plan_of(asked).deployments if each.label == label)


def seen(asked: Scenario, label: str = "nixl") -> dict[str, str | None]:
    """The CUDA_VISIBLE_DEVICES of each instance."""
    names = {each.name for each in planned(asked, label).instances}
    made = process_specs(asked, planned(asked, label))
    return {spec.name: spec.env.get(VISIBLE) for spec in made if spec.name in names}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_four_and_four_get_a_gpu_each(node: Path, engine: str) -> None:
    asked = scenario(engine, prefill=4, decode=4)
    found = seen(asked)
    assert list(found) == [
        *(f"prefill-{rank}" for rank in range(4)),
        *(f"decode-{rank}" for rank in range(4)),
    ]
    assert list(found.values()) == [str(number) for number in range(8)]
    require_gpus(plan_of(asked))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_ranks_get_neighbouring_gpus(node: Path, engine: str) -> None:
    found = seen(scenario(engine, prefill=1, decode=3, tensor_parallel_size=2))
    assert list(found.values()) == ["0,1", "2,3", "4,5", "6,7"]


def test_every_aggregated_server_of_the_plan_has_its_own(node: Path) -> None:
    asked = scenario(listed="[aggregated, nixl]", prefill=2, decode=2, tensor_parallel_size=2)
    found = seen(asked, "aggregated")
    shown = [devices.split(",") for devices in found.values() if devices]
    assert len(shown) == len(planned(asked, "aggregated").instances)
    flat = [device for devices in shown for device in devices]
    assert flat == [str(number) for number in range(2 * len(shown))]


def test_what_the_environment_shows_is_dealt_out(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "7, GPU-5d1,3,2")
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["7", "GPU-5d1", "3", "2"]
    with pytest.raises(InputError, match=f"× TP 2; {VISIBLE} names 4"):
        require_gpus(plan_of(scenario(prefill=2, decode=2, tensor_parallel_size=2)))
    monkeypatch.setenv(VISIBLE, "")
    assert set(seen(scenario(prefill=4, decode=4)).values()) == {None}


def test_what_the_scenario_names_stays_and_is_dealt_to_nobody_else(node: Path) -> None:
    named = {"prefill_devices": ["6"], "decode_devices": ["6"]}  # shared on purpose
    asked = scenario(options=named)
    assert list(seen(asked).values()) == ["6", "6"]
    require_gpus(plan_of(asked))
    assert list(seen(scenario(options={"prefill_devices": ["1"]}, prefill=2)).values()) == ["1", "0", "2"]
    assert list(seen(scenario(options={"env": {VISIBLE: "0,1"}})).values()) == ["0,1", "0,1"]
    both = {"prefill_devices": ["4", "5"], "decode_devices": ["6"]}
    lone = scenario(options=both, listed="[aggregated]", prefill=2)
    assert seen(lone, "aggregated")["aggregated-0"] == "4"
    chosen = scenario("sglang", {"prefill_args": {"base-gpu-id": 3}})
    assert list(seen(chosen).values()) == [None, "0"]


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        ({"prefill": 4, "decode": 4}, "nixl needs 8 GPUs: 4 prefill + 4 decode × TP 1; this host has 4"),
        (
            {"prefill": 1, "decode": 2, "tensor_parallel_size": 2},
            "needs 6 GPUs: 1 prefill + 2 decode × TP 2; ",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_too_few_are_refused_with_the_count(
    node: Path, engine: str, deployment: dict[str, Any], said: str
) -> None:
    write_smi(node, 4)
    with pytest.raises(InputError) as told:
        require_gpus(plan_of(scenario(engine, **deployment)))
    assert said in told.value.message
    assert "prefill_devices" in told.value.hint


@pytest.mark.parametrize(
    ("engine", "arguments", "count"),
    [
        ("vllm", {}, 2),
        ("vllm", {"pipeline_parallel_size": 2}, 4),
        ("vllm", {"data-parallel-size": 4}, 8),
        ("vllm", {"data-parallel-size": 4, "data-parallel-size-local": 1}, 2),
        ("sglang", {"dp-size": 2}, 4),
        ("sglang", {"dp-size": 2, "enable-dp-attention": True}, 2),
        ("sglang", {"pp_size": 3}, 6),
        ("sglang", {"device": "cpu"}, 0),
    ],
)
def test_an_instance_takes_all_its_ranks(engine: str, arguments: dict[str, Any], count: int) -> None:
    from kvbench import engines

    options = scenario(engine, {"engine_args": arguments}).deployment.engine_options
    assert engines.get(engine).gpus(options, "prefill", 0, 2) == GpuNeed(count)


def test_on_cpus_and_for_emulated_engines_nothing_is_dealt(node: Path) -> None:
    for asked in (
        scenario(options={"version": "0.32.0+cpu"}, prefill=9, decode=9),
        scenario(options={"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}, prefill=9, decode=9),
    ):
        assert set(seen(asked).values()) == {None}
        require_gpus(plan_of(asked))


def test_a_plan_without_gpus_reads_as_it_did(node: Path) -> None:
    """Runs of an older kvbench, whose plans know no devices, can be gone on with."""
    without = plan_of(scenario(options={"version": "0.32.0+cpu"})).to_json()
    assert not any("devices" in each for made in without["deployments"] for each in made["instances"])
    dealt = plan_of(scenario()).to_json()
    assert [each["devices"] for each in dealt["deployments"][1]["instances"]] == [("0",), ("1",)]


def test_commands_for_a_machine_that_is_not_this_one(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, as by `kvbench launch --print`: on one host in turn; one alone there is told none."""
    write_smi(node, 1)
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["0", "1", "2", "3"]
    (node / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(node))
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["0", "1", "2", "3"]
    apart = scenario(prefill=1, decode=2, host="10.0.0.1", decode_host="10.0.0.2")
    assert list(seen(apart).values()) == [None, "0", "1"]


def test_tcp_beside_active_rdma_is_told(tmp_path: Path) -> None:
    listed = rdma(hgx.machine(tmp_path))
    ask = "[{name: mooncake, protocol: tcp}, {name: nixl, ucx_tls: tcp}, {name: nixl, label: free}]"
    found = list(transport_checks(scenario(listed=ask), listed))
    assert [check.name for check in found] == ["transport of mooncake", "transport of nixl"]
    assert all(check.status == "warn" and "mlx5_0" in check.detail for check in found)
    assert "mlx5_4" not in found[0].detail  # a storage port without a link
    assert list(transport_checks(scenario(listed=ask), [])) == []
    assert list(transport_checks(scenario("emulated", {}, "[mooncake]"), listed)) == []


def test_the_cpu_lab_asks_for_what_cpus_have() -> None:
    asked, _ = load_scenario("vllm-cpu-tiny")
    for name, variable in (("nixl", "UCX_TLS"), ("nixl_push", "UCX_TLS"), ("mooncake", "MC_FORCE_TCP")):
        made = process_specs(asked, planned(asked, name))[0]
        assert made.env[variable] in ("tcp", "1")
    config = process_specs(asked, planned(asked, "nixl"))[0].argv[-1]
    assert json.loads(config)["kv_connector_extra_config"] == {"backends": ["UCX"], "num_threads": 0}


def test_pods_are_given_theirs_by_kubernetes(node: Path) -> None:
    asked = scenario(prefill=2, decode=2)
    text = json.dumps(manifests_of(asked, planned(asked), K8sOptions(image="x")))
    assert VISIBLE not in text


def test_plan_launch_sweep_and_doctor_say_the_same(node: Path, tmp_path: Path) -> None:
    write_smi(node, 4)
    path = tmp_path / "four.yaml"
    chosen = {"engine": "vllm", "prefill": 4, "decode": 4, "base_port": 0, "engine_options": VLLM}
    path.write_text(
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: [nixl]\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    said = "nixl needs 8 GPUs: 4 prefill + 4 decode × TP 1; this host has"
    for words in (["plan"], ["launch"], ["sweep", "--output", str(tmp_path / "out")], ["doctor"]):
        done = kvbench(words[0], str(path), *words[1:])
        assert done.status != 0
        assert said in " ".join(done.text.split()), words
    assert not (tmp_path / "out").exists()
