"""Raw transfers between hosts: namespaces with a real sshd each, whose agents start both sides."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Running, kvbench, tagged_processes, the_run, wait_until
from sample_transfers import MOVERS
from sshhosts import Hosts, no_hosts_reason, standing

from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.errors import InputError
from kvbench.microbench.hosts import BetweenHosts, MicrobenchPlaces, choose_pairs
from kvbench.microbench.options import MicrobenchOptions
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.report.tables.transfers import pair_matrices
from kvbench.transfer.parts.usable import movers_on

REASON = no_hosts_reason()
needs_hosts = pytest.mark.skipif(bool(REASON), reason=REASON)
on_request = pytest.mark.skipif(
    os.environ.get("KVBENCH_TEST_SSH", "") != "1", reason="takes a minute: `make test-ssh` runs it"
)
QUICK = ("--op", "write", "--block-size", "64K", "--batch-size", "4", "--seconds", "0.05")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with standing(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def written(folder: Path, hosts: dict[str, Any]) -> Path:
    """A scenario whose first host prefills, and whose second decodes."""
    names = list(hosts)
    path = folder / "far.yaml"
    text = {
        "version": 1,
        "model": "tiny",
        "deployment": {"launcher": "ssh", "hosts": hosts, "roles": {"prefill": names[0], "decode": names[1]}},
        "connectors": ["tcp"],
        "workload": {"input_len": [64], "output_len": 4},
        "slo": {"ttft_ms": 200},
    }
    path.write_text(yaml.safe_dump(text, sort_keys=False))
    return path


@needs_hosts
def test_all_pairs_are_measured_and_a_lost_host_costs_only_its_own(hosts: Hosts, tmp_path: Path) -> None:
    sections = {name: hosts.section(name, nics=["data0"]) for name in "ab"}
    sections["c"] = hosts.section("c", ssh={"port": 2223})
    path = written(tmp_path, sections)
    before = {name: hosts.received(name) for name in "ab"}
    results = tmp_path / "results"
    done = kvbench(
        *("microbench", "--scenario", str(path), "--pairs", "all", "--backend", "tcp", *QUICK),
        *("--output", str(results)),
    )
    run = the_run(results)
    rows = run.transfer_records()
    states = {row.pair: row.status for row in rows}
    assert len(rows) == 6, done.text
    assert states == {
        **dict.fromkeys(["a → b", "b → a"], "ok"),
        **dict.fromkeys(["a → c", "b → c", "c → a", "c → b"], "error"),
    }, done.text
    assert all("refuses the connection" in row.error for row in rows if row.status == "error")
    measured = [row for row in rows if row.status == "ok"]
    assert all(row.verified for row in measured)
    for row, name in zip(measured, "ba", strict=True):
        # Through the data net, to whom the row says.
        assert hosts.received(name) - before[name] > row.calls * row.nbytes
    report = (run.path / "report.md").read_text()
    assert "## From host to host" in report
    assert "| c | FAILED | FAILED | – |" in report
    assert "from host to host · tcp write" in done.out
    assert done.status == 1
    assert set(run.environment["hosts"]) == {"a", "b"}
    assert (run.path / "logs" / "a-b").is_dir()
    assert tagged_processes(run) == []
    assert all(list((hosts.folder / "work" / name).iterdir()) == [] for name in "ab")


@on_request
@needs_hosts
@pytest.mark.native
def test_mooncake_and_nixl_between_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """Over a shaped net, past the shared memory that these hosts have in common."""
    hosts.shape("1gbit")
    path = written(tmp_path, {name: hosts.section(name, nics=["data0"]) for name in "ab"})
    results = tmp_path / "results"
    done = kvbench(
        *("microbench", "--scenario", str(path), "--from", "b", "--to", "a", "--protocol", "tcp"),
        *("--backend", "tcp,mooncake,nixl", "--block-size", "1M", "--batch-size", "16"),
        *("--seconds", "0.3", "--output", str(results)),
    )
    rows = the_run(results).transfer_records()
    assert {row.pair for row in rows} == {"b → a"}, done.text
    assert [row.error for row in rows if row.status != "ok"] == [], done.text
    assert {row.case.backend for row in rows} == {"tcp", "mooncake", "nixl"}
    assert all(row.verified and 0 < (row.gb_per_s or 0) < 0.14 for row in rows), done.text


@on_request
@needs_hosts
def test_a_cable_that_is_pulled_costs_the_rest_of_its_pairs(hosts: Hosts, tmp_path: Path) -> None:
    path = written(tmp_path, {name: hosts.section(name) for name in "abc"})
    results = tmp_path / "results"
    running = Running(
        *("microbench", "--scenario", str(path), "--pairs", "all", "--backend", "tcp", "--op", "write"),
        *("--block-size", "64K", "--batch-size", "4", "--seconds", "1", "--output", str(results)),
    )
    try:
        running.wait_for("a → b: tcp")
        hosts.cut("b")
        done = running.finish()
    finally:
        hosts.heal("b")
        running.kill()
    run = the_run(results)
    states = {row.pair: row.status for row in run.transfer_records()}
    assert len(states) == 6, done.text
    assert {pair for pair, status in states.items() if status == "ok"} >= {"a → b", "a → c", "c → a"}
    assert {states["b → a"], states["b → c"], states["c → b"]} == {"error"}, done.text
    assert run.manifest["status"] == "complete"
    wait_until(lambda: tagged_processes(run) == [], 15.0)


def row(one: str, other: str, rate: float | None, op: Any = "write", backend: str = "tcp") -> TransferRecord:
    status: Any = "ok" if rate else "error"
    return TransferRecord(
        Case(backend, "tcp", op, 4096, 4), status, gb_per_s=rate, initiator_host=one, target_host=other
    )


def test_a_matrix_says_who_sends_to_whom() -> None:
    rows = [
        row("a", "b", 1.5), row("a", "b", 2.5), row("b", "a", None), row("a", "b", 3.5, op="read"),
        row("a", "b", 9.0, backend="null"),
    ]  # fmt: skip
    write, read = pair_matrices(rows)
    assert (write.title, write.cells) == ("tcp write", [["a", "–", "2.50"], ["b", "FAILED", "–"]])
    assert read.cells == [["a", "–", "–"], ["b", "3.50", "–"]]  # a reads what b has
    assert pair_matrices(rows[:2]) == []
    assert pair_matrices([TransferRecord(Case("tcp", "tcp", "write", 1, 1))] * 2) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"pairs": "some"}, "--pairs knows no 'some'"),
        ({"pairs": "all", "from_host": "a"}, "leave --from and --to out"),
        ({"lab": True}, "--lab makes hosts on this machine"),
        ({"peer_prefix": "ssh x"}, "--peer-prefix says where a side is"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        BetweenHosts(MicrobenchOptions(scenario="quickstart", **given))


def test_pairs_are_of_hosts_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="speak of a scenario's hosts"):
        MicrobenchPlaces.of(MicrobenchOptions(from_host="a"))
    path = written(tmp_path, {"a": {"address": "10.0.0.1"}, "b": {"address": "10.0.0.2"}})
    scenario, _ = resolve(CliOptions(str(path)))

    def pairs(**given: Any) -> list[tuple[str, str]]:
        return choose_pairs(scenario, MicrobenchOptions(scenario=str(path), **given))

    assert pairs() == [("a", "b")]
    assert pairs(from_host="b", to_host="a") == [("b", "a")]
    assert pairs(pairs="all") == [("a", "b"), ("b", "a")]
    with pytest.raises(InputError, match="no host is called 'x'"):
        pairs(to_host="x")
    with pytest.raises(InputError, match="both sides would be on a"):
        pairs(to_host="a")


def test_what_one_host_lacks_is_not_tried_on_any() -> None:
    fine = {name.name: {"problem": "", "lacking": {}} for name in MOVERS}
    lacks = {**fine, "nixl": {"problem": "no wheel", "lacking": {"rdma": "no RDMA device"}}}
    found = {mover.name: mover for mover in movers_on({"a": fine, "b": lacks})}
    assert (found["tcp"].problem, found["nixl"].problem) == ("", "b: no wheel")
    assert found["nixl"].lacking == {"rdma": "b: no RDMA device"}
