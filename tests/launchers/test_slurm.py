"""Slurm's command lines and answers, and which node serves which role. For real: test_slurm_lab.py."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.errors import LaunchError, ScenarioError
from kvbench.launchers.parts.slurm_words import (
    KEPT_ENV,
    Component,
    dealt,
    dropped_env,
    groups_of,
    parse_job,
    parse_pairs,
    parse_squeue,
    placed,
    salloc_command,
    srun_command,
)
from kvbench.planning.overrides import CliOptions, resolve

JOB = """\
JobId=65 HetJobId=65 HetJobOffset=0 JobName=kvbench-x UserId=me(1000) JobState=RUNNING Reason=None \
Dependency=(null) NodeList=pre[0-1] BatchHost=pre0 Comment=a = b Command=(null)
JobId=66 HetJobId=65 HetJobOffset=1 JobName=kvbench-x JobState=RUNNING Reason=None NodeList=dec0
"""


def options(**given: Any) -> SlurmOptions:
    return SlurmOptions.model_validate(given)


def words(**given: Any) -> list[str]:
    wanted = options(**given)
    return salloc_command(wanted, groups_of(wanted), "kvbench-x")


def test_one_component_for_each_role_that_has_nodes_of_its_own() -> None:
    command = words(
        partition="gpu",
        time="30",
        extra=["--switches=1"],
        prefill={"constraint": "a&b", "gres": "gpu:8", "nodes": 2},
        decode={"partition": "big", "exclusive": True, "extra": ["--licenses=l"]},
    )
    assert command[:2] == ["salloc", "--no-shell"]
    cut = command.index(":")
    common = ["--job-name=kvbench-x", "--time=30"]
    assert command[2:cut] == [
        *common, "--nodes=2", "--ntasks-per-node=1", "--partition=gpu", "--constraint=a&b", "--gres=gpu:8",
        "--switches=1",
    ]  # fmt: skip
    assert command[cut + 1 :] == [
        *common, "--nodes=1", "--ntasks-per-node=1", "--partition=big", "--exclusive", "--switches=1",
        "--licenses=l",
    ]  # fmt: skip


def test_without_roles_there_is_one_pool_of_two_nodes() -> None:
    command = words(account="me", cpus_per_task=8)
    assert ":" not in command
    assert {"--nodes=2", "--account=me", "--cpus-per-task=8", "--time=02:00:00"} <= set(command)
    assert "--nodes=5" in words(nodes=5)


def test_a_load_generator_alone_asks_for_its_nodes_only() -> None:
    (group,) = groups_of(options(loadgen={"nodes": 3, "partition": "cpu"}), loadgen_only=True)
    assert (group.roles, group.wanted.nodes, group.wanted.partition) == (("loadgen",), 3, "cpu")
    assert placed([group], [["a", "b", "c"]], 1, 1) == {"loadgen": ("a", "b", "c")}


@pytest.mark.parametrize(
    "wrong",
    [
        {"extra": ["--job-name=mine"]}, {"extra": ["sleep"]}, {"extra": ["--"]}, {"extra": [":"]},
        {"time": "soon"}, {"prefill": {}}, {"partition": "two words"}, {"job": "x"}, {"env": ["A=B"]},
        {"unknown": 1},
    ],
)  # fmt: skip
def test_what_would_break_the_command_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        options(**wrong)


def test_a_step_runs_on_its_node_within_the_job() -> None:
    plain = srun_command(Component("7", None, "RUNNING", "", "n1"), "n1", ["MY"], "exec agent")
    assert {"--jobid=7", "--nodelist=n1", "--overlap", "--input=0", "--kill-on-bad-exit=1"} <= set(plain)
    assert plain[-3:] == ["sh", "-c", "exec agent"]
    assert f"--export={','.join(KEPT_ENV)},MY" in plain
    assert not [word for word in plain if word.startswith("--het-group")]
    part = srun_command(Component("66", 1, "RUNNING", "", "n2", "65"), "n2", [], "exec agent")
    assert {"--jobid=65", "--het-group=1"} <= set(part)


def test_an_srun_hears_nothing_of_the_job_that_kvbench_runs_in() -> None:
    env = {"SLURM_NTASKS": "4", "SLURM_CONF": "/x", "SLURM_CPU_BIND": "q", "SRUN_DEBUG": "1", "PATH": "/bin"}
    assert dropped_env(env) == ["SLURM_CPU_BIND", "SLURM_NTASKS", "SRUN_DEBUG"]


def test_squeue_tells_why_a_job_waits() -> None:
    lines = "12+0|PENDING|(Resources)|2026-11-22T03:00:00\n12+1|PENDING|(a|b)|N/A\nslurm: warning\n\n"
    first, second = parse_squeue(lines)
    assert first.words() == ("Slurm job 12+0 is pending: Resources, expected to start 2026-11-22T03:00:00")
    assert second.words() == "Slurm job 12+1 is pending: a|b"


def test_a_heterogeneous_job_is_read_in_the_order_of_its_parts() -> None:
    for text in (JOB, "\n".join(reversed(JOB.strip().split("\n")))):
        first, second = parse_job(text)
        assert (first.job_id, first.offset, first.leader, first.node_list) == ("65", 0, "65", "pre[0-1]")
        assert (second.job_id, second.offset, second.node_list) == ("66", 1, "dec0")
    assert parse_pairs(JOB.split("\n")[0])["Comment"] == "a = b"
    with pytest.raises(LaunchError, match="nothing about the job"):
        parse_job("No jobs in the system\n")


def test_a_job_that_ended_is_told_with_the_reason() -> None:
    (job,) = parse_job("JobId=9 JobState=NODE_FAIL Reason=NodeDown NodeList=(null)")
    assert (job.words(), job.node_list) == ("Slurm job 9 is NODE_FAIL, reason NodeDown", "")


names = st.lists(st.from_regex(r"n[0-9]{1,3}", fullmatch=True), min_size=1, max_size=12, unique=True)


@given(names, st.integers(1, 6), st.integers(1, 6))
def test_every_node_of_a_pool_serves_something_and_no_instance_is_without(
    nodes: list[str], prefill: int, decode: int
) -> None:
    found = dealt(tuple(nodes), prefill, decode)
    assert found["prefill"]
    assert found["decode"]
    assert {name for those in found.values() for name in those} == set(nodes)
    if len(nodes) > 1:
        assert not set(found["prefill"]) & set(found["decode"])
    if len(nodes) > prefill + decode:
        assert len(found["prefill"]) == prefill
        assert not set(found["loadgen"]) & {*found["prefill"], *found["decode"]}


def test_roles_without_nodes_of_their_own_join_others() -> None:
    wanted = options(prefill={"constraint": "p"}, decode={"constraint": "d"})
    hosts = placed(groups_of(wanted), [["a", "b"], ["c"]], 2, 1)
    assert hosts == {"prefill": ("a", "b"), "decode": ("c",), "router": ("a",), "loadgen": ("a",)}


SLURM = "deployment.launcher=slurm"


def test_a_scenario_names_its_launcher_and_what_it_needs() -> None:
    scenario, _ = resolve(CliOptions(overrides=(SLURM, 'deployment.slurm={"prefill": {}, "decode": {}}')))
    assert scenario.deployment.slurm.prefill is not None
    resolve(CliOptions(overrides=("deployment.launcher=ray",)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (('deployment.slurm={"nodes": 2}',), "deployment.slurm is for launcher: slurm"),
        ((SLURM, "deployment.ray={}"), "deployment.ray is for launcher: ray"),
        ((SLURM, 'deployment.hosts={"a": {"address": "10.0.0.1"}}'), "finds the hosts itself"),
        ((SLURM, 'deployment.roles={"prefill": "a"}'), "finds the hosts itself"),
        ((SLURM, 'deployment.slurm={"partitoin": "x"}'), "partition"),
    ],
)
def test_a_scenario_that_mixes_launchers_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve(CliOptions(overrides=settings))
