"""A ceiling probe: what comes out at most, and how little it leaves behind."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import first_tokens

from kvbench.core.search.ceiling import (
    FIRST_REQUESTS,
    SATURATION_REQUESTS,
    SaturationProbe,
    completion_rate,
    plan_saturation,
)
from kvbench.core.search.data import TrialFigures

BEAT_S = 0.2507


def served(
    service_s: float, servers: int, rest_s: float, seed: int, latency_s: float | None = None
) -> tuple[TrialFigures, int, float]:
    """(what was measured, requests sent, seconds of work left behind) of so many servers side by side."""
    alone_s = latency_s or service_s + rest_s
    saturation = plan_saturation(320 / alone_s, alone_s, 1.0, seed)
    ends = first_tokens(saturation.offsets_s, np.full(len(saturation.offsets_s), service_s), servers) + rest_s
    ends, now_s = np.sort(ends), BEAT_S
    while not saturation.is_over(ends[ends <= now_s], now_s):
        now_s += BEAT_S
    sent = int((saturation.offsets_s <= now_s).sum())
    left_s = (sent - int((ends <= now_s).sum())) * service_s / servers
    return saturation.measured(ends, now_s), sent, left_s


@pytest.mark.parametrize(
    ("service_s", "servers", "rest_s"), [(0.5, 64, 0.0), (2.0, 256, 0.0), (0.05, 1, 5.0)]
)
def test_a_ceiling_is_what_the_servers_can_do(service_s: float, servers: int, rest_s: float) -> None:
    for seed in range(6):
        found, _, left_s = served(service_s, servers, rest_s, seed)
        assert not found.grows
        assert found.completion_rate == pytest.approx(servers / service_s, rel=0.15)
        assert left_s <= 20 * (service_s + rest_s)


@pytest.mark.parametrize("service_s", [0.1, 0.5, 2.0])
def test_one_server_alone_is_spared_the_saturation(service_s: float) -> None:
    """It works on what was dropped: a saturation for five latencies leaves it 1,600 requests."""
    found, sent, left_s = served(service_s, 1, 0.0, 1)
    assert sent == FIRST_REQUESTS
    assert left_s <= FIRST_REQUESTS * service_s
    assert found.grows, "no ceiling, only where to begin"
    assert 0.4 / service_s <= found.completion_rate <= 1.1 / service_s


def test_a_latency_that_was_taken_for_too_short_makes_no_ceiling() -> None:
    """Asked beforehand with fewer tokens, say: nothing is done after two of them."""
    found, sent, _ = served(10.0, 64, 0.0, 1, latency_s=1.0)
    assert (found.completion_rate, sent) == (None, FIRST_REQUESTS)


@pytest.mark.parametrize("latency_s", [0.1, 2.0])
def test_a_system_without_a_limit_shows_none(latency_s: float) -> None:
    found, _, left_s = served(latency_s, 20_000, 0.0, 1)
    assert found.grows
    assert left_s < 1.0


@given(
    rate=st.floats(0.5, 20_000),
    latency_s=st.floats(0, 30),
    burstiness=st.sampled_from([0.3, 1.0, math.inf]),
    seed=st.integers(0, 2**32),
)
def test_a_plan_keeps_its_bounds(rate: float, latency_s: float, burstiness: float, seed: int) -> None:
    saturation = plan_saturation(rate, latency_s, burstiness, seed)
    offsets = saturation.offsets_s
    assert np.all(offsets >= 0)
    assert np.all(np.diff(offsets) >= 0)
    first = int(np.searchsorted(offsets, saturation.begins_s, side="right"))
    assert 1 <= first <= FIRST_REQUESTS
    assert 1 <= len(offsets) - first <= SATURATION_REQUESTS
    assert saturation.begins_s >= 2 * latency_s
    assert np.array_equal(offsets, plan_saturation(rate, latency_s, burstiness, seed).offsets_s)


def test_completions_that_still_rise_are_no_ceiling() -> None:
    steady = completion_rate(np.arange(2.0, 20.0, 0.1), 20.0)
    assert steady[0] == pytest.approx(10.0, rel=0.02)
    assert steady[1]
    rising = completion_rate(20.0 * np.sqrt(np.linspace(0.01, 1.0, 400)), 20.0)
    assert not rising[1]
    late = completion_rate(np.arange(15.0, 20.0, 0.1), 20.0)
    assert not late[1]
    assert (completion_rate([1.0] * 9, 20.0), completion_rate([], 1.0)) == (None, None)


def saturated(sent: int, latency_s: float, until_s: float = 20.0) -> SaturationProbe:
    return SaturationProbe(np.linspace(0.0, until_s, sent), 0.0, until_s, latency_s, sent / until_s)


def test_a_ceiling_is_one_only_if_much_is_left_behind() -> None:
    ends = np.arange(2.0, 20.0, 0.1)  # 10 a second
    found = saturated(600, 1.0).measured(ends, 20.0)
    assert found.completion_rate == pytest.approx(10.0, rel=0.02)
    assert not found.grows
    easy = saturated(len(ends) + 12, 1.0).measured(ends, 20.0)
    assert easy.completion_rate == pytest.approx(len(ends) / 20.0, rel=0.2)
    assert easy.grows
    assert saturated(600, 1.0).measured([], 20.0) == TrialFigures(duration_s=20.0)
    quick = np.arange(0.03, 2.7, 0.0658)  # 15 a second of 26 ms: 0.4 are under way on average, 2 by chance
    assert saturated(len(quick) + 2, 0.026, 2.7).measured(quick, 2.7).grows
    assert not saturated(len(quick) + 14, 0.026, 2.7).measured(quick, 2.7).grows
