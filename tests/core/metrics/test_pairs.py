"""What one way adds to another for the same requests, and how sure that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.metrics.paired import LEAST_PAIRS, Added, added, block_length


def by_name(found: list[Added]) -> dict[str, Added]:
    return {each.figure: each for each in found}


@settings(max_examples=15, deadline=None)
@given(st.floats(-5, 5), st.integers(LEAST_PAIRS, 200), st.integers(0, 10**6))
def test_a_constant_is_found_exactly(shift: float, n: int, seed: int) -> None:
    without = np.random.default_rng(seed).lognormal(3, 1, n)
    for each in added([(without + shift, without)]):
        assert each.added == pytest.approx(shift, abs=1e-6)
        assert each.lower == pytest.approx(shift, abs=1e-6)
        assert each.upper == pytest.approx(shift, abs=1e-6)


def test_what_both_share_falls_out() -> None:
    """Latencies spread over hundreds of ms; their twins tell 0.3 ms apart within hundredths."""
    random = np.random.default_rng(3)
    shared = random.lognormal(4, 1, 1000)
    one = shared + 0.3 + random.normal(0, 0.2, 1000)
    found = by_name(added([(one, shared + random.normal(0, 0.2, 1000))]))
    assert found["request"].added == pytest.approx(0.3, abs=0.04)
    assert found["request"].upper - found["request"].lower < 0.08
    assert found["request"].seen
    assert found["mean"].with_ == pytest.approx(float(one.mean()))
    assert found["p50"].without is not None
    assert found["request"].with_ is None


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    """Neighbours share their noise here (a queue's do), which an interval for single requests would miss."""
    inside, times = 0, 60
    for seed in range(times):
        random = np.random.default_rng(seed)
        noise = random.normal(0, 1, 400)
        for index in range(1, 400):
            noise[index] = 0.7 * noise[index - 1] + noise[index] * 0.7
        without = random.lognormal(2, 0.3, 400)
        mean = by_name(added([(without + 1.0 + noise, without)]))["mean"]
        inside += mean.lower <= 1.0 <= mean.upper
    assert inside >= 0.8 * times


def test_no_difference_is_not_told_from_zero() -> None:
    random = np.random.default_rng(9)
    shared = random.lognormal(3, 1, 300)
    pairs = [(shared + random.normal(0, 1, 300), shared + random.normal(0, 1, 300)) for _ in range(2)]
    assert not by_name(added(pairs))["request"].seen


def test_nothing_is_said_of_a_few() -> None:
    few = np.ones(LEAST_PAIRS - 1)
    assert added([(few, few)]) == []
    assert added([]) == []
    assert added([(np.array([]), np.array([]))]) == []
    with pytest.raises(ValueError, match="twin"):
        added([(few, few[1:])])


@given(st.integers(1, 3000), st.integers(0, 100))
def test_blocks_are_never_longer_than_a_fifth(n: int, seed: int) -> None:
    values = np.cumsum(np.random.default_rng(seed).normal(0, 1, n))
    assert 1 <= block_length(values) <= max(1, n // 5)
