"""kvbench on a real Slurm of this machine, two nodes: ``make test-slurm``. Not among the default tests."""

import json
import os
import signal
import sys
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

from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.errors import LaunchError
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.slurm import SlurmJob
from tools.labs import SlurmLab, problem, step_daemons

pytestmark = [
    pytest.mark.skipif("KVBENCH_TEST_SLURM" not in os.environ, reason="opt-in: make test-slurm"),
    pytest.mark.timeout(240),
]
ROOT = Path(__file__).resolve().parents[2]
BY_ROLE = {"prefill": {"constraint": "prefill"}, "decode": {"constraint": "decode"}}
DEPLOYMENT = f"launcher: slurm\n  slurm: {json.dumps({'time': '10', **BY_ROLE})}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    if missing := problem():
        pytest.skip(missing)
    with SlurmLab(tmp_path_factory.mktemp("slurm")) as lab, pytest.MonkeyPatch.context() as patch:
        for name, value in lab.env.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT))
        yield lab


def options(**given: Any) -> SlurmOptions:
    return SlurmOptions.model_validate({"time": "10", **given})


def agent(tag: str) -> str:
    return f"exec {sys.executable} -m kvbench.processes.agent --tag {tag}"


def test_each_role_gets_the_node_that_its_constraint_names(lab: SlurmLab) -> None:
    notes: list[str] = []
    with SlurmJob(options(**BY_ROLE), (1, 1), "roles", notes.append) as job:
        assert (job.hosts, job.address("pre0")) == (HOSTS, "127.0.0.1")
        for node in ("pre0", "dec0"):
            channel = job.channel(node, 'echo "$SLURMD_NODENAME"; exec cat')
            assert received(channel) == node.encode()
            channel.close()
    assert lab.call("squeue", "--noheader") == ""


def test_a_pool_of_nodes_is_dealt_out_and_agents_answer(lab: SlurmLab) -> None:
    with SlurmJob(options(), (1, 1), "pool") as job:
        (prefill,), (decode,) = job.hosts["prefill"], job.hosts["decode"]
        assert {prefill, decode} == {"pre0", "dec0"}
        agents = [AgentClient(job.channel(node, agent("pool"))) for node in (prefill, decode)]
        assert [agent.name for agent in agents] == [prefill, decode]
        assert all(abs(agent.clock_ahead_s()) < 0.05 for agent in agents)  # one machine: one clock
        for client in agents:
            client.close()
    assert until(lambda: not tagged("pool"), GONE_S)


@pytest.mark.parametrize("size", [1, 4096, 300_000])
def test_lines_of_any_length_pass_both_ways_unchanged(lab: SlurmLab, size: int) -> None:
    lines = [bytes([97 + index]) * size for index in range(8)]
    with SlurmJob(options(nodes=1), (1, 1), "echo") as job:
        channel = job.channel(job.hosts["prefill"][0], "exec cat")
        for line in lines:
            channel.send(line)
        assert [received(channel) for _ in lines] == lines
        channel.close()
        assert "status 0" in channel.ended


def test_the_environment_stays_here_but_for_what_is_named(
    lab: SlurmLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "never")
    monkeypatch.setenv("MY_SETTING", "a,b c")
    with SlurmJob(options(nodes=1, env=["MY_SETTING"]), (1, 1), "env") as job:
        channel = job.channel(job.hosts["prefill"][0], 'echo "$MY_SECRET|$MY_SETTING|$KVBENCH_RUN_TAG"')
        assert received(channel) == b"|a,b c|env"
        channel.close()


def test_a_job_that_waits_tells_why_and_is_cancelled_in_time(lab: SlurmLab) -> None:
    notes: list[str] = []
    with SlurmJob(options(exclusive=True), (1, 1), "first"):
        with pytest.raises(LaunchError, match=r"is pending: .*it is cancelled"):
            SlurmJob(options(exclusive=True, pending_timeout_s=4), (1, 1), "second", notes.append).__enter__()
        assert "kvbench-second" not in lab.call("squeue", "--noheader", "--format=%j")
    assert any("Resources" in words or "Priority" in words for words in notes)


def test_ctrl_c_cancels_a_job_that_waits(lab: SlurmLab) -> None:
    def interrupt(words: str) -> None:
        raise KeyboardInterrupt

    with SlurmJob(options(exclusive=True), (1, 1), "first"):
        with (
            pytest.raises(KeyboardInterrupt),
            SlurmJob(options(exclusive=True), (1, 1), "stopped", interrupt),
        ):
            pass
        assert "kvbench-stopped" not in lab.call("squeue", "--noheader", "--format=%j")


