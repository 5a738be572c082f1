"""A ceiling probe: what comes out at most, and how little it leaves behind."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.ceiling import (
    LATENCIES,
    REQUESTS_MOST,
    ceiling_length_s,
    ceiling_measured,
    ceiling_offsets,
    completion_rate,
    is_over,
)
from kvbench.core.searchdata import Measured

BEAT_S = 0.25


def served(
    service_s: float, servers: int, rest_s: float, seed: int, latency_s: float | None = None
) -> tuple[Measured, float]:
    """(what a probe measured, seconds of work that it left behind) of so many servers side by side."""
    alone_s = latency_s or service_s + rest_s
    offsets = ceiling_offsets(320 / alone_s, alone_s, 1.0, seed)
    free = [0.0] * servers
    ends = np.empty(len(offsets))
    for index, arrival in enumerate(offsets.tolist()):
        left = max(arrival, heapq.heappop(free)) + service_s
        heapq.heappush(free, left)
        ends[index] = left + rest_s
    ends = np.sort(ends)
    now_s = 0.0
    while now_s < offsets[-1]:
        now_s += BEAT_S
        if is_over(ends[ends <= now_s], offsets[offsets <= now_s], now_s, alone_s):
            break
    sent = int((offsets <= now_s).sum())
    left_s = (sent - int((ends <= now_s).sum())) * service_s / servers
    return ceiling_measured(ends, offsets[:sent], now_s, alone_s), left_s


@pytest.mark.parametrize(("service_s", "servers", "rest_s"), [(0.02, 1, 0.0), (0.5, 64, 0.0), (2.0, 32, 0.0)])
def test_a_ceiling_is_what_the_servers_can_do(service_s: float, servers: int, rest_s: float) -> None:
    found = [served(service_s, servers, rest_s, seed)[0] for seed in range(12)]
    true = servers / service_s
    rates = [each.completion_rate / true for each in found if each.completion_rate is not None]
    assert len(rates) == 12
    assert np.median(rates) == pytest.approx(1.0, abs=0.12)
    assert sum(not each.grows for each in found) >= 6
    assert all(
        each.completion_rate >= 0.7 * true for each in found if not each.grows and each.completion_rate
    )


@pytest.mark.parametrize("service_s", [0.02, 0.1, 0.5, 2.0])
def test_one_server_alone_is_not_buried(service_s: float) -> None:
    """Some hundred requests' work at most, where a flood for five latencies leaves 1,600."""
    for seed in range(10):
        found, left_s = served(service_s, 1, 0.0, seed)
        assert left_s <= 120 * service_s
        assert found.completion_rate is not None
        assert found.completion_rate <= 1.5 / service_s


@pytest.mark.parametrize("latency_s", [0.5, 2.0])
def test_a_system_without_a_limit_shows_none(latency_s: float) -> None:
    for seed in range(5):
        found, _ = served(latency_s, 20_000, 0.0, seed)
        assert found.grows
        assert found.completion_rate is not None
        assert found.completion_rate >= 0.8 * 320 / latency_s, "it followed to the top"


def test_a_latency_that_was_taken_for_too_short_makes_no_ceiling() -> None:
    """Asked beforehand with few tokens, say: nothing can be overdue after a tenth of its time."""
    for seed in range(5):
        found, _ = served(2.0, 5000, 0.0, seed, latency_s=0.5)
        assert found.grows or found.completion_rate is None
        _, left_s = served(20.0, 1, 0.0, seed, latency_s=0.5)
        assert left_s <= 60 * 20.0


@given(st.floats(0.5, 20_000), st.floats(0, 30), st.sampled_from([0.3, 1.0, math.inf]), st.integers(0, 2**32))
def test_the_load_climbs_within_its_bounds(
    top: float, latency_s: float, burstiness: float, seed: int
) -> None:
    offsets = ceiling_offsets(top, latency_s, burstiness, seed)
    assert 1 <= len(offsets) <= REQUESTS_MOST
    assert np.all(offsets > 0)
    assert np.all(np.diff(offsets) >= 0)
    assert np.array_equal(offsets, ceiling_offsets(top, latency_s, burstiness, seed))
    assert ceiling_length_s(latency_s) >= LATENCIES * latency_s


def test_the_rate_doubles_again_and_again_and_then_stays() -> None:
    offsets = ceiling_offsets(400.0, 1.0, math.inf, 1)
    climb_s = 6.0
    counts = np.histogram(offsets, np.linspace(climb_s / 4, climb_s, 7))[0]
    assert counts[1:] / counts[:-1] == pytest.approx(2.0, rel=0.2)
    assert ((offsets > climb_s) & (offsets <= climb_s + 1)).sum() == pytest.approx(400, rel=0.02)


def test_completions_that_still_rise_are_no_ceiling() -> None:
    steady = completion_rate(np.arange(2.0, 20.0, 0.1), 20.0)
    assert steady is not None
    assert steady[0] == pytest.approx(10.0, rel=0.02)
    assert steady[1]
    rising = completion_rate(20.0 * np.sqrt(np.linspace(0.01, 1.0, 400)), 20.0)
    assert rising is not None
    climbing = completion_rate(np.log2(np.linspace(1.0, 400.0, 400)), 8.6)
    assert climbing is not None
    assert not climbing[1]
    assert completion_rate(np.array([1.0, 2.0]), 20.0) is None
    assert completion_rate(np.array([1.0, 1.0, 1.0]), 20.0) is None
    assert completion_rate(np.array([1.0, 2.0, 3.0]), 20.0) == (1.0, True)
    assert completion_rate(np.array([]), 1.0) is None


def test_a_ceiling_is_one_only_if_much_is_overdue() -> None:
    ends = np.arange(2.0, 20.0, 0.1)  # 10 a second, each 1 s alone
    sent = np.linspace(0.0, 20.0, 600)
    flooded = ceiling_measured(ends, sent, 20.0, 1.0)
    assert flooded.completion_rate == pytest.approx(10.0, rel=0.02)
    assert not flooded.grows
    easy = ceiling_measured(ends, ends - 1.0, 20.0, 1.0)
    assert easy.completion_rate == flooded.completion_rate
    assert easy.grows
    assert ceiling_measured([], sent, 20.0, 1.0) == Measured(duration_s=20.0)
    slow = np.arange(1.0, 6.0)  # 1 a second
    few = ceiling_measured(slow, sent[sent <= 5.0], 5.0, 1.0)
    assert few.completion_rate == pytest.approx(1.0)
    assert few.grows, "too few to be sure of"
    assert is_over(slow, sent[sent <= 5.0], 5.0, 1.0), "but enough to go on no longer"
