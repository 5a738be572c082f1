"""The search against thresholds, noise, refusals, and a queue whose answer is known."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.gates.evidence import Evidence
from kvbench.core.gates.gates import judge
from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.records import RequestRecord, VerdictKind
from kvbench.core.search.search import Hint, Probe, RateSearch, SearchAnswer, SearchLimits

Trial = Callable[[float], VerdictKind]
LIMITS = SearchLimits(start_rate=8, min_rate=0.5, max_rate=512, precision=0.05, max_trials=30)


def run(search: RateSearch, trial: Trial) -> SearchAnswer:
    """Drive a search to its end, and hold it to its promises on the way."""
    limits = search.limits
    while (probe := search.ask()) is not None:
        assert limits.min_rate <= probe.rate <= limits.max_rate
        assert search.ask() == probe
        search.tell(probe.rate, trial(probe.rate))
        assert len(search.history) <= limits.max_trials
    answer = search.answer()
    assert (answer.trials, answer.max_request_rate) == (len(search.history), answer.lower)
    if answer.lower is not None and answer.upper is not None:
        assert answer.lower < answer.upper
    assert (answer.censored == "above") == (answer.lower is not None and answer.upper is None)
    assert (answer.censored == "below") == (answer.lower is None and answer.upper is not None)
    json.dumps(answer.to_json(), allow_nan=False)
    return answer


def threshold(truth: float) -> Trial:
    return lambda rate: "met" if rate <= truth else "missed"


def steps(search: RateSearch) -> list[tuple[float, str]]:
    return [(entry.rate, entry.purpose) for entry in search.history]


def test_the_way_of_a_cold_start() -> None:
    search = RateSearch(SearchLimits(8, 0.5, 512, 0.2))
    answer = run(search, threshold(20))
    assert steps(search) == [
        (8, "start"), (16, "expand"), (32, "expand"), (22.63, "bisect"), (19.03, "bisect"),
        (19.03, "confirm"),
    ]  # fmt: skip
    assert (answer.lower, answer.upper, answer.status) == (19.03, 22.63, "converged")
    assert answer.confirmed


def test_a_trial_has_enough_requests_to_judge_the_slo() -> None:
    for attainment, least in ((0.9, 0.0), (0.999, 1300.0), (1.0, 0.0)):
        probe = RateSearch(SearchLimits(8, 0.5, 512, attainment=attainment)).ask()
        assert probe is not None
        assert probe.least_s * probe.rate == pytest.approx(least)


def test_a_good_hint_costs_few_trials() -> None:
    search = RateSearch(SearchLimits(8, 0.5, 512, 0.1), Hint(19))
    answer = run(search, threshold(20))
    assert steps(search) == [(19, "start"), (21.85, "expand"), (20.38, "bisect"), (19, "confirm")]
    assert (answer.lower, answer.upper) == (19, 20.38)
    untrusted = RateSearch(LIMITS, Hint(19, trusted=False))
    untrusted.tell(19, "met")
    assert untrusted.ask() == Probe(38, "expand")
    assert RateSearch(LIMITS, Hint(9999)).ask() == Probe(512, "start", full_length=True)


@settings(deadline=None)
@given(
    st.floats(0.5, 512, exclude_max=True), st.floats(0.5, 512), st.sampled_from([0.01, 0.05, 0.1, 0.3]),
    st.sampled_from([None, 0.3, 0.9, 1.0, 1.1, 5.0]), st.booleans(),
)  # fmt: skip
def test_a_threshold_is_bracketed(
    truth: float, start: float, precision: float, hint: float | None, trusted: bool
) -> None:
    search = RateSearch(
        SearchLimits(start, 0.5, 512, precision, 30), None if hint is None else Hint(truth * hint, trusted)
    )
    answer = run(search, threshold(truth))
    assert answer.status == "converged"
    assert answer.confirmed
    assert answer.lower <= truth < answer.upper <= answer.lower * (1 + precision) * (1 + 1e-9)


def test_the_ends_of_the_range() -> None:
    high = RateSearch(LIMITS)
    answer = run(high, threshold(math.inf))
    assert (answer.status, answer.censored, answer.lower) == ("censored", "above", 512)
    assert steps(high)[-1] == (512, "confirm")
    low = RateSearch(LIMITS)
    answer = run(low, threshold(0.1))
    assert (answer.status, answer.censored, answer.upper) == ("slo_unattainable", "below", 0.5)
    assert steps(low) == [(8, "start"), (4, "expand"), (1, "expand"), (0.5, "expand"), (0.5, "confirm")]
    only = run(RateSearch(SearchLimits(4, 4, 4)), threshold(5))
    assert (only.status, only.trials) == ("censored", 2)


def test_a_missed_confirmation_moves_the_bracket_down() -> None:
    search = RateSearch(SearchLimits(8, 0.5, 512, 0.2))
    for rate, verdict in [(8, "met"), (16, "missed"), (11.31, "met"), (13.45, "missed")]:
        search.tell(rate, verdict)  # type: ignore[arg-type]
    assert search.ask() == Probe(11.31, "confirm")
    search.tell(11.31, "missed")
    assert search.ask() == Probe(9.512, "bisect")
    answer = run(search, threshold(10))
    assert (answer.lower, answer.upper, answer.status) == (9.512, 11.31, "converged")


def test_the_last_trial_confirms() -> None:
    search = RateSearch(SearchLimits(8, 0.5, 512, 0.01, max_trials=4))
    answer = run(search, threshold(10))
    assert [purpose for _, purpose in steps(search)] == ["start", "expand", "bisect", "confirm"]
    assert (answer.status, answer.confirmed) == ("exhausted", True)
    assert (answer.lower, answer.upper) == (8, 11.31)


def test_a_contradiction_is_tried_once_more() -> None:
    for second, lower, upper in [("missed", None, 6.0), ("met", 12.0, None)]:
        search = RateSearch(LIMITS)
        search.tell(6, "missed")
        search.tell(12, "met")
        assert search.ask() == Probe(6, "recheck")
        search.tell(6, second)  # type: ignore[arg-type]
        answer = search.answer()
        assert (answer.lower, answer.upper, answer.status) == (lower, upper, "undecided")


@pytest.mark.parametrize("verdicts", [("missed",), ("met", "missed")])
def test_a_miss_below_a_met_rate_is_tried_once_more_at_most(verdicts: tuple[VerdictKind, ...]) -> None:
    search = RateSearch(LIMITS)
    for verdict in verdicts:
        search.tell(6, verdict)
    search.tell(12, "met")
    run(search, lambda _: "missed")
    again = Counter(entry.rate for entry in search.history if entry.purpose == "recheck")
    assert again[6] == (len(verdicts) == 1)
    assert set(again.values()) <= {1}


def test_refused_trials_are_repeated_and_never_counted_as_missed() -> None:
    search = RateSearch(LIMITS)
    answer = run(search, lambda rate: "invalid" if rate > 20 else "met")
    assert [purpose for rate, purpose in steps(search) if rate == 32] == ["expand", "retry", "retry"]
    assert answer.upper is None
    assert (answer.status, answer.censored) == ("undecided", "above")
    assert 19 < answer.lower <= 20
    assert "invalid" in answer.reason


def test_refused_trials_above_a_miss_leave_it_as_the_end() -> None:
    answer = run(RateSearch(LIMITS), lambda rate: "met" if rate < 9 else "invalid" if rate < 14 else "missed")
    assert (answer.upper, answer.status) == (16, "undecided")
    assert 8 <= answer.lower < 9


def test_nothing_but_refusals() -> None:
    answer = run(RateSearch(LIMITS), lambda rate: "invalid")
    assert (answer.lower, answer.upper, answer.status, answer.censored) == (None, None, "undecided", "")
    assert answer.trials <= 12


def test_a_retry_that_succeeds_goes_on() -> None:
    search = RateSearch(LIMITS)
    search.tell(8, "invalid")
    assert search.ask() == Probe(8, "retry")
    search.tell(8, "met")
    assert search.ask() == Probe(16, "expand")


@settings(max_examples=70, deadline=None)
@given(
    st.floats(0.6, 500), st.floats(0.5, 512), st.floats(0, 1), st.integers(0, 2**32 - 1), st.integers(1, 30),
    st.integers(0, 2),
)  # fmt: skip
def test_random_refusals_never_make_a_wrong_claim(
    truth: float, start: float, refused: float, seed: int, max_trials: int, retries: int
) -> None:
    random = np.random.default_rng(seed)
    limits = SearchLimits(start, 0.5, 512, 0.05, max_trials, max_retries=retries)
    answer = run(
        RateSearch(limits), lambda rate: "invalid" if random.random() < refused else threshold(truth)(rate)
    )
    assert answer.lower is None or answer.lower <= truth
    assert answer.upper is None or answer.upper > truth
    assert answer.status not in ("censored", "slo_unattainable")
    if answer.status == "converged":
        assert answer.upper <= answer.lower * 1.05 * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["met", "missed", "invalid"]), max_size=40), st.integers(1, 25))
def test_any_verdicts_end_and_can_be_resumed(verdicts: list[VerdictKind], max_trials: int) -> None:
    limits = SearchLimits(8, 0.5, 512, 0.05, max_trials)
    script = iter(verdicts)
    search = RateSearch(limits)
    answer = run(search, lambda rate: next(script, "missed"))
    resumed = RateSearch(limits)
    for entry in search.history:
        resumed.tell(entry.rate, entry.verdict)
    assert resumed.history == search.history
    assert resumed.answer() == answer


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0.5, 512), st.sampled_from(["met", "missed", "invalid"])), min_size=1, max_size=8
    )
)
def test_results_from_elsewhere_are_taken_in(results: list[tuple[float, VerdictKind]]) -> None:
    search = RateSearch(LIMITS)
    for rate, verdict in results:
        search.tell(rate, verdict)
    run(search, threshold(30))


def test_noise_spreads_the_answer_only_a_little() -> None:
    found = []
    for seed in range(100):
        random = np.random.default_rng(seed)

        def noisy(rate: float, random: np.random.Generator = random) -> VerdictKind:
            chance = 1 / (1 + math.exp(min(50.0, 40 * math.log(rate / 30))))  # 10 % of the rate: 0.98 to 0.02
            return "met" if random.random() < chance else "missed"

        answer = run(RateSearch(LIMITS), noisy)
        if answer.max_request_rate is not None:
            found.append(answer.max_request_rate / 30)
    assert len(found) == 100
    assert 0.92 < np.median(found) < 1.03
    assert np.percentile(found, 5) > 0.8
    assert np.percentile(found, 95) < 1.1


@pytest.mark.parametrize("values", [
    {"min_rate": 0.0}, {"start_rate": 0.1}, {"max_rate": 4.0}, {"max_rate": math.inf}, {"precision": 0.0},
    {"max_trials": 0}, {"max_retries": -1}, {"confidence": 1.0},
])  # fmt: skip
def test_impossible_limits_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SearchLimits(**{"start_rate": 8, "min_rate": 0.5, "max_rate": 512, **values})  # type: ignore[arg-type]


def test_impossible_words_are_refused() -> None:
    search = RateSearch(LIMITS)
    for rate in (0.0, -1.0, math.nan, 1e9):
        with pytest.raises(ValueError, match="limits"):
            search.tell(rate, "met")
    with pytest.raises(ValueError, match="verdict"):
        search.tell(8, "maybe")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hint"):
        RateSearch(LIMITS, Hint(-1))


# --- A queue with a known answer: M/D/1, one server of constant service time, TTFT = wait + service. ---
def md1_attainment(rate: float, service_s: float, limit_s: float) -> float:
    """P(wait + service ≤ limit) in the steady state (Erlang's series, summed with enough digits)."""
    wait = limit_s - service_s
    if wait < 0 or rate * service_s >= 1:
        return 0.0
    with localcontext() as context:
        context.prec = 60
        total = Decimal(0)
        for k in range(int(wait / service_s + 1e-9) + 1):
            x = Decimal(rate) * (Decimal(k * service_s) - Decimal(wait))
            total += (x**k if k else Decimal(1)) / math.factorial(k) * (-x).exp()
        return float((1 - Decimal(rate) * Decimal(service_s)) * total)


def md1_rate(service_s: float, limit_s: float, attainment: float) -> float:
    """The rate at which the steady state attains just that share."""
    low, high = 0.0, 1 / service_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if md1_attainment(middle, service_s, limit_s) >= attainment else (low, middle)
        )
    return low


