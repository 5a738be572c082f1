"""The posterior of a highest rate, from a few noisy trials around it.

Two kinds of system are weighed against each other, since a search does not know which one it has before it:

- **A queue** (``queue_model``), where a TTFT limit leaves a *slack* for waiting. Its capacity and its variation
  (the squared coefficients of variation of arrivals and services, added) are unknown; the highest rate is
  where just as much is late, at last, as is allowed. What a trial saw is compared with what a queue shows that
  was empty when the trial began: a rate above the capacity is not late at once, and the closer a queue is to
  its capacity, the fewer independent moments there are in a trial.
- **Anything else**, by a steepness of its own: misses(rate) = 1 − attainment ** exp(steepness · (rate / root −
  1)), the share allowed at the root, 1 far above, 0 far below, from the first moment on.

Of each, a trial tells shares (a binomial likelihood of as many requests as count as independent; where there
is a queue, half as loudly again the share at the TTFT that the trial stayed within, since no miss tells little)
or a mean; capacities, above which no rate is sustained; and mere verdicts.

No system is the same at each trial, nor from beginning to end: a trial's own speed differs by a factor of
unknown size, and from trial to trial the rate looked for may wander by another. What an early trial said
counts less then, and the answer is that of the end. Sizes, variation or steepness, kind and rate are summed
on a grid; what a trial says is never believed beyond all doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.likelihoods import STEEPNESS, VARIATION, VARIATION_PRIOR, Likelihoods
from kvbench.core.search.rate_points import RatePoint, Waiting

FloatArray = npt.NDArray[np.float64]

GRID: Final = 160
PASSES: Final = 3
"""Each on a grid about what the one before found."""
LEVEL: Final = 0.9
"""Of the interval."""
EFFECTS: Final = ((0.004, 0.62), (0.012, 0.2), (0.03, 0.06), (0.07, 0.04), (0.15, 0.08))
WANDERS: Final = ((0.0, 1.0, 0.74), (0.02, 1.0, 0.04), (0.2, 0.08, 0.22))
"""(size, prior weight): standard deviations of the logarithm of a trial's own speed, and of a step between
two trials."""
BIAS=0.05
QUEUE: Final = 0.85
"""Prior weight of a queue, where TTFT is limited."""
QUANTILES: Final = (0.001, 0.05, 0.5, 0.95, 0.999)


@dataclass(frozen=True)
class RateEstimate:
    """Median and 5 and 95 % quantiles of the rate looked for; its density on a grid of rates.

    ``wanders``: the probability that it was not the same all the time.
    """

    median: float
    lower: float
    upper: float
    rates: FloatArray
    density: FloatArray
    wanders: float = 0.0

    @property
    def width(self) -> float:
        """Relative half-width of the interval."""
        return (self.upper / self.lower - 1) / 2

    def within(self, rate: float, precision: float) -> float:
        """The probability that the rate looked for is no further from this one than so, relatively."""
        near = (self.rates >= rate / (1 + precision)) & (self.rates <= rate * (1 + precision))
        return float(self.density[near].sum())


def fit(
    points: Sequence[RatePoint], low: float, high: float, waiting: Waiting | None = None
) -> RateEstimate:
    """The posterior within [low, high], taken for log-uniform before anything is known.

    Raises ValueError without points.
    """
    if not points:
        raise ValueError("a fit needs at least one trial")
    rates = [point.rate for point in points] + [p.capacity for p in points if p.capacity is not None]
    low, high = max(low, min(rates) / 100), min(high, max(rates) * 100)
    estimate = None
    for _ in range(PASSES):
        grid = np.asarray(np.geomspace(low, high, GRID), np.float64)
        estimate, ends = _summed(points, grid, waiting or Waiting())
        span = float(ends[1] / ends[0]) ** 0.1
        low, high = max(low, ends[0] / span), min(high, ends[1] * span)
        if high <= low * (1 + 1e-6):
            break
    assert estimate is not None
    return estimate


def _summed(
    points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting
) -> tuple[RateEstimate, tuple[float, float]]:
    """The posterior on one grid, and between which rates nearly all of it lies."""
    step = math.log(rates[1] / rates[0])
    steady, moved = np.zeros(len(rates)), np.zeros(len(rates))
    parts = list(_parts(points, rates, waiting, step))
    most = max(log for log, _, _ in parts)
    for log, density, wanders in parts:
        (moved if wanders else steady)[:] += math.exp(log - most) * density
    total = steady + moved
    density = total / total.sum()
    ends = np.interp(QUANTILES, np.cumsum(density), rates).tolist()
    estimate = RateEstimate(ends[2], ends[1], ends[3], rates, density, float(moved.sum() / total.sum()))
    return estimate, (ends[0], ends[4])


def _parts(
    points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting, step: float
) -> Iterator[tuple[float, FloatArray, bool]]:
    """(log weight, density by rate, whether it wanders) of each kind and size."""
    likelihoods = Likelihoods(points, rates, waiting)
    line = np.exp(likelihoods.line())
    kinds = [(VARIATION_PRIOR, QUEUE, True), (np.full(len(STEEPNESS), 1 / len(STEEPNESS)), 1 - QUEUE, False)]
    if not waiting.slack_s:
        kinds = [(kinds[1][0], 1.0, False)]
    wandering = [
        ((1 - often) * np.eye(len(rates)) + often * _blur(len(rates), step, size), weight, size > 0)
        for size, often, weight in WANDERS
    ]
    smears = {}
    for _, _, queue in kinds:
        steep = likelihoods.steepness(queue, math.sqrt(rates[0] * rates[-1]))
        smears[queue] = [
            _blur(len(rates), step, min(BIAS / each, 0.5)) if BIAS / each > 0.3 * step else None for each in steep.tolist()
        ]
    for size, weight in EFFECTS:
        effect = _blur(len(rates), step, size)
        for prior, share, queue in kinds:
            tables = [likelihoods.of(index, queue, size, effect) for index in range(len(points))]
            for jump, likely, wanders in wandering:
                state = np.broadcast_to(prior, (len(rates), len(prior))).copy()
                log = math.log(weight * share * likely)
                for index, table in enumerate(tables):
                    if wanders and index:
                        state = jump @ state
                    state = state * table
                    total = float(state.sum())
                    log += math.log(max(total, 1e-300))
                    state /= max(total, 1e-300)
                density = np.zeros(len(rates))
                for column, smear in enumerate(smears[queue]):
                    density += smear @ state[:, column] if smear is not None else state[:, column]
                if not queue:
                    density = density * line
                    total = float(density.sum())
                    log += math.log(max(total, 1e-300))
                    density /= max(total, 1e-300)
                yield log, density, wanders


def _blur(size: int, step: float, spread: float) -> FloatArray:
    """Averages over a normal shift of the logarithm, by rows."""
    if spread < 0.3 * step:
        return np.eye(size)
    away = (np.arange(size)[:, None] - np.arange(size)[None, :]) * (step / spread)
    weights = np.exp(-0.5 * away * away)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)


__all__ = ["LEVEL", "STEEPNESS", "VARIATION", "RateEstimate", "RatePoint", "fit"]
