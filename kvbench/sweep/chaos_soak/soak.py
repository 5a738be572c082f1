"""``kvbench soak SCENARIO --hours H``: run a fixed rate for hours, window by window, and report drift.

A window is a trial; its record also has each process's memory, descriptors, threads and KV blocks.
``--resume`` runs the remaining windows on restarted processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.console import Console

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Method
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.errors import EXIT_FAILED, EXIT_OK, StoreError
from kvbench.planning.overrides import CliOptions
from kvbench.report.tables.soak_rows import soak_problems
from kvbench.results.run import load_run
from kvbench.sweep import resume
from kvbench.sweep.bench import create_store
from kvbench.sweep.chaos_soak.constant_rate import (
    CellRate,
    FixedRatePlan,
    FixedRateRun,
    HeldOptions,
    holdings,
    open_unfinished_run,
    rates_in,
    with_length,
)
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.trial.canary_supply import CanarySupply
from kvbench.sweep.trial.trial import TrialRunner

WINDOWS: Final = 60
"""Number of windows of a soak, within these limits of a window's length."""
SHORTEST_S, LONGEST_S = 10.0, 300.0


@dataclass(frozen=True)
class SoakOptions:
    """Length of a soak in seconds of load; ``window_s`` None: derived from the length."""

    held: HeldOptions
    seconds: float
    window_s: float | None = None

    @property
    def window(self) -> float:
        if self.window_s is not None:
            return min(self.window_s, self.seconds)
        return min(self.seconds, max(SHORTEST_S, min(LONGEST_S, self.seconds / WINDOWS)))

    @property
    def windows(self) -> int:
        return max(1, math.ceil(self.seconds / self.window - 1e-9))


def command(cli: CliOptions, options: SoakOptions, output: Path, console: Console) -> int:
    """Run the soak, write and print the report; return 1 on drift, wrong outputs or a dead process. Raises
    InputError for an impossible one."""
    held = FixedRatePlan.of(cli, options.held)
    more = {"rates": held.rates, "window_s": options.window, "windows": options.windows}
    store = create_store(output, held.scenario, held.source, held.plan, "soak", more)
    return _carry_out(
        SoakRun(held.scenario, held.plan, store, held.rates, options.window, options.windows), console
    )


def resume_run(path: Path, console: Console, *, force: bool) -> int:
    """Resume a soak: run the remaining windows. Raises InputError, StoreError."""
    run = open_unfinished_run(path, "soak", console)
    if run is None:
        return EXIT_OK
    planned = run.manifest.get("asked") or {}
    try:
        rates, window_s, windows = rates_in(planned), float(planned["window_s"]), int(planned["windows"])
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(
            f"{path}/manifest.json has no plan of a soak: {error}", hint="start a new run"
        ) from error
    again = resume.reopen(path, force=force)
    console.print(f"{len(run.all_trials)} windows are kept", markup=False)
    return _carry_out(SoakRun(again.scenario, again.plan, again.store, rates, window_s, windows), console)


def _carry_out(soak: SoakRun, console: Console) -> int:
    status = soak.carry_out(console)
    return EXIT_FAILED if soak_problems(load_run(soak.store.path)) else status


@dataclass(frozen=True)
class SoakRun(FixedRateRun):
    """Measures the windows of all pairs that the folder lacks."""

    method: ClassVar[Method] = "soak"
    window_s: float
    windows: int

    def measured_scenario(self) -> Scenario:
        return with_length(self.scenario, self.window_s, min(self.rates.values()))

    def pair(self, bench: DeployedBench, planned: DeploymentPlan, held: CellRate, done: set[str]) -> None:
        scenario, progress = self.measured_scenario(), self.watcher.trial_progress
        with bench.running(planned) as (launcher, deployment):

            def columns() -> dict[str, Any]:
                """Return a window's position and the processes' resources at its end."""
                at_s, session = (plan.number - 1) * self.window_s, self.store.resumed
                return {
                    "soak": {"at_s": at_s, "session": session, "holdings": holdings(deployment).to_json()}
                }

            trials = TrialRunner(scenario, deployment, self.store, launcher, progress, more_columns=columns)
            if held.pool is not None:
                trials.canaries[held.cell] = CanarySupply(scenario, deployment, held.pool)
            for number in range(1, self.windows + 1):
                reason = f"window {number}"
                plan = TrialPlan(held.cell, number, held.rate, reason, method="soak", searched=False)
                if plan.trial_id not in done:
                    self.watcher.trial_finished(trials.run(plan))
