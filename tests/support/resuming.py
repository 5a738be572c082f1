"""Run folders as a kill leaves them, and virtual sweeps in which no trial is simulated twice."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_files import edit_json

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.search.load_plan import TrialPlan
from kvbench.errors import Problem
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.checksums import CHECKSUMS, begin_checksums
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.bench import Bench, Site, create_store
from kvbench.sweep.cell import Fixed
from kvbench.sweep.display import Silent
from kvbench.sweep.simulate import SimulatedBench
from kvbench.sweep.sweep import searching_sweep

Tape = dict[TrialPlan, tuple[TrialRecord, list[RequestRecord]]]
WORDS = ("trials.jsonl", "cells.jsonl", "manifest.json", "plan.json", "environment.json", "scenario.yaml")


class TapedSite:
    """A simulated trial is a function of its plan: one that was run before is looked up."""

    def __init__(self, site: Site, tape: Tape, store: RunStore) -> None:
        self.trace_rate, self.has_direct = site.trace_rate, site.has_direct
        self.prepare, self.close, self.alone, self.outputs = (
            site.prepare, site.close, site.alone, site.outputs,
        )  # fmt: skip
        self.watch_answers, self.last_canaries = site.watch_answers, site.last_canaries
        self.requests = site.requests
        self._run = site.run
        self._tape = tape
        self._store = store

    def run(self, plan: TrialPlan) -> TrialRecord:
        if plan in self._tape:
            self._store.add_trial(*self._tape[plan])
        else:
            record = self._run(plan)
            self._tape[plan] = record, load_run(self._store.path).request_records(record.trial_id)
        return self._tape[plan][0]


class TapedBench:
    """A simulated bench whose sites look up trials on a tape."""

    alike = True

    def __init__(self, bench: Bench, tape: Tape, store: RunStore, missing: str) -> None:
        self.open, self.gives_reference = bench.open, bench.gives_reference
        self.problem = lambda planned: Problem("it is not installed") if planned.label == missing else None
        self._up = bench.up
        self._tape = tape
        self._store = store

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        with self._up(planned, round_) as site:
            yield TapedSite(site, self._tape, self._store)


class Taped:
    """One virtual sweep, from beginning to end and from any cut on."""

    def __init__(self, cli: CliOptions) -> None:
        self.tape: Tape = {}
        self.missing = ""
        """A connector whose library is not installed any more."""
        self.fixed = Fixed(cli.fixed_rate) if cli.fixed_rate else None
        self.scenario, self._source = resolve(cli)
        self.plan = plan_of(self.scenario)

    def unbroken(self, results: Path) -> Path:
        """From beginning to end; returns the folder, and fills the tape."""
        options: dict[str, Any] = {"rate": self.fixed.rate} if self.fixed else {}
        store = create_store(results, self.scenario, self._source, self.plan, "simulate", options)
        self._run(store)
        return store.path

    def gone_on(self, folder: Path) -> RunFolder:
        """From what a folder holds to the end."""
        store = RunStore.reopen(folder)
        resume.take_over(store, self.scenario, self.fixed)
        self._run(store)
        return load_run(folder)

    def _run(self, store: RunStore) -> None:
        with store:
            bench = TapedBench(SimulatedBench(self.scenario, store), self.tape, store, self.missing)
            searching_sweep(self.scenario, self.plan, store, Silent(), bench, self.fixed).run()


def write_order(folder: Path) -> list[tuple[str, bytes]]:
    """The lines of trials.jsonl and cells.jsonl in the order in which a sweep has written them.

    A cell's lines come when its trials are over; the trials at one equal rate come after all cells.
    """
    trials = (folder / "trials.jsonl").read_bytes().splitlines(keepends=True)
    cells = (folder / "cells.jsonl").read_bytes().splitlines(keepends=True)
    order: list[tuple[str, bytes]] = []
    last: Mapping[str, Any] | None = None
    for line in trials:
        row = json.loads(line)
        if last is not None and (row["cell"] != last or row["method"] == "equal_rate"):
            cells = _flushed(cells, last, order)
        order.append(("trials.jsonl", line))
        last = row["cell"]
    return order + [("cells.jsonl", line) for line in cells]


def _flushed(cells: list[bytes], cell: Mapping[str, Any], order: list[tuple[str, bytes]]) -> list[bytes]:
    cell_lines = [line for line in cells if json.loads(line)["cell"] == cell]
    order += [("cells.jsonl", line) for line in cell_lines]
    return cells[len(cell_lines) :]


def cut_off(folder: Path, target: Path, lines: int, *, torn: bool) -> Path:
    """The folder as a kill left it after so many lines; ``torn``: within the next one."""
    target.mkdir(parents=True)
    for name in WORDS:
        shutil.copy(folder / name, target / name)
    order = write_order(folder)
    kept = {"trials.jsonl": b"", "cells.jsonl": b""}
    for name, line in order[:lines]:
        kept[name] += line
    if torn and lines < len(order):
        name, line = order[lines]
        kept[name] += line[: len(line) // 2]
    for name, content in kept.items():
        (target / name).write_bytes(content)
    shutil.copytree(folder / "requests", target / "requests")  # of later trials, too: they are written anew
    manifest = json.loads((target / "manifest.json").read_text())
    (session,) = manifest["sessions"]
    manifest.update(status="running", ended_at=None, sessions=[{**session, "ended_at": None, "why": ""}])
    (target / "manifest.json").write_text(json.dumps(manifest))
    begin_checksums(target, session["run_tag"])
    return target


def without_checksums(folder: Path) -> Path:
    """The folder as a kvbench wrote it that had none."""
    (folder / CHECKSUMS).unlink()
    edit_json(folder / "manifest.json", lambda manifest: manifest.pop("checksums"))
    return folder


def trials_of(run: RunFolder) -> list[dict[str, Any]]:
    """All trials in order, without the time of day."""
    return [{**trial.to_json(), "started_at": ""} for trial in run.all_trials]
