"""The posterior of a highest rate, from a few noisy trials around it.

Three things that a trial shows, each believed no further than it goes:

- **Shares.** How many requests broke the SLO, of how many, worth how many independent ones. Near the root the
  logarithm of the share of misses is linear in the rate (the waiting time of a queue has an exponential tail
  whose exponent is proportional to capacity − rate), so misses(rate) = 1 − attainment ** exp(steepness ·
  (rate / root − 1)): the share allowed at the root, 1 far above, 0 far below. The binomial likelihood of the
  effective number of requests keeps what a quantile loses: late requests come in clumps, so that most short
  trials look better than the truth, and few look far worse.
- **Scores** (``TrialFigures.score``): 1 / margin − 1 is nearly linear in the rate over a wide range. That of
  a percentile is too biased for the answer (a short trial's is nearly always too good), but it shows where to
  go while all shares are still 0 or 1. That of a mean is used with its own error.
- **Capacity**: what the system passed on while its queue was never empty. No rate above it is sustained, and
  with a queue the score's line ends there, at −1.

Root, steepness and the score's slope are unknown; their joint posterior is summed on a grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvbench.core.search.data import TrialOutcome

FloatArray = npt.NDArray[np.float64]

GRID: Final = 600
STEEPNESS: Final = np.geomspace(6.0, 120.0, 13)
SLOPES: Final = np.geomspace(0.4, 60.0, 18)
SCORE_ERROR: Final = 0.5
CURVATURE: Final = 0.25
"""Standard error of a percentile's score, and what is added to any for each unit of distance from 0."""
RATE_ERROR: Final = 0.01
BOUND_ERROR: Final = 0.03
"""Relative. Drift and chance make two trials at one rate differ; a mere verdict is sharp only to this."""
OUTLIER: Final = 0.02
SCORE_OUTLIER: Final = 0.1
CAPACITY_OUTLIER: Final = 0.002
"""What a trial's word is worth at least, however much the others speak against it."""
FEW: Final = 0.7
"""Exponent of the prior that is Fisher's information (Jeffreys' has 1/2). With few misses in all, the median
of the roots found would lie too high without it; for counts, about 2/3 makes the median right."""
QUEUE_ELSE: Final = 0.05
"""Weight of a limit that is no queue, against the density of one that is."""
CEILING_ERROR: Final = 0.05
SATURATED: Final = 0.9
"""A ceiling probe of which a larger share was completed in time was no burden, and no ceiling."""
ARRIVALS: Final = 0.75
ARRIVALS_MOST: Final = 1.03
"""How much of a chance surplus of arrivals counts as a higher rate (an exponent), and how much at most."""


@dataclass(frozen=True)
class RatePoint:
    """One trial: its rate, and what it says.

    ``misses`` of ``n`` broke the SLO where ``attainment`` of them should not, and ``clump`` of them count as
    one (n = 0: nothing is known). ``score``; ``score_error`` if it is to be trusted so far. ``bound``: the
    rate is known to be "above" or "below" the root, and no more is.
    ``capacity`` with its standard error: the most that was passed on.
    """

    rate: float
    misses: float = 0.0
    n: float = 0.0
    clump: float = 1.0
    attainment: float = 0.95
    score: float | None = None
    score_error: float | None = None
    bound: Literal["", "above", "below"] = ""
    capacity: float | None = None
    capacity_error: float = 0.0


@dataclass(frozen=True)
class RateEstimate:
    """Median and 5 and 95 % quantiles of the rate looked for."""

    median: float
    lower: float
    upper: float

    @property
    def width(self) -> float:
        """Relative half-width of the interval."""
        return (self.upper / self.lower - 1) / 2


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
    capacity, capacity_error = measured.capacity, measured.capacity_error or 0.0
    if measured.grows or measured.attainment is None or not measured.n:
        return RatePoint(rate, bound=bound, capacity=capacity, capacity_error=capacity_error)
    if measured.offered_rate:
        surplus = (measured.offered_rate / rate) ** ARRIVALS
        rate *= min(max(surplus, 1 / ARRIVALS_MOST), ARRIVALS_MOST)
    mean = measured.target is None
    error = measured.score_error if measured.score_error is not None else math.inf
    return RatePoint(
        rate,
        misses=(1.0 - measured.attainment) * measured.n,
        n=0 if mean else measured.n,
        clump=measured.n / max(measured.effective_n, 1.0),
        attainment=measured.target or attainment,
        score=measured.score,
        score_error=max(error, 0.01) if mean else None,
        capacity=capacity,
        capacity_error=capacity_error,
    )


def fit(points: Sequence[RatePoint], low: float, high: float) -> RateEstimate:
    """The posterior within [low, high], taken for log-uniform before anything is known.

    Raises ValueError without points.
    """
    if not points:
        raise ValueError("a fit needs at least one trial")
    rates = [point.rate for point in points] + [p.capacity for p in points if p.capacity is not None]
    low, high = max(low, min(rates) / 100), min(high, max(rates) * 100)
    for _ in range(2):  # the second pass on a grid about what the first found
        roots = np.geomspace(low, high, GRID)
        total = np.cumsum(_posterior(points, np.asarray(roots, np.float64)))
        quantiles = np.interp(np.array([0.001, 0.05, 0.5, 0.95, 0.999]) * total[-1], total, roots)
        span = float(quantiles[-1] / quantiles[0]) ** 0.1
        low, high = max(low, float(quantiles[0]) / span), min(high, float(quantiles[-1]) * span)
        if high <= low * (1 + 1e-9):
            break
    return RateEstimate(float(quantiles[2]), float(quantiles[1]), float(quantiles[3]))


