"""Precision that a search's time allows, and its text."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import pytest

from kvbench.core.plan.prospect import (
    EVEN,
    FLOOR,
    SPENT,
    UNEVEN,
    KnownCell,
    half_width,
    headroom_s,
    prospect_of,
    prospect_text,
    prospects,
    seen_of,
    shortfall_text,
    trial_s,
)
from kvbench.core.records import Cell, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.replay.replay import AGREEING, DISCREPANCY
from kvbench.core.slo import Slo
from kvbench.core.stats import NORMAL_90
from tests.core.scenario.test_scenario import MINIMAL, parse

ALONE = KnownCell(10.0, 0.1, 0.1)


def with_slo(slo: str = "{ttft_ms: 400, attainment: 0.9}", *sets: str) -> Scenario:
    return parse(MINIMAL.replace("slo: {ttft_ms: 250}", f"slo: {slo}"), *sets)


def test_even_services_need_as_many_requests_as_judged_searches_did() -> None:
    """Requests and half-widths of all searches of `develop` and `check` with continuous batching that replays
    decided."""
    judged = [(961, 0.037), (1166, 0.043), (1776, 0.047), (1817, 0.024), (2013, 0.037), (4276, 0.080)]
    ratios = [half_width(requests, EVEN) / width for requests, width in judged]
    assert median(ratios) == pytest.approx(1.0, rel=0.16)


def test_more_requests_and_evener_services_give_more_precision_down_to_a_floor() -> None:
    few, many = half_width(1000, EVEN), half_width(4000, EVEN)
    assert math.sqrt(many**2 - FLOOR**2) == pytest.approx(math.sqrt(few**2 - FLOOR**2) / 2)
    assert half_width(1000, UNEVEN) > 1.5 * few
    assert half_width(1e9, UNEVEN) == pytest.approx(FLOOR, rel=1e-3)
    error = DISCREPANCY / math.sqrt(AGREEING)
    assert pytest.approx(math.expm1(2 * NORMAL_90 * error) / 2, rel=0.03) == FLOOR


def test_a_trial_is_as_long_as_the_search_makes_it() -> None:
    search = with_slo().search
    assert trial_s(search, 100.0, 0.1, 0.1) == 20.0  # 2000 requests
    assert trial_s(search, 10.0, 0.1, 0.1) == 60.0  # 600 requests
    assert trial_s(search, 10.0, 0.1, 4.0) == 100.0  # 25 headrooms
    assert trial_s(search, 10.0, 20.0, 0.1) == pytest.approx(216.0)  # its latencies
    assert trial_s(search, 10.0, 0.1, 1e4) == 360.0  # six times the usual
    short = with_slo("{ttft_ms: 400}", "search.max_trial_s=30", "search.max_requests=200").search
    assert trial_s(short, 100.0, 0.1, 0.1) == 2.0
    assert trial_s(short, 1.0, 0.1, 0.1) == 60.0  # min_requests


def test_the_longest_headroom_sets_the_length_of_trials() -> None:
    scenario = with_slo("{limits: [ttft p90 <= 400, ttft p99.9 <= 4000, tpot mean <= 50]}")
    slo = scenario.slo.main()
    assert headroom_s(slo, ALONE) == pytest.approx(3.9)
    found = prospect_of(scenario, slo, ALONE)
    assert found is not None
    assert found.trials == scenario.search.max_trials - SPENT
    assert found.trial_s == trial_s(scenario.search, 10.0, 0.1, headroom_s(slo, ALONE))
    assert found.even == half_width(10.0 * found.trials * found.trial_s, EVEN)
    assert found.even < found.moderate < found.uneven
    assert prospect_of(scenario, Slo(), ALONE) is None


def test_a_budget_is_shared_and_limits_the_precision() -> None:
    slo = "{ttft_ms: 400, attainment: 0.9}"
    free, much, little = (
        prospect_of(scenario, scenario.slo.main(), ALONE)
        for scenario in (with_slo(slo), *(with_slo(slo, f"search.budget_s={s}") for s in (10**6, 200)))
    )
    assert free is not None
    assert free == much
    assert little is not None
    cells = len(with_slo(slo).connectors) * len(with_slo(slo).workload.input_len)
    assert little.trials * little.trial_s == pytest.approx(200 / cells)
    assert little.even == half_width(10.0 * 200 / cells, EVEN) > free.even
    search = with_slo(slo, "search.budget_s=200", "search.precision=0.045").search
    assert "search.budget_s=" in shortfall_text(search, little)


# -- what is known of a cell --------------------------------------------------------------------------
def trial(rate: float, purpose: str, share: float, ttft_ms: float, verdict: Any = "undecided") -> TrialRecord:
    summary = {
        "ttft_ms": {"p50": ttft_ms},
        "e2el_ms": {"p50": ttft_ms + 50},
        "criteria": [{"kind": "share", "target": 0.9, "value": share}],
    }
    return TrialRecord(f"{purpose}-{rate:g}", Cell("a", 1, 1), rate, 0, verdict, "", purpose, summary=summary)


def test_the_first_trial_with_some_in_time_tells_where_the_answer_is() -> None:
    saturation, far, near = (
        trial(900, "ceiling", 0.1, 5000),
        trial(90, "start", 0.0, 900),
        trial(40, "expand", 0.4, 120),
    )
    void, later = trial(60, "expand", 0.4, 70, "invalid"), trial(20, "bisect", 1.0, 60)
    assert seen_of([saturation, far, void]) is None
    seen = seen_of([saturation, far, void, near, later])
    assert seen == KnownCell(40, pytest.approx(0.12), pytest.approx(0.17))


def test_a_mean_is_in_sight_up_to_three_times_its_limit() -> None:
    far, near = trial(90, "start", 0.0, 900), trial(40, "expand", 0.4, 120)
    for record, value in ((far, 400.0), (near, 250.0)):
        record.summary["criteria"] = [{"kind": "mean", "target": 100.0, "value": value}]
    assert seen_of([far]) is None
    assert (seen_of([far, near]) or KnownCell(0, 0, 0)).rate == 40


# -- what is said -------------------------------------------------------------------------------------


def test_the_plan_says_it_in_a_line() -> None:
    found = prospects(with_slo())
    assert [prospect.rate for prospect in found] == [1, 10, 100]
    text = prospect_text(found)
    assert text.startswith("at 1, 10, 100 req/s the time allows ±")
    assert "% if services are even, ±" in text
    assert "12 trials of 600, 60, 20 s" in text
    assert [prospect.rate for prospect in prospects(with_slo("{ttft_ms: 400}", "search.start_rate=7"))] == [7]
    assert prospects(with_slo("{}", "search.method=fixed", "search.rates=[1]")) == ()
    assert prospect_text(()) == ""


@pytest.mark.parametrize(
    ("rate", "sets", "helps"),
    [
        (0.5, (), "more time: few requests come at such a rate"),
        (2.0, ("search.max_trials=6", "search.max_trial_s=30"), f"search.max_trials={SPENT + 11}"),
        (500.0, ("search.max_requests=200",), "search.max_requests=1000"),
        (2.0, ("search.precision=0.015",), "search.precision=0.019"),
    ],
)
def test_what_would_help_where_the_time_does_not_suffice(
    rate: float, sets: tuple[str, ...], helps: str
) -> None:
    scenario = with_slo("{ttft_ms: 400, attainment: 0.9}", *sets)
    found = prospect_of(scenario, scenario.slo.main(), KnownCell(rate, 0.1, 0.1))
    assert found is not None
    text = shortfall_text(scenario.search, found)
    assert text.startswith(f"near {rate:g} req/s {found.trials} trials of ")
    assert f" %, and ±{100 * scenario.search.precision:.2g} % is requested: " in text
    assert helps in text
