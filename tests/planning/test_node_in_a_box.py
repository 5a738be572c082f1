"""Every bundled scenario on a recorded node of eight H200, against what each vLLM release's sources take."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import hgx
import pytest
from commands import invoke
from recorded_vllm import arguments, bound_ports, config_problems, recorded, versions

from kvbench import connectors
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.ranks import Ranks
from kvbench.core.scenario.scenario import Scenario
from kvbench.engines.parts.vllm_options import VllmOptions
from kvbench.errors import InputError, LabError
from kvbench.hosts.lab.hosts import may_use_netns, run, tool
from kvbench.planning.gpu_dealing import VISIBLE
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.planning.scenario_files import load_scenario

SCENARIOS = sorted(path.stem for path in (Path(__file__).parents[2] / "scenarios").glob("*.yaml"))
ON_VLLM = [name for name in SCENARIOS if load_scenario(name)[0].deployment.engine == "vllm"]
UNEQUAL = (
    "deployment.tensor_parallel_size=1",  # a list has no effect with sizes of the roles
    "deployment.prefill={instances: 2, tensor_parallel_size: 2, data_parallel_size: 2}",
    "deployment.decode={tensor_parallel_size: 4, expert_parallel: true}",
)
"""P twice, each of two data-parallel groups of two ranks, and D of four ranks: 8 GPUs and 4."""
BOUNDARIES = ("0.10.2", "0.11.0", "0.11.1", "0.13.0", "0.15.1", "0.16.0", "0.33.0")
"""Releases before and after which other ranks bind ports, and the newest."""
CASES = [(version, ()) for version in versions()] + [(version, UNEQUAL) for version in BOUNDARIES]
KVBENCH_ENV = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"}
"""Set for all releases with P2pNcclConnector; the earlier ones add nothing to ids that could be disabled."""


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine as the recorded node of eight."""
    hgx.write_smi(tmp_path, 8)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv(VISIBLE, raising=False)
    return tmp_path


def rendered(name: str, *overrides: str) -> Iterator[tuple[Scenario, DeploymentPlan, list[ProcessSpec]]]:
    """Each deployment's processes, but for connectors that the release has not, or with a server more."""
    scenario, _ = load_scenario(name, overrides)
    for planned in plan_of(scenario).deployments:
        try:
            yield scenario, planned, process_specs(scenario, planned)
        except InputError as error:
            left_out = (
                " has no ",
                "does not read the option",
                "needs a metadata server",
                "requires equal ranks of P and D",
            )
            if not any(words in error.message for words in left_out):
                raise


def engines_of(specs: list[ProcessSpec]) -> list[ProcessSpec]:
    return [spec for spec in specs if "serve" in spec.argv]


def address_problems(spec: ProcessSpec) -> list[str]:
    """The addresses in a connector's environment that are not its own node's."""
    if "--kv-transfer-config" not in spec.argv:
        return []
    wanted = dict.fromkeys(("VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"), spec.host)
    return [f"{name}={spec.env.get(name)}" for name, host in wanted.items() if spec.env.get(name) != host]


