"""Searches a rate by what trials measured: a yes or no is the least that a trial gives.

With what they tell, a posterior of the rate is kept (``kvbench.core.search.posterior``); each trial goes to
its median, so that all of them measure where it matters:

1. From 0.9 × the ceiling, a hint, or the start rate: **expand** × 1.15, × 1.3, × 2 or further, if the margins
   say so, but not beyond the capacity, until both a rate that kept what is asked and one that did not were
   seen. While all trials are missed, steps down are halves as long as some requests are in time.
2. **Bisect**: to the median of the posterior, again and again, but not beyond what was seen; while the
   interval is wide, further up or down the more trials in a row came out the same. There trials are
   *thorough*: a quick yes comes before a queue has built up, and a limit that leaves much time for waiting
   takes many times that to be reached. A search that goes on for long gets longer trials.
3. **Confirm**: trials a little below the median, once that is sharp. The search is over when the rate looked
   for is within the precision of the answer with a high probability (``_sure``), and a thorough trial at the
   median, or up to the precision above it, was met; or else the highest met one below it takes its place.
   All trials are pooled, so that one which is repeated until it is met proves nothing by that.

An *undecided* trial is neither yes nor no. Its share counts like any other: a rate at which it is open
whether the SLO holds is close to the one looked for. Contradictions need no rule: the posterior moves and
widens, and there are more trials.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any, Final, Literal

from kvbench.core.search import by_replay
from kvbench.core.search.data import Probe, Purpose, SearchAnswer, Status, TrialOutcome
from kvbench.core.search.live_config import requests_s
from kvbench.core.search.posterior.posterior import LEVEL, RateEstimate
from kvbench.core.search.trial_history import (
    DOWN_COLD,
    UP_TRUSTED,
    TrialHistory,
    reached_target,
    step_factor,
)

DOWN_NEAR: Final = 2.0
"""The longest step down from a trial in which some requests were in time: the rate cannot be far."""
CLOSE: Final = 0.75
"""From this share of the capacity on a queue takes its time to build up, and a quick yes is none."""
UP_MOST: Final = 3.0
BELOW_CAPACITY: Final = 0.97
"""The longest step up, as a factor, and as a share of the capacity."""
BEYOND: Final = 1.1
"""The median is followed so far beyond a rate that was seen to keep, or to break, what is asked."""
WAITS: Final = 25.0
"""A thorough trial lasts so many times what the TTFT limit leaves for waiting: a queue that gets 5 % too much
reaches the limit after 20."""
SECONDS: Final = 10.0
"""But not less, however fast the system: warm-ups, pauses and neighbours know no latencies."""
STRETCH_AFTER: Final = 9
STRETCH: Final = 3.0
"""After so many trials, so many times the length of the first thorough ones."""
SOON: Final = 8
SURE_SOON, SURE = 0.82, 0.865
"""How probable it must be that the rate is within the precision, in the first trials, and later: who looks
more often sees more by chance. Of drawn systems' answers (develop and check, 226 searches) 69 of 72 were
then; with 0.82 for all, 86 of 93."""
LEAN: Final = 0.15
LEAN_MOST: Final = 0.45
"""While the interval is wide: so much further from its median, as a share of the posterior, a trial goes for
each one in a row before that was kept, or missed, as the one before; and at most. A median that is always
kept is no median."""
KEPT_IN_A_ROW: Final = 4
"""So many trials in a row that were kept, and still it is not sure: what is missing is how far up it goes."""
NEAR: Final = 1.85
"""In units of the precision: the interval's half-width from which on a trial may confirm."""
CONFIRM_BELOW: Final = 0.1
CONFIRM_STEP: Final = 0.06
CONFIRM_MOST: Final = 0.28
"""In units of the precision: so far below the median a trial is to confirm, or every other one would fail;
so much further for each that has failed; and at most."""


