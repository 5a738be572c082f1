"""The time left of a sweep, on virtual time: it counts down, hardly ever grows, and is about right."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvbench.core.records import Cell, TrialRecord
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import CellResult
from kvbench.results.store import RunInfo, RunStore
from kvbench.sweep.display import Silent, TimeLeft
from kvbench.sweep.simulate import SimulatedBench
from kvbench.sweep.strategies import Standing
from kvbench.sweep.sweep import searching_sweep

pytestmark = pytest.mark.timeout(300)
STEPS = 10
"""How often the time left is looked at in a trial."""
LONG = ("quickstart", "xpyd")


@dataclass
class Clock(Silent):
    """Watches a simulated sweep by its own clock: the seconds of all trials so far."""

    left: TimeLeft
    now_s: float = 0.0
    shown: list[tuple[float, Cell, float]] = field(default_factory=list)
    """(time, cell, time left) of each look."""

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        for step in range(1, STEPS + 1):
            in_trial_s = record.duration_s * step / STEPS
            left_s = self.left.left_s(self.now_s + in_trial_s, record.cell, in_trial_s)
            if left_s is not None:
                self.shown.append((self.now_s + in_trial_s, record.cell, left_s))
        self.now_s += record.duration_s
        known = (standing.confidence, standing.width) if standing else (None, None)
        self.left.trial_ended(record, *known)

    def cell_finished(self, result: CellResult) -> None:
        self.left.cell_ended(result.cell)


def watched(name: str, folder: Path, **settings: Any) -> Clock:
    scenario, source = resolve(CliOptions(scenario=name, **settings))
    plan = plan_of(scenario)
    clock = Clock(TimeLeft(plan, paced=False))
    assert clock.left.left_s(0.0) is None
    with RunStore.create(folder, name, source, plan.to_json(), {}, RunInfo(kind="simulate")) as store:
        searching_sweep(scenario, plan, store, clock, SimulatedBench(scenario, store)).run()
    return clock


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.heavy) for name in LONG), "burst-or-sustained"]
)
def test_the_time_left_hardly_grows_and_is_about_right_at_half_time(name: str, tmp_path: Path) -> None:
    clock = watched(name, tmp_path, overrides=("seed=5",))
    total_s = clock.now_s
    for cell in dict.fromkeys(cell for _, cell, _ in clock.shown):
        remaining = [left_s for _, of, left_s in clock.shown if of == cell]
        lowest = remaining[0]
        for left_s in remaining:
            assert left_s <= 1.2 * lowest, (cell, left_s, lowest)
            lowest = min(lowest, left_s)
    half_s, _, left_s = min(clock.shown, key=lambda look: abs(look[0] - total_s / 2))
    assert left_s == pytest.approx(total_s - half_s, rel=0.3)
    # Within a trial it counts down by about the time that goes by.
    falls = [a[2] - b[2] for a, b in zip(clock.shown, clock.shown[1:], strict=False) if a[1] == b[1]]
    assert sum(fall > 0 for fall in falls) > 0.75 * len(falls)


def test_a_run_in_real_time_begins_with_the_plans_estimate_of_launches(tmp_path: Path) -> None:
    scenario, _ = resolve(CliOptions(scenario="quickstart"))
    plan = plan_of(scenario)
    left = TimeLeft(plan)
    for cell in plan.cells[:-1]:
        left.cell_ended(cell)
    before = left.left_s(0.0)
    slower = left.left_s(2 * before)
    assert slower > before > 0
