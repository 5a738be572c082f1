"""kvbench on a real Ray cluster of this machine, two nodes: ``make test-ray``, in .venv-ray."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_labs import (
    GONE_S,
    HOSTS,
    ended,
    received,
    require_nothing_after_a_kill,
    run,
    tagged,
    until,
    whole_trial,
)

from kvbench.core.scenario.hosts import RayOptions
from kvbench.errors import LaunchError
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.ray import RayNodesOf
from tools.labs import RayLab

pytestmark = [
    pytest.mark.skipif("KVBENCH_TEST_RAY" not in os.environ, reason="opt-in: make test-ray"),
    pytest.mark.timeout(300),
    # Ray's own: sockets and files that it closes when the process ends.
    pytest.mark.filterwarnings("ignore"),
]
BY_ROLE = {"prefill": {"resources": {"prefill_node": 1}}, "decode": {"resources": {"decode_node": 1}}}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """In place of conftest's: Ray keeps what a driver has opened until the process ends."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    # Ray puts sockets there, whose paths must be short.
    with (
        tempfile.TemporaryDirectory(prefix="kvray-") as folder,
        RayLab(Path(folder)) as lab,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in lab.env.items():
            patch.setenv(name, value)
        # It reads them when it is imported; and what it opens once for all is open before the first test.
        with RayNodesOf(options(lab), "first"):
            pass
        yield lab


def on(lab: RayLab) -> str:
    return f"launcher: ray\n  ray: {json.dumps({'address': lab.address, **BY_ROLE})}"


def options(lab: RayLab, **given: Any) -> RayOptions:
    return RayOptions.model_validate({"address": lab.address, **BY_ROLE, **given})


def test_each_role_gets_the_node_that_its_resource_names(lab: RayLab) -> None:
    with RayNodesOf(options(lab), "roles") as nodes:
        assert nodes.hosts == HOSTS
        assert (nodes.address("pre0"), nodes.address("dec0")) == ("127.0.0.2", "127.0.0.3")
        agents = [AgentClient(nodes.channel(name, agent("roles"))) for name in ("pre0", "dec0")]
        assert all(abs(agent.clock_ahead_s()) < 0.1 for agent in agents)  # one machine: one clock
        for client in agents:
            client.close()
    assert until(lambda: not tagged("roles"), GONE_S)


def agent(tag: str) -> str:
    return f"exec python3 -m kvbench.processes.agent --tag {tag}"


def test_labels_choose_nodes_too(lab: RayLab) -> None:
    crossed = {"prefill": {"labels": {"role": "decode"}}, "decode": {"labels": {"role": "prefill"}}}
    with RayNodesOf(options(lab, **crossed), "labels") as nodes:
        assert (nodes.hosts["prefill"], nodes.hosts["decode"]) == (("dec0",), ("pre0",))


@pytest.mark.parametrize("size", [1, 4096, 300_000])
def test_lines_of_any_length_pass_both_ways_unchanged_and_in_order(lab: RayLab, size: int) -> None:
    lines = [b"%03d" % index * size for index in range(100 if size < 10_000 else 12)]
    with RayNodesOf(options(lab), "echo") as nodes:
        channel = nodes.channel("dec0", "exec cat")
        for line in lines:
            channel.send(line)
        assert [received(channel) for _ in lines] == lines
        channel.close()
        assert "status 0" in ended(channel, 5)


def test_an_agent_that_fails_tells_its_last_words(lab: RayLab) -> None:
    with RayNodesOf(options(lab), "fails") as nodes:
        channel = nodes.channel("pre0", "echo out of luck >&2; exit 3")
        assert ended(channel, 30) == "the agent on pre0 ended (status 3): out of luck"
        channel.close()


def test_what_the_cluster_lacks_is_told_within_the_deadline(lab: RayLab) -> None:
    lacking = {"decode": {"resources": {"nope": 2}}}
    with pytest.raises(
        LaunchError, match=r"no node has what decode: CPU 1, nope 2 requires .*pre0: .*prefill"
    ):
        RayNodesOf(options(lab, **lacking, wait_s=3), "lacks").__enter__()


def test_what_is_in_use_is_waited_for(lab: RayLab) -> None:
    messages: list[str] = []
    holding = [sys.executable, "-c", OWNER, lab.address, "holds"]
    with subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        with pytest.raises(LaunchError, match="in use"):
            RayNodesOf(options(lab, wait_s=3), "waits", messages.append).__enter__()
        holder.stdin.close()
        holder.wait(60)
    assert messages
    with RayNodesOf(options(lab), "waits") as nodes:
        assert nodes.hosts["decode"] == ("dec0",)


def test_a_cluster_that_wants_another_token_is_told_as_such(lab: RayLab) -> None:
    joining = [sys.executable, "-c", OWNER, lab.address, "stranger"]
    env = {**os.environ, "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run(joining, env=env, capture_output=True, text=True, timeout=120)
    assert f"the Ray cluster at {lab.address} refuses the connection" in done.stderr


def test_a_cluster_that_is_not_there_is_told_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"no Ray cluster answers at 127\.0\.0\.1:9") as caught:
        RayNodesOf(RayOptions(address="127.0.0.1:9"), "absent").__enter__()
    assert "ray start --head" in caught.value.hint
    assert time.monotonic() - began < 60  # Ray by itself takes two minutes


OWNER = """
import sys
from kvbench.core.scenario.hosts import RayOptions
from kvbench.launchers.agents.agent_client import Agent
from kvbench.launchers.ray import RayNodesOf
wanted = {"prefill": {"resources": {"prefill_node": 1}}, "decode": {"resources": {"decode_node": 1}}}
options = RayOptions.model_validate({"address": sys.argv[1], **wanted})
with RayNodesOf(options, sys.argv[2]) as nodes:
    command = f"exec python3 -m kvbench.processes.agent --tag {sys.argv[2]}"
    agents = [Agent(nodes.channel(name, command)) for name in ("pre0", "dec0")]
    print("up", flush=True)
    sys.stdin.read()
    for each in agents:
        each.close()
"""


def test_nothing_remains_after_kill_9(lab: RayLab) -> None:
    require_nothing_after_a_kill(OWNER, lab.address, "orphan")


def test_a_whole_run_puts_p_and_d_on_their_nodes(lab: RayLab, tmp_path: Path) -> None:
    folder = run(tmp_path, on(lab))
    assert set(json.loads((folder / "environment.json").read_text())["hosts"]) == {"pre0", "dec0"}
    plan = json.loads((folder / "plan.json").read_text())["processes"]["tcp"]
    assert plan["prefill-0"]["spec"]["host"] == "127.0.0.2"
    assert plan["decode-0"]["spec"]["host"] == "127.0.0.3"
    whole_trial(folder)


@pytest.mark.native
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
def test_kv_moves_between_the_nodes_by_the_real_libraries(
    lab: RayLab, tmp_path: Path, connector: str
) -> None:
    # The libraries are in kvbench's own environment, whose Python the agents can have.
    python = Path(__file__).resolve().parents[2] / ".venv" / "bin" / "python"
    asking = f"from kvbench import transfer; print(transfer.get({connector!r}).check() or '')"
    done = subprocess.run([python, "-c", asking], capture_output=True, text=True, timeout=60, check=True)
    if done.stdout.strip():
        pytest.skip(done.stdout.strip())
    sets = ("--set", f"connectors=[{connector}]", "--set", f"deployment.ray.python={python}")
    assert "tcp" in whole_trial(run(tmp_path, on(lab), *sets))["engine"]["transport"]


def test_a_node_that_fails_ends_its_channel_with_the_reason(lab: RayLab) -> None:
    # Last of all: the node does not come back.
    with RayNodesOf(options(lab), "failed") as nodes:
        channel = nodes.channel("dec0", "echo up; exec cat")
        received(channel)
        lab.kill_node("dec0")
        assert "dec0" in ended(channel, 120)
        channel.close()
