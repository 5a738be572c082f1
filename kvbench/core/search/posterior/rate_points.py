"""Evidence of each trial on the wanted rate, with its uncertainty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from kvbench.core.search.data import TrialFigures, TrialOutcome

CEILING_ERROR: Final = 0.05
SATURATED: Final = 0.9
"""A ceiling probe with a larger share of completions did not saturate the system."""
ARRIVALS: Final = 0.75
"""Exponent with which a random surplus of arrivals counts as a higher rate."""
ARRIVALS_MOST: Final = 1.03
"""Largest factor by which it changes the rate."""
WORST_VALUE: Final = 50.0
"""Largest mean used, as a multiple of its limit."""


@dataclass(frozen=True)
class RatePoint:
    """One trial's rate and evidence; times in seconds since the trial's start.

    ``misses`` of ``n`` requests missed the SLO (n = 0: unknown), ``attainment`` of them should meet it;
    ``clump`` of them count as one. ``mean``: a mean in units of its limit. ``begin_s``, ``end_s``: first and
    last arrival of the ``n``. ``ttft_s``: TTFT at the quantile of the required share. ``score``,
    ``queue_rate``: see ``TrialFigures``. ``bound``: only a verdict: the rate is "above" or "below" the
    root. ``capacity``: highest throughput, by ``capacity_n`` first tokens. ``cut``: the trial ended at
    a miss, a worse moment than usual.
    """

    rate: float
    misses: float = 0.0
    n: float = 0.0
    clump: float = 1.0
    attainment: float = 0.95
    score: float | None = None
    score_error: float = 0.0
    mean: float | None = None
    mean_error: float = 0.0
    begin_s: float = 0.0
    end_s: float = 0.0
    ttft_s: float | None = None
    queue_rate: float | None = None
    bound: Literal["", "above", "below"] = ""
    capacity: float | None = None
    capacity_error: float = 0.0
    capacity_n: float = 0.0
    cut: bool = False

    def capacity_above(self, met: float) -> float | None:
        """Return the capacity, or None if it is below a met rate by more than its standard error."""
        known = self.capacity is not None and self.capacity + self.capacity_error >= met
        return self.capacity if known else None


@dataclass(frozen=True)
class Waiting:
    """TTFT headroom for waiting: ``headroom_s`` of ``limit_s``; both 0 if TTFT is not limited."""

    limit_s: float = 0.0
    headroom_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """TTFT of a request that does not wait."""
        return self.limit_s - self.headroom_s


OF_MEAN: Final = 1 - math.exp(-1)
"""Share of exponential waiting times below their mean."""
LEAST_SLACK: Final = 0.02
"""Lowest headroom, as a share of the limit."""


def waiting_of(outcomes: Sequence[TrialOutcome]) -> Waiting:
    """Return the headroom by the fastest requests of any trial."""
    known = [outcome.measured for outcome in outcomes if outcome.measured is not None]
    limits = [figures.ttft_limit_s for figures in known if figures.ttft_limit_s]
    fast = [figures.ttft_fast_s for figures in known if figures.ttft_fast_s is not None]
    if not limits or not fast:
        return Waiting()
    limit_s = min(limits)
    return Waiting(limit_s, max(limit_s - min(fast), LEAST_SLACK * limit_s))


def point_of(outcome: TrialOutcome, attainment: float) -> RatePoint | None:
    """Return one trial's evidence. ``attainment``: required share of a trial without figures."""
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
    target = OF_MEAN if measured.target is None else measured.target
    capacity, capacity_error = measured.capacity, measured.capacity_error or 0.0
    if measured.grows or measured.attainment is None or not measured.n:
        return RatePoint(
            rate,
            attainment=target,
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
        attainment=target,
        begin_s=begin_s,
        end_s=end_s,
        queue_rate=measured.queue_rate,
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
        score=measured.score,
        score_error=measured.score_error if measured.score_error is not None else math.inf,
        ttft_s=measured.ttft_s,
    )


def _of_mean(found: RatePoint, measured: TrialFigures) -> RatePoint:
    if measured.score is None:
        return found
    mean = min(1.0 / max(1.0 + measured.score, 1.0 / WORST_VALUE), WORST_VALUE)
    error = measured.score_error if measured.score_error is not None else math.inf
    return replace(found, mean=mean, mean_error=error * mean * mean)


def _steady(measured: TrialFigures) -> tuple[float, float]:
    """Return begin and end of the counted arrivals in seconds since the trial's start."""
    end_s = measured.duration_s
    length_s = measured.n / measured.offered_rate if measured.offered_rate else end_s
    return max(end_s - length_s, 0.0), end_s
