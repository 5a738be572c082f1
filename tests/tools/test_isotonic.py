"""AIPerf's default rule: values that ascend, and brackets that narrow to where a margin crosses 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.perf_search.pipeline import run_closed
from tools.perf_search.rivals import (
    MOST_POINTS,
    REQUESTS,
    WARMUP_S,
    Bench,
    SmoothIsotonic,
    isotonic_fit,
    isotonic_rule,
)
from tools.perf_search.systems import SYSTEMS


def test_neighbours_that_descend_are_pooled() -> None:
    assert isotonic_fit([1.0, 3.0, 2.0, 4.0]).tolist() == [1.0, 2.5, 2.5, 4.0]
    assert isotonic_fit([3.0, 2.0, 1.0]).tolist() == [2.0, 2.0, 2.0]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_what_is_pooled_ascends_and_keeps_its_mean(values: list[float]) -> None:
    pooled = isotonic_fit(values)
    assert np.all(np.diff(pooled) >= 0)
    assert float(pooled.mean()) == pytest.approx(float(np.mean(values)), abs=1e-6)
    assert isotonic_fit(pooled.tolist()).tolist() == pytest.approx(pooled.tolist())


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 17, 100, 333, 999])
@pytest.mark.parametrize("shape", [1.0, 0.2, 5.0])
def test_the_limit_is_found_to_five_percent(limit: int, shape: float) -> None:
    search = SmoothIsotonic(
        lambda users: math.copysign(abs(users - limit - 0.5) ** shape, users - limit - 0.5)
    )
    found = search.run()
    assert found is not None
    assert found <= limit <= found * 1.06 + 1
    assert search.points <= MOST_POINTS


def test_where_there_is_no_limit_that_is_the_answer() -> None:
    assert SmoothIsotonic(lambda users: 1.0).run() is None
    everything = SmoothIsotonic(lambda users: -1.0)
    assert everything.run() == 1000
    assert everything.points == 11


def test_noise_ends_it_in_time() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        search = SmoothIsotonic(lambda users: (users - 40) / 40 + float(rng.normal(0, 0.5)))
        search.run()
        assert search.points <= MOST_POINTS


def test_a_closed_loop_by_number() -> None:
    outcomes = run_closed(SYSTEMS["slots"], 40, math.inf, np.random.default_rng(1), 500)
    assert len(outcomes.end_s) == 500
    assert len(run_closed(SYSTEMS["slots"], 40, math.inf, np.random.default_rng(1), 10).end_s) == 10


def test_the_rule_counts_requests_and_pays_for_its_warm_up() -> None:
    bench = Bench(SYSTEMS["md1"], 1)
    rate = isotonic_rule(bench)
    assert rate is not None
    assert 0.5 < rate / 17.4 < 1.2
    assert bench.measured_s > bench.trials * (WARMUP_S + REQUESTS / 20.0)
