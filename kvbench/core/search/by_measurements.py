"""Search by the figures that trials measured, not by their verdicts alone.

The figures update a posterior of the rate (``kvbench.core.search.posterior``). Each trial runs near its
median, where it is most informative:

1. **Expand** from 0.9 × the ceiling, a hint, or the start rate: × 1.15, × 1.3, × 2 or further if the margins
   allow it, but not beyond the capacity, until one rate met the SLO and one missed it. While all trials miss,
   the rate is halved as long as some requests are within the limits.
2. **Bisect** at the median of the posterior, within the rates tried. While the interval is wide, trials move
   further up or down the more successive trials had the same outcome. These trials are *full-length*: a
   queue needs time to build up, many times the TTFT headroom. Long searches get longer trials.
3. **Confirm** a little below the median once the interval is narrow. The search ends when the rate is known
   within the precision (``_precise``), and a full-length trial at the median, or up to the precision above,
   was met; otherwise the highest met rate below it takes its place. All trials are pooled, so repeating one
   until it is met proves nothing.

An *undecided* trial counts by its share of requests like any other: it is close to the wanted rate.
Contradictory trials move and widen the posterior, which leads to more trials.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any, Final, Literal

from kvbench.core.search import by_replay
from kvbench.core.search.data import (
    SECONDS,
    WAITS,
    Probe,
    Purpose,
    SearchAnswer,
    Status,
    TrialOutcome,
    requests_s,
)
from kvbench.core.search.posterior.posterior import LEVEL, RateEstimate
from kvbench.core.search.trial_history import (
    DOWN_COLD,
    UP_TRUSTED,
    TrialHistory,
    reached_target,
    step_factor,
)

DOWN_NEAR: Final = 2.0
"""Longest step down, as a divisor, from a trial in which some requests met the limits."""
CLOSE: Final = 0.75
"""Share of the capacity above which a trial is full-length: a queue builds up slowly there."""
BELOW_CAPACITY: Final = 0.97
"""Highest rate of a step up, as a share of the capacity."""
BEYOND: Final = 1.1
"""Largest factor by which the median may exceed the missed rates, or fall below the met ones."""
STRETCH_AFTER: Final = 9
"""Number of trials after which full-length trials get longer."""
STRETCH: Final = 3.0
"""Their length then, as a multiple of the first full-length ones."""
SOON: Final = 8
CERTAIN_SOON, CERTAIN = 0.82, 0.865
"""Probability that the rate is within the precision at which a search converges: in the first ``SOON``
trials, and later (repeated looks find more by chance). In 226 searches of random systems 69 of 72 converged
answers were right; with 0.82 throughout, 86 of 93."""
LEAN: Final = 0.15
"""Shift from the median while the interval is wide, as a share of the posterior, for each successive trial
with the same outcome: a median that is always met is too low."""
LEAN_MOST: Final = 0.45
"""Largest such shift."""
KEPT_IN_A_ROW: Final = 4
"""Number of successive met trials after which a higher rate is tried instead of a confirmation, and of trials
without a met one after which a lower rate is tried than the median."""
CONFIRM_BELOW: Final = 0.1
"""Distance of a confirming trial below the median, as a share of the precision: half of those at it miss."""
CONFIRM_STEP: Final = 0.06
"""Further distance for each confirmation that failed."""
CONFIRM_MOST: Final = 0.28
"""Largest distance."""


def next_probe(history: TrialHistory, estimate: RateEstimate) -> Probe | None:
    """Return the next trial, or None to end the search. Needs an outcome other than a ceiling's."""
    if _settled(history, estimate) is not None:
        return None
    limits, tried, tallies = history.limits, history.tried, history.bracket.tallies
    lowest, highest = min(trial.rate for trial in tried), max(trial.rate for trial in tried)
    good, bad = _bracket(history, estimate)
    some_good, some_bad = good > 0, bad < math.inf
    if not some_good and lowest <= limits.min_rate:
        return history.confirm_lowest()
    if not some_bad and highest >= limits.max_rate:
        return history.confirm_highest(highest)
    if history.trusted_replay is not None:
        return by_replay.next_probe(history, history.trusted_replay)
    near = estimate.width <= by_replay.CONFIRMS * limits.precision
    sharp = near and not _always_kept(history)
    capacity, target = _capacity(history), estimate.median
    if not sharp:
        # At most half way (in logarithms) to a rate with a known outcome.
        leaning = max(_leaning(history, estimate), math.sqrt(target * min(good, target)))
        target = min(leaning, math.sqrt(target * max(bad, target)))
    if not some_bad:
        step = min(highest * step_factor(UP_TRUSTED, len(tried)), BELOW_CAPACITY * capacity)
        beyond = min(estimate.upper, highest * (1 + limits.precision)) if len(tried) > 1 else 0.0
        target = min(max(target, step, beyond), highest * by_replay.UP_MOST)
    elif not some_good:
        close = any(_some_in_time(trial) for trial in tried if trial.rate == lowest)
        step = lowest / (DOWN_NEAR if close else step_factor(DOWN_COLD, len(tried)))
        target = max(target, step) if close or len(tried) < 3 else step
    else:
        # A short trial proves nothing against the median: no queue had built up yet.
        proved = max(
            (trial.rate for trial in tried if trial.full_length and _kept(trial) is True), default=0.0
        )
        outside = good < bad and not min(good, proved) / BEYOND <= target <= bad * BEYOND
        target = math.sqrt(good * bad) if outside else target
        if near and not sharp:
            # Repeat a missed rate: if it is met now, the system has changed.
            target = _return_to(history, estimate)
    unusable = min((rate for rate, tally in tallies.items() if not history.usable(tally)), default=math.inf)
    bracketed = some_good and some_bad
    if sharp and bracketed:
        target /= 1 + _aim_below(history) * limits.precision
    if bracketed and len(tried) >= KEPT_IN_A_ROW and all(trial.verdict != "met" for trial in tried):
        # An answer needs a met trial: near the median, every one may be undecided.
        target = min(target, estimate.lower / (1 + limits.precision))
    target = history.inside(min(target, unusable / (1 + limits.precision)))
    if target in tallies and not history.usable(tallies[target]):
        return None
    if unusable < math.inf and sum(trial.rate == target for trial in tried) >= 2:
        return None
    purpose: Purpose = "confirm" if sharp else "bisect" if bracketed else "expand"
    full_length = target > CLOSE * capacity or bracketed
    return Probe(target, purpose, full_length, _least_s(history, target) if full_length else 0.0)


