"""Which of two rates is the higher one, from equally probable rates of both."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.core.findings.rate_change import PARTS, PossibleRates, known, within
from kvbench.core.search.posterior import posterior


def test_of_two_alike_neither_is_the_higher_one() -> None:
    one = within(9.0, 11.0, 0.9)
    assert one.above(one) == pytest.approx(0.5)
    low, high = one.ratio(one)
    assert low == pytest.approx(1 / high)


def test_an_interval_stands_for_a_log_normal_with_so_much_between_its_ends() -> None:
    rates = np.array(within(9.0, 11.0, 0.9).least)
    assert np.median(rates) == pytest.approx(math.sqrt(99))
    assert np.mean((rates >= 9.0) & (rates <= 11.0)) == pytest.approx(0.9, abs=1 / PARTS)
    drawn = np.exp(np.random.default_rng(1).normal(np.log(rates).mean(), np.log(11 / 9) / 2 / 1.645, 100_000))
    other = within(9.5, 12.0, 0.9)
    assert other.above(within(9.0, 11.0, 0.9)) == pytest.approx(
        np.mean([np.mean(rate > drawn) for rate in other.least]), abs=0.01
    )


def test_what_nothing_bounds_may_be_anything() -> None:
    at_least, none, found = within(10.0, None), within(None, 2.0), within(4.0, 5.0, 0.9)
    assert (at_least.above(found), found.above(at_least), found.above(none)) == (1.0, 0.0, 1.0)
    assert none.above(found) == 0.0
    assert at_least.above(at_least) == none.above(none) == 0.0
    low, high = at_least.ratio(found)
    assert (low, high) == (pytest.approx(2.0, rel=0.01), math.inf)
    assert found.ratio(none)[1] == math.inf
    assert within(9.0, 11.0) == PossibleRates((9.0,), (11.0,))  # a bracket of unknown probability
    assert within(9.0, 11.0).above(within(8.0, 9.5)) == 0.0
    assert within(None, None) == PossibleRates((0.0,), (math.inf,))


def test_rates_by_engine() -> None:
    assert within(10.0, None).divided(2) == PossibleRates((5.0,), (math.inf,))
    assert known([2.0, 4.0]).divided(2) == known([1.0, 2.0])


def test_as_many_rates_stand_for_an_interval_as_for_a_posterior() -> None:
    assert posterior.PARTS == PARTS == len(within(1.0, 2.0, 0.9).most)
