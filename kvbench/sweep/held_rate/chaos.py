"""``kvbench chaos SCENARIO``: hold a rate, do faults by a seeded plan, tell what each of them cost.

Each fault is a trial of its own on a deployment of its own, so that none meets what another one left; the
plan is drawn before anything starts and lies in the manifest (``asked.faults``), by which a run is gone on
with and repeated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from kvbench.core.held_rate.fault_cost import FaultCost
from kvbench.core.held_rate.fault_plan import (
    LAB_KINDS,
    FaultTimes,
    PlannedFault,
    WantedFault,
    faults_of,
    plan_faults,
    usual_faults,
)
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import EXIT_OK, InputError, KvbenchError, StoreError
from kvbench.hosts.lab.lab import Lab
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.obstacles import require_open_files
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.report.tables.table import json_text
from kvbench.results.run import CellResult, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.display import Watcher
from kvbench.sweep.held_rate.fault_lab import running_in_lab
from kvbench.sweep.held_rate.fault_trial import FaultTrial, HeldRate
from kvbench.sweep.held_rate.held import (
    HeldOptions,
    canary_pool_of,
    carried_out,
    failed,
    held_cells,
    held_scenario,
    rates_in,
    rates_of,
    skip,
    with_canaries,
    with_length,
)
from kvbench.sweep.held_rate.strikes import target_counts
from kvbench.sweep.new_run import create_store


@dataclass(frozen=True)
class ChaosOptions:
    """What a chaos run is asked for. ``faults``: none are all that can be done; ``lab``: a lab to run in."""

    held: HeldOptions
    faults: tuple[str, ...] = ()
    times: FaultTimes = field(default_factory=FaultTimes)
    repeats: int = 1
    lab: Lab | None = None


def command(cli: CliOptions, asked: ChaosOptions, output: Path, console: Console, *, only_plan: bool) -> int:
    """Do all faults, write the report, print its table; returns the exit code. ``only_plan``: print what
    would be done. Raises InputError for what cannot be done here.
    """
    scenario, source = held_scenario(cli, asked.held)
    plan = plan_of(scenario)
    require_gpus(plan)
    require_open_files(scenario)
    cells = held_cells(plan)
    rates = rates_of(asked.held, cells)
    faults = planned_faults(scenario, plan, cells, asked)
    rows = {label: [each.to_json() for each in mine] for label, mine in faults.items()}
    if only_plan:
        _print_plan(faults, rates, console)
        return EXIT_OK
    lab = None if asked.lab is None else asked.lab.record()
    store = create_store(
        output, scenario, source, plan, "chaos", {"faults": rows, "rates": rates, "lab": lab}
    )
    if lab is not None:
        store.update(labels=[*store.manifest["labels"], "lab"])
    return _carry_out(scenario, plan, store, faults, rates, console, asked.lab)


def resumed(path: Path, console: Console, *, force: bool, lab: Lab | None = None) -> int:
    """Go on with a chaos run: the planned faults that have no trial yet. Raises InputError, StoreError."""
    run = load_run(path)
    if run.manifest.get("kind") != "chaos":
        raise InputError(f"{path} is a run of kind {run.manifest.get('kind')}, not chaos")
    if resume.is_complete(run):
        console.print(f"{path} is complete: nothing is left to do", markup=False)
        from kvbench.report.report import tell_program

        tell_program([run], console)
        return EXIT_OK
    asked = run.manifest.get("asked") or {}
    if asked.get("lab") and lab is None:
        raise InputError(f"{path} was run in a lab", hint="go on with --lab")
    try:
        faults, rates = {label: faults_of(rows) for label, rows in asked["faults"].items()}, rates_in(asked)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"{path}/manifest.json has no plan of faults: {error}", hint="begin anew") from error
    again = resume.reopen(path, force=force)
    console.print(f"{len(run.all_trials)} faults are kept", markup=False)
    return _carry_out(again.scenario, again.plan, again.store, faults, rates, console, lab)


def planned_faults(
    scenario: Scenario, plan: Plan, cells: Sequence[Cell], asked: ChaosOptions
) -> dict[str, list[PlannedFault]]:
    """The faults of each pair, by its label. Raises InputError for what cannot be done here."""
    wanted = [WantedFault.parse(each) for each in asked.faults]
    for each in wanted:
        if each.kind in LAB_KINDS and asked.lab is None:
            raise InputError(
                f"{each.text}: there is no network here whose packets kvbench may lose",
                hint="--lab puts the deployment between two hosts of its own (network namespaces)",
            )
    deployment = scenario.deployment
    if deployment.launcher != "local" and any(each.kind == "freeze" for each in wanted):
        raise InputError(
            "freeze stops processes of this machine alone", hint="kill and restart work anywhere"
        )
    found = {}
    for cell in cells:
        planned = next(each for each in plan.deployments if each.label == cell.connector)
        counts = target_counts(planned, asked.lab)
        usual = [
            each
            for each in usual_faults(counts, lab=asked.lab is not None)
            if deployment.launcher == "local" or each.kind != "freeze"
        ]
        times = replace(asked.times, ready_s=deployment.ready_timeout_s)
        found[cell.connector] = plan_faults(wanted or usual, counts, times, asked.repeats, scenario.seed)
    return found


def _carry_out(
    scenario: Scenario,
    plan: Plan,
    store: RunStore,
    faults: Mapping[str, Sequence[PlannedFault]],
    rates: Mapping[str, float],
    console: Console,
    lab: Lab | None,
) -> int:
    def work(watcher: Watcher) -> Sequence[CellResult]:
        return ChaosRun(scenario, plan, store, watcher, faults, rates, lab).run()

    return carried_out(store, len(faults), console, work)


@dataclass(frozen=True)
class ChaosRun:
    """Does the faults of all pairs that have no trial in the folder yet."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    watcher: Watcher
    faults: Mapping[str, Sequence[PlannedFault]]
    rates: Mapping[str, float]
    lab: Lab | None = None

    def run(self) -> list[CellResult]:
        """One result a pair. Raises StoreError without the folder, LaunchError without its hosts."""
        bench = DeployedBench(self.scenario, self.plan, self.store, self.watcher)
        done = {each.trial_id for each in load_run(self.store.path).all_trials}
        results = []
        with bench.open():
            for planned in self.plan.deployments:
                if planned.label not in self.faults or skip(planned, bench, self.store, self.watcher):
                    continue
                results.append(self._pair(bench, planned, done))
                self.store.put_cell(results[-1])
                self.watcher.cell_finished(results[-1])
        return results

    def _pair(self, bench: DeployedBench, planned: DeploymentPlan, done: set[str]) -> CellResult:
        cell = next(each for each in self.plan.cells if each.connector == planned.label)
        problems: list[KvbenchError] = []
        try:
            pool = canary_pool_of(self.scenario, bench, self.plan, self.store, cell, self.watcher)
        except StoreError:
            raise
        except KvbenchError as error:
            return failed(cell, error, "chaos")
        held = HeldRate(cell, self.rates[planned.label], pool)
        for fault in self.faults[planned.label]:
            if f"{cell.key}-chaos-{fault.number:02d}" in done:
                continue
            self.watcher.stage(f"{planned.label}: {fault.name}, repeat {fault.repeat}")
            try:
                record = self._one(bench, planned, held, fault)
            except StoreError:
                raise
            except KvbenchError as error:
                self.store.require_room()
                self.watcher.note(f"{planned.label}: {fault.name} could not be measured: {error.message}")
                problems.append(error)
                continue
            self.watcher.trial_finished(record)
            self.watcher.stage(f"{planned.label}: {fault_text(record)}")
        if problems:
            return failed(cell, problems[0], "chaos")
        return CellResult(cell, "done", method="chaos", main=False)

    def _one(
        self, bench: DeployedBench, planned: DeploymentPlan, held: HeldRate, fault: PlannedFault
    ) -> TrialRecord:
        requests = held.rate * fault.most_s
        scenario = with_canaries(with_length(self.scenario, fault.most_s, held.rate), requests, held.pool)
        if self.lab is not None:
            with running_in_lab(scenario, planned, self.store, self.lab, fault) as (inside, launcher, pair):
                trial = FaultTrial(inside, held, self.store, self.watcher, self.lab)
                return trial.run(fault, launcher, pair)
        trial = FaultTrial(scenario, held, self.store, self.watcher)
        with bench.running(planned, f"{fault.number:02d}") as (launcher, pair):
            return trial.run(fault, launcher, pair)


