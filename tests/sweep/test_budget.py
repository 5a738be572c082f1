"""One budget for all searches of a sweep: which cell gets how much of it, on virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import CellResult, RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume, simulate
from kvbench.sweep.bench import Bench, Site, TrialBudget, create_store
from kvbench.sweep.display import Silent
from kvbench.sweep.strategies import Standing
from kvbench.sweep.sweep import searching_sweep
from kvbench.sweep.system import ExternalSystem, SystemSite
from kvbench.sweep.verify.audit import audit
from tools.random_systems.judge.search import DrawnAnswers, searched
from tools.random_systems.system import Disturbances, Service, Slo, System, Workload

pytestmark = pytest.mark.timeout(300)
A, B, C = (Cell(name, 128, 16) for name in "abc")


def ended(cell: Cell, lower: float | None, upper: float | None) -> CellResult:
    return CellResult(cell, "done", {"lower": lower, "upper": upper})


def test_what_a_cell_leaves_goes_to_its_connector_and_then_to_later_ones() -> None:
    long = Cell("a", 512, 16)
    cells = [A, long, B, Cell("b", 512, 16)]
    budget = TrialBudget(400.0, cells)
    assert budget.share_s() == 100
    budget.left_s -= 40
    budget.end(ended(A, 9, 11))
    assert budget.share_s() == 120
    budget.left_s -= 120
    budget.end(ended(long, 4, 5))
    parts = []
    for cell, seconds in budget.spare_parts([A, long]):
        parts.append((cell, seconds))
        budget.left_s -= 10
    assert parts == [(A, 20), (long, 30)]
    assert (budget.share_s(), list(budget.spare_parts([A]))) == (110, [(A, 20)])


def test_without_a_budget_time_is_not_limited() -> None:
    assert TrialBudget().share_s() == math.inf
    assert (list(TrialBudget().spare_parts([A])), TrialBudget().overlaps(A, 1, 2)) == ([], None)


def test_a_comparison_is_decided_once_every_other_connector_is_known() -> None:
    budget = TrialBudget(400.0, [A, B, C, Cell("b", 512, 16)], {"c": 2})
    budget.end(ended(B, 12, 14))
    assert budget.overlaps(A, 9, 11) is None
    assert budget.overlaps(A, 9, 12.5) is True
    budget.end(CellResult(C, "failed"))
    assert budget.overlaps(A, 9, 11) is False
    budget.end(ended(C, 20, 24))  # of two engines
    assert budget.overlaps(A, 9, 11) is True
    budget.end(ended(C, None, 16))
    assert budget.overlaps(A, 9, 11) is False
    budget.end(ended(B, 10, None))
    assert budget.overlaps(A, 9, 11) is True


# -- one cell ------------------------------------------------------------------------------------------
def system(service: Service, mean_s: float = 0.1) -> System:
    """One server with requests of 100 ms on average; 90 % within 300 ms."""
    return System(
        "queue", ("queue",), "fifo", 1, mean_s, service, 0.0, 0.0, None, Disturbances(), True,
        Workload(128, 1, 1.0), Slo(300.0, None, 0.9),
    )  # fmt: skip


def one_search(service: Service, budget_s: float, folder: Path) -> tuple[CellResult, float]:
    """The result, and the seconds of its trials."""
    run = searched(system(service), 1, folder, 200.0, sets=(f"search.budget_s={budget_s}",))
    return run.cells[0], spent_s(run)


def spent_s(run: RunFolder) -> float:
    return math.fsum(trial.duration_s for trial in run.all_trials if trial.method == "sustained")


def test_a_search_of_even_requests_converges_within_its_time(tmp_path: Path) -> None:
    result, spent = one_search(Service(), 250.0, tmp_path)
    assert result.answer["status"] == "converged"
    assert result.answer["max_request_rate"] == pytest.approx(5.87, rel=0.05)
    assert spent <= 260


def test_a_search_whose_time_is_over_says_what_more_it_takes(tmp_path: Path) -> None:
    result, spent = one_search(Service(), 60.0, tmp_path)
    assert result.reason.startswith("stopped after the cell's part of search.budget_s: ±5 % needs about")
    assert 50 <= spent <= 75


def test_a_search_that_cannot_reach_its_precision_in_time_ends_early(tmp_path: Path) -> None:
    result, spent = one_search(Service("lognormal", 0.7), 200.0, tmp_path)
    assert result.reason.startswith("±5 % needs about")
    assert result.reason.endswith("more: its requests vary too much")
    assert spent < 190


# -- a whole sweep -------------------------------------------------------------------------------------
@dataclass
class TwoSystems(Bench):
    """Two connectors, each a system of its own. ``trials``: number until the process is interrupted."""

    scenario: Scenario
    store: RunStore
    systems: Mapping[str, System]
    trials: float = math.inf

    def open(self) -> AbstractContextManager[Scenario]:
        return nullcontext(self.scenario)

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        answers = DrawnAnswers(self.systems[planned.label])
        site = SystemSite(self.scenario, ExternalSystem(self.scenario, answers), self.store)
        site.run = self.counted(site.run)  # type: ignore[assignment, method-assign]
        yield site

    def counted(self, run: Callable[[TrialPlan], TrialRecord]) -> Callable[[TrialPlan], TrialRecord]:
        def once(plan: TrialPlan) -> TrialRecord:
            self.trials -= 1
            if self.trials < 0:
                raise KeyboardInterrupt
            return run(plan)

        return once


class Notes(Silent):
    """``events``: notes in order, and each trial's connector."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def note(self, text: str, *, caveat: bool = False) -> None:
        self.events.append(text)

    def trial_finished(self, record: TrialRecord, standing: Standing | None = None) -> None:
        self.events.append(record.cell.connector)


