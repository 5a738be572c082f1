"""What one cell teaches the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.canaries.answer_kinds import CanaryResult, JudgedCanary
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.sweep.bench import Knowledge, Site, create_store, extrapolated
from kvbench.sweep.display import Silent
from kvbench.sweep.simulate import SimulatedBench
from kvbench.sweep.sweep import searching_sweep

PAIRS = frozenset({"mooncake", "nixl"})


def knowledge(**rates: float) -> Knowledge:
    cells = {}
    for key, rate in rates.items():
        connector, length = key.rsplit("_", 1)
        cells[Cell(connector, int(length), 16)] = rate
    return Knowledge({}, cells)


def test_the_other_pair_at_the_same_length_is_trusted() -> None:
    hint = knowledge(aggregated_256=30, mooncake_256=60).hint(Cell("nixl", 256, 16), PAIRS)
    assert (hint.rate, hint.trusted) == (60, True)


def test_an_aggregated_server_says_little_of_a_pair() -> None:
    assert knowledge(aggregated_256=30).hint(Cell("nixl", 256, 16), PAIRS) is None


def test_one_other_length_is_a_guess_and_two_are_a_line() -> None:
    one = knowledge(aggregated_256=30).hint(Cell("aggregated", 1024, 16), PAIRS)
    two = knowledge(aggregated_256=30, aggregated_1024=12.6).hint(Cell("aggregated", 2048, 16), PAIRS)
    assert not one.trusted
    assert 30 / 4 < one.rate < 30
    assert two.trusted
    assert two.rate == pytest.approx(7.1, abs=0.1)


@given(st.floats(0.001, 1), st.floats(1e-6, 1e-2), st.permutations([128, 512, 2048]))
def test_a_cost_linear_in_the_length_is_found(fixed: float, per_token: float, lengths: list[int]) -> None:
    known = [(length, 1 / (fixed + per_token * length)) for length in lengths[:2]]
    true = 1 / (fixed + per_token * lengths[2])
    assert extrapolated(known, lengths[2]) == pytest.approx(true, rel=1e-6)


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.floats(1e-3, 1e5)), min_size=1, max_size=5),
    st.integers(1, 10**6),
)
def test_a_guess_is_always_a_rate(known: list[tuple[int, float]], input_len: int) -> None:
    assert 0 < extrapolated(known, input_len) < float("inf")


class WrongAfterTcp(SimulatedBench):
    """After the last trial of tcp an answer is wrong."""

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        wrong = CanaryResult(8, wrong=(JudgedCanary(0, "x", "garbage", "end_of_cell"),))
        with super().up(planned, round_) as site:
            site.last_canaries = lambda cell: (wrong if cell.connector == "tcp" else None, None)
            yield site


def test_a_refused_rate_teaches_nothing(tmp_path: Path) -> None:
    sets = ("connectors=[aggregated,tcp,nixl]", "workload.input_len=[128]", "search.precision=0.3")
    scenario, source = resolve(CliOptions("quickstart", sets))
    plan = plan_of(scenario)
    store = create_store(tmp_path, scenario, source, plan, "simulate", {})
    with store:
        searching_sweep(scenario, plan, store, Silent(), WrongAfterTcp(scenario, store)).run()
    run = load_run(store.path)
    assert {cell.cell.connector: cell.status for cell in run.cells}["tcp"] == "refused"
    first = next(trial for trial in run.trials if trial.cell.connector == "nixl")
    assert first.purpose == "ceiling"
    assert not any(trial.cell.connector == "tcp" for trial in run.all_trials if trial.method == "equal_rate")