def _least_s(history: TrialHistory, rate: float) -> float:
    """Return the minimum length of a full-length trial in seconds; longer late in a search."""
    waits_s = max(WAITS * history.waiting.headroom_s, SECONDS, requests_s(rate))
    lengths = [trial.measured.duration_s for trial in history.tried if trial.full_length and trial.measured]
    if not lengths or len(history.tried) < STRETCH_AFTER:
        return waits_s
    return max(waits_s, STRETCH * median(lengths[:3]))


def answer(history: TrialHistory, estimate: RateEstimate, *, finished: bool) -> SearchAnswer:
    """Return the best answer so far: the rate that a trial has confirmed, or else the most likely one. A rate
    needs a met trial at or below it; the lower bound does not exceed the highest met rate, unless the search
    ended by a replay, whose interval needs no verdict."""
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
            trial.rate
            for trial in tried
            if trial.verdict == "met" and trial.rate <= max(estimate.upper, found)
        ]
        shown = found if settled is not None and history.trusted_replay is not None else max(met)
        lower, upper = min(estimate.lower, shown, found), max(estimate.upper, found)
        if settled is None and history.replay is not None and not history.replay.objections:
            # No trial refutes it, though it is imprecise or all met rates are above it.
            also = history.replay.estimate
            lower, upper = min(lower, also.lower), max(upper, also.upper)
        if settled is None and lower < limits.min_rate:
            lower = 0.0  # no lower rate was tried
        bounded = _bracket(history, estimate)[1] < math.inf or _capacity(history) < math.inf
        if settled is None and history.trusted_replay is None and not bounded:
            # No trial missed it, so max_rate alone ends the posterior.
            found, upper, censored = max(met), None, "above"
    elif tried and all(trial.verdict == "missed" for trial in tried):
        upper, censored = history.bracket.upper, "below"
    elif estimate.upper >= limits.max_rate:
        upper = None  # that end was assumed, not measured
    if found is None and (above := [trial.rate for trial in tried if trial.verdict == "met"]):
        upper = None if upper is None else max(upper, min(above))
        reason = f"trials contradict each other: {min(above):g} req/s was met, but all together indicate less"
    elif found is None and tried and history.trials_left <= 0:
        status, reason = "exhausted", f"{history.end_text} came before any rate was met"
    if settled is not None and settled >= limits.max_rate:
        status, reason = "censored", f"not missed at {settled:g}, the highest rate allowed: raise max_rate"
        upper, censored = None, "above"
    figures = {**history.figures(found), **_belief(history, estimate, finished)}
    trials = len(history.outcomes)
    return SearchAnswer(found, lower, upper, censored, status, settled is not None, trials, reason, **figures)


