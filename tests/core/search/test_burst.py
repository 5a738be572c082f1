"""The burst method's rule, against systems whose capacity is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.search.burst import BURST_S, BurstSearch, burst_offsets, burst_requests


def found(capacity: float, start: float = 8.0, max_trials: int = 40, precision: float = 0.05) -> BurstSearch:
    search = BurstSearch(start, 0.1, 1000, precision, max_trials)
    while (rate := search.ask()) is not None:
        search.tell(rate, "met" if rate <= capacity else "missed")
    return search


@given(st.floats(0.2, 900), st.floats(0.1, 1000))
def test_it_brackets_the_rate(capacity: float, start: float) -> None:
    answer = found(capacity, start).answer()
    assert answer.status == "converged"
    assert answer.lower <= capacity <= answer.upper
    assert answer.upper <= answer.lower * 1.0501
    assert not answer.confirmed


def test_it_goes_as_by_hand() -> None:
    search = BurstSearch(10, 0.1, 1000, 0.05, 20)
    rates = []
    while (rate := search.ask()) is not None:
        rates.append(rate)
        search.tell(rate, "met" if rate <= 33 else "missed")
    assert rates == [10, 20, 40, 30, 35, 32.5, 33.75]


@pytest.mark.parametrize(
    ("capacity", "status", "rate", "censored"),
    [(5000, "censored", 1000, "above"), (0.01, "slo_unattainable", None, "below")],
)
def test_ends_of_the_scale(capacity: float, status: str, rate: float | None, censored: str) -> None:
    answer = found(capacity).answer()
    assert (answer.status, answer.max_request_rate, answer.censored) == (status, rate, censored)


def test_few_trials_and_refused_ones() -> None:
    assert found(33, max_trials=3).answer().status == "exhausted"
    search = BurstSearch(10, 0.1, 1000, 0.05, 20)
    assert search.answer().status == "undecided"
    search.tell(10, "invalid")
    assert search.ask() == 10
    search.tell(10, "invalid")
    assert (search.ask(), search.answer().reason) == (None, "trials were invalid")
    with pytest.raises(ValueError, match="rates must satisfy"):
        BurstSearch(10, 20, 30, 0.05, 5)


@given(st.floats(0.1, 2000), st.floats(0.1, 50), st.integers(0, 2**60))
def test_a_burst_is_five_seconds_of_arrivals(rate: float, burstiness: float, seed: int) -> None:
    offsets = burst_offsets(rate, burstiness, seed)
    assert len(offsets) == burst_requests(rate) == max(1, round(BURST_S * rate))
    assert offsets[-1] == pytest.approx(len(offsets) / rate)
    assert (offsets >= 0).all()
    assert (offsets[1:] >= offsets[:-1]).all()
