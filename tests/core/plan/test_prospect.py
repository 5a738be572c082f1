"""What a search's time buys: the formula against queues of known truth, and what is said of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbench.core.plan.prospect import (
    EVEN,
    SPENT,
    UNEVEN,
    Asked,
    KnownCell,
    half_width,
    may_suffice,
    prospect_of,
    prospect_text,
    prospects,
    seen_of,
    shortfall_text,
    trial_s,
)
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.slo import Slo
from tests.core.scenario.test_scenario import MINIMAL, parse
from tools.known_queues import md1_max_rate

Z90 = 1.645


def asked_for(slo: str = "{ttft_ms: 400, attainment: 0.9}", *sets: str) -> Scenario:
    return parse(MINIMAL.replace("slo: {ttft_ms: 250}", f"slo: {slo}"), *sets)


# -- the formula --------------------------------------------------------------------------------------
def test_an_md1_queue_is_known_as_well_as_the_formula_says() -> None:
    """M/D/1 of 100 ms, TTFT ≤ 400 ms for 90 %: how widely ln(misses) / steepness of long trials is spread."""
    service_s, slack_s, share, seconds = 0.1, 0.3, 0.1, 2000.0
    rate = md1_max_rate(service_s, service_s + slack_s, 1 - share)
    rng, found = np.random.default_rng(3), []
    for _ in range(200):
        came = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
        ahead = np.arange(len(came)) * service_s - came
        waits = ahead - np.minimum.accumulate(ahead)
        found.append(float((waits > slack_s).mean()))
    steepness = 1 + 2 * slack_s * rate  # k² = 1
    measured = Z90 * float(np.std(found)) / share / steepness
    # Of arrivals whose chance counts in full: nothing of it is known.
    told = half_width(Asked(share, slack_s), KnownCell(rate, 0.1, 0.1), 1.0, seconds, burstiness=1e9)
    assert told == pytest.approx(measured, rel=0.35)


def test_without_a_slack_requests_count_for_themselves() -> None:
    alone = KnownCell(10.0, 0.1, 0.1)
    told = half_width(Asked(0.05, 0.0), alone, EVEN, 1000.0)
    assert told == pytest.approx(Z90 * math.sqrt(0.95 / (0.05 * 10_000)))
    assert half_width(Asked(None, 0.0), alone, EVEN, 1000.0) == pytest.approx(Z90 / 100)
    clumps = replace(alone, clump=4.0)
    assert half_width(Asked(0.05, 0.0), clumps, EVEN, 1000.0) == pytest.approx(2 * told)


@pytest.mark.parametrize("allowed", [0.5, 0.05, 0.001, None])
def test_more_time_and_evener_services_tell_more(allowed: float | None) -> None:
    asked, alone = Asked(allowed, 0.5), KnownCell(10.0, 0.1, 0.1)
    told = half_width(asked, alone, EVEN, 1000.0)
    assert half_width(asked, alone, EVEN, 4000.0) == pytest.approx(told / 2)
    assert half_width(asked, alone, UNEVEN, 1000.0) > 1.5 * told
    if allowed is not None:
        assert half_width(Asked(allowed / 10, 0.5), alone, EVEN, 1000.0) > told


def test_a_trial_is_as_long_as_the_search_makes_it() -> None:
    search = asked_for().search
    assert trial_s(search, 100.0, 0.1, 0.1) == 20.0  # 2000 requests
    assert trial_s(search, 10.0, 0.1, 0.1) == 60.0  # 600 requests
    assert trial_s(search, 10.0, 0.1, 4.0) == 100.0  # 25 slacks
    assert trial_s(search, 10.0, 20.0, 0.1) == pytest.approx(216.0)  # its latencies
    assert trial_s(search, 10.0, 0.1, 1e4) == 360.0  # six times the usual
    short = asked_for("{ttft_ms: 400}", "search.max_trial_s=30", "search.max_requests=200").search
    assert trial_s(short, 100.0, 0.1, 0.1) == 2.0
    assert trial_s(short, 1.0, 0.1, 0.1) == 60.0  # min_requests


def test_the_worst_criterion_counts() -> None:
    scenario = asked_for("{limits: [ttft p90 <= 400, ttft p99.9 <= 4000, tpot mean <= 50]}")
    alone = KnownCell(10.0, 0.1, 0.5)
    slo = scenario.slo.main()
    slacks = [(each.allowed, each.slack_s) for each in Asked.of(slo, alone)]
    assert slacks == [
        (pytest.approx(0.1), pytest.approx(0.3)),
        (pytest.approx(0.001), pytest.approx(3.9)),
        (None, 0.0),
    ]
    found = prospect_of(scenario, slo, alone)
    assert found.trials == scenario.search.max_trials - SPENT
    seconds = found.trials * found.trial_s
    assert found.even == max(half_width(each, alone, EVEN, seconds) for each in Asked.of(slo, alone))
    assert found.even < found.moderate < found.uneven
    assert prospect_of(scenario, Slo(), alone) is None


def test_a_budget_is_shared_and_limits_the_precision() -> None:
    slo, alone = "{ttft_ms: 400, attainment: 0.9}", KnownCell(10.0, 0.1, 0.1)
    free, much, little = (
        prospect_of(scenario, scenario.slo.main(), alone)
        for scenario in (asked_for(slo), *(asked_for(slo, f"search.budget_s={s}") for s in (10**6, 200)))
    )
    assert free is not None
    assert free == much
    assert little is not None
    cells = len(asked_for(slo).connectors) * len(asked_for(slo).workload.input_len)
    assert little.trials * little.trial_s == pytest.approx(200 / cells)
    times = free.trials * free.trial_s / (200 / cells)
    assert little.even == pytest.approx(free.even * math.sqrt(times))
    scenario = asked_for(slo, "search.budget_s=200", "search.precision=0.01")
    assert "search.budget_s=" in shortfall_text(scenario.search, scenario.slo.main(), little, alone)


# -- what is known of a cell --------------------------------------------------------------------------
def trial(rate: float, purpose: str, share: float, ttft_ms: float, verdict: Any = "undecided") -> TrialRecord:
    summary = {
        "ttft_ms": {"p50": ttft_ms}, "e2el_ms": {"p50": ttft_ms + 50}, "judged_met": 80, "judged_missed": 20,
        "effective_n": 25.0, "criteria": [{"kind": "share", "target": 0.9, "value": share}],
    }  # fmt: skip
    return TrialRecord(f"{purpose}-{rate:g}", Cell("a", 1, 1), rate, 0, verdict, "", purpose, summary=summary)


def test_the_first_trial_with_some_in_time_tells_where_the_answer_is() -> None:
    flood, far, near = (
        trial(900, "ceiling", 0.1, 5000),
        trial(90, "start", 0.0, 900),
        trial(40, "expand", 0.4, 120),
    )
    void, later = trial(60, "expand", 0.4, 70, "invalid"), trial(20, "bisect", 1.0, 60)
    assert seen_of([flood, far, void]) is None
    seen = seen_of([flood, far, void, near, later])
    assert seen == KnownCell(40, pytest.approx(0.12), pytest.approx(0.17), pytest.approx(4.0))


@pytest.mark.parametrize(("effective_n", "clump"), [(25.0, 4.0), (400.0, 1.0), (0.5, 100.0), (None, 1.0)])
def test_a_clump_is_at_least_a_request_and_at_most_all(effective_n: float | None, clump: float) -> None:
    one = trial(40, "expand", 0.4, 120)
    one.summary["effective_n"] = effective_n
    seen = seen_of([one])
    assert seen.clump == pytest.approx(clump)


def test_a_mean_is_in_sight_up_to_three_times_its_limit() -> None:
    far, near = trial(90, "start", 0.0, 900), trial(40, "expand", 0.4, 120)
    for each, value in ((far, 400.0), (near, 250.0)):
        each.summary["criteria"] = [{"kind": "mean", "target": 100.0, "value": value}]
    assert seen_of([far]) is None
    assert (seen_of([far, near]) or KnownCell(0, 0, 0)).rate == 40


# -- what is said -------------------------------------------------------------------------------------
def test_the_promise_is_kept_for_the_easy_and_not_given_for_the_hard() -> None:
    def suffices(slo: str, rate: float, *sets: str) -> bool:
        scenario = asked_for(slo, *sets)
        found = prospect_of(scenario, scenario.slo.main(), KnownCell(rate, 0.1, 0.1))
        assert found is not None
        return may_suffice(scenario.search, found)

    assert suffices("{ttft_ms: 2000, attainment: 0.9}", 50.0)
    assert not suffices("{ttft_ms: 102, attainment: 0.99}", 50.0)  # 2 % above idle
    assert not suffices("{limits: [ttft p99.9 <= 400]}", 2.0)
    assert not suffices("{ttft_ms: 400}", 0.03, "search.max_trial_s=60", "search.min_requests=1")
    assert suffices("{ttft_ms: 400}", 10.0, "search.max_trials=200")
    assert not suffices("{ttft_ms: 400}", 10.0, "search.max_trials=5")


def test_the_plan_says_it_in_a_line() -> None:
    found = prospects(asked_for())
    assert [each.rate for each in found] == [1, 10, 100]
    text = prospect_text(found)
    assert text.startswith("at 1, 10, 100 req/s the time allows ±")
    assert "% if services are even, ±" in text
    assert "12 trials of 600, 60, 20 s" in text
    assert [each.rate for each in prospects(asked_for("{ttft_ms: 400}", "search.start_rate=7"))] == [7]
    assert prospects(asked_for("{}", "search.method=fixed", "search.rates=[1]")) == ()
    assert prospect_text(()) == ""


def test_what_would_help_is_said_where_the_time_will_not_do() -> None:
    scenario = asked_for("{ttft_ms: 102, attainment: 0.99}")
    slo, known = scenario.slo.main(), KnownCell(0.5, 0.1, 0.1)
    found = prospect_of(scenario, slo, known)
    assert found is not None
    text = shortfall_text(scenario.search, slo, found, known)
    assert text.startswith("near 0.5 req/s 12 trials of 1.2e+03 s allow ±")
    assert "at best, and ±5 % is requested" in text
    for help_ in ("a looser limit: 2.04 of 102 ms remain", "not in the tail", "more time: few requests"):
        assert help_ in text
    wanted = replace(found, even=0.04, moderate=0.045)
    assert "allow ±4.5 % unless services are even" in shortfall_text(scenario.search, slo, wanted, known)
    assert f"search.max_trials={SPENT + 27}" in shortfall_text(scenario.search, slo, wanted, known)
