"""A sweep that was cut off anywhere goes on to the same answer: every cut of a virtual one is tried."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import kvbench
from resuming import Taped, cut_off, trials_of, without_checksums, write_order
from rich.console import Console
from run_files import copied, edit_json, edit_rows

import kvbench as api
from kvbench.core.canaries.pool import CanaryPool, Proof
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, Outputs
from kvbench.errors import InputError, KvbenchError, StoreError
from kvbench.files import scratch
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.report import watch as watching
from kvbench.report.bundle import BundleOptions, bundle
from kvbench.report.export import prometheus
from kvbench.report.findings.load_rows import load_rows
from kvbench.report.findings.notes import notes, warnings
from kvbench.report.report import render_terminal, write_report
from kvbench.report.tables.methods import method_tables
from kvbench.report.tables.result import summary_table
from kvbench.results.finished_cells import ELSEWHERE, earlier_sessions, host_differences
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.bench import Site, create_store
from kvbench.sweep.deployed import scratch_prefix
from kvbench.sweep.display import Silent
from kvbench.sweep.simulate import SimulatedBench
from kvbench.sweep.sweep import searching_sweep
from kvbench.sweep.verify.audit import audit

pytestmark = pytest.mark.timeout(180)

QUICK = (
    "connectors=[aggregated,tcp]", "search.precision=0.3", "search.trial_s=0.5", "search.max_trial_s=0.5",
    "search.min_requests=20", "search.max_trials=4",
)  # fmt: skip
SUSTAINED = (*QUICK, "workload.input_len=[128,256]", "search.equal_rate=true")
BESIDE = (*QUICK, "workload.input_len=[128]", "search.equal_rate=false", "search.compare_burst=true")
TIERS = (
    *QUICK,
    "workload.input_len=[128]",
    "search.equal_rate=true",
    "slo={tiers: {strict: {ttft_ms: 150, tpot_ms: 12}, loose: {ttft_ms: 400, tpot_ms: 25}}}",
)
BY_HAND = (*QUICK, "workload.input_len=[128]", "search.method=burst")
LISTED = (*QUICK, "workload.input_len=[128]", "search.method=fixed", "search.rates=[5,10,20]")
WISHES = {
    "sustained": CliOptions("quickstart", SUSTAINED),
    "burst beside": CliOptions("quickstart", BESIDE),
    "tiers": CliOptions("quickstart", TIERS),
    "burst": CliOptions("quickstart", BY_HAND),
    "listed": CliOptions("quickstart", LISTED),
    "bench": CliOptions("quickstart", (*QUICK, "workload.input_len=[128,256]"), fixed_rate=10.0),
}
LONG = ("sustained", "burst beside", "tiers")
"""The default suite tries some of their cuts."""


@pytest.mark.parametrize(("kind", "step"), [
    *((kind, 8 if kind in LONG else 1) for kind in WISHES),
    *(pytest.param(kind, 1, marks=pytest.mark.heavy) for kind in LONG),
])  # fmt: skip
def test_from_every_cut_the_answer_is_that_of_an_unbroken_run(tmp_path: Path, kind: str, step: int) -> None:
    sweep = Taped(WISHES[kind])
    whole = sweep.unbroken(tmp_path / "whole")
    expected, order, tried = load_run(whole), write_order(whole), len(sweep.tape)
    assert tried == len(expected.all_trials)
    for lines in range(0, len(order), step):
        broken = cut_off(whole, tmp_path / f"{lines}" / whole.name, lines, torn=lines % 3 > 0)
        kept = len(load_run(broken).all_trials)
        assert kept == sum(name == "trials.jsonl" for name, _ in order[:lines])
        run = sweep.gone_on(broken)
        assert (run.warnings, run.manifest["status"]) == ([], "complete")
        assert trials_of(run) == trials_of(expected), lines
        assert run.cells == expected.cells, lines
        key = lambda result: (result.cell.key, result.method, result.tier)  # noqa: E731
        assert sorted(run.other_cells, key=key) == sorted(expected.other_cells, key=key), lines
        assert [session["why"] for session in run.manifest["sessions"]] == ["cut off", "complete"]
    assert len(sweep.tape) == tried, "a trial was asked for that the unbroken run had not"


def test_what_is_finished_stays_when_its_library_is_gone(tmp_path: Path) -> None:
    sweep = Taped(WISHES["bench"])
    whole = sweep.unbroken(tmp_path / "whole")
    last = len(write_order(whole)) - 1
    sweep.missing = load_run(whole).cells[-1].cell.connector
    run = sweep.gone_on(cut_off(whole, tmp_path / "cut" / whole.name, last, torn=True))
    assert [cell.status for cell in run.cells] == ["done", "done", "done", "skipped"]
    assert run.cells[:3] == load_run(whole).cells[:3]
    assert audit(run.path).damages == []


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual run that was killed within its second cell."""
    base = tmp_path_factory.mktemp("broken")
    whole = Taped(WISHES["listed"]).unbroken(base / "whole")
    return cut_off(whole, base / "cut" / whole.name, 5, torn=True)