def test_what_slurm_refuses_is_told_in_its_words(lab: SlurmLab) -> None:
    with pytest.raises(LaunchError, match="Invalid feature specification"):
        SlurmJob(options(constraint="nope"), (1, 1), "refused").__enter__()
    with pytest.raises(LaunchError, match="invalid partition"):
        SlurmJob(options(partition="nope"), (1, 1), "refused").__enter__()


def test_an_allocation_that_exists_is_used_and_left(lab: SlurmLab) -> None:
    lab.call("salloc", "--no-shell", "--nodes=2", "--time=10", "--job-name=mine")
    number = lab.call("squeue", "--noheader", "--name=mine", "--format=%i").strip()
    try:
        with SlurmJob(options(job=number), (1, 1), "guest") as job:
            assert job.job_id == number
            channel = job.channel(job.hosts["decode"][0], "echo here")
            assert received(channel) == b"here"
            channel.close()
        assert lab.call("squeue", "--noheader", "--name=mine", "--format=%T").strip() == "RUNNING"
    finally:
        lab.call("scancel", number)
    with pytest.raises(LaunchError, match=r"CANCELLED|COMPLETING"):
        SlurmJob(options(job=number), (1, 1), "guest").__enter__()


def test_a_cancelled_job_ends_its_channels_with_the_reason(lab: SlurmLab) -> None:
    with SlurmJob(options(**BY_ROLE), (1, 1), "cancelled") as job:
        channel = job.channel("dec0", "echo up; exec cat")
        received(channel)
        lab.call("scancel", job.job_id)
        assert "CANCELLED" in ended(channel, 30)
        channel.close()


OWNER = """
import sys
from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.launchers.agents.agent_client import Agent
from kvbench.launchers.slurm import SlurmJob
command = f"exec {sys.executable} -m kvbench.processes.agent --tag orphan"
with SlurmJob(SlurmOptions(time="10"), (1, 1), "orphan") as job:
    agents = [Agent(job.channel(node, command)) for node in ("pre0", "dec0")]
    print("up", flush=True)
    sys.stdin.read()
"""


def test_nothing_remains_after_kill_9(lab: SlurmLab) -> None:
    require_nothing_after_a_kill(OWNER)
    assert until(lambda: lab.call("squeue", "--noheader") == "", GONE_S)


def test_an_agent_ends_when_its_srun_is_killed(lab: SlurmLab) -> None:
    with SlurmJob(options(nodes=1), (1, 1), "cut") as job:
        channel = job.channel(job.hosts["prefill"][0], agent("cut"))
        received(channel)
        os.killpg(channel.pid, signal.SIGKILL)
        ended(channel, 10)
        # The job goes on meanwhile: only its step is gone.
        assert until(lambda: not tagged("cut"), 2 * GONE_S)
        channel.close()
    assert until(lambda: not step_daemons(), GONE_S)


def test_a_whole_run_puts_p_and_d_on_their_nodes(lab: SlurmLab, tmp_path: Path) -> None:
    folder = run(tmp_path, DEPLOYMENT)
    assert set(json.loads((folder / "environment.json").read_text())["hosts"]) == {"pre0", "dec0"}
    logs = {path.name for path in (folder / "logs" / "tcp").iterdir()}
    assert {"prefill-0.log", "decode-0.log", "router.log"} <= logs
    whole_trial(folder)
    tag = json.loads((folder / "manifest.json").read_text()).get("run_tag", folder.name)
    assert until(lambda: lab.call("squeue", "--noheader") == "" and not tagged(str(tag)), GONE_S)


@pytest.mark.native
@pytest.mark.parametrize("connector", ["mooncake", "nixl"])
def test_kv_moves_between_the_nodes_by_the_real_libraries(
    lab: SlurmLab, tmp_path: Path, connector: str
) -> None:
    from kvbench import transfer

    if missing := transfer.get(connector).check():
        pytest.skip(str(missing))
    folder = run(tmp_path, DEPLOYMENT, "--set", f"connectors=[{connector}]")
    assert "tcp" in whole_trial(folder)["engine"]["transport"]


def test_a_node_that_fails_ends_its_channel_with_the_reason(lab: SlurmLab) -> None:
    # Last of all: the node does not come back.
    with SlurmJob(options(**BY_ROLE), (1, 1), "failed") as job:
        channel = job.channel("dec0", "echo up; exec cat")
        received(channel)
        lab.kill_node("dec0")
        assert "dec0" in ended(channel, 120)
        channel.close()