def next_probe(history: TrialHistory, estimate: RateEstimate) -> Probe | None:
    """The next trial, None when the search is over. There must be an outcome beside a ceiling's."""
    if _settled(history, estimate) is not None:
        return None
    limits, tried, tallies = history.limits, history.tried, history.bracket.tallies
    lowest, highest = min(each.rate for each in tried), max(each.rate for each in tried)
    good, bad = _bracket(history, estimate)
    some_good, some_bad = good > 0, bad < math.inf
    if not some_good and lowest <= limits.min_rate:
        return history.confirm_lowest()
    if not some_bad and highest >= limits.max_rate:
        return history.confirm_highest(highest)
    if history.trusted_replay is not None:
        return by_replay.next_probe(history, history.trusted_replay)
    near = estimate.width <= limits.precision * NEAR
    sharp = near and not _always_kept(history)
    capacity, target = _capacity(history), estimate.median
    if not sharp:
        # Half way at most to where there is an answer already.
        leaning = max(_leaning(history, estimate), math.sqrt(target * min(good, target)))
        target = min(leaning, math.sqrt(target * max(bad, target)))
    if not some_bad:
        step = min(highest * step_factor(UP_TRUSTED, len(tried)), BELOW_CAPACITY * capacity)
        beyond = min(estimate.upper, highest * (1 + limits.precision)) if len(tried) > 1 else 0.0
        target = min(max(target, step, beyond), highest * UP_MOST)
    elif not some_good:
        close = any(_some_in_time(each) for each in tried if each.rate == lowest)
        step = lowest / (DOWN_NEAR if close else step_factor(DOWN_COLD, len(tried)))
        target = max(target, step) if close or len(tried) < 3 else step
    else:
        # What was over before a queue had built up has proved nothing, if the median says so.
        proved = max((each.rate for each in tried if each.thorough and _kept(each) is True), default=0.0)
        outside = good < bad and not min(good, proved) / BEYOND <= target <= bad * BEYOND
        target = math.sqrt(good * bad) if outside else target
        if near and not sharp:
            # Back to what was missed once: where that is kept now, the system is no longer what it was.
            target = _return_to(history, estimate)
    unusable = min((rate for rate, tally in tallies.items() if not history.usable(tally)), default=math.inf)
    if sharp and some_good and some_bad:
        target /= 1 + _aim_below(history) * limits.precision
    target = history.inside(min(target, unusable / (1 + limits.precision)))
    if target in tallies and not history.usable(tallies[target]):
        return None
    if unusable < math.inf and sum(each.rate == target for each in tried) >= 2:
        return None
    purpose: Purpose = "confirm" if sharp else "bisect" if some_good and some_bad else "expand"
    thorough = target > CLOSE * capacity or (some_good and some_bad)
    return Probe(target, purpose, thorough, _least_s(history, target) if thorough else 0.0)


def _least_s(history: TrialHistory, rate: float) -> float:
    """For how long a thorough trial goes on: what waits must be seen, and the longer the search, the more."""
    waits_s = max(WAITS * history.waiting.slack_s, SECONDS, requests_s(rate))
    lengths = [each.measured.duration_s for each in history.tried if each.thorough and each.measured]
    if not lengths or len(history.tried) < STRETCH_AFTER:
        return waits_s
    return max(waits_s, STRETCH * median(lengths[:3]))


def answer(history: TrialHistory, estimate: RateEstimate, *, finished: bool) -> SearchAnswer:
    """The best answer so far: the rate that a trial has confirmed, or else the most likely one.

    No rate without a trial that was met at or below it, and no lower bound above all rates that were met.
    """
    settled = _settled(history, estimate)
    found = settled if settled is not None else _most_likely(history, estimate)
    lower: float | None = None
    upper: float | None = estimate.upper
    censored: Literal["", "above", "below"] = ""
    status: Status = "converged"
    confirming = None if found is None else history.confirming(found)
    reason = "" if confirming is None else f"met at {confirming.rate:g}"
    if settled is None:
        status, reason = _unsettled(history, estimate, finished)
    limits, tried = history.limits, history.tried
    if found is not None:
        met = [
            each.rate for each in tried if each.verdict == "met" and each.rate <= max(estimate.upper, found)
        ]
        lower, upper = min(estimate.lower, found, max(met)), max(estimate.upper, found)
        if settled is None and lower < limits.min_rate:
            lower = 0.0  # nothing below it was tried
    elif tried and all(each.verdict == "missed" for each in tried):
        upper, censored = history.bracket.upper, "below"
    elif estimate.upper >= limits.max_rate:
        upper = None  # that end was assumed, not measured
    if found is None and tried and history.trials_left <= 0:
        status, reason = "exhausted", f"max_trials = {limits.max_trials} came before any rate was met"
    if settled is not None and settled >= limits.max_rate:
        status, reason = "censored", f"not missed at {settled:g}, the highest rate allowed: raise max_rate"
        upper, censored = None, "above"
    figures = {**history.figures(found), **_belief(history, estimate, finished)}
    trials = len(history.outcomes)
    return SearchAnswer(found, lower, upper, censored, status, settled is not None, trials, reason, **figures)


def _most_likely(history: TrialHistory, estimate: RateEstimate) -> float | None:
    """The median of the posterior, but not below all rates that were met; None if none was met."""
    return _not_below_all_met(history, history.inside(estimate.median), estimate.upper)


def _not_below_all_met(history: TrialHistory, rate: float, highest: float) -> float | None:
    """That rate if a trial was met at or below it, else the lowest met one, or None beyond ``highest``."""
    if history.supporting(rate) is not None:
        return rate
    lowest = min((each.rate for each in history.tried if each.verdict == "met"), default=math.inf)
    return lowest if lowest <= highest else None


def _belief(history: TrialHistory, estimate: RateEstimate, finished: bool) -> dict[str, Any]:
    """The posterior, as an answer keeps it."""
    at_first = history.estimate_at_first if finished else None
    return {
        "level": LEVEL,
        "posterior": estimate.equal_parts(),
        "wanders": round(estimate.wanders, 4),
        "posterior_at_first": () if at_first is None else at_first.equal_parts(),
    }


