"""One budget for all searches of a sweep: which cell gets how much of it, on virtual time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvbench.core.records import Cell
from kvbench.planning.overrides import CliOptions
from kvbench.results.run import CellResult, RunFolder, load_run
from kvbench.sweep import simulate
from kvbench.sweep.bench import TrialBudget
from kvbench.sweep.verify.audit import audit
from tools.random_systems.judge.search import searched
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
def system(service: Service) -> System:
    """One server with requests of 100 ms on average; 90 % within 300 ms."""
    return System(
        "queue", ("queue",), "fifo", 1, 0.1, service, 0.0, 0.0, None, Disturbances(), True,
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
    result, spent = one_search(Service("lognormal", 0.7), 150.0, tmp_path)
    assert result.reason.startswith("±5 % needs about")
    assert result.reason.endswith("more: its requests vary too much")
    assert spent < 120


# -- a whole sweep -------------------------------------------------------------------------------------
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
    assert [str(each) for each in audit(path).damages] == []
