"""Search by verdicts alone, for trials without figures.

1. **Expand** from the start rate: up while trials are met, down while they are missed. From a cold start up
   by × 2, down by ÷ 2, ÷ 4, ÷ 4 (an unattainable SLO shows within a few trials). From a trusted hint by
   × 1.15, × 1.3, then as from a cold start: a good guess costs two trials.
2. **Bisect** between the highest met and the lowest missed rate, at their geometric mean, until
   upper / lower ≤ 1 + precision.
3. **Confirm** the lower end by one more trial. If that misses, the rate becomes the upper end and the search
   continues below it. The same applies to a met ``max_rate`` and a missed ``min_rate``.

A miss below a met rate is a contradiction (noise, drift, or imported results): the missed rate is tried once
more. A second miss counts, since a rate is sustained only if all lower rates are.
"""

from __future__ import annotations

import math
from typing import Literal

from kvbench.core.search.data import Probe, SearchAnswer, Status
from kvbench.core.search.trial_history import (
    DOWN_COLD,
    DOWN_TRUSTED,
    UP_COLD,
    UP_TRUSTED,
    RateTally,
    TrialHistory,
    rounded,
    step_factor,
)


def next_probe(history: TrialHistory, *, trusted: bool) -> Probe | None:
    """Return the next trial, or None to end the search. ``trusted``: it began at a trusted hint."""
    bracket = history.bracket
    contradicting = _contradicting_rate(history)
    if contradicting is not None:
        return Probe(contradicting, "recheck")
    if bracket.lower is None:
        return _below(history, trusted)
    if history.trials_left == 1 and bracket.upper is not None and history.unconfirmed(bracket.lower):
        return Probe(bracket.lower, "confirm")  # a confirmed wide interval is better than an unconfirmed one
    if bracket.top is None:
        return _above(history, bracket.lower, trusted)
    if not _close(history, bracket.lower, bracket.top):
        return Probe(rounded(math.sqrt(bracket.lower * bracket.top)), "bisect")
    return history.confirm_highest(bracket.lower)


def answer(history: TrialHistory, *, finished: bool) -> SearchAnswer:
    lower, upper = history.bracket.lower, history.bracket.upper
    end = lower if lower is not None else upper
    tally = RateTally() if end is None else history.bracket.tallies[end]
    confirmed = (tally.mets if lower is not None else tally.misses) >= 2
    censored: Literal["", "above", "below"] = ""
    if lower is not None and upper is None:
        censored = "above"
    elif lower is None and upper is not None:
        censored = "below"
    status, reason = _status(history, confirmed, finished)
    trials, figures = len(history.outcomes), history.figures(lower)
    return SearchAnswer(lower, lower, upper, censored, status, confirmed, trials, reason, **figures)


def _status(history: TrialHistory, confirmed: bool, finished: bool) -> tuple[Status, str]:
    limits, bracket = history.limits, history.bracket
    lower, upper = bracket.lower, bracket.upper
    if confirmed and lower is not None and upper is not None and _close(history, lower, upper):
        return "converged", f"met at {lower:g}, missed at {upper:g}"
    if confirmed and lower is not None and upper is None and lower >= limits.max_rate:
        return "censored", f"met at {lower:g}, the highest rate allowed: raise max_rate"
    if confirmed and lower is None and upper is not None and upper <= limits.min_rate:
        return "slo_unattainable", f"missed at {upper:g} already, the lowest rate allowed"
    if history.trials_left <= 0:
        return "exhausted", f"stopped after {history.end_text}; the precision is not reached"
    if not finished:
        return "undecided", "the search was not finished"
    if bracket.unusable is not None:
        return "undecided", f"trials at and near {bracket.unusable:g} were invalid"
    return "undecided", "the trials to confirm the answer were invalid"


def _above(history: TrialHistory, lower: float, trusted: bool) -> Probe | None:
    if lower >= history.limits.max_rate:
        return history.confirm_highest(lower)
    steps = sum(tally.last == "met" for tally in history.bracket.tallies.values())
    factor = step_factor(UP_TRUSTED if trusted else UP_COLD, steps)
    return Probe(history.inside(lower * factor), "expand")


def _below(history: TrialHistory, trusted: bool) -> Probe | None:
    tallies = history.bracket.tallies
    lowest = min(tallies)
    if lowest <= history.limits.min_rate:
        return history.confirm_lowest()
    factor = step_factor(DOWN_TRUSTED if trusted else DOWN_COLD, len(tallies))
    return Probe(history.inside(lowest / factor), "expand")


def _contradicting_rate(history: TrialHistory) -> float | None:
    """Return the lowest rate below a met one that was missed in its only trial."""
    tallies = history.bracket.tallies
    highest_met = max((rate for rate, tally in tallies.items() if tally.last == "met"), default=0.0)
    return min(
        (
            rate
            for rate, tally in tallies.items()
            if rate < highest_met and tally.last == "missed" and tally.mets + tally.misses == 1
            if history.usable(tally)
        ),
        default=None,
    )


def _close(history: TrialHistory, lower: float, top: float) -> bool:
    middle = rounded(math.sqrt(lower * top))
    return top <= lower * (1 + history.limits.precision) or not lower < middle < top