def _unsettled(history: TrialHistory, estimate: RateEstimate, finished: bool) -> tuple[Status, str]:
    """Why there is no answer that can be relied on."""
    rate, limits, replay = history.inside(estimate.median), history.limits, history.trusted_replay
    if replay is not None and finished and by_replay.too_far(history, replay):
        return "exhausted", by_replay.too_far_text(history, replay)
    if history.trials_left > 0:
        if not finished:
            return "undecided", "the search was not finished"
        if _bracket(history, estimate)[0] == 0 and any(e.rate <= limits.min_rate for e in history.tried):
            return "undecided", f"still open at {limits.min_rate:g}, the lowest rate allowed: lower min_rate"
        return "undecided", f"trials at {history.bracket.unusable or rate:g} and around it were refused"
    if estimate.within(rate, limits.precision) >= _sure(history):
        return "undecided", (
            f"max_trials = {limits.max_trials} came before a trial at {rate:g} or up to "
            f"{limits.precision:.0%} above it was met"
        )
    return "exhausted", f"max_trials = {limits.max_trials} came before the precision asked for"


def _bracket(history: TrialHistory, estimate: RateEstimate) -> tuple[float, float]:
    """(the highest rate that kept what is asked, the lowest that did not), by what was measured.

    Those that all the others contradict are left out, if there are some.
    """
    good = [each.rate for each in history.tried if _kept(each) is True]
    bad = [each.rate for each in history.tried if _kept(each) is False]
    good = [rate for rate in good if rate <= estimate.upper] or good
    bad = [rate for rate in bad if rate >= estimate.lower] or bad
    return max(good, default=0.0), min(bad, default=math.inf)


def _kept(outcome: TrialOutcome) -> bool | None:
    measured = outcome.measured
    if outcome.verdict != "undecided":
        return outcome.verdict == "met"
    if measured is None or (measured.n and measured.score is None):
        return None
    # Too few came back in all the trial's time to tell anything: it was far too much.
    return bool(measured.n) and measured.score is not None and measured.score >= 0


def _always_kept(history: TrialHistory) -> bool:
    """Whether all of the last trials were kept: confirming once more would tell nothing new."""
    last = history.tried[-KEPT_IN_A_ROW:]
    return len(last) == KEPT_IN_A_ROW and all(_kept(each) is True for each in last)


def _return_to(history: TrialHistory, estimate: RateEstimate) -> float:
    """The lowest rate that was missed, and not kept since; or beyond all that was kept."""
    kept, missed = 0.0, math.inf
    for each in reversed(history.tried):
        known = _kept(each)
        kept = max(kept, each.rate) if known else kept
        missed = min(missed, each.rate) if known is False and each.rate > kept else missed
    return min(missed, max(kept, estimate.upper) * BEYOND)


def _leaning(history: TrialHistory, estimate: RateEstimate) -> float:
    """The median; or the further up or down, the more trials in a row had the same outcome."""
    kept = [known for each in history.tried if (known := _kept(each)) is not None]
    same = next((count for count, each in enumerate(reversed(kept)) if each != kept[-1]), len(kept))
    lean = min(LEAN * max(same - 1, 0), LEAN_MOST) * (1 if kept and kept[-1] else -1)
    return estimate.quantile(0.5 + lean)


def _aim_below(history: TrialHistory) -> float:
    failed = sum(each.purpose == "confirm" and not reached_target(each) for each in history.tried)
    return min(CONFIRM_BELOW + CONFIRM_STEP * failed, CONFIRM_MOST)


def _capacity(history: TrialHistory) -> float:
    """The least that a trial saw the system pass on at most; inf if none saw its limit."""
    return min((point.capacity for point in history.points if point.capacity), default=math.inf)


def _settled(history: TrialHistory, estimate: RateEstimate) -> float | None:
    """The rate that the search ends with, if it is over: near the median, sure enough, and met in a trial."""
    precision = history.limits.precision
    replay = history.trusted_replay
    if replay is not None:
        return _most_likely(history, estimate) if by_replay.suffices(history, replay) else None
    if all(each.verdict == "met" for each in history.tried) and _capacity(history) == math.inf:
        return None  # nothing bounds it from above
    median = history.inside(estimate.median)
    met = [each.rate for each in history.tried if reached_target(each) and each.thorough]
    if not any(median <= rate <= median * (1 + precision) for rate in met):
        median = max((rate for rate in met if rate <= median), default=0.0)
    median = _not_below_all_met(history, median, median * (1 + precision)) or 0.0
    return median if median and estimate.within(median, precision) >= _sure(history) else None


def _sure(history: TrialHistory) -> float:
    return SURE_SOON if len(history.outcomes) <= SOON else SURE


def _some_in_time(outcome: TrialOutcome) -> bool:
    return outcome.measured is not None and bool(outcome.measured.n and outcome.measured.attainment)
