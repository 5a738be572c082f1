"""What one way adds to another for the same requests, and how sure that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.stats import LEAST_PAIRS, Added, added, block_length


def by_name(found: list[Added]) -> dict[str, Added]:
    return {delta.figure: delta for delta in found}


@settings(max_examples=15, deadline=None)
@given(st.floats(-5, 5), st.integers(LEAST_PAIRS, 200), st.integers(0, 10**6))
def test_a_constant_is_found_exactly(shift: float, n: int, seed: int) -> None:
    without = np.random.default_rng(seed).lognormal(3, 1, n)
    for delta in added([(without + shift, without)]):
        assert delta.added == pytest.approx(shift, abs=1e-6)
        assert delta.lower == pytest.approx(shift, abs=1e-6)
        assert delta.upper == pytest.approx(shift, abs=1e-6)


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


def test_the_figures_are_those_of_all_pairs_together() -> None:
    random = np.random.default_rng(1)
    trials = [(random.normal(20, 3, 50), random.normal(10, 2, 50)) for _ in range(2)]
    with_, without = (np.concatenate([trial[side] for trial in trials]) for side in (0, 1))
    found = by_name(added(trials))
    for name, figure in {"p50": 50, "p90": 90, "p99": 99}.items():
        a, b = np.percentile(with_, figure), np.percentile(without, figure)
        assert (found[name].with_, found[name].without) == (pytest.approx(a), pytest.approx(b))
        assert found[name].added == pytest.approx(a - b)
    assert found["mean"].added == pytest.approx(with_.mean() - without.mean())
    assert found["request"].added == pytest.approx(np.median(with_ - without))
    for delta in found.values():
        assert delta.lower < delta.added < delta.upper
        assert delta.seen


def test_no_difference_is_not_told_from_zero() -> None:
    random = np.random.default_rng(9)
    shared = random.lognormal(3, 1, 300)
    pairs = [(shared + random.normal(0, 1, 300), shared + random.normal(0, 1, 300)) for _ in range(2)]
    assert not by_name(added(pairs))["request"].seen


def test_nothing_is_said_of_a_few() -> None:
    few = np.ones(LEAST_PAIRS - 1)
    assert (added([(few, few)]), added([]), added([(np.array([]), np.array([]))])) == ([], [], [])
    with pytest.raises(ValueError, match="pair"):
        added([(few, few[1:])])


def test_a_block_is_as_long_as_neighbours_resemble_each_other() -> None:
    assert block_length(np.array([0.0, 1.0] * 500)) == 10  # of nothing that lasts: the cube root of 1000
    assert block_length(np.array([0.0, 1.0] * 4)) == 1
    lasting = np.repeat(np.random.default_rng(2).normal(0, 1, 50), 20)  # about 20 alike
    assert 30 <= block_length(lasting) <= 60
    assert block_length(np.repeat([0.0, 1.0], 500)) == 200


@given(st.integers(1, 3000), st.integers(0, 100))
def test_blocks_are_never_longer_than_a_fifth(n: int, seed: int) -> None:
    values = np.cumsum(np.random.default_rng(seed).normal(0, 1, n))
    assert 1 <= block_length(values) <= max(1, n // 5)
