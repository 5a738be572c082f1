"""Whole searches on virtual time, ceiling probe and live rule included, of servers once answered wrongly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from serving import decided, first_tokens

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.search.ceiling import plan_saturation
from kvbench.core.search.data import SearchAnswer, TrialFigures
from kvbench.core.search.live_config import CriterionTarget, LiveConfig, trial_length_s
from kvbench.core.search.search import RateSearch, SearchLimits
from kvbench.core.search.sequential_trial import LiveTrial
from tools.known_queues import md1_max_rate

BEAT_S = 0.2507
FirstTokens = Callable[[np.ndarray], np.ndarray]
"""Planned sends in seconds → when each request's first token comes."""


def servers_in_parallel(service_s: float, servers: int | None) -> FirstTokens:
    """So many of them, or one for each request; all idle when a trial begins."""

    return lambda offsets: first_tokens(offsets, np.full(len(offsets), service_s), servers)


def saturation(server: FirstTokens, rate: float, alone_s: float, seed: int) -> tuple[TrialFigures, float]:
    """(what a ceiling probe measured, the work that it left, as requests)."""
    plan = plan_saturation(rate, alone_s, 1.0, seed)
    ends, now_s = np.sort(server(plan.offsets_s)), BEAT_S
    while not plan.is_over(ends[ends <= now_s], now_s):
        now_s += BEAT_S
    return plan.measured(ends, now_s), float((plan.offsets_s <= now_s).sum() - (ends <= now_s).sum())


def find(
    server: FirstTokens, alone_s: float, limit_s: float, max_rate: float, seed: int, target: float = 0.9
) -> SearchAnswer:
    """As the sweep does it: a cold start at four requests under way, and a ceiling probe first."""
    start = min(4.0 / alone_s, max_rate)
    search = RateSearch(SearchLimits(start, 0.01, max_rate, attainment=target), ceiling=True)
    while (probe := search.ask()) is not None:
        seed += 1
        if probe.purpose == "ceiling":
            search.tell(probe.rate, "undecided", saturation(server, probe.rate, alone_s, seed)[0])
            continue
        n = round(trial_length_s(probe.rate, alone_s) * probe.rate)
        config = LiveConfig(
            planned_offsets(probe.rate, n, 1.0, seed), probe.rate, alone_s, ttft_limit_s=limit_s,
            full_length=probe.full_length, confirms=probe.purpose == "confirm",
        )  # fmt: skip
        live = LiveTrial(config, [CriterionTarget("share", target)])
        first = server(np.asarray(config.offsets_s))
        decision = decided(live, first, limit_s, 0.0, BEAT_S)
        search.tell(probe.rate, decision.verdict, decision.measured)
    return search.answer()


@pytest.mark.parametrize("seed", [0, 100, 200])
def test_a_server_that_never_misses_is_not_limited(seed: int) -> None:
    """Each first token comes after 2.0 s, however many are served at once; nothing is ever missed."""
    answer = find(servers_in_parallel(2.0, None), 2.0, 5.0, 40.0, seed)
    assert (answer.max_request_rate, answer.censored) == (40.0, "above")
    assert answer.trials <= 3
    assert all(point["verdict"] == "met" for point in answer.curve if point["purpose"] != "ceiling")


@pytest.mark.heavy
@pytest.mark.parametrize(("service_s", "limit_s", "seeds"), [(0.02, 0.06, 2), (0.1, 0.3, 5)])
def test_a_queue_is_neither_buried_nor_misjudged(service_s: float, limit_s: float, seeds: int) -> None:
    """M/D/1 with room for three services. Its curve is shallow, so the answer is not sharp."""
    true = md1_max_rate(service_s, limit_s, 0.9)
    server = servers_in_parallel(service_s, 1)
    answers = [find(server, service_s, limit_s, 400.0, 100 * seed) for seed in range(seeds)]
    rates = [answer.max_request_rate for answer in answers if answer.max_request_rate is not None]
    assert (len(rates), np.median(rates)) == (len(answers), pytest.approx(true, rel=0.08))
    assert all(0.8 * true <= rate <= 1.2 * true for rate in rates)
    assert saturation(server, 320 / service_s, service_s, 1)[1] * service_s <= 32.0
