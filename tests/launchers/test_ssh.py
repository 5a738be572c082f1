"""Hosts reached by ssh: network namespaces with a real sshd each, and what stands between us and them."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Running, kvbench, tagged, tagged_processes, the_run, wait_until
from sshhosts import PORT, Hosts, no_hosts_reason, standing

from kvbench.core.scenario.hosts import Ssh
from kvbench.core.scenario.scenario import parse_scenario
from kvbench.errors import InputError, LaunchError, ScenarioError, StoreError
from kvbench.launchers.agents.remote import Fleet, agent_command, in_shell
from kvbench.launchers.ssh import SshConnections, connector
from kvbench.planning.doctor.hosts import gid_checks, measure_nics, require_nodes
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.scenario_files import registry
from kvbench.results.finished_cells import ELSEWHERE
from kvbench.results.run import RunFolder
from kvbench.sweep import resume
from kvbench.sweep.bench import create_store
from kvbench.sweep.display import Silent
from kvbench.sweep.sweep import deployed_sweep

REASON = no_hosts_reason()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)
on_request = pytest.mark.skipif(
    os.environ.get("KVBENCH_TEST_SSH", "") != "1", reason="takes a minute: `make test-ssh` runs it"
)
GONE_S = 15.0


def scenario_text(hosts: dict[str, Any], roles: dict[str, Any], **deployment: Any) -> str:
    return yaml.safe_dump(
        {
            "version": 1,
            "model": "tiny",
            "deployment": {"launcher": "ssh", "hosts": hosts, "roles": roles, **deployment},
            "connectors": deployment.pop("connectors", ["tcp"]),
            "workload": {"input_len": [64], "output_len": 4},
            "slo": {"ttft_ms": 20000, "tpot_ms": 5000},
        },
        sort_keys=False,
    )


def parsed(hosts: dict[str, Any], roles: dict[str, Any], **deployment: Any) -> Any:
    return parse_scenario(scenario_text(hosts, roles, **deployment), "far.yaml", registry()).deployment


A, B = {"address": "10.0.0.1"}, {"address": "10.0.0.2"}


class TestScenario:
    def test_each_instance_has_its_host_and_address(self) -> None:
        deployment = parsed({"a": A, "b": B}, {"prefill": "a", "decode": ["b", "a"]}, decode=3)
        named = {
            name: deployment.address_of(name) for name in ("prefill-0", "decode-0", "decode-1", "decode-2")
        }
        assert list(named.values()) == ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.0.2"]
        assert deployment.address_of("router") == deployment.address_of("aggregated-0") == "10.0.0.1"
        assert deployment.roles.host_of("loadgen-cell-01") == "a"
        assert deployment.several_hosts
        assert list(deployment.used_hosts) == ["a", "b"]

    def test_workers_of_the_generator_are_dealt_out_and_the_spare_is_the_first_ones(self) -> None:
        roles = parsed({"a": A, "b": B}, {"prefill": "a", "decode": "a", "loadgen": ["b", "a"]}).roles
        assert [roles.host_of(f"loadgen-x-01-w{index}") for index in range(3)] == ["b", "a", "b"]
        assert roles.host_of("loadgen-spare") == "b"

    @pytest.mark.parametrize(
        ("hosts", "roles", "words"),
        [
            ({}, {}, "launcher ssh needs deployment.hosts"),
            ({"a": A}, {"prefill": "a"}, "deployment.roles.decode must name a host"),
            ({"a": A}, {"prefill": "a", "decode": "x"}, "no host is called `x`; there are: a"),
            (
                {"a": A, "b": {"address": "127.0.0.1"}},
                {"prefill": "a", "decode": "b"},
                "a local address on each host",
            ),
            ({"a": {**A, "adress": "x"}}, {"prefill": "a", "decode": "a"}, "did you mean `address`"),
            (
                {"a": {**A, "ssh": {"password": "x"}}},
                {"prefill": "a", "decode": "a"},
                "unknown key `password`",
            ),
        ],
    )
    def test_what_cannot_be_is_said(self, hosts: dict[str, Any], roles: dict[str, Any], words: str) -> None:
        with pytest.raises(ScenarioError, match=words):
            parsed(hosts, roles)

    def test_hosts_without_a_launcher_for_them(self) -> None:
        with pytest.raises(ScenarioError, match="launcher: ssh"):
            parsed({"a": A}, {"prefill": "a", "decode": "a"}, launcher="local")

    def test_the_agents_command(self) -> None:
        host = parsed({"a": A}, {"prefill": "a", "decode": "a"}).hosts["a"]
        command = agent_command(host, "the tag")
        assert '"$HOME"/.cache/kvbench/venv/bin/python' in command
        assert "'the tag'" in command
        assert in_shell("/a b") == "'/a b'"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with standing(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@dataclass
class Reach:
    """Tries one host as a scenario would."""

    hosts: Hosts

    def error(self, name: str = "a", **section: Any) -> LaunchError:
        with pytest.raises(LaunchError) as caught, self.fleet(name, **section) as fleet:
            fleet.require()
        return caught.value

    def fleet(self, name: str = "a", **section: Any) -> Fleet:
        described = {name: self.hosts.section(name, **section)}
        deployment = parsed(described, {"prefill": name, "decode": name})
        connections = SshConnections()
        return Fleet(
            deployment,
            f"ssh-test-{os.getpid()}",
            connector(lambda host: deployment.hosts[host].ssh, connections),
            connections.close,
        )


@pytest.fixture
def reach(hosts: Hosts) -> Reach:
    return Reach(hosts)


@needs_hosts
class TestReaching:
    def test_an_agent_comes_up_and_goes(self, reach: Reach) -> None:
        with reach.fleet() as fleet:
            fleet.require()
            assert fleet["a"].ask("environment")["hostname"] == socket.gethostname()
            links = fleet["a"].ask("environment")["nics"]
            assert len(tagged(f"ssh-test-{os.getpid()}")) == 1
            assert links is not None
        assert tagged(f"ssh-test-{os.getpid()}") == []

    def test_the_wrong_key(self, reach: Reach) -> None:
        error = reach.error(ssh={"key": str(reach.hosts.folder / "stranger")})
        assert "refuses the login" in error.message
        assert "authorized_keys" in error.hint

    def test_a_key_that_is_none_or_not_there(self, reach: Reach) -> None:
        assert "cannot be used" in reach.error(ssh={"key": str(reach.hosts.known_hosts)}).message
        assert "does not exist" in reach.error(ssh={"key": "/no/such/key"}).message

    def test_an_unknown_host_is_refused(self, reach: Reach, tmp_path: Path) -> None:
        (tmp_path / "empty").touch()
        error = reach.error(ssh={"known_hosts": str(tmp_path / "empty")})
        assert "is not in" in error.message
        assert "compare its key's fingerprint" in error.hint

    def test_another_key_than_is_known_is_refused(self, reach: Reach, tmp_path: Path) -> None:
        other = (reach.hosts.folder / "host-b.pub").read_text().split()[:2]
        known = tmp_path / "known"
        known.write_text(f"[{reach.hosts.address('a')}]:{PORT} {' '.join(other)}\n")
        error = reach.error(ssh={"known_hosts": str(known)})
        assert "has a different key" in error.message
        assert "ssh-keygen -f" in error.hint

    def test_nobody_listens_and_nobody_answers(self, reach: Reach) -> None:
        assert "refuses the connection" in reach.error(ssh={"port": 2223}).message
        error = reach.error(
            ssh={"host": f"10.78.{reach.hosts.address('a').split('.')[2]}.200", "connect_timeout_s": 0.5}
        )
        assert "did not answer within 0.5 s" in error.message

    def test_no_kvbench_and_no_python_over_there(self, reach: Reach, tmp_path: Path) -> None:
        bare = tmp_path / "python"
        bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        bare.chmod(0o755)
        assert "kvbench is not installed there" in reach.error(python=str(bare)).message
        assert "deployment.hosts.NAME.python" in reach.error(python="/no/such/python").hint

    def test_a_folder_that_cannot_be_made(self, reach: Reach) -> None:
        assert "a: cannot work in /proc/none" in reach.error(workdir="/proc/none").message

    def test_all_trouble_is_told_at_once(self, hosts: Hosts) -> None:
        sections = {
            "a": hosts.section("a", ssh={"port": 2223}),
            "b": hosts.section("b", workdir="/proc/none"),
        }
        deployment = parsed(sections, {"prefill": "a", "decode": "b"})
        connections = SshConnections()
        reach = connector(lambda host: deployment.hosts[host].ssh, connections)
        with (
            pytest.raises(LaunchError, match=r"a \(.* refuses the connection; b: cannot work"),
            Fleet(deployment, "t", reach, connections.close) as fleet,
        ):
            fleet.require()

    def test_commands_and_files_by_hand(self, hosts: Hosts, tmp_path: Path) -> None:
        connections = SshConnections()
        ssh = Ssh(**hosts.section("a")["ssh"])
        (tmp_path / "file").write_text("content")
        try:
            there = connections.put("a", ssh, tmp_path / "file", str(tmp_path / "new" / "folder"))
            assert Path(there).read_text() == "content"
            assert connections.output("a", ssh, "echo out; echo err >&2; exit 3", 10) == (3, "out\nerr\n")
            with pytest.raises(LaunchError, match="took longer than"):
                connections.output("a", ssh, "sleep 20", 0.3)
        finally:
            connections.close()


@needs_hosts
def test_each_nic_reaches_the_one_of_its_place(hosts: Hosts) -> None:
    """Both nets are named as NICs for KV; the third host names one only."""
    sections = {name: hosts.section(name, nics=["data0", "ssh0"]) for name in "ab"}
    sections["c"] = hosts.section("c", nics=["data0"])
    text = scenario_text(sections, {"prefill": "a", "decode": "b", "loadgen": "c"})
    scenario = parse_scenario(text, "far.yaml", registry())
    connections = SshConnections()
    reach = connector(lambda host: scenario.deployment.hosts[host].ssh, connections)
    with Fleet(scenario.deployment, f"nics-{os.getpid()}", reach, connections.close) as fleet:
        fleet.require()
        links = measure_nics(scenario, fleet)
    assert list(links) == [
        ("a/data0", "b/data0"), ("a/ssh0", "b/ssh0"), ("b/data0", "a/data0"), ("b/ssh0", "a/ssh0"),
    ]  # fmt: skip
    assert all(link["bytes_per_s"] > 0 and link["rtt_s"] > 0 for link in links.values()), links


def test_gids_are_shown_and_a_port_without_one_is_warned_of() -> None:
    mapped = "0000:0000:0000:0000:0000:ffff:0a00:0001"
    gids = [
        {"index": 0, "gid": "fe80:0000:0000:0000:0000:0000:0000:0001", "type": "RoCE v2", "nic": "eth0"},
        {"index": 3, "gid": mapped, "type": "RoCE v2", "nic": "eth0"},
    ]
    ports = [
        {"port": 1, "link_layer": "Ethernet", "gids": gids},
        {"port": 2, "link_layer": "Ethernet", "gids": []},
    ]
    good, bad = gid_checks("a", {"rdma": [{"name": "mlx5_0", "ports": ports}]})
    assert (good.name, good.status, good.detail) == ("a mlx5_0:1", "ok", f"GID 3 is {mapped}, RoCE v2")
    assert (bad.name, bad.status) == ("a mlx5_0:2", "warn")
    assert list(gid_checks("a", {"rdma": None})) == []


def test_doctor_waits_in_no_queue() -> None:
    text = scenario_text({}, {}, slurm={})
    scenario = parse_scenario(text.replace("launcher: ssh", "launcher: slurm"), "far.yaml", registry())
    with pytest.raises(InputError, match="nodes of a running Slurm job") as caught:
        require_nodes(scenario, {})
    assert "salloc" in caught.value.hint
    require_nodes(scenario, {"SLURM_JOB_ID": "7"})


def written(hosts: Hosts, folder: Path, connectors: list[Any], trial_s: int = 1) -> Path:
    """A scenario with P on a, D on b, router and generator on c."""
    sections = {name: hosts.section(name) for name in hosts.names}
    text = yaml.safe_load(
        scenario_text(sections, {"prefill": "a", "decode": "b", "router": "c"}, base_port=0)
    )
    text["connectors"] = connectors
    # One rate, which is not searched: what a busy machine makes of it is no matter here.
    text["search"] = {"method": "fixed", "rates": [10], "trial_s": trial_s, "min_requests": 10 * trial_s}
    text["search"] |= {"max_trial_s": trial_s}
    text["deployment"]["engine_options"] = {"time_scale": 10}
    path = folder / "far.yaml"
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


class Notes(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str, *, caveat: bool = False) -> None:
        self.texts.append(text)


@needs_hosts
def test_a_sweep_over_three_hosts(hosts: Hosts, tmp_path: Path) -> None:
    path = written(hosts, tmp_path, ["tcp"])
    before = hosts.received("b")
    scenario, source = resolve(CliOptions(str(path)))
    plan = plan_of(scenario)
    notes = Notes()
    with create_store(tmp_path / "results", scenario, source, plan, "sweep", {}) as store:
        deployed_sweep(scenario, plan, store, notes).run()
    run = the_run(tmp_path / "results")
    (cell,) = run.other_cells
    assert cell.status in ("done", "refused"), cell  # refused: this machine was too busy
    assert hosts.received("b") - before > 64 * 2048  # one prompt's KV at the least
    assert set(run.environment["hosts"]) == {"a", "b", "c"}
    rows = run.telemetry(run.all_trials[0].trial_id)
    assert set(rows.host) == {"a", "b", "c"}
    assert {"nic:a/data0", "nic:b/data0", "prefill-0", "decode-0"} <= set(rows.source)
    assert set(rows[rows.source == "decode-0"].host) == {"b"}
    assert (run.path / "logs" / "tcp" / "prefill-0.log").stat().st_size > 0
    written_plan = json.loads((run.path / "plan.json").read_text())
    assert written_plan["processes"]["tcp"]["decode-0"]["spec"]["host"] == hosts.data_address("b")
    assert f"listen on {hosts.data_address('a')}" in "".join(notes.texts)
    assert str(hosts.key.read_text()) not in (run.path / "scenario.yaml").read_text()
    assert tagged_processes(run) == []
    assert [list((hosts.folder / "work" / name).iterdir()) for name in "abc"] == [[], [], []]
    another_host_is_not_gone_on_with(run)


def another_host_is_not_gone_on_with(run: RunFolder) -> None:
    machine = json.loads((run.path / "environment.json").read_text())
    machine["hosts"]["b"]["hostname"] = "elsewhere"
    (run.path / "environment.json").write_text(json.dumps(machine))
    kept = {key: value for key, value in run.manifest.items() if key != "checksums"}
    (run.path / "manifest.json").write_text(json.dumps({**kept, "status": "interrupted"}))
    (run.path / "checksums.jsonl").unlink()  # as of a kvbench that had none
    with pytest.raises(StoreError, match=r"started on other hosts:\n  host b, hostname: elsewhere then, "):
        resume.resume(run.path)
    assert tagged_processes(run) == []
    gone_on = the_run(resume.resume(run.path, force=True).parent)
    assert ELSEWHERE in gone_on.labels
    assert gone_on.manifest["sessions"][-1]["differs"][0].startswith("host b, hostname: elsewhere then")


@on_request
@needs_hosts
def test_a_lost_host_ends_its_cell_and_the_next_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    """The cable is pulled in the middle of a trial, and is in again for the next connector."""
    twice = [{"name": "tcp", "label": "first"}, {"name": "tcp", "label": "second"}]
    path = written(hosts, tmp_path, twice, trial_s=4)
    results = tmp_path / "results"
    long = Running("sweep", str(path), "--output", str(results))
    try:
        wait_until(lambda: results.exists() and any(results.glob("*/logs/first/loadgen-*-01.log")), 40.0)
        hosts.cut("b")
        cut_at = time.monotonic()
        wait_until(lambda: '"failed"' in next(results.glob("*/cells.jsonl")).read_text(), 20.0)
        took_s = time.monotonic() - cut_at
        hosts.heal("b")
        done = long.finish()
    finally:
        hosts.heal("b")
        long.kill()
    run = the_run(results)
    results_by_label = {cell.cell.connector: cell for cell in [*run.cells, *run.other_cells]}
    assert results_by_label["second"].status in ("done", "refused"), done.text
    assert results_by_label["first"].status == "failed"
    assert "the host b is lost" in results_by_label["first"].reason
    assert took_s < 15.0
    assert done.status == 1
    assert tagged_processes(run) == []


@on_request
@needs_hosts
def test_a_frozen_process_on_a_host_is_named(hosts: Hosts, tmp_path: Path) -> None:
    running = Running("launch", str(written(hosts, tmp_path, ["tcp"])))
    try:
        message = running.wait_for("decode-0")
        running.wait_for("Ctrl-C")
        pid = int(message.rpartition("pid ")[2].rstrip(")\n"))
        os.kill(pid, signal.SIGSTOP)
        done = running.finish()
    finally:
        running.kill()
    assert done.status == 1
    assert f"on the host b: decode-0 {pid} is frozen" in done.out
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), GONE_S)


@on_request
@needs_hosts
def test_kill_9_leaves_nothing_on_any_host(hosts: Hosts, tmp_path: Path) -> None:
    path = written(hosts, tmp_path, ["tcp"])
    results = tmp_path / "results"
    running = Running("sweep", str(path), "--output", str(results))
    wait_until(lambda: results.exists() and any(results.glob("*/logs/tcp/loadgen-*-01.log")), 40.0)
    run = the_run(results)
    assert len(tagged_processes(run)) >= 6
    running.kill()
    wait_until(lambda: tagged_processes(run) == [], GONE_S)
    wait_until(lambda: not any(list((hosts.folder / "work" / name).iterdir()) for name in "abc"), GONE_S)


@on_request
@needs_hosts
@pytest.mark.native
def test_mooncake_and_nixl_move_kv_between_the_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Over a shaped net, past the shared memory that these hosts have in common."""
    hosts.shape("1gbit")
    connectors = ["aggregated", "mooncake", "nixl"]
    path = written(hosts, tmp_path, connectors, trial_s=2)
    text = yaml.safe_load(path.read_text())
    text["workload"]["input_len"] = [512]
    path.write_text(yaml.safe_dump(text))
    before = hosts.received("b")
    done = kvbench("sweep", str(path), "--output", str(tmp_path / "results"))
    run = the_run(tmp_path / "results")
    states = {cell.cell.connector: cell.status for cell in run.other_cells}
    assert set(states.values()) <= {"done", "refused"}, done.text
    assert set(states) == set(connectors), done.text
    moved = sum(
        len(run.requests(trial.trial_id)) * 512 * 2048
        for trial in run.all_trials
        if trial.cell.connector != "aggregated"
    )
    assert hosts.received("b") - before > moved > 0
    assert all(cell.equal_outputs for cell in run.other_cells if cell.cell.connector != "aggregated")


@on_request
@needs_hosts
def test_what_runs_is_listed_and_stopped_and_hosts_are_looked_at(hosts: Hosts, tmp_path: Path) -> None:
    path = written(hosts, tmp_path, ["tcp"])
    looked = kvbench("doctor", "--hosts", str(path)).succeeded()
    assert "the same on all hosts" in looked.text
    assert looked.text.count("GB/s") == 6
    running = Running("launch", str(path))
    try:
        running.wait_for("Ctrl-C")
        printed = kvbench("ps", str(path), env={"COLUMNS": "250"}).out
        (tag,) = {word for word in printed.split() if word.startswith("launch-") and tagged(word)}
        assert len(tagged(tag)) >= 8
        stopped = kvbench("stop", "--run", tag, str(path))
        assert "process(es) ended" in stopped.out
        wait_until(lambda: tagged(tag) == [])
        assert running.finish().status == 1
    finally:
        running.kill()