def fault_text(record: TrialRecord) -> str:
    """``restart prefill: back after 1.3 s, 12 lost, 0 hung, 0 late; goodput lost 14 requests``."""
    found = record.summary["chaos"]
    cost = FaultCost.from_json(found["cost"])
    back = "never back" if cost.back_s is None else f"back after {cost.back_s:.1f} s"
    fates = ", ".join(f"{cost.fates[fate]} {fate}" for fate in ("lost", "hung", "late"))
    return f"{found['name']}: {back}, {fates}; goodput lost {cost.goodput_lost:.0f} requests"


def _print_plan(
    faults: Mapping[str, Sequence[PlannedFault]],
    rates: Mapping[str, float],
    console: Console,
) -> None:
    if console.stderr:
        rows = {label: [each.to_json() for each in mine] for label, mine in faults.items()}
        sys.stdout.write(json_text({"faults": rows, "rates": dict(rates)}))
        return
    for label, mine in faults.items():
        seconds = sum(each.most_s for each in mine)
        console.print(
            f"{label}: {len(mine)} faults at {rates[label]:g} req/s, {seconds / 60:.1f} minutes at most",
            markup=False,
        )
        for each in mine:
            down = f", undone after {each.down_s:g} s" if each.down_s else ""
            console.print(
                f"  {each.number:3}  repeat {each.repeat}  {each.kind} {each.process} at {each.at_s:.2f} s"
                f"{down}, watched for {each.after_s:g} s",
                markup=False,
            )
