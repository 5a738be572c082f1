"""The posterior of a highest rate, from a few noisy trials around it.

Two kinds of system are weighed against each other, since a search does not know which one it has before it:

- **A queue** (``queue_model``), where a TTFT limit leaves a *slack* for waiting. Its capacity and its
  variation (the squared coefficients of variation of arrivals and services, added) are unknown; the highest
  rate is where just as much is late, at last, as is allowed. What a trial saw is compared with what a queue
  shows that was empty when the trial began: a rate above the capacity is not late at once, and the closer a
  queue is to its capacity, the fewer independent moments there are in a trial. The luck of the arrivals is
  taken out (``arrival_luck``).
- **Anything else**, by a steepness of its own: misses(rate) = 1 − attainment ** ((rate / root) ** steepness),
  the share allowed at the root, 1 far above, 0 far below, from the first moment on; and by the
  *scores* (``TrialFigures.score``), which fall in a line.

Of each, a trial tells shares (a binomial likelihood of as many requests as count as independent; where there
is a queue also the share at the TTFT that the trial stayed within, since no miss tells little) or a mean;
capacities, above which no rate is sustained; and mere verdicts.

No system is the same at each trial, nor from beginning to end: a trial's own speed differs by a factor of
unknown size; and the rate looked for may wander from trial to trial, or jump. What an early trial said counts
less then, and the answer is that of the end. Where misses hardly depend on the rate, a little bias of all
trials is a large one of the rate. Sizes, variation or steepness, kind and rate are summed on a grid; what a
trial says is never believed beyond all doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.posterior.likelihoods import STEEPNESS, Likelihoods
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting

FloatArray = npt.NDArray[np.float64]

GRID: Final = 160
PASSES: Final = 3
"""Each on a grid about what the one before found."""
LEVEL: Final = 0.9
"""Of the interval."""
EFFECTS: Final = ((0.004, 0.62), (0.012, 0.2), (0.03, 0.06), (0.07, 0.04), (0.15, 0.08))
"""(standard deviation of the logarithm of a trial's own speed, prior weight). The weights here and of QUEUE
are those that make what develop's trials showed most likely (expectation maximisation), rounded."""
WANDERS: Final = ((0.0, 1.0, 0.74), (0.02, 1.0, 0.04), (0.2, 0.08, 0.22))
"""(size, how often, prior weight) of a step of the rate's logarithm between two trials."""
QUEUE: Final = 0.85
"""Prior weight of a queue, where TTFT is limited."""
BIAS: Final = 0.1
"""Relative, of the misses of all trials together. With 0.05, 89 % of develop's intervals held the truth, with
0.12 91 %; those of perf_search stayed as wide."""
EVEN: Final = 0.02
"""Up to this size of a trial's own speed they are much alike."""
QUANTILES: Final = (0.001, 0.05, 0.5, 0.95, 0.999)


@dataclass(frozen=True)
class RateEstimate:
    """Median and 5 and 95 % quantiles of the rate looked for; its density on a grid of rates (sum 1).

    ``wanders``: the probability that it was not the same all the time; ``plain``: that it is a queue's, with
    trials that differ by no more than ``EVEN``.
    """

    median: float
    lower: float
    upper: float
    rates: FloatArray
    density: FloatArray
    wanders: float = 0.0
    plain: float = 0.0

    @property
    def width(self) -> float:
        """Relative half-width of the interval."""
        return (self.upper / self.lower - 1) / 2

    def within(self, rate: float, precision: float) -> float:
        """The probability that the rate looked for is no further from this one than so, relatively."""
        near = (self.rates >= rate / (1 + precision)) & (self.rates <= rate * (1 + precision))
        return float(self.density[near].sum())


def fit(points: Sequence[RatePoint], low: float, high: float, waiting: Waiting | None = None) -> RateEstimate:
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


@dataclass(frozen=True)
class _Part:
    """One kind of system and size of its effects: its log weight, and its density by rate (sum 1)."""

    log: float
    density: FloatArray
    wanders: bool
    plain: bool


def _summed(
    points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting
) -> tuple[RateEstimate, tuple[float, float]]:
    """The posterior on one grid, and between which rates nearly all of it lies."""
    parts = list(_parts(points, rates, waiting))
    weights = np.array([part.log for part in parts])
    weights = np.exp(weights - weights.max())
    weights /= weights.sum()
    density = np.asarray(weights @ np.array([part.density for part in parts]), np.float64)
    least, lower, median, upper, most = np.interp(QUANTILES, np.cumsum(density), rates).tolist()
    wanders = float(weights @ np.array([part.wanders for part in parts]))
    plain = float(weights @ np.array([part.plain for part in parts]))
    return RateEstimate(median, lower, upper, rates, density, wanders, plain), (least, most)


def _parts(points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting) -> Iterator[_Part]:
    """Of each kind and size. Trials come in order, as a filter takes them: the last state is the answer."""
    step = math.log(rates[1] / rates[0])
    likelihoods = Likelihoods(points, rates, waiting)
    line = np.exp(likelihoods.line())
    even = np.full((len(rates), len(STEEPNESS)), 1 / len(STEEPNESS))
    kinds = [(likelihoods.queues(), QUEUE, True), (even, 1 - QUEUE, False)]
    kinds = kinds if waiting.slack_s else [(even, 1.0, False)]
    still = np.eye(len(rates))
    wandering = [
        ((1 - often) * still + often * _blur(len(rates), step, size), weight, size > 0)
        for size, often, weight in WANDERS
    ]
    smears = {queue: _smears(likelihoods.steepness(queue, rates[GRID // 2]), step) for _, _, queue in kinds}
    for size, weight in EFFECTS:
        effect = _blur(len(rates), step, size)
        for prior, share, queue in kinds:
            tables = [likelihoods.of(index, queue, size, effect) for index in range(len(points))]
            for jump, likely, wanders in wandering:
                log = math.log(weight * share * likely)
                gained, state = _filtered(tables, prior, jump if wanders else None)
                density = np.asarray(
                    sum(smear @ column for smear, column in zip(smears[queue], state.T, strict=True))
                )
                density = density if queue else density * line
                total = max(float(density.sum()), 1e-300)
                yield _Part(log + gained + math.log(total), density / total, wanders, queue and size <= EVEN)


def _filtered(
    tables: Sequence[FloatArray], prior: FloatArray, jump: FloatArray | None
) -> tuple[float, FloatArray]:
    """(log evidence, state after the last trial) of tables of likelihoods by rate and column."""
    log, state = 0.0, prior
    for index, table in enumerate(tables):
        state = (state if jump is None or not index else jump @ state) * table
        total = max(float(state.sum()), 1e-300)
        log += math.log(total)
        state = state / total
    return log, np.asarray(state, np.float64)


def _smears(steepness: FloatArray, step: float) -> list[FloatArray]:
    """What a bias of all trials makes of the rate, by column."""
    return [_blur(GRID, step, min(BIAS / each, 0.5)) for each in steepness.tolist()]


def _blur(size: int, step: float, spread: float) -> FloatArray:
    """Averages over a normal shift of the logarithm, by rows."""
    if spread < 0.3 * step:
        return np.eye(size)
    away = (np.arange(size)[:, None] - np.arange(size)[None, :]) * (step / spread)
    weights = np.exp(-0.5 * away * away)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)