def test_an_address_of_another_node_is_seen() -> None:
    """Each mistake that vLLM would die of or wait by, planted once."""
    argv = ("vllm", "serve", "m", "--kv-transfer-config", "{}")
    right = {"VLLM_HOST_IP": "10.0.0.2", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.2"}
    assert address_problems(ProcessSpec("p", argv, right, host="10.0.0.2")) == []
    for name in right:
        for wrong in ({**right, name: "10.0.0.1"}, {key: host for key, host in right.items() if key != name}):
            assert len(address_problems(ProcessSpec("p", argv, wrong, host="10.0.0.2"))) == 1


@pytest.mark.parametrize(
    ("version", "more"), CASES, ids=[f"{version}{' unequal' * bool(more)}" for version, more in CASES]
)
@pytest.mark.parametrize("name", ON_VLLM)
def test_a_release_takes_every_word_of_a_scenario(
    name: str, version: str, more: tuple[str, ...], node: Path
) -> None:
    labels = []
    for scenario, planned, specs in rendered(name, f"deployment.engine_options.version={version}", *more):
        labels.append(planned.label)
        options = scenario.deployment.engine_options
        assert isinstance(options, VllmOptions)
        users = options.environment("prefill", 0)
        # What a scenario passes on word for word is for the release that it names.
        original = load_scenario(name)[0].deployment.engine_options
        passed = set() if original == options else {f"--{key}" for key in options.engine_args}
        taken: Counter[tuple[str, int]] = Counter()
        for spec in engines_of(specs):
            given, wrong = arguments(spec.argv, version)
            wrong = [problem for problem in wrong if problem.partition(":")[0] not in passed]
            if config := given.get("--kv-transfer-config"):
                wrong += config_problems(json.loads(config), version)
            ours = {key for key in spec.env if key.startswith("VLLM_")} - users.keys() - KVBENCH_ENV
            wrong += sorted(ours - recorded("env", version).keys())
            wrong += address_problems(spec)
            assert not wrong, (planned.label, spec.name)
            taken.update((given["--host"], port) for port in bound_ports(given, spec.env, version))
        helpers = [planned.router_port, *planned.service_ports]
        taken.update((scenario.deployment.host, port) for port in helpers if port)
        assert max(taken.values()) == 1, [place for place, count in taken.items() if count > 1]
        assert {port for _, port in taken} == set(planned.ports), "planned is what is bound"
    assert labels, "without P/D it runs on every release"


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_port_of_any_scenario_is_planned_twice(name: str, node: Path) -> None:
    ports = plan_of(load_scenario(name)[0]).ports
    assert len(set(ports)) == len(ports)
    assert all(1024 <= port <= 65535 for port in ports)


@pytest.mark.parametrize("version", versions())
def test_connectors_plan_the_ports_that_the_sources_bind(version: str) -> None:
    ranks = Ranks(tensor=4, data=2)
    counts = {"rank": 8, "data rank": 2, "instance": 1}
    variables = {"nixl": "VLLM_NIXL_SIDE_CHANNEL_PORT", "mooncake": "VLLM_MOONCAKE_BOOTSTRAP_PORT"}
    for name, variable in variables.items():
        who = recorded("ports", version).get(variable)
        try:
            profile = connectors.get(name).profile(version)
        except InputError:
            continue
        if not profile.v0_engine:  # the V0 engine's ports are no variable's
            assert profile.side_ports("prefill", ranks) == counts[str(who)], (name, version)


def test_what_no_release_takes_is_seen() -> None:
    """The check itself: a flag that came later, one that is gone, a value that lacks, a key nobody reads."""
    _, wrong = arguments(["vllm", "serve", "m", "--nnodes", "2", "--num-redundant-experts"], "0.11.0")
    assert wrong == ["--nnodes: unknown to vLLM 0.11.0", "--num-redundant-experts: wants a value"]
    assert arguments(["vllm", "serve", "m", "--swap-space", "4"], "0.33.0")[1]
    config = {
        "kv_connector": "MooncakeConnector",
        "kv_rank": 0,
        "kv_connector_extra_config": {"device_name": ""},
    }
    assert len(list(config_problems(config, "0.33.0"))) == 1
    assert len(list(config_problems(config, "0.24.0"))) == 1
    shared = {"--port": "21003", "--tensor-parallel-size": "4"}
    env = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "21002"}
    assert bound_ports(shared, env, "0.11.0") == [21003, 21002, 21003, 21004, 21005]
    assert bound_ports(shared, env, "0.11.1") == [21003, 21002]


@pytest.mark.parametrize("ports", ["22000", "0"])
def test_commands_for_two_other_hosts_are_printed_here(ports: str, node: Path) -> None:
    """Nothing is looked for at addresses that are not this machine's, whatever the ports."""
    options = ["--connector", "nixl", "--set", f"deployment.base_port={ports}"]
    done = invoke("launch", "qwen3-30b-a3b-h200-nixl", "--print", *options).succeeded()
    assert "--host 10.0.0.2" in done.out.replace("\\\n    ", "")


