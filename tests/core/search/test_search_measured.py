"""The search with what trials measured: shares, capacities, ceilings; and the posterior that it keeps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.records import VerdictKind
from kvbench.core.search import by_measurements
from kvbench.core.search.by_measurements import CERTAIN, _aim_below, _settled
from kvbench.core.search.posterior.posterior import RateEstimate, fit
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting, point_of
from kvbench.core.search.search import (
    Hint,
    Probe,
    RateSearch,
    SearchAnswer,
    SearchLimits,
    TrialFigures,
    TrialOutcome,
    foreseen_after,
)
from kvbench.core.search.trial_history import TrialHistory

pytestmark = pytest.mark.timeout(400)
LIMITS = SearchLimits(start_rate=8, min_rate=0.5, max_rate=512)
Outcome = tuple[VerdictKind, TrialFigures | None]
Trial = Callable[[Probe], Outcome]


def run(search: RateSearch, trial: Trial) -> SearchAnswer:
    """Drive a search to its end, and hold it to its promises on the way."""
    limits = search.limits
    while (probe := search.ask()) is not None:
        assert limits.min_rate <= probe.rate <= limits.max_rate
        assert search.ask() == probe
        search.tell(probe.rate, *trial(probe))
        assert len(search.history) <= limits.max_trials
        interim = search.answer()
        assert interim.trials == len(search.history)
    answer = search.answer()
    json.dumps(answer.to_json(), allow_nan=False)
    assert len(answer.curve) == answer.trials
    rate, lower, upper = answer.max_request_rate, answer.lower, answer.upper
    if rate is not None:
        assert limits.min_rate <= rate <= limits.max_rate
        assert lower <= rate
        met = [entry.rate for entry in search.history if entry.verdict == "met"]
        assert min(met) <= rate * (1 + 1e-9)
        assert lower <= max(met)
        assert upper is None or rate <= upper
    if answer.status == "converged" and rate is not None:
        assert answer.confirmed
        top = rate * (1 + limits.precision) * (1 + 1e-9)
        assert any(
            entry.verdict == "met" and rate <= entry.rate <= top and not short_of_target(entry.measured)
            for entry in search.history
        )
    again = RateSearch(limits, None, ceiling=search_ceiling(search))
    for previous in search.history:
        question = again.ask()
        assert (question.rate, question.purpose) == (previous.rate, previous.purpose)
        measured = previous.measured
        kept = (
            None if measured is None else TrialFigures.from_json(json.loads(json.dumps(measured.to_json())))
        )
        again.tell(previous.rate, previous.verdict, kept)
    assert (again.ask(), again.answer()) == (None, answer)
    return answer


def short_of_target(measured: TrialFigures | None) -> bool:
    known = measured is not None and measured.target is not None and measured.attainment is not None
    return known and measured.attainment < measured.target  # type: ignore[union-attr, operator]


def search_ceiling(search: RateSearch) -> bool:
    return bool(search.history) and search.history[0].purpose == "ceiling"


def queue(
    root: float, seed: int, *, capacity: float = math.inf, steepness: float = 30.0, effective: int = 60,
    refused: float = 0.0,
) -> Trial:  # fmt: skip
    """A system by the fit's own model: so many independent requests' worth a trial."""
    random = np.random.default_rng(seed)

    def trial(probe: Probe) -> Outcome:
        if random.random() < refused:
            return "invalid", None
        if probe.purpose == "ceiling":
            done = min(probe.rate, capacity)
            return "undecided", TrialFigures(completion_rate=done) if math.isfinite(done) else TrialFigures()
        over = probe.rate / root - 1
        hazard = 0.0513 * math.exp(min(max(steepness * over, -30), 8))
        share = 1 - random.binomial(effective, -math.expm1(-hazard)) / effective
        score = 8.0 * -over if over < 0.1 else -0.8
        verdict: VerdictKind = "undecided"
        if share < 0.85:
            verdict = "missed"
        elif (share == 1.0 and over < -0.1) or (probe.purpose == "confirm" and share >= 0.95):
            verdict = "met"
        return verdict, TrialFigures(
            share, share - 0.05, min(1.0, share + 0.05), effective * 10, effective, 0.95, score, 0.2
        )

    return trial


HEAVY = pytest.mark.heavy


@pytest.mark.parametrize(
    ("ceiling", "seeds"),
    [(True, 8), pytest.param(True, 14, marks=HEAVY), pytest.param(False, 14, marks=HEAVY)],
)
def test_the_root_is_found_without_bias_and_the_interval_holds_it(ceiling: bool, seeds: int) -> None:
    answers = [
        run(RateSearch(LIMITS, ceiling=ceiling), queue(30, seed, capacity=33)) for seed in range(seeds)
    ]
    assert {answer.status for answer in answers} == {"converged"}
    found = np.array([answer.max_request_rate for answer in answers], float) / 30
    assert np.median(found) == pytest.approx(1.0, abs=0.015)
    assert np.mean(np.abs(found - 1) <= 0.05) >= 0.9
    assert np.median([answer.trials for answer in answers]) <= (7 if ceiling else 9)
    inside = [answer.lower <= 30 <= answer.upper for answer in answers if answer.lower and answer.upper]
    assert sum(inside) >= 0.7 * seeds  # nine of ten expected
    for answer in answers:
        assert answer.confirmed
        met = [point["rate"] for point in answer.curve if point["verdict"] == "met"]
        assert any(0.9999 <= rate / (answer.max_request_rate or 0) <= 1.0501 for rate in met)


def test_after_some_trials_it_is_foreseen_whether_all_will_do() -> None:
    limits = replace(LIMITS, max_trials=16)

    def foreseen(steepness: float, effective: int, seed: int) -> RateSearch:
        search = RateSearch(limits)
        trial = queue(30, seed, steepness=steepness, effective=effective)
        while (probe := search.ask()) is not None and len(search.history) < foreseen_after(16):
            assert search.foreseen is None
            search.tell(probe.rate, *trial(probe))
        return search

    assert foreseen_after(16) == 6
    for seed in range(3):
        sharp, flat = foreseen(40.0, 200, seed).answer(), foreseen(3.0, 8, seed).answer()
        assert sharp.time_suffices is True
        assert flat.time_suffices is False
    assert RateSearch(limits).answer().time_suffices is None


def test_the_way_of_a_cold_start_with_a_ceiling() -> None:
    search = RateSearch(LIMITS, ceiling=True)
    assert search.ask() == Probe(512, "ceiling")
    search.tell(512, "undecided", TrialFigures(completion_rate=40.0))
    assert search.ask() == Probe(36, "start", full_length=True)
    answer = search.answer()
    assert (answer.status, answer.max_request_rate, answer.censored) == ("undecided", None, "")


def confirming(verdict: VerdictKind, attainment: float) -> RateSearch:
    """A search whose every confirming trial comes out like that."""
    truth = queue(30, 1, capacity=33)

    def trial(probe: Probe) -> Outcome:
        actual, measured = truth(probe)
        if probe.purpose != "confirm" or measured is None:
            return ("undecided" if actual == "met" else actual), measured
        return verdict, replace(measured, attainment=attainment)

    search = RateSearch(replace(LIMITS, max_trials=9), ceiling=True)
    run(search, trial)
    return search


@pytest.mark.parametrize(("failed", "below"), [(0, 0.10), (1, 0.16), (2, 0.22), (4, 0.28)])
def test_each_failed_confirmation_moves_the_next_further_below_the_median(failed: int, below: float) -> None:
    """By shares of the precision, up to a limit; what was met or had another purpose does not count."""
    others = (TrialOutcome(9.9, "met", "confirm"), TrialOutcome(10.5, "missed", "bisect"))
    missed = (TrialOutcome(10, "missed", "confirm"),) * failed
    history = TrialHistory(LIMITS, (*others, *missed))
    assert _aim_below(history) == pytest.approx(below)


def test_a_rate_that_no_trial_met_is_not_called_converged() -> None:
    for verdict, attainment in (("undecided", 0.948), ("undecided", 0.96), ("met", 0.94)):
        search = confirming(verdict, attainment)  # type: ignore[arg-type]
        answer = search.answer()
        assert answer.status in ("undecided", "exhausted")
        assert not answer.confirmed
        assert answer.trials == search.limits.max_trials
        if verdict == "met":  # with a share short of the target, which confirms nothing
            assert answer.max_request_rate == pytest.approx(30, rel=0.1)
        else:
            assert answer.max_request_rate is None
    assert confirming("met", 0.96).answer().status == "converged"


def test_a_step_down_is_no_leap_where_requests_were_in_time() -> None:
    """Four misses at falling rates with a part of the requests in time: the fifth is not tried at 1/16."""
    search = RateSearch(SearchLimits(40, 0.1, 400))
    rates = []
    for share in (0.3, 0.4, 0.5, 0.6):
        probe = search.ask()
        rates.append(probe.rate)
        search.tell(
            probe.rate, "missed", TrialFigures(share, share - 0.1, share + 0.1, 100, 50, 0.95, -0.3, 0.2)
        )
    probe = search.ask()
    assert probe is not None
    assert all(before / after <= 2.01 for before, after in pairwise([*rates, probe.rate]))


def test_a_step_down_from_nothing_in_time_is_bounded_too() -> None:
    for measured in (None, TrialFigures(0.0, 0.0, 0.1, 100, 50, 0.95, -1.0, 0.1)):
        search, rates = RateSearch(SearchLimits(40, 0.01, 400)), []
        for _ in range(5):
            probe = search.ask()
            rates.append(probe.rate)
            search.tell(probe.rate, "missed", measured)
        assert all(before / after <= 4.01 for before, after in pairwise(rates))


def test_a_ceiling_that_says_nothing_leaves_the_start() -> None:
    for verdict, measured in (
        ("undecided", TrialFigures()),
        ("undecided", None),
        ("invalid", TrialFigures(completion_rate=9)),
    ):
        search = RateSearch(LIMITS, ceiling=True)
        search.tell(512, verdict, measured)  # type: ignore[arg-type]
        assert search.ask() == Probe(8, "start")
    unburdened = RateSearch(LIMITS, ceiling=True)
    unburdened.tell(512, "undecided", TrialFigures(completion_rate=500))
    assert unburdened.ask() == Probe(512, "start")
    trusted = RateSearch(LIMITS, Hint(20), ceiling=True)
    assert trusted.ask() == Probe(20, "start", full_length=True)


def test_the_answer_tells_what_it_rests_on() -> None:
    answer = run(RateSearch(LIMITS, ceiling=True), queue(30, 1, capacity=33))
    assert answer.attainment_lower <= answer.attainment <= answer.attainment_upper
    assert (answer.n, answer.curve[0]["purpose"]) == (600, "ceiling")
    assert {"rate", "verdict", "purpose", "attainment", "n"} <= set(answer.curve[-1])


def test_the_ends_of_the_range() -> None:
    high = run(RateSearch(LIMITS), queue(1e4, 1))
    assert (high.status, high.censored, high.max_request_rate) == ("censored", "above", 512)
    low = run(RateSearch(LIMITS), queue(0.01, 1))
    assert (low.status, low.censored, low.upper) == ("slo_unattainable", "below", 0.5)
    assert low.trials <= 6


def test_trials_that_cannot_tell_are_tried_once_more_and_then_left() -> None:
    search = RateSearch(LIMITS)
    search.tell(8, "met")
    search.tell(16, "undecided")
    assert search.ask() == Probe(16, "retry")
    search.tell(16, "undecided")
    probe = search.ask()
    assert 8 < probe.rate < 16
    answer = run_on(search, lambda probe: ("met" if probe.rate <= 12 else "undecided", None))
    assert (answer.status, answer.upper) == ("undecided", None)
    assert 8 <= answer.lower <= 12


def run_on(search: RateSearch, trial: Trial) -> SearchAnswer:
    while (probe := search.ask()) is not None:
        search.tell(probe.rate, *trial(probe))
    return search.answer()


def test_refused_trials_stay_out_of_the_answer() -> None:
    answers = [run(RateSearch(LIMITS), queue(30, seed, refused=0.3)) for seed in range(4)]
    found = [answer.max_request_rate for answer in answers if answer.status == "converged"]
    assert len(found) >= 3
    assert all(rate is not None and 26 < rate < 34 for rate in found)


def figures(score: float) -> TrialFigures:
    """Of a trial in which it is open whether the limits are kept."""
    return TrialFigures(0.94, 0.9, 0.97, 600, 60, 0.95, score, 0.05)


def test_a_rate_that_no_trial_met_is_no_answer() -> None:
    """One trial could not tell, and those at the most likely rate were refused."""
    search = RateSearch(SearchLimits(8, 0.5, 512, max_trials=3))
    search.tell(8, "undecided", figures(-0.05))
    while (probe := search.ask()) is not None:
        search.tell(probe.rate, "invalid")
    answer = search.answer()
    assert (answer.max_request_rate, answer.lower, answer.attainment) == (None, None, None)
    assert (answer.status, answer.censored) == ("exhausted", "")
    assert 8 < answer.upper < 512
    assert "before any rate was met" in answer.reason


@pytest.mark.parametrize(("far", "found"), [(56.0, 55.0), (99.0, None)])
def test_a_long_tail_beyond_the_precision_does_not_converge(far: float, found: float | None) -> None:
    figures = TrialFigures(attainment=0.97, n=600, effective_n=600, target=0.9, duration_s=60.0)
    outcomes = (
        TrialOutcome(55.0, "met", "confirm", figures),
        TrialOutcome(110.0, "missed", "expand", replace(figures, attainment=0.1)),
    )
    history = TrialHistory(replace(LIMITS, precision=0.2, max_trials=2), outcomes)
    estimate = RateEstimate(np.array([53.0, 55.0, 56.0, far]), np.array([0.02, 0.80, 0.06, 0.12]))
    assert estimate.within(55.0, 0.2) > CERTAIN
    assert _settled(history, estimate) == found
    reason = "met at 55" if found else "stopped after max_trials = 2; the precision is not reached"
    assert by_measurements.answer(history, estimate, finished=True).reason == reason


def test_an_answer_is_not_below_all_rates_that_were_met() -> None:
    """Met once at 10, and much worse right above it: the curve through all trials is below 10."""
    search = RateSearch(SearchLimits(10, 0.5, 512, max_trials=3))
    search.tell(10, "met", TrialFigures(0.96, 0.9, 0.99, 600, 60, 0.95, 0.01, 0.2))
    for rate in (10.5, 10.2):
        search.tell(rate, "missed", TrialFigures(0.6, 0.5, 0.7, 600, 60, 0.95, -0.4, 0.02))
    estimate, answer = search.estimate(), search.answer()
    assert estimate.median < 10
    assert answer.max_request_rate in (10, None)
    assert answer.status != "converged"
    assert answer.upper >= 10
    assert answer.max_request_rate or "contradict each other: 10 req/s was met" in answer.reason


def test_the_lower_end_is_not_above_all_rates_that_were_met() -> None:
    search = RateSearch(SearchLimits(5, 0.5, 512, max_trials=4))
    search.tell(5, "met", TrialFigures(1.0, 0.99, 1.0, 600, 60, 0.95, 1.0, 0.05))
    for rate in (9.9, 10.0, 10.1):
        search.tell(rate, "undecided", figures((10 - rate) / 5))
    answer = search.answer()
    assert answer.max_request_rate > 9
    assert answer.lower == 5


def test_above_a_refused_rate_nothing_is_claimed() -> None:
    truth = queue(30, 1)

    def trial(probe: Probe) -> Outcome:
        return ("invalid", None) if probe.rate > 20 else truth(probe)

    answer = run_on(RateSearch(LIMITS), trial)
    assert answer.status in ("undecided", "exhausted")
    assert answer.max_request_rate <= 512


def test_a_contradiction_widens_the_interval() -> None:
    def width(*misses: int) -> float:
        steady = [RatePoint(rate, count, 400, 10) for rate, count in ((8, 0), (9, 4), (11, 80), (12, 200))]
        here = [RatePoint(10, miss, 400, 10) for miss in misses]
        return fit([*steady, *here], 0.5, 512, Waiting()).width

    # Three times as many misses as allowed, and none at all, at one rate: less sure than twice as allowed.
    assert width(60, 0, 60, 0) > width(20, 20, 20, 20)


def test_a_point_is_no_more_than_its_trial() -> None:
    measured = TrialFigures(0.9, n=100, effective_n=20, target=0.9, score=-0.1, offered_rate=10.4)
    point = point_of(TrialOutcome(10, "undecided", "bisect", measured), 0.95)
    assert (point.n, point.clump, point.attainment) == (100, 5, 0.9)
    assert point.misses == pytest.approx(10)
    assert 10 < point.rate < 10.4
    mean = point_of(
        TrialOutcome(10, "met", "bisect", TrialFigures(0.9, n=100, score=0.1, score_error=0.02)), 0.95
    )
    assert (mean.n, mean.mean) == (0, pytest.approx(1 / 1.1))
    assert mean.mean_error == pytest.approx(0.02 / 1.1**2)
    assert point_of(TrialOutcome(10, "invalid", "bisect", measured), 0.95) is None
    assert point_of(TrialOutcome(10, "undecided", "bisect"), 0.95) is None
    grows = point_of(TrialOutcome(10, "missed", "expand", TrialFigures(grows=True, capacity=9.0)), 0.95)
    assert (grows.bound, grows.capacity) == ("above", 9.0)
    with pytest.raises(ValueError, match="at least one"):
        fit([], 1, 2, Waiting())


@pytest.mark.heavy
def test_a_mean_is_searched_by_its_score() -> None:
    found = []
    for seed in range(20):
        random = np.random.default_rng(seed)

        def trial(probe: Probe, random: np.random.Generator = random) -> Outcome:
            score = 5 * (1 - probe.rate / 30) + random.normal(0, 0.1)
            least = 0.0 if probe.purpose == "confirm" else 0.3
            verdict: VerdictKind = "met" if score > least else "missed" if score < -0.3 else "undecided"
            return verdict, TrialFigures(0.5, n=500, effective_n=500, score=max(score, -0.9), score_error=0.1)

        answer = run(RateSearch(LIMITS), trial)
        assert answer.status in ("converged", "exhausted", "undecided")
        assert (answer.lower or 0) <= 30 <= (answer.upper or 0)
        found.append((answer.max_request_rate or 0) / 30)
    assert np.median(found) == pytest.approx(1, abs=0.015)
    assert np.all(np.abs(np.array(found) - 1) < 0.06)


measures: st.SearchStrategy[Any] = st.builds(
    TrialFigures, attainment=st.none() | st.floats(0, 1), n=st.integers(0, 10_000),
    effective_n=st.floats(0, 1000), target=st.none() | st.sampled_from([0.5, 0.95, 0.999, 1.0]),
    score=st.none() | st.floats(-1, 20), score_error=st.none() | st.floats(0, 100),
    offered_rate=st.none() | st.floats(0.1, 1000), capacity=st.none() | st.floats(0.1, 1000),
    capacity_error=st.none() | st.floats(0, 100), grows=st.booleans(),
    completion_rate=st.none() | st.floats(0, 1000),
)  # fmt: skip


@settings(max_examples=6, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["met", "missed", "undecided", "invalid"]), st.none() | measures),
        max_size=25,
    ),
    st.integers(1, 25),
    st.booleans(),
)
def test_whatever_is_told_it_ends_within_limits(draws: list[Outcome], max_trials: int, ceiling: bool) -> None:
    limits = SearchLimits(8, 0.5, 512, 0.05, max_trials)
    script = iter(draws)
    run(RateSearch(limits, ceiling=ceiling), lambda probe: next(script, ("missed", None)))


@settings(max_examples=5, deadline=None)
@given(st.floats(1, 400), st.floats(10, 80), st.booleans(), st.integers(0, 2**31))
def test_any_root_is_found(root: float, steepness: float, ceiling: bool, seed: int) -> None:
    trial = queue(root, seed, capacity=1.1 * root, steepness=steepness, effective=200)
    search = RateSearch(LIMITS, ceiling=ceiling)
    answer = run(search, trial)
    if answer.max_request_rate is None:  # no rate is printed that no trial met
        assert all(entry.rate >= answer.upper for entry in search.history if entry.verdict == "met")
        assert answer.upper >= root
    else:
        assert answer.max_request_rate == pytest.approx(root, rel=0.15)


def test_trials_that_are_all_kept_lead_further_up() -> None:
    """A capacity that was taken for too low: a search that stays where all is well never finds out."""
    wrong = TrialOutcome(10, "missed", "start", TrialFigures(grows=True, capacity=7.0, capacity_error=0.1))
    calm = TrialFigures(
        1.0, n=400, effective_n=300, target=0.95, score=1.0, score_error=0.1, ttft_limit_s=1.0
    )
    search = RateSearch(SearchLimits(start_rate=10, min_rate=0.5, max_rate=512, max_trials=16), None)
    assert search.ask() is not None
    search.tell(10, "missed", wrong.measured)
    rates = []
    for _ in range(6):
        probe = search.ask()
        rates.append(probe.rate)
        search.tell(probe.rate, "met", calm)
    assert rates[-1] > 1.1 * rates[1]
    assert max(rates) < 11


def test_a_lowest_rate_that_stays_open_says_so() -> None:
    limits = SearchLimits(start_rate=8, min_rate=7.9, max_rate=512, max_trials=16)
    search = RateSearch(limits, None)
    late = TrialFigures(0.93, n=400, effective_n=60, target=0.95, score=-0.05, score_error=0.1)
    while search.ask() is not None:
        search.tell(search.ask().rate, "undecided", late)  # type: ignore[union-attr]
    answer = search.answer()
    assert answer.status == "undecided"
    assert answer.reason == "still open at 7.9, the lowest rate allowed: lower min_rate"


def test_a_fast_system_has_trials_of_seconds() -> None:
    search = RateSearch(SearchLimits(start_rate=400, min_rate=1, max_rate=5000), None)
    known = TrialFigures(
        0.95, n=900, effective_n=300, target=0.95, score=0.0, score_error=0.1, ttft_limit_s=0.05, ttft_s=0.05,
        ttft_fast_s=0.01,
    )  # fmt: skip
    search.tell(400, "missed", replace(known, attainment=0.7, score=-0.3))
    search.tell(300, "met", replace(known, attainment=1.0, score=1.0))
    probe = search.ask()
    assert probe.full_length
    assert probe.least_s == 10.0


def test_a_trial_of_which_nothing_came_back_leads_down() -> None:
    """It has no figures and no verdict: all that was sent was still under way when its time was up."""
    search = RateSearch(SearchLimits(start_rate=10, min_rate=0.5, max_rate=512), None)
    calm = TrialFigures(1.0, n=400, effective_n=300, target=0.9, score=0.8, score_error=0.1, duration_s=60)
    search.tell(10, "met", calm)
    first = search.ask()
    assert first.rate > 10
    search.tell(first.rate, "undecided", TrialFigures(duration_s=200))
    for _ in range(3):
        probe = search.ask()
        assert 10 <= probe.rate < first.rate
        search.tell(probe.rate, "undecided", TrialFigures(duration_s=200))


def test_a_capacity_that_trials_exceeded_is_left_out() -> None:
    """Servers that share their work complete little of a burst: none of its requests ends early."""
    some_late = TrialFigures(
        0.973, n=1200, effective_n=1000, target=0.95, score=0.3, score_error=0.1, duration_s=40.0,
        ttft_limit_s=1.0, ttft_s=0.7, ttft_fast_s=0.1,
    )  # fmt: skip
    search = RateSearch(LIMITS, ceiling=True)
    search.ask()
    search.tell(512, "undecided", TrialFigures(completion_rate=40.0))
    rates = []
    for _ in range(5):
        probe = search.ask()
        assert probe is not None
        rates.append(probe.rate)
        search.tell(probe.rate, "met", some_late)
    assert rates[0] == 36
    assert rates[-1] > 80


def test_a_rate_that_nothing_missed_is_at_least_that() -> None:
    search = RateSearch(SearchLimits(10.0, 0.01, 20.0, max_trials=2))
    while (probe := search.ask()) is not None:
        figures = TrialFigures(
            attainment=1.0, attainment_lower=0.99, n=600, effective_n=300, target=0.95, score=0.6,
            score_error=0.02, offered_rate=probe.rate, duration_s=60, ttft_limit_s=0.5, ttft_s=0.2,
            ttft_fast_s=0.1,
        )  # fmt: skip
        search.tell(probe.rate, "met", figures)
    answer = search.answer()
    highest = max(entry.rate for entry in search.history)
    assert highest < search.limits.max_rate
    assert (answer.max_request_rate, answer.upper, answer.censored) == (highest, None, "above")
    assert answer.status == "exhausted"