def md1_trial(rate: float, service_s: float, slo: Slo, requests: int, seed: int) -> VerdictKind:
    free, records = 0.0, []
    for i, at in enumerate(planned_offsets(rate, requests, 1.0, seed).tolist()):
        free = max(free, at) + service_s
        records.append(
            RequestRecord(str(i), at, 1, 1, sent_s=at, first_token_s=free, last_token_s=free, output_len=1)
        )
    return judge(Evidence(records, summarise(records, slo, rate, free), slo))[0]


def md1_searches(
    service_s: float, limit_s: float, trial_s: float, seeds: int, limits: SearchLimits, hinted: bool
) -> tuple[list[float], list[int]]:
    """found / true and trials of ``seeds`` searches; a hint is off by up to 20 %."""
    slo = Slo(ttft_ms=limit_s * 1e3)
    truth = md1_rate(service_s, limit_s, slo.attainment)
    found, trials = [], []
    for seed in range(seeds):
        off = math.exp(np.random.default_rng(seed).uniform(-0.2, 0.2))
        search = RateSearch(limits, Hint(truth * off) if hinted else None)

        def trial(rate: float, search: RateSearch = search, seed: int = seed) -> VerdictKind:
            number = 1000 * seed + len(search.history)
            return md1_trial(rate, service_s, slo, max(60, int(rate * trial_s)), number)

        answer = run(search, trial)
        found.append((answer.max_request_rate or 0.0) / truth)
        trials.append(answer.trials)
    return found, trials


def test_the_queue_simulated_agrees_with_its_formula() -> None:
    free, inside, n = 0.0, 0, 100_000
    for at in planned_offsets(40.0, n, 1.0, 5).tolist():
        free = max(free, at) + 0.02
        inside += free - at <= 0.1
    assert inside / n == pytest.approx(md1_attainment(40.0, 0.02, 0.1), abs=0.01)


@pytest.mark.parametrize("hinted", [False, True])
def test_the_search_finds_the_queues_rate(hinted: bool) -> None:
    found, trials = md1_searches(0.02, 0.25, 10.0, 9, SearchLimits(10, 0.5, 400, 0.1, 10), hinted)
    assert 0.9 < np.median(found) < 1.1
    assert min(found) > 0.7
    assert max(found) < 1.25
    assert np.median(trials) <= (6 if hinted else 8)