@pytest.mark.parametrize(("gpus", "warn"), [(8, False), (1, True)])
def test_printed_commands_that_want_more_gpus_than_are_here_say_so(gpus: int, warn: bool, node: Path) -> None:
    """They may be for another machine; but GPU 1 of one is none."""
    hgx.write_smi(node, gpus)
    path = node / "pair.yaml"
    path.write_text(PAIR)
    done = invoke("launch", str(path), "--print").succeeded("CUDA_VISIBLE_DEVICES=1")
    note = "# note: nixl needs 2 GPUs (prefill 1 × 1, decode 1 × 1), and this host has 1: "
    assert (note in done.out) == warn, done.out


PAIR = """
version: 1
model: qwen3-8b
deployment: {engine: vllm, engine_options: {model: Qwen/Qwen3-8B, version: 0.13.0}}
connectors: [nixl]
workload: {input_len: [1024], output_len: 16}
slo: {ttft_ms: 2000}
"""


# Two hosts
@pytest.fixture
def two_hosts() -> Iterator[dict[str, str]]:
    """Address → network namespace: the scenarios' two nodes, with a cable between them."""
    if not may_use_netns():
        pytest.skip("two hosts as namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN")
    ip, number = tool("ip"), os.getpid() % 100_000
    names = {"10.0.0.1": f"kvn{number}a", "10.0.0.2": f"kvn{number}b"}
    with ExitStack() as made:
        try:
            for name in names.values():
                run([ip, "netns", "add", name])
                made.callback(run, [ip, "netns", "del", name])
            first, second = names.values()
            run(
                [
                    ip, "-n", first, "link", "add", "kv0", "type", "veth", "peer", "name", "kv0", "netns",
                    second,
                ]
            )  # fmt: skip
            for address, name in names.items():
                run([ip, "-n", name, "address", "add", f"{address}/24", "dev", "kv0"])
                run([ip, "-n", name, "link", "set", "kv0", "up"])
                run([ip, "-n", name, "link", "set", "lo", "up"])
        except LabError as error:
            pytest.skip(f"two hosts as namespaces cannot be made: {error.message}")
        yield names


LOOK = """
import socket, sys, urllib.request
for place in sys.argv[1:]:
    host, port = place.split(":")
    socket.create_connection((host, int(port)), 5).close()
print("all answer")
"""


@pytest.mark.parametrize("more", [(), UNEQUAL], ids=["as it is", "unequal ranks"])
@pytest.mark.parametrize("name", [name for name in ON_VLLM if "h200" in name])
def test_all_servers_of_a_scenario_stand_beside_each_other_on_two_hosts(
    name: str, more: tuple[str, ...], two_hosts: dict[str, str], tmp_path: Path, node: Path
) -> None:
    """Each command runs on its host, with a `vllm` that takes the release's words and binds its ports."""
    stub = tmp_path / "vllm"
    stub.write_text(
        f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parents[1]}/support/recorded_vllm.py "$@"\n'
    )
    stub.chmod(0o755)
    for scenario, planned, specs in rendered(name, *more):
        options = scenario.deployment.engine_options
        assert isinstance(options, VllmOptions)
        version = options.version
        path = f"{tmp_path}:{os.environ['PATH']}"
        with ExitStack() as running:
            started, places = [], []
            for spec in engines_of(specs):
                given, _ = arguments(spec.argv, version)
                where = ["ip", "netns", "exec", two_hosts[given["--host"]]]
                env = {**spec.env, "VLLM_VERSION": version, "PATH": path}
                process = subprocess.Popen(
                    [tool("ip"), *where[1:], *spec.argv],
                    env={key: value for key, value in env.items() if key != "PYTHONPATH"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                running.callback(_ended, process)
                started.append(process)
                places += [f"{given['--host']}:{port}" for port in bound_ports(given, spec.env, version)]
            for process in started:
                assert process.stdout.readline().startswith("ready"), _killed_stderr(process)
            for namespace in two_hosts.values():
                look = [tool("ip"), "netns", "exec", namespace, sys.executable, "-c", LOOK, *places]
                done = subprocess.run(look, capture_output=True, text=True, timeout=30, check=False)
                assert done.stdout == "all answer\n", (planned.label, done.stderr[-500:])


def _ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=10)


def _killed_stderr(process: subprocess.Popen[str]) -> str:
    time.sleep(0.1)
    process.kill()
    return process.communicate(timeout=10)[1][-1000:]
