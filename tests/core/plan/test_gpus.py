"""Every GPU of a host is dealt out, none twice, and too few are refused with the count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hgx
import pytest
from commands import invoke

from kvbench.core.findings.setups import forced_tcp
from kvbench.core.plan.gpus import GpuNeed
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.errors import InputError
from kvbench.hosts.devices import rdma
from kvbench.planning.doctor.scenario import transport_checks
from kvbench.planning.gpu_dealing import VISIBLE, remote_device_env, require_gpus
from kvbench.planning.kubernetes import K8sOptions, manifests_of
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.planning.scenario_files import load_scenario, registry
from kvbench.processes.agent.answers import ANSWERS
from kvbench.report.findings.notes import notes
from kvbench.results.run import load_run
from kvbench.results.store import RunInfo, RunStore

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
    (folder / "topology").write_text(hgx.topology())
    topology = f'[ "$1" = topo ] && exec cat "{folder / "topology"}"'
    path.write_text(f"#!/bin/sh\n{topology}\ncat <<'EOF'\n" + "\n".join(rows) + "\nEOF\n")
    path.chmod(0o755)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as the recorded node of eight; the folder of its nvidia-smi."""
    hgx.write_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    return tmp_path


def scenario(
    engine: str = "vllm", options: dict[str, Any] | None = None, listed: str = "[nixl]", **deployment: Any
) -> Scenario:
    base = {"vllm": VLLM, "sglang": SGLANG}.get(engine, {})
    chosen = {
        "engine": engine, "base_port": 30000, "engine_options": {**base, **(options or {})}, **deployment,
    }  # fmt: skip
    text = (
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: {listed}\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    return parse_scenario(text, "x.yaml", registry())


def planned(case: Scenario, label: str = "nixl") -> DeploymentPlan:
    return next(deployment for deployment in plan_of(case).deployments if deployment.label == label)


def seen(case: Scenario, label: str = "nixl") -> dict[str, str | None]:
    """The CUDA_VISIBLE_DEVICES of each instance."""
    names = {instance.name for instance in planned(case, label).instances}
    made = process_specs(case, planned(case, label))
    return {spec.name: spec.env.get(VISIBLE) for spec in made if spec.name in names}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_four_and_four_get_a_gpu_each(node: Path, engine: str) -> None:
    case = scenario(engine, prefill=4, decode=4)
    found = seen(case)
    assert list(found) == [
        *(f"prefill-{rank}" for rank in range(4)),
        *(f"decode-{rank}" for rank in range(4)),
    ]
    assert list(found.values()) == [str(number) for number in range(8)]
    require_gpus(plan_of(case))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_ranks_get_neighbouring_gpus(node: Path, engine: str) -> None:
    found = seen(scenario(engine, prefill=1, decode=3, tensor_parallel_size=2))
    assert list(found.values()) == ["0,1", "2,3", "4,5", "6,7"]


def test_every_aggregated_server_of_the_plan_has_its_own(node: Path) -> None:
    case = scenario(listed="[aggregated, nixl]", prefill=2, decode=2, tensor_parallel_size=2)
    found = seen(case, "aggregated")
    shown = [devices.split(",") for devices in found.values() if devices]
    assert len(shown) == len(planned(case, "aggregated").instances)
    flat = [device for devices in shown for device in devices]
    assert flat == [str(number) for number in range(2 * len(shown))]


def test_what_the_environment_shows_is_dealt_out(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "7, GPU-5d1,3,2")
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["7", "GPU-5d1", "3", "2"]
    with pytest.raises(InputError, match=f"prefill 2 × 2, .*and {VISIBLE} names 4"):
        require_gpus(plan_of(scenario(prefill=2, decode=2, tensor_parallel_size=2)))
    monkeypatch.setenv(VISIBLE, "1,0,-1,2,3")
    with pytest.raises(InputError, match=f"and {VISIBLE} names 2 .lower"):
        require_gpus(plan_of(scenario(prefill=2, decode=2)))
    monkeypatch.setenv(VISIBLE, "")
    assert set(seen(scenario(prefill=4, decode=4)).values()) == {None}


def test_what_the_scenario_names_stays_and_is_dealt_to_nobody_else(node: Path) -> None:
    named = {"prefill_devices": ["6"], "decode_devices": ["6"]}  # shared on purpose
    case = scenario(options=named)
    assert list(seen(case).values()) == ["6", "6"]
    require_gpus(plan_of(case))
    assert list(seen(scenario(options={"prefill_devices": ["1"]}, prefill=2)).values()) == ["1", "0", "2"]
    assert list(seen(scenario(options={"env": {VISIBLE: "0,1"}})).values()) == ["0,1", "0,1"]
    both = {"prefill_devices": ["4", "5"], "decode_devices": ["6"]}
    lone = scenario(options=both, listed="[aggregated]", prefill=2)
    assert seen(lone, "aggregated")["aggregated-0"] == "4"
    hgx.write_smi(node, 1)
    words = r"needs 1 GPU \(decode 1 × 1\), and this host has 1, 0 of them not named by the scenario \(lower"
    with pytest.raises(InputError, match=words):
        require_gpus(plan_of(scenario(options={"prefill_devices": ["0"]})))
    hgx.write_smi(node, 8)
    chosen = scenario("sglang", {"prefill_args": {"base-gpu-id": 3}})
    assert list(seen(chosen).values()) == [None, "0"]


@pytest.mark.parametrize(("deployment", "text"), [
    ({"prefill": 4, "decode": 4}, "nixl needs 8 GPUs (prefill 4 × 1, decode 4 × 1), and this host has 4"),
    ({"prefill": 1, "decode": 2, "tensor_parallel_size": 2},
     "needs 6 GPUs (prefill 1 × 2, decode 2 × 2), and this host has 4"),
])  # fmt: skip
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_too_few_are_refused_by_count(node: Path, engine: str, deployment: dict[str, Any], text: str) -> None:
    hgx.write_smi(node, 4)
    with pytest.raises(InputError) as caught:
        require_gpus(plan_of(scenario(engine, **deployment)))
    assert caught.value.message.endswith(text)
    assert "prefill_devices" in caught.value.hint


@pytest.mark.parametrize(("engine", "arguments", "count"), [
    ("vllm", {}, 2), ("vllm", {"pipeline_parallel_size": 2}, 4), ("vllm", {"data-parallel-size": 4}, 8),
    ("vllm", {"data-parallel-size": 4, "data-parallel-size-local": 1}, 2), ("sglang", {"dp-size": 2}, 4),
    ("sglang", {"dp-size": 2, "enable-dp-attention": True}, 2), ("sglang", {"pp_size": 3}, 6),
    ("sglang", {"device": "cpu"}, 0),
])  # fmt: skip
def test_an_instance_takes_all_its_ranks(engine: str, arguments: dict[str, Any], count: int) -> None:
    from kvbench import engines

    deployed = scenario(engine, {"engine_args": arguments}, tensor_parallel_size=2).deployment
    ranks = deployed.ranks_of("prefill-0")
    assert engines.get(engine).gpus(deployed.engine_options, "prefill", 0, ranks) == GpuNeed(count)


def test_on_cpus_and_for_emulated_engines_nothing_is_dealt(node: Path) -> None:
    for case in (
        scenario(options={"version": "0.32.0+cpu"}, prefill=9, decode=9),
        scenario(options={"env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}, prefill=9, decode=9),
    ):
        assert set(seen(case).values()) == {None}
        require_gpus(plan_of(case))


def test_a_plan_without_gpus_reads_as_it_did(node: Path) -> None:
    """Runs of an older kvbench, whose plans know no devices, can be gone on with."""
    without = plan_of(scenario(options={"version": "0.32.0+cpu"})).to_json()
    assert not any("devices" in instance for made in without["deployments"] for instance in made["instances"])
    dealt = plan_of(scenario()).to_json()
    assert [instance["devices"] for instance in dealt["deployments"][1]["instances"]] == [("0",), ("1",)]


def test_commands_for_a_machine_that_is_not_this_one(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed, as by `kvbench launch --print`: on one host in turn; one alone there is told none."""
    hgx.write_smi(node, 1)
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["0", "1", "2", "3"]
    (node / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(node))
    assert list(seen(scenario(prefill=2, decode=2)).values()) == ["0", "1", "2", "3"]
    apart = scenario(prefill=1, decode=2, host="10.0.0.1", decode_host="10.0.0.2")
    assert list(seen(apart).values()) == [None, "0", "1"]


# --- hosts far away
def far(hosts: dict[str, dict[str, Any]], roles: dict[str, Any], **deployment: Any) -> Scenario:
    named = {
        name: {"address": f"10.0.0.{number}", **host} for number, (name, host) in enumerate(hosts.items())
    }
    return scenario(deployment.pop("engine", "vllm"), hosts=named, roles=roles, launcher="ssh", **deployment)


def far_seen(case: Scenario, answers: dict[str, dict[str, Any]] | None = None) -> dict[str, str]:
    given = remote_device_env(case, planned(case), answers)
    return {process: env[VISIBLE] for process, env in given.items()}


EIGHT = {"used_bytes": {str(number): 0 for number in range(8)}, "visible": None}
"""What an agent on a host of eight GPUs answers to ``gpus``, as it comes over the wire."""


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_on_hosts_far_away_each_gets_its_own_too(engine: str) -> None:
    case = far({"a": {}, "b": {}}, {"prefill": "a", "decode": "b"}, engine=engine, prefill=4, decode=4)
    found = far_seen(case, {"a": EIGHT, "b": EIGHT})
    assert list(found.values()) == ["0", "1", "2", "3"] * 2
    one = far({"a": {}}, {"prefill": "a", "decode": "a"}, engine=engine, tensor_parallel_size=4)
    assert far_seen(one, {"a": EIGHT}) == {"prefill-0": "0,1,2,3", "decode-0": "4,5,6,7"}
    two = {**EIGHT, "used_bytes": {"0": 0, "1": 0}}
    with pytest.raises(InputError, match=r"prefill 1 × 4, decode 1 × 4\), and host a has 2"):
        far_seen(one, {"a": two})


def test_what_a_scheduler_shows_is_what_is_dealt_out() -> None:
    """Slurm's and Ray's choice stands in the agent's CUDA_VISIBLE_DEVICES; Ray's empty one hides all."""
    case = far({"a": {}}, {"prefill": "a", "decode": "a"}, prefill=2, decode=2)
    assert list(far_seen(case, {"a": {**EIGHT, "visible": "7,5,3,1"}}).values()) == ["7", "5", "3", "1"]
    with pytest.raises(InputError, match="CUDA_VISIBLE_DEVICES of host a names 2"):
        far_seen(case, {"a": {**EIGHT, "visible": "4,5"}})
    assert far_seen(case, {"a": {**EIGHT, "visible": ""}}) == {}


def test_named_devices_of_a_host_count_before_what_its_agent_reports() -> None:
    case = far({"a": {"devices": [6, 7]}}, {"prefill": "a", "decode": "a"})
    assert far_seen(case, {"a": EIGHT}) == far_seen(case) == {"prefill-0": "6", "decode-0": "7"}
    more = far({"a": {"devices": [6, 7]}}, {"prefill": "a", "decode": "a"}, prefill=2)
    with pytest.raises(InputError, match=r"nixl needs 3 GPUs .* and the devices of host a are 2"):
        require_gpus(plan_of(more))
    emulated = far({"a": {"devices": [0, 1, 2, 3]}}, {"prefill": "a", "decode": "a"}, engine="emulated",
                   tensor_parallel_size=2)  # fmt: skip
    assert far_seen(emulated) == {"prefill-0": "0,1", "decode-0": "2,3"}


def test_far_away_too_what_the_scenario_names_stays() -> None:
    named = {"engine_options": {**VLLM, "prefill_devices": ["1"]}}
    case = far({"a": {}}, {"prefill": "a", "decode": "a"}, decode=2, **named)
    assert far_seen(case, {"a": EIGHT}) == {"decode-0": "0", "decode-1": "2"}


def test_where_nothing_is_known_of_a_host_nothing_is_made_up_for_one_alone() -> None:
    case = far({"a": {}, "b": {}}, {"prefill": "a", "decode": "b"})
    assert far_seen(case) == far_seen(case, {"a": {"error": "gone"}, "b": {"used_bytes": {}}}) == {}


def test_an_agent_reports_what_its_environment_shows(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (node / "nvidia-smi").write_text("#!/bin/sh\nprintf '0, 12\\n1, 0\\n'\n")
    assert ANSWERS["gpus"](node, {}) == {"used_bytes": {0: 12 * 2**20, 1: 0}, "visible": None}
    monkeypatch.setenv(VISIBLE, "1")
    assert ANSWERS["gpus"](node, {})["visible"] == "1"


def test_tcp_beside_active_rdma_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = rdma(hgx.machine(tmp_path))
    ask = (
        "[{name: mooncake, protocol: tcp}, {name: nixl, ucx_tls: 'tcp,cuda_copy'}, {name: nixl, label: free}]"
    )
    case = scenario(listed=ask)
    found = list(transport_checks(case, plan_of(case), listed))
    assert [check.detail.split()[0] for check in found] == ["mooncake", "nixl"]
    assert all(check.status == "warn" and "mlx5_0" in check.detail for check in found)
    assert "UCX_TLS=tcp,cuda_copy" in found[1].detail
    assert "mlx5_4" not in found[0].detail  # a storage port without a link
    assert list(transport_checks(case, plan_of(case), [])) == []
    emulated = scenario("emulated", {}, "[mooncake]")
    assert list(transport_checks(emulated, plan_of(emulated), listed)) == []
    monkeypatch.setenv("UCX_TLS", "tcp")  # some images set it, and vLLM inherits it
    plain = scenario()
    (inherited,) = transport_checks(plan=plan_of(plain), scenario=plain, listed=listed)
    assert "UCX_TLS=tcp)" in inherited.detail


@pytest.mark.parametrize(("env", "argv", "forced"), [
    ({"UCX_TLS": "tcp,cuda_copy,cuda_ipc"}, [], True), ({"UCX_TLS": "rc,tcp"}, [], False),
    ({"UCX_TLS": "all"}, [], False), ({"UCX_TLS": "^ib"}, [], True), ({"UCX_TLS": "^cma"}, [], False),
    ({"UCX_TLS": "cuda_ipc,sm"}, [], False), ({"MC_FORCE_TCP": "0"}, [], True),
    ({"MC_FORCE_HCA": "1"}, [], False), ({"NCCL_IB_DISABLE": "1"}, [], True),
    ({}, ["--disaggregation-transfer-backend", "mooncake_tcp"], True), ({}, [], False),
])  # fmt: skip
def test_what_forces_tcp(env: dict[str, str], argv: list[str], forced: bool) -> None:
    assert bool(forced_tcp(argv, env)) == forced


def test_the_report_says_it_of_what_was_started(tmp_path: Path) -> None:
    """From the run folder alone: the commands of plan.json, and each host's devices of environment.json."""
    case = scenario(listed="[{name: nixl, ucx_tls: tcp}, aggregated]")
    plan = plan_of(case)
    processes = {
        deployment.label: {spec.name: spec.to_json() for spec in process_specs(case, deployment)}
        for deployment in plan.deployments
    }
    far = {"a": {"rdma": rdma(hgx.machine(tmp_path / "node"))}, "b": {"rdma": []}}
    made = {**plan.to_json(), "processes": processes}
    with RunStore.create(tmp_path / "runs", "x", b"version: 1", made, {"hosts": far}, RunInfo()) as store:
        (note,) = [remark for remark in notes(load_run(store.path), []) if "over TCP" in remark.text]
    assert note.text.startswith("nixl is configured to move KV over TCP (UCX_TLS=tcp) although RDMA")
    assert "mlx5_0 of a" in note.text


def test_the_cpu_lab_asks_for_what_cpus_have() -> None:
    case, _ = load_scenario("vllm-cpu-tiny")
    for name, variable in (("nixl", "UCX_TLS"), ("nixl_push", "UCX_TLS"), ("mooncake", "MC_FORCE_TCP")):
        made = process_specs(case, planned(case, name))[0]
        assert made.env[variable] in ("tcp", "1")
    config = process_specs(case, planned(case, "nixl"))[0].argv[-1]
    assert json.loads(config)["kv_connector_extra_config"] == {"backends": ["UCX"], "num_threads": 0}


def test_pods_are_given_theirs_by_kubernetes(node: Path) -> None:
    case = scenario(prefill=2, decode=2)
    text = json.dumps(manifests_of(case, planned(case), K8sOptions(image="x")))
    assert VISIBLE not in text


def test_plan_and_doctor_say_where_each_gpu_sits(node: Path, tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    chosen = {"engine": "vllm", "prefill": 1, "decode": 4, "base_port": 0, "engine_options": VLLM}
    path.write_text(
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: [nixl]\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    text = " ".join(invoke("plan", str(path)).out.split())
    assert "note: GPU 0: NUMA node 0; nearest RDMA mlx5_0 (PXB); NVLink to 7 GPUs (NV18)" in text
    assert "note: GPU 4: NUMA node 1; nearest RDMA mlx5_5 (PXB)" in text
    assert "note: GPU 5" not in text  # nobody gets it
    assert "gpu 7 NUMA node 1; nearest RDMA mlx5_8" in " ".join(invoke("doctor").out.split())


def test_plan_launch_sweep_and_doctor_say_the_same(node: Path, tmp_path: Path) -> None:
    hgx.write_smi(node, 4)
    path = tmp_path / "four.yaml"
    chosen = {"engine": "vllm", "prefill": 4, "decode": 4, "base_port": 0, "engine_options": VLLM}
    path.write_text(
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: [nixl]\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    message = "nixl needs 8 GPUs (prefill 4 × 1, decode 4 × 1), and this host has"
    for words in (["plan"], ["launch"], ["sweep", "--output", str(tmp_path / "out")], ["doctor"]):
        done = invoke(words[0], str(path), *words[1:])
        assert done.status != 0
        # The doctor's table breaks its lines.
        wanted = "nixl needs 8 GPUs" if words == ["doctor"] else message
        assert wanted in " ".join(done.text.split()), words
    assert not (tmp_path / "out").exists()