def _most_likely(history: TrialHistory, estimate: RateEstimate) -> float | None:
    """Return the median of the posterior, but not below all met rates; None if no rate was met."""
    return _not_below_all_met(history, history.inside(estimate.median), estimate.upper)


def _not_below_all_met(history: TrialHistory, rate: float, highest: float) -> float | None:
    """Return the rate if a trial at or below it was met, else the lowest met one; None beyond ``highest``."""
    if history.supporting(rate) is not None:
        return rate
    lowest = min((trial.rate for trial in history.tried if trial.verdict == "met"), default=math.inf)
    return lowest if lowest <= highest else None


def _belief(history: TrialHistory, estimate: RateEstimate, finished: bool) -> dict[str, Any]:
    """Return the posterior as an answer stores it."""
    at_first = history.estimate_at_first if finished else None
    return {
        "level": LEVEL,
        "posterior": estimate.equal_parts(),
        "wanders": round(estimate.wanders, 4),
        "posterior_at_first": () if at_first is None else at_first.equal_parts(),
    }


def _unsettled(history: TrialHistory, estimate: RateEstimate, finished: bool) -> tuple[Status, str]:
    """Return the status of a search without a confirmed answer, and the reason."""
    rate, limits, replay = history.inside(estimate.median), history.limits, history.trusted_replay
    needed = "" if replay is None else by_replay.needed_text(history, replay)
    if history.trials_left > 0:
        if replay is not None and finished and by_replay.too_far(history, replay):
            return "exhausted", by_replay.needed_text(history, replay, ": its requests vary too much")
        if not finished:
            return "undecided", "the search was not finished"
        if _bracket(history, estimate)[0] == 0 and any(e.rate <= limits.min_rate for e in history.tried):
            return "undecided", f"still open at {limits.min_rate:g}, the lowest rate allowed: lower min_rate"
        return "undecided", f"trials at and near {history.bracket.unusable or rate:g} were invalid"
    if needed:
        return "exhausted", f"stopped after {history.end_text}: {needed}"
    if _precise(history, estimate, rate):
        return "undecided", (
            f"{history.end_text} came before a trial at {rate:g} or up to "
            f"{limits.precision:.0%} above it was met"
        )
    return "exhausted", f"stopped after {history.end_text}; the precision is not reached"


def _bracket(history: TrialHistory, estimate: RateEstimate) -> tuple[float, float]:
    """Return the highest met and the lowest missed rate by measured scores. Rates outside the posterior's
    interval are left out if others remain."""
    good = [trial.rate for trial in history.tried if _kept(trial) is True]
    bad = [trial.rate for trial in history.tried if _kept(trial) is False]
    good = [rate for rate in good if rate <= estimate.upper] or good
    bad = [rate for rate in bad if rate >= estimate.lower] or bad
    return max(good, default=0.0), min(bad, default=math.inf)


