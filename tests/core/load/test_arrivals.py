"""Planned offsets: gamma gaps, exact and repeatable."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.load.arrivals import Following, Sends, planned_offsets
from kvbench.errors import InputError

rates = st.floats(0.01, 5000)
shapes = st.floats(0.05, 100) | st.just(math.inf)


@given(rates, st.integers(0, 300), shapes, st.integers(0, 2**64))
def test_offsets_ascend_from_after_the_start_and_repeat(rate: float, n: int, shape: float, seed: int) -> None:
    offsets = planned_offsets(rate, n, shape, seed)
    assert len(offsets) == n
    assert np.all(np.diff(offsets) >= 0)
    assert np.all(offsets >= 0)
    assert np.array_equal(offsets, planned_offsets(rate, n, shape, seed))


@given(rates, st.floats(0.2, 20), st.integers(0, 2**32))
def test_gaps_have_the_planned_mean_and_variation(rate: float, shape: float, seed: int) -> None:
    n = 20_000
    gaps = np.diff(planned_offsets(rate, n + 1, shape, seed), prepend=0.0)
    # The standard error of the mean is cv / sqrt(n); eight of them never happen by chance.
    cv = 1 / math.sqrt(shape)
    assert abs(gaps.mean() * rate - 1) < 8 * cv / math.sqrt(n)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.25)


@given(rates, st.integers(1, 100))
def test_infinite_burstiness_is_a_constant_gap(rate: float, n: int) -> None:
    offsets = planned_offsets(rate, n, math.inf, 1)
    assert offsets == pytest.approx(np.arange(1, n + 1) / rate)


def test_the_count_in_a_window_varies_as_a_poisson_count_does() -> None:
    last = [planned_offsets(10, 100, 1.0, seed)[-1] for seed in range(200)]
    assert np.std(last) == pytest.approx(1.0, rel=0.3)  # sqrt(100) / 10; zero if it were rescaled


def test_another_seed_is_another_plan() -> None:
    assert not np.array_equal(planned_offsets(10, 50, 1.0, 1), planned_offsets(10, 50, 1.0, 2))


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert planned_offsets(math.inf, 3, 1.0, 1).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rate", "n", "shape"), [(0, 1, 1), (-1, 1, 1), (math.nan, 1, 1), (1, -1, 1), (1, 1, 0)]
)
def test_impossible_values_are_refused(rate: float, n: int, shape: float) -> None:
    with pytest.raises(InputError):
        planned_offsets(rate, n, shape, 1)


def test_a_request_waits_for_its_last_answer_and_falls_with_the_first_that_fails() -> None:
    """0 starts 1 and 2 at once, 3 waits for both, and 4 for 3."""
    after, think_s = ((), (0,), (0,), (1, 2), (3,)), (0.0, 1.0, 2.0, 3.0, 4.0)
    following = Following(after, think_s, [0] * 5, [0] * 5, [False] * 5)
    sends = Sends([0.5] * 5, following)
    assert (sends.planned(), sends.planned()) == ((0.5, 0), None)
    assert sends.answered(0, 10.0) == [(11.0, 1), (12.0, 2)]
    # Answers may be noticed out of order: the later one counts.
    assert (sends.answered(2, 20.0), sends.answered(1, 19.0)) == ([], [(23.0, 3)])
    assert sends.answered(3, 30.0) == [(34.0, 4)]
    sends = Sends([0.5] * 5, following)
    sends.sent(0, 0.5)
    sends.answered(0, 10.0)
    sends.sent(1, 11.0)
    sends.failed(1)  # and 3 and 4, each once, but not 2
    sends.failed(3)
    assert (sends.left, sends.answered(2, 20.0), sends.begun_s(2)) == (True, [], 0.5)
    sends.sent(2, 12.0)
    assert not sends.left
