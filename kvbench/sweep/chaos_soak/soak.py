"""``kvbench soak SCENARIO --hours H``: hold a rate for hours, window by window, and tell what drifts.

A window is a trial like any other: its requests, figures and findings are stored as soon as it ends, with
what each process holds then (memory, descriptors, threads, KV blocks). ``--resume`` goes on with the windows
that are left, on processes that are started anew.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError, StoreError
from kvbench.launchers.base import Launcher
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.obstacles import require_open_files
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.report.tables.soak_rows import soak_problems
from kvbench.results.run import CellResult, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.bench import create_store
from kvbench.sweep.chaos_soak.constant_rate import (
    HeldOptions,
    canary_pool_of,
    carried_out,
    failed,
    held_cells,
    held_scenario,
    holdings,
    rates_in,
    rates_of,
    skip,
    with_length,
)
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.display import Watcher
from kvbench.sweep.trial.canary_supply import CanarySupply
from kvbench.sweep.trial.load_plan import TrialPlan
from kvbench.sweep.trial.trial import TrialRunner

WINDOWS: Final = 60
"""A soak is cut into so many windows, but none shorter or longer than these."""
SHORTEST_S, LONGEST_S = 10.0, 300.0


@dataclass(frozen=True)
class SoakOptions:
    """For how long a rate is held, in seconds of load; ``window_s`` None: chosen by the length."""

    held: HeldOptions
    seconds: float
    window_s: float | None = None

    @property
    def window(self) -> float:
        """Seconds of one window."""
        if self.window_s is not None:
            return min(self.window_s, self.seconds)
        return min(self.seconds, max(SHORTEST_S, min(LONGEST_S, self.seconds / WINDOWS)))

    @property
    def windows(self) -> int:
        return max(1, math.ceil(self.seconds / self.window - 1e-9))


def command(cli: CliOptions, asked: SoakOptions, output: Path, console: Console) -> int:
    """Hold the rates, write the report, print its table; returns the exit code: 1 if something drifts, an
    answer is wrong, or a process has died. Raises InputError for what cannot be held.
    """
    scenario, source = held_scenario(cli, asked.held)
    plan = plan_of(scenario)
    require_gpus(plan)
    require_open_files(scenario)
    cells = held_cells(plan)
    rates = rates_of(asked.held, cells)
    more = {"rates": rates, "window_s": asked.window, "windows": asked.windows}
    store = create_store(output, scenario, source, plan, "soak", more)
    return _carry_out(scenario, plan, store, more, console)


def resumed(path: Path, console: Console, *, force: bool) -> int:
    """Go on with a soak: the windows that are left. Raises InputError, StoreError."""
    run = load_run(path)
    if run.manifest.get("kind") != "soak":
        raise InputError(f"{path} is a run of kind {run.manifest.get('kind')}, not soak")
    if resume.is_complete(run):
        console.print(f"{path} is complete: nothing is left to do", markup=False)
        from kvbench.report.report import tell_program

        tell_program([run], console)
        return EXIT_OK
    again = resume.reopen(path, force=force)
    console.print(f"{len(run.all_trials)} windows are kept", markup=False)
    asked = run.manifest.get("asked") or {}
    return _carry_out(again.scenario, again.plan, again.store, asked, console)


def _carry_out(
    scenario: Scenario,
    plan: Plan,
    store: RunStore,
    asked: Mapping[str, Any],
    console: Console,
) -> int:
    try:
        rates, window_s, windows = rates_in(asked), float(asked["window_s"]), int(asked["windows"])
    except (KeyError, TypeError, ValueError) as error:
        store.close()
        raise StoreError(
            f"{store.path}/manifest.json has no plan of a soak: {error}", hint="begin anew"
        ) from error

    def work(watcher: Watcher) -> Sequence[CellResult]:
        return SoakRun(scenario, plan, store, watcher, rates, window_s, windows).run()

    status = carried_out(store, len(rates), console, work)
    run = load_run(store.path)
    return EXIT_FAILED if soak_problems(run) else status


@dataclass(frozen=True)
class SoakRun:
    """Measures the windows of all pairs that the folder does not have yet."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    watcher: Watcher
    rates: Mapping[str, float]
    window_s: float
    windows: int
    _sick: dict[str, str] = field(default_factory=dict)

    def run(self) -> list[CellResult]:
        """One result a pair. Raises StoreError without the folder, LaunchError without its hosts."""
        scenario = with_length(self.scenario, self.window_s, min(self.rates.values()))
        bench = DeployedBench(scenario, self.plan, self.store, self.watcher)
        results = []
        with bench.open():
            for planned in self.plan.deployments:
                if planned.label not in self.rates or skip(planned, bench, self.store, self.watcher):
                    continue
                results.append(self._pair(bench, scenario, planned))
                self.store.put_cell(results[-1])
                self.watcher.cell_finished(results[-1])
        return results

    def _pair(self, bench: DeployedBench, scenario: Scenario, planned: DeploymentPlan) -> CellResult:
        cell = next(each for each in self.plan.cells if each.connector == planned.label)
        done = {each.trial_id for each in load_run(self.store.path).all_trials}
        try:
            pool = canary_pool_of(scenario, bench, self.plan, self.store, cell, self.watcher)
            with bench.running(planned) as (launcher, deployment):
                soaked = _Soaked(self, scenario, cell, pool, launcher, deployment)
                for number in range(1, self.windows + 1):
                    plan = soaked.plan(number)
                    if plan.trial_id not in done:
                        soaked.window(plan)
        except StoreError:
            raise
        except KvbenchError as error:
            self.store.require_room()
            self.watcher.note(f"{planned.label} failed: {error.message}")
            return failed(cell, error, "soak")
        return CellResult(cell, "done", method="soak", main=False)


class _Soaked:
    """One pair that is up, and its windows."""

    def __init__(
        self,
        run: SoakRun,
        scenario: Scenario,
        cell: Cell,
        pool: CanaryPool | None,
        launcher: Launcher,
        deployment: RunningDeployment,
    ) -> None:
        self._run = run
        self._cell = cell
        self._deployment = deployment
        self._number = 0
        progress = run.watcher.trial_progress
        self._trials = TrialRunner(
            scenario, deployment, run.store, launcher, progress, more_columns=self._columns
        )
        if pool is not None:
            self._trials.canaries[cell] = CanarySupply(scenario, deployment, pool)

    def plan(self, number: int) -> TrialPlan:
        rate = self._run.rates[self._cell.connector]
        return TrialPlan(self._cell, number, rate, f"window {number}", method="soak", searched=False)

    def window(self, plan: TrialPlan) -> None:
        """Offers one window; it is stored when this returns. Raises KvbenchError if a process died."""
        self._number = plan.number
        record = self._trials.run(plan)
        self._run.watcher.trial_finished(record)

    def _columns(self) -> dict[str, Any]:
        """What stands beside a window's figures: what the processes hold when it is over."""
        return {
            "soak": {
                "at_s": (self._number - 1) * self._run.window_s,
                "session": self._run.store.resumed,
                "holdings": holdings(self._deployment).to_json(),
            }
        }