@dataclass
class Raced:
    """A sweep of two systems with one budget."""

    first: System
    second: System
    budget_s: float
    precision: float = 0.05
    notes: Notes = field(default_factory=Notes)

    def __post_init__(self) -> None:
        sets = (
            *("connectors=[aggregated,tcp]", "workload.input_len=[128]", "workload.output_len=1", "seed=3"),
            *("slo={ttft_ms: 300, attainment: 0.9}", "search.max_trial_s=150", "search.equal_rate=false"),
            *(f"search.precision={self.precision}", "search.max_trials=20"),
        )
        self.scenario, self.source = resolve(CliOptions("quickstart", sets, budget_s=self.budget_s))
        self.plan = plan_of(self.scenario)

    def run(self, folder: Path, until: float = math.inf) -> RunFolder:
        return self.finish(create_store(folder, self.scenario, self.source, self.plan, "simulate", {}), until)

    def resumed(self, run: RunFolder) -> RunFolder:
        store = RunStore.reopen(run.path)
        resume.take_over(store, self.scenario, None)
        return self.finish(store)

    def finish(self, store: RunStore, until: float = math.inf) -> RunFolder:
        systems = {"aggregated": self.first, "tcp": self.second}
        bench = TwoSystems(self.scenario, store, systems, until)
        with suppress(KeyboardInterrupt), store:
            searching_sweep(self.scenario, self.plan, store, self.notes, bench).run()
        return load_run(store.path)


def of_cell(run: RunFolder, connector: str) -> tuple[CellResult, float]:
    """The cell's result, and the seconds of its trials."""
    (result,) = (cell for cell in run.cells if cell.cell.connector == connector)
    durations_s = (trial.duration_s for trial in run.all_trials if trial.cell == result.cell)
    return result, math.fsum(durations_s)


def width(result: CellResult) -> float:
    assert result.answer is not None
    return float(result.answer["upper"] / result.answer["lower"] - 1) / 2


def within_budget(run: RunFolder, budget_s: float) -> bool:
    """Whether all trials but the last are within the budget."""
    return spent_s(run) <= budget_s + run.all_trials[-1].duration_s


def test_a_cell_out_of_reach_gives_its_time_to_the_next(tmp_path: Path) -> None:
    race = Raced(system(Service("lognormal", 0.7), 0.09), system(Service(), 0.12), 280.0)
    run = race.run(tmp_path)
    (varied, varied_s), (even, even_s) = of_cell(run, "aggregated"), of_cell(run, "tcp")
    assert varied.reason.endswith("more: its requests vary too much")
    assert varied.answer is not None
    assert varied.answer["max_request_rate"] is not None  # a trial was met
    assert varied_s < 140
    assert even.answer is not None
    assert even.answer["status"] == "converged"
    assert even_s > 140  # its first part
    assert within_budget(run, 280)


def test_time_that_is_left_is_spent_on_a_comparison_that_is_open(tmp_path: Path) -> None:
    race = Raced(system(Service()), system(Service(), 0.101), 500.0, 0.1)
    run = race.run(tmp_path)
    second, _ = of_cell(run, "tcp")
    assert not [note for note in race.notes.events if "is requested" in note]
    (note,) = (text for text in race.notes.events if "further trials" in text)
    assert "tcp" in race.notes.events[race.notes.events.index(note) :]
    assert second.answer is not None
    assert second.answer["status"] == "converged"
    assert width(second) <= 0.05
    assert within_budget(run, 500)


def test_a_cell_that_is_clear_of_all_others_ends_at_twice_the_precision(tmp_path: Path) -> None:
    run = Raced(system(Service()), system(Service("exponential", 1.0), 0.02), 900.0).run(tmp_path)
    slow, fast = (of_cell(run, connector)[0] for connector in ("aggregated", "tcp"))
    assert width(slow) <= 0.05 < width(fast) <= 0.1
    assert fast.reason.endswith("its comparison is decided")
    assert within_budget(run, 900)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Raced, RunFolder]:
    race = Raced(system(Service()), system(Service(), 0.12), 200.0, 0.1)
    return race, race.run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("until", [2, 4])
def test_an_interrupted_sweep_goes_on_with_the_time_that_is_left(
    whole: tuple[Raced, RunFolder], tmp_path: Path, until: int
) -> None:
    """Its trials are as long as without the interruption: their lengths depend on the time left."""
    race, expected = whole
    broken = race.run(tmp_path, until)
    assert len(broken.all_trials) == until < len(expected.all_trials)
    found = race.resumed(broken)
    tried, wanted = (
        np.array([(trial.request_rate, trial.duration_s) for trial in run.all_trials])
        for run in (found, expected)
    )
    assert tried == pytest.approx(wanted)
    assert [cell.reason for cell in found.cells] == [cell.reason for cell in expected.cells]
    assert within_budget(found, 200)


SETS = (
    *("connectors=[aggregated,tcp]", "workload.input_len=[256]", "search.precision=0.1", "seed=3"),
    *("deployment.engine_options.time_scale=4", "slo.ttft_ms=800", "slo.tpot_ms=80"),
    *("search.max_trial_s=60", "search.equal_rate=false"),
)


def test_a_sweep_keeps_to_its_budget_and_can_be_verified(tmp_path: Path) -> None:
    path = simulate.simulated(CliOptions("quickstart", SETS, budget_s=60.0), tmp_path)
    run = load_run(path)
    assert len(run.cells) == 2
    assert spent_s(run) <= 70
    assert [str(damage) for damage in audit(path).damages] == []