def _kept(outcome: TrialOutcome) -> bool | None:
    measured = outcome.measured
    if outcome.verdict != "undecided":
        return outcome.verdict == "met"
    if measured is None or (measured.n and measured.score is None):
        return None
    # Too few responses arrived during the trial to judge any: the rate was far too high.
    return bool(measured.n) and measured.score is not None and measured.score >= 0


def _always_kept(history: TrialHistory) -> bool:
    """Return whether all of the last trials were met, so that another confirmation shows nothing new."""
    last = history.tried[-KEPT_IN_A_ROW:]
    return len(last) == KEPT_IN_A_ROW and all(_kept(trial) is True for trial in last)


def _return_to(history: TrialHistory, estimate: RateEstimate) -> float:
    """Return the lowest rate that was missed and not met since, or one above all met rates."""
    kept, missed = 0.0, math.inf
    for trial in reversed(history.tried):
        known = _kept(trial)
        kept = max(kept, trial.rate) if known else kept
        missed = min(missed, trial.rate) if known is False and trial.rate > kept else missed
    return min(missed, max(kept, estimate.upper) * BEYOND)


def _leaning(history: TrialHistory, estimate: RateEstimate) -> float:
    """Return a quantile further from the median the more successive trials had the same outcome."""
    kept = [known for trial in history.tried if (known := _kept(trial)) is not None]
    same = next((count for count, outcome in enumerate(reversed(kept)) if outcome != kept[-1]), len(kept))
    lean = min(LEAN * max(same - 1, 0), LEAN_MOST) * (1 if kept and kept[-1] else -1)
    return estimate.quantile(0.5 + lean)


def _aim_below(history: TrialHistory) -> float:
    failed = sum(trial.purpose == "confirm" and not reached_target(trial) for trial in history.tried)
    return min(CONFIRM_BELOW + CONFIRM_STEP * failed, CONFIRM_MOST)


def _capacity(history: TrialHistory) -> float:
    """Return the lowest measured capacity in requests per second; inf if no trial reached it."""
    return min((point.capacity for point in history.points if point.capacity), default=math.inf)


def _settled(history: TrialHistory, estimate: RateEstimate) -> float | None:
    """Return the final rate: near the median, probable enough, and met in a trial; None if not yet known."""
    precision = history.limits.precision
    replay = history.trusted_replay
    if replay is not None:
        return _most_likely(history, estimate) if by_replay.suffices(history, replay) else None
    if all(trial.verdict == "met" for trial in history.tried) and _capacity(history) == math.inf:
        return None  # nothing bounds it from above
    watched_s = sum(trial.measured.duration_s for trial in history.tried if trial.measured)
    if 0 < watched_s < by_replay.watched_s(history.limits):  # 0: unknown
        return None
    median = history.inside(estimate.median)
    met = [trial.rate for trial in history.tried if reached_target(trial) and trial.full_length]
    if not any(median <= rate <= median * (1 + precision) for rate in met):
        median = max((rate for rate in met if rate <= median), default=0.0)
    median = _not_below_all_met(history, median, median * (1 + precision)) or 0.0
    return median if median and _precise(history, estimate, median) else None


def _precise(history: TrialHistory, estimate: RateEstimate, rate: float) -> bool:
    """Return whether the posterior is within the precision of a rate, without a long tail outside."""
    precision, enough = history.limits.precision, CERTAIN_SOON if len(history.outcomes) <= SOON else CERTAIN
    return estimate.width <= by_replay.CONFIRMS * precision and estimate.within(rate, precision) >= enough


def _some_in_time(outcome: TrialOutcome) -> bool:
    return outcome.measured is not None and bool(outcome.measured.n and outcome.measured.attainment)
