"""What each trial says of the rate looked for, and how well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvbench.core.search.data import TrialFigures, TrialOutcome

CEILING_ERROR: Final = 0.05
SATURATED: Final = 0.9
"""A ceiling probe of which a larger share was completed in time was no burden, and no ceiling."""
ARRIVALS: Final = 0.75
ARRIVALS_MOST: Final = 1.03
"""How much of a chance surplus of arrivals counts as a higher rate (an exponent), and how much at most."""
WORST_VALUE: Final = 50.0
"""A mean beyond so many times its limit says no more than one at it."""


@dataclass(frozen=True)
class RatePoint:
    """One trial: its rate, and what it says; times in seconds since the trial's start.

    ``misses`` of ``n`` broke the SLO where ``attainment`` of them should not, and ``clump`` of them count as
    one (n = 0: nothing is known); ``together`` of them were under way at once. ``score`` with its standard
    error. ``mean``: a mean in units of its limit, with its standard error. ``begin_s`` and ``end_s``: when
    those arrived. ``ttft_s``: the TTFT that the share asked for stayed within; ``late``: those beyond the
    limit on TTFT, among the misses. ``queue_rate`` and ``gap_variation``: see ``TrialFigures``. ``bound``:
    the rate is known to be "above" or "below" the root, and no more is. ``capacity`` with its standard error:
    the most that was passed on, by so many. ``cut``: it was over as soon as it was seen to miss, at a moment
    that is worse than usual.
    """

    rate: float
    misses: float = 0.0
    n: float = 0.0
    clump: float = 1.0
    together: float = 1.0
    attainment: float = 0.95
    score: float | None = None
    score_error: float = 0.0
    mean: float | None = None
    mean_error: float = 0.0
    begin_s: float = 0.0
    end_s: float = 0.0
    ttft_s: float | None = None
    late: float | None = None
    queue_rate: float | None = None
    gap_variation: float = 1.0
    bound: Literal["", "above", "below"] = ""
    capacity: float | None = None
    capacity_error: float = 0.0
    capacity_n: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Waiting:
    """What a TTFT limit leaves for waiting: ``slack_s`` of ``limit_s``; both 0 where TTFT is not limited."""

    limit_s: float = 0.0
    slack_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """TTFT of a request that does not wait."""
        return self.limit_s - self.slack_s


OF_MEAN: Final = 1 - math.exp(-1)
"""The share of exponential waiting times that are below their mean."""
LEAST_SLACK: Final = 0.02
"""Of the limit."""


def waiting_of(outcomes: Sequence[TrialOutcome]) -> Waiting:
    """By the fastest requests that any trial saw."""
    known = [each.measured for each in outcomes if each.measured is not None]
    limits = [each.ttft_limit_s for each in known if each.ttft_limit_s]
    fast = [each.ttft_fast_s for each in known if each.ttft_fast_s is not None]
    if not limits or not fast:
        return Waiting()
    limit_s = min(limits)
    return Waiting(limit_s, max(limit_s - min(fast), LEAST_SLACK * limit_s))


FEWEST: Final = 30
"""Requests of a trial whose slower ones say what is usual."""
ALIKE: Final = 0.9
"""Of the slack: one that is larger is no other."""


def waiting_of_slow(outcomes: Sequence[TrialOutcome], waiting: Waiting) -> Waiting | None:
    """The same if the share asked for, or the mean, waited for nothing in the trial that was best in it: some
    requests are slow by themselves. None if that makes no difference."""
    known = [each.measured for each in outcomes if each.measured is not None]
    shown = [own for each in known if each.n >= FEWEST and (own := _usual(each)) is not None]
    slack_s = waiting.limit_s - min(shown, default=waiting.alone_s)
    if not LEAST_SLACK * waiting.limit_s < slack_s < ALIKE * waiting.slack_s:
        return None
    return Waiting(waiting.limit_s, slack_s)


def _usual(measured: TrialFigures) -> float | None:
    """TTFT in seconds that the share asked for stayed within, or the mean one."""
    if measured.target is not None:
        return measured.ttft_s
    if measured.score is None or measured.score <= -1.0 or not measured.ttft_limit_s:
        return None
    return measured.ttft_limit_s / (1.0 + measured.score)


def point_of(outcome: TrialOutcome, attainment: float) -> RatePoint | None:
    """What one trial says of the rate looked for; None if nothing.

    ``attainment``: the share asked for, where the trial has none (as verdicts without figures do).
    """
    measured, rate = outcome.measured, outcome.rate
    if outcome.verdict == "invalid":
        return None
    if outcome.purpose == "ceiling":
        completed = measured.completion_rate if measured is not None else None
        if measured is None or not completed or completed >= SATURATED * rate or measured.grows:
            return None
        return RatePoint(rate, capacity=completed, capacity_error=CEILING_ERROR * completed)
    bound: Literal["above", "below"] = "below" if outcome.verdict == "met" else "above"
    if measured is None:
        return None if outcome.verdict == "undecided" else RatePoint(rate, bound=bound)
    asked = OF_MEAN if measured.target is None else measured.target
    capacity, capacity_error = measured.capacity, measured.capacity_error or 0.0
    if measured.grows or measured.attainment is None or not measured.n:
        return RatePoint(
            rate,
            attainment=asked,
            end_s=measured.duration_s,
            bound=bound,
            capacity=capacity,
            capacity_error=capacity_error,
            capacity_n=measured.capacity_n,
        )
    begin_s, end_s = _steady(measured)
    if measured.offered_rate:
        surplus = (measured.offered_rate / rate) ** ARRIVALS
        rate *= min(max(surplus, 1 / ARRIVALS_MOST), ARRIVALS_MOST)
    found = RatePoint(
        rate,
        attainment=asked,
        begin_s=begin_s,
        end_s=end_s,
        queue_rate=measured.queue_rate,
        gap_variation=measured.gap_variation,
        cut=outcome.verdict == "missed",
        capacity=capacity,
        capacity_error=capacity_error,
        capacity_n=measured.capacity_n,
    )
    return _of_mean(found, measured) if measured.target is None else _of_share(found, measured)


def _of_share(found: RatePoint, measured: TrialFigures) -> RatePoint:
    assert measured.attainment is not None
    assert measured.target is not None
    return replace(
        found,
        misses=(1.0 - measured.attainment) * measured.n,
        n=measured.n,
        clump=measured.n / max(measured.effective_n, 1.0),
        together=max(1.0, found.rate * measured.latency_s),
        score=measured.score,
        score_error=measured.score_error if measured.score_error is not None else math.inf,
        ttft_s=measured.ttft_s,
        late=None if measured.ttft_attainment is None else (1.0 - measured.ttft_attainment) * measured.n,
    )


def _of_mean(found: RatePoint, measured: TrialFigures) -> RatePoint:
    if measured.score is None:
        return found
    mean = min(1.0 / max(1.0 + measured.score, 1.0 / WORST_VALUE), WORST_VALUE)
    error = measured.score_error if measured.score_error is not None else math.inf
    return replace(found, mean=mean, mean_error=error * mean * mean)


def _steady(measured: TrialFigures) -> tuple[float, float]:
    """When the requests that were counted arrived, in seconds since the trial's start."""
    end_s = measured.duration_s
    length_s = measured.n / measured.offered_rate if measured.offered_rate else end_s
    return max(end_s - length_s, 0.0), end_s