def _posterior(points: Sequence[RatePoint], roots: FloatArray) -> FloatArray:
    shares = np.zeros((len(roots), len(STEEPNESS)))
    scores = np.zeros((len(roots), len(SLOPES)))
    information = np.zeros_like(shares)
    # A trial that had no bursts by chance shows small clumps, so all trials share one figure.
    known = sum(point.n for point in points)
    clump = (sum(point.n * point.clump**2 for point in points) / known) ** 0.5 if known else 1.0
    for point in points:
        if point.n:
            shares += _of_share(point, clump, roots)
            information += _information(point, clump, roots)
        if point.bound:
            sign = -1.0 if point.bound == "above" else 1.0
            away = sign * np.log(roots / point.rate) / BOUND_ERROR
            shares += _doubted(_logistic(away), OUTLIER)[:, None]
        if point.score is not None:
            scores += _of_score(point, roots)
        if point.capacity is not None:
            room = np.log(point.capacity / roots) / max(point.capacity_error / point.capacity, 0.01)
            shares += _doubted(_logistic(room + 1.0), CAPACITY_OUTLIER)[:, None]
    if known:
        shares += FEW * np.log(information + 1e-3)
    return np.asarray(_summed(shares) * _summed(scores + _queue(points, roots)), np.float64)


def _queue(points: Sequence[RatePoint], roots: FloatArray) -> FloatArray | float:
    """Log density of root and slope by the sharpest capacity: a queue's line is at −1 there."""
    seen = [(p.capacity, p.capacity_error / p.capacity) for p in points if p.capacity is not None]
    if not seen:
        return 0.0
    capacity, error = min(seen, key=lambda each: each[1])
    at_capacity = SLOPES[None, :] * (1 - capacity / roots[:, None])
    blur = np.sqrt(SCORE_ERROR**2 + (SLOPES[None, :] * error) ** 2)
    return np.asarray(np.log(QUEUE_ELSE + np.exp(-0.5 * ((at_capacity + 1) / blur) ** 2) / blur))


def _summed(log: FloatArray) -> FloatArray:
    """Likelihood of each root, whatever the second parameter."""
    return np.asarray(np.exp(log - log.max()).sum(axis=1), np.float64)


def _hazard(point: RatePoint, roots: FloatArray, off: float = 0.0) -> FloatArray:
    """−log of the share within the SLO, by root and steepness, at a rate that is off by so much."""
    over = point.rate * (1 + off) / roots[:, None] - 1
    allowed = -np.log(min(point.attainment, 1 - 1e-6))
    hazard = allowed * np.exp(np.clip(STEEPNESS[None, :] * over, -40, 12))
    return np.asarray(np.minimum(hazard, 50.0), np.float64)


def _of_share(point: RatePoint, clump: float, roots: FloatArray) -> FloatArray:
    """Log likelihood by root and steepness, averaged over what the rate may really have been."""
    total = np.zeros((len(roots), len(STEEPNESS)))
    for off, weight in ((-1.5, 0.25), (0.0, 0.5), (1.5, 0.25)):
        hazard = _hazard(point, roots, RATE_ERROR * off)
        log = point.misses * np.log(-np.expm1(-hazard) + 1e-300) - (point.n - point.misses) * hazard
        total += weight * np.exp(np.maximum(log / clump, -300.0))
    return np.asarray(np.log(total + 1e-9), np.float64)


def _information(point: RatePoint, clump: float, roots: FloatArray) -> FloatArray:
    """Fisher's information of one trial about the root, up to a factor."""
    hazard = _hazard(point, roots)
    return np.asarray(point.n / clump * hazard**2 / np.expm1(hazard), np.float64)


def _of_score(point: RatePoint, roots: FloatArray) -> FloatArray:
    """Log likelihood by root and slope; a score near −1 is only known to be as bad as that."""
    assert point.score is not None
    expected = SLOPES[None, :] * (1 - point.rate / roots[:, None])
    trusted = point.score_error is not None
    error = (
        SCORE_ERROR
        if point.score_error is None
        else np.hypot(point.score_error, SLOPES[None, :] * RATE_ERROR)
    )
    away = (point.score - expected) / np.hypot(error, CURVATURE * point.score)
    near = _logistic(away) if point.score < -0.4 else np.exp(-0.5 * away**2)
    return np.asarray(np.log((OUTLIER if trusted else SCORE_OUTLIER) + near), np.float64)


def _doubted(likelihood: FloatArray, outlier: float) -> FloatArray:
    return np.asarray(np.log(outlier + (1 - outlier) * likelihood), np.float64)


def _logistic(z: FloatArray) -> FloatArray:
    """Nearly the normal distribution function."""
    return np.asarray(1 / (1 + np.exp(-1.702 * np.clip(z, -40, 40))), np.float64)