def second_cell(folder: Path) -> dict[str, Any]:
    cell = load_run(folder).plan["cells"][1]
    return {key: cell[key] for key in ("connector", "input_len", "output_len")}


def test_the_command_goes_on_and_a_complete_run_is_left_alone(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    (folder / ".trials.jsonl.123.abc.tmp").write_bytes(b"half")
    (folder / "requests").mkdir(exist_ok=True)
    (folder / "requests" / ".x.parquet.123.abc.tmp").write_bytes(b"half")
    console = Console(record=True, file=io.StringIO(), width=200)
    assert resume.command(folder, CliOptions(), "sweep", console) == 0
    assert "1 of 2 cells are finished; 4 trials are kept" in console.export_text()
    assert not list(folder.rglob(".*"))
    run = load_run(folder)
    assert len(run.all_trials) == 6
    stored = (folder / "trials.jsonl").read_bytes()
    assert "is complete" in kvbench("sweep", "--resume", str(folder)).succeeded().out
    assert ((folder / "trials.jsonl").read_bytes(), load_run(folder).manifest) == (stored, run.manifest)


def test_options_may_repeat_the_plan_but_not_contradict_it(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    with pytest.raises(InputError, match=r"slo\.ttft_ms: 150\.0 in the folder, 300\.0 requested"):
        resume.command(folder, replace(WISHES["listed"], ttft_ms=300.0), "sweep", Console(quiet=True))
    with pytest.raises(InputError, match="is a run of kind simulate"):
        resume.command(folder, CliOptions(), "bench", Console(quiet=True))
    resume.resume(folder)
    assert resume.command(folder, WISHES["listed"], "sweep", Console(quiet=True)) == 0


def test_a_second_process_is_refused_and_told_who_works_there(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    with RunStore.reopen(folder) as store:
        who = f"being written by another process: pid {os.getpid()} .*{store.run_tag}"
        with pytest.raises(StoreError, match=who):
            resume.reopen(folder)
    assert load_run(folder).manifest["status"] == "complete"


def test_a_second_process_leaves_the_first_one_s_temporary_files(
    broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(broken, tmp_path)
    describe, first = resume.environment.describe, ExitStack()

    def begun_meanwhile() -> dict[str, Any]:
        first.enter_context(RunStore.reopen(folder))
        specs.append(first.enter_context(scratch(scratch_prefix(folder), folder.name)))
        return describe()

    specs: list[Path] = []
    monkeypatch.setattr(resume.environment, "describe", begun_meanwhile)
    with first:
        with pytest.raises(StoreError, match="being written by another process"):
            resume.reopen(folder)
        assert specs[0].exists()


def test_other_conditions_are_refused_unless_forced_and_then_marked(broken: Path, tmp_path: Path) -> None:
    folder = without_checksums(copied(broken, tmp_path))
    numpy = {"numpy": "0.0.1"}
    edit_json(folder / "environment.json", lambda data: data["libraries"].update(numpy), hostname="elsewhere")
    with pytest.raises(StoreError, match=r"hostname: elsewhere then, .*\n  numpy: 0\.0\.1 then") as refused:
        resume.resume(folder)
    assert "--force" in refused.value.hint
    run = load_run(resume.resume(folder, force=True))
    assert ELSEWHERE in run.labels
    assert run.manifest["sessions"][-1]["differs"][0].startswith("hostname: elsewhere then")
    assert ELSEWHERE in run.all_trials[-1].labels
    (note,) = [candidate for candidate in notes(run, summary_table(run)) if ELSEWHERE in candidate.text]
    assert note.text.startswith(
        f"{ELSEWHERE}: session 2 of 2 ran under other conditions: hostname: elsewhere"
    )
    write_report(folder, ("md",))
    assert note.text in (folder / "report.md").read_text()


def test_hosts_are_compared_by_their_names_in_the_scenario() -> None:
    a = {"hostname": "one", "cpu": {"model": "x"}, "nics": [{"name": "eth0", "pci_address": "0000:01:00.0"}]}
    b = {"hostname": "two", "libraries": {"nixl-cu12": "0.7"}}
    assert host_differences({}, {"a": a}) == []
    assert host_differences({"a": a, "b": b}, {"b": b, "a": dict(a)}) == []
    assert host_differences({"a": a, "b": b}, {"a": {**a, "hostname": "three", "nics": []}, "c": b}) == [
        "host b: no longer used",
        "host c: not used before",
        "host a, hostname: one then, three now",
        "host a, nics: eth0 then, none now",
    ]
    newer = {**b, "libraries": {"nixl-cu12": "0.8"}}
    assert host_differences({"b": b}, {"b": newer}) == ["host b, nixl-cu12: 0.7 then, 0.8 now"]


def test_true_outputs_that_change_from_session_to_session_are_noted(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)

    def output_notes(*texts: str) -> list[str]:
        rows = [
            {"label": "aggregated", "input_len": 128, "texts": [text], "latency_s": 0.1} for text in texts
        ]
        (folder / "outputs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        run = load_run(folder)
        return [note.text for note in notes(run, summary_table(run)) if "greedy outputs" in note.text]

    assert output_notes("a b", "a b") == []
    (message,) = output_notes("a b", "a c")
    assert message.startswith("aggregated at 128: its greedy outputs differed when requested again")
    assert "('a b' then, 'a c' now)" in message


def test_another_plan_or_another_search_is_not_gone_on_with(broken: Path, tmp_path: Path) -> None:
    changed = without_checksums(copied(broken, tmp_path / "plan"))
    edit_json(changed / "plan.json", lambda plan: plan["cells"].pop())
    with pytest.raises(StoreError, match="plans other cells"):
        resume.resume(changed)
    other = without_checksums(copied(broken, tmp_path / "trials"))
    shutil.rmtree(other / "requests", ignore_errors=True)  # they would contradict the edit
    edit_rows(other / "trials.jsonl", lambda row: row.update(request_rate=7.5), 3, 4)
    with pytest.raises(StoreError, match=r"at 7\.5 req/s .* is not the trial that the search requests"):
        resume.resume(other)
    assert load_run(other).manifest["status"] == "failed"
    older = without_checksums(copied(broken, tmp_path / "older"))
    edit_json(older / "manifest.json", lambda manifest: manifest.pop("asked"))
    with pytest.raises(StoreError, match="cannot be resumed"):
        resume.resume(older)


def test_a_cell_that_failed_is_measured_once_more(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    lost = second_cell(folder)
    with RunStore.reopen(folder) as store:
        store.put_cell({"cell": lost, "status": "failed", "reason": "decode-0 has ended"})
    assert not resume.is_complete(load_run(folder))
    run = load_run(resume.resume(folder))
    assert [result.status for result in [*run.cells, *run.other_cells]] == ["done", "done"]
    assert resume.is_complete(run)


class FailingBench(SimulatedBench):
    """A simulated bench on which one connector does not start, or not for one round."""

    failing = ""
    failing_round = ""

    def up(self, planned: DeploymentPlan, round_: str = "") -> AbstractContextManager[Site]:
        if planned.label == self.failing and round_ == self.failing_round:
            raise KvbenchError("decode-0 has ended")
        return super().up(planned, round_)


def test_the_equal_rate_stays_equal_if_a_slower_cell_fails_first(tmp_path: Path) -> None:
    """The others are measured once more, with the same requests; only their newest trial is shown."""
    sets = (
        *QUICK[1:],
        "connectors=[aggregated,tcp,nixl]",
        "workload.input_len=[128]",
        "search.equal_rate=true",
        "seed=2",
    )
    scenario, source = resolve(CliOptions("quickstart", sets))
    plan = plan_of(scenario)

    def run(store: RunStore, failing: str) -> RunFolder:
        bench = FailingBench(scenario, store)
        bench.failing = failing
        with store:
            searching_sweep(scenario, plan, store, Silent(), bench).run()
        return load_run(store.path)

    whole = run(create_store(tmp_path / "whole", scenario, source, plan, "simulate", {}), "")
    rates = {cell.cell.connector: cell.answer["max_request_rate"] for cell in whole.cells if cell.answer}
    slowest = min(rates, key=lambda connector: rates[connector])
    first = run(create_store(tmp_path / "failed", scenario, source, plan, "simulate", {}), slowest)
    assert {trial.cell.connector for trial in first.equal_rate_trials} == {*rates} - {slowest}
    store = RunStore.reopen(first.path)
    resume.take_over(store, scenario, None)
    again = run(store, "")
    shown, rows = again.equal_rate_trials, load_rows(again, errors=False)
    assert (len(again.other_trials), len(shown), len(rows)) == (5, 3, 3)
    assert len({(trial.request_rate, trial.seed) for trial in shown}) == 1
    assert shown[0].request_rate < first.equal_rate_trials[0].request_rate
    (table,) = (candidate for candidate in method_tables(again) if candidate.name == "equal_rate")
    assert {row["request_rate"] for row in table.rows} == {shown[0].request_rate}
    assert [str(damage) for damage in audit(again.path).damages] == []
    store = RunStore.reopen(first.path)
    resume.take_over(store, scenario, None)
    assert len(run(store, "").other_trials) == 5


def test_a_deployment_that_dies_after_its_searches_is_reported_and_resumed(tmp_path: Path) -> None:
    sets = (*QUICK[1:], "connectors=[aggregated,tcp]", "workload.input_len=[128]", "search.equal_rate=true")
    scenario, source = resolve(CliOptions("quickstart", sets))
    plan = plan_of(scenario)
    with create_store(tmp_path / "run", scenario, source, plan, "simulate", {}) as store:
        bench = FailingBench(scenario, store)
        bench.failing, bench.failing_round = "aggregated", "equal-rate"
        searching_sweep(scenario, plan, store, Silent(), bench).run()
    run = load_run(store.path)
    (note,) = warnings(run, [], [])
    assert note.text == "aggregated was not measured at an equal rate: decode-0 has ended"
    assert [trial.cell.connector for trial in run.equal_rate_trials] == ["tcp"]
    assert not resume.is_complete(run)
    again = load_run(resume.resume(store.path))
    assert {trial.cell.connector for trial in again.equal_rate_trials} == {"aggregated", "tcp"}
    assert resume.is_complete(again)
    assert warnings(again, [], []) == []


class Killed(BaseException):
    """Stands for SIGKILL."""


class CanarySite:
    """A simulated site that stores outputs and canaries as a deployed one does, and notes who collects."""

    def __init__(self, site: Site, label: str, bench: CanaryBench) -> None:
        self._site, self._label, self._bench = site, label, bench

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def outputs(self, input_len: int) -> Outputs:
        outputs = Outputs(("right",), 0.1)
        self._bench.store.add_outputs(self._label, input_len, outputs)
        return outputs

    def watch_answers(self, cell: Cell, known: CanaryPool | None) -> CanaryPool | None:
        if known is not None or self._label in self._bench.without_canaries:
            return known
        if self._label == self._bench.killed:
            raise Killed
        lengths = (cell.input_len, cell.output_len)
        proof: Proof = "reference" if self._label == "reference" else "own"
        outputs = Outputs(("a", "b"), 0.1)
        pool = CanaryPool(self._label, lengths, (lengths,) * 2, 1, 100, outputs, proof)
        self._bench.store.add_canaries(pool)
        self._bench.collected.append(self._label)
        return pool


class CanaryBench(SimulatedBench):
    """Its deployments collect canaries. ``killed``: the deployment that is killed while it does so."""

    killed = without_canaries = ""
    started: list[str]
    collected: list[str]

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return True

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        self.started.append(planned.label)
        with super().up(planned, round_) as site:
            yield CanarySite(site, planned.label, self)


@pytest.mark.parametrize(
    ("more", "killed", "without", "started", "collected"),
    [
        ((), "reference", "", ["reference", "tcp"], ["reference"]),
        (("checks.canary_share=0",), "tcp", "reference", ["tcp"], ["tcp"]),
        ((), "nixl", "reference", ["nixl"], ["nixl"]),
    ],
    ids=["killed while it collects", "no canaries wanted", "a connector has its own"],
)
def test_a_reference_collects_the_canaries_that_a_kill_prevented(
    tmp_path: Path, more: tuple[str, ...], killed: str, without: str, started: list[str], collected: list[str]
) -> None:
    names = "[tcp,nixl]" if killed == "nixl" else "[tcp]"
    sets = (*QUICK[1:], f"connectors={names}", "workload.input_len=[128]", "search.equal_rate=false", *more)
    scenario, source = resolve(CliOptions("quickstart", sets))
    plan = plan_of(scenario)

    def run(store: RunStore, killed: str) -> CanaryBench:
        bench = CanaryBench(scenario, store)
        bench.killed, bench.without_canaries, bench.started, bench.collected = killed, without, [], []
        with suppress(Killed), store:
            searching_sweep(scenario, plan, store, Silent(), bench).run()
        return bench

    first = create_store(tmp_path, scenario, source, plan, "simulate", {})
    run(first, killed)
    store = RunStore.reopen(first.path)
    resume.take_over(store, scenario, None)
    bench = run(store, "")
    assert (bench.started, bench.collected) == (started, collected)


def test_what_an_earlier_cell_taught_after_failing_is_no_other_search(broken: Path, tmp_path: Path) -> None:
    """It failed, a later cell began without its rate, and it is measured before that one goes on."""
    folder = copied(broken, tmp_path)
    record = load_run(folder).all_trials[0]
    requested = (record.trial_id, record.request_rate * 2, record.purpose)
    with pytest.raises(StoreError, match="is not the trial that the search requests"):
        earlier_sessions(load_run(folder), "fixed").check(record, *requested)
    lost = second_cell(folder)
    with RunStore.reopen(folder) as store:
        store.put_cell({"cell": lost, "status": "failed", "reason": "decode-0 has ended"})
        store.put_cell({"cell": lost, "status": "done"})
    earlier_sessions(load_run(folder), "fixed").check(record, *requested)
    with pytest.raises(StoreError, match="is not the trial that the search requests"):
        earlier_sessions(load_run(folder), "fixed").check(record, "another-02", *requested[1:])


def test_a_reasons_lines_of_a_log_stay_lines_of_their_own(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    lost = second_cell(folder)
    long = " ".join(f"word{number}" for number in range(40))
    reason = (
        f"decode-0 was killed by signal 9\nlast lines of the logs:\n  router: INFO up\n  prefill-0: {long}"
    )
    with RunStore.reopen(folder) as store:
        store.put_cell({"cell": lost, "status": "failed", "reason": reason, "hint": "see dmesg"})
    console = Console(width=100, record=True, quiet=False, file=io.StringIO())
    render_terminal(load_run(folder), console)
    printed = console.export_text().splitlines()
    place = next(place for place, line in enumerate(printed) if line.endswith("killed by signal 9"))
    assert printed[place + 1 : place + 3] == ["    last lines of the logs:", "      router: INFO up"]
    assert printed[place + 3].startswith("      prefill-0: word0 word1")
    assert printed[place + 4].startswith("        word")
    assert "    → see dmesg" in printed
    write_report(folder, ("md",))
    lines = (folder / "report.md").read_text().splitlines()
    assert any(line.startswith("- ") and line.endswith("killed by signal 9 → see dmesg") for line in lines)
    assert "  - `router: INFO up`" in lines
    assert f"  - `prefill-0: {long}`" in lines


def test_readers_take_the_folder_of_a_killed_run(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    run = load_run(folder)
    assert run.manifest["status"] == "interrupted"
    assert any("the last line is cut off" in warning for warning in run.warnings)
    assert any("cut off" in warning for warning in api.load(folder).warnings)
    write_report(folder, ("md", "html", "csv", "json"))
    assert "cut off" in (folder / "report.md").read_text()
    assert "cut off" in (folder / "report.html").read_text()
    assert prometheus(run)
    assert watching.command(folder, Console(quiet=True)) != 0
    bundled = bundle(folder, BundleOptions(output=tmp_path / "b.tar.gz"))
    assert "trials.jsonl" in bundled.files
