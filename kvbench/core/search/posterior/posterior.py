"""The posterior of a highest rate, from a few noisy trials around it.

Two kinds of system are weighed against each other, since a search does not know which one it measures:

- **A queue** (``queue_model``), if a TTFT limit leaves headroom for waiting. Its capacity and its
  variation (the squared coefficients of variation of arrivals and services, added) are unknown; at the
  highest rate just the allowed share is late in the long run. A trial is compared with a queue that was empty
  when it began: above the capacity requests are not late at once, and near it a trial has fewer independent
  moments. Arrival variance is removed (``queue_rate``).
- **Anything else**, with a steepness: misses(rate) = 1 − attainment ** ((rate / root) ** steepness), at any
  time of the trial; and with *scores* (``TrialFigures.score``) linear in the rate.

Each trial gives shares (a binomial likelihood with the effective sample size; for a queue also the share at
the reached TTFT, since no misses alone show little) or a mean; capacities, which no rate exceeds; or only a
verdict.

Systems vary: each trial's speed differs by a factor of unknown size, and the rate may change between trials.
Early trials then count less, and the answer applies to the end of the search. If misses barely depend on the
rate, a small bias of all trials is a large one of the rate. Sizes, variation or steepness, kind and rate are
summed on a grid; no single trial excludes a rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from threadpoolctl import ThreadpoolController

from kvbench.core.search.posterior.likelihoods import STEEPNESS, Likelihoods
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting

FloatArray = npt.NDArray[np.float64]

GRID: Final = 160
PASSES: Final = 2
"""Number of grids, each centred on the last one's result."""
EFFECTS: Final = ((0.015, 0.92), (0.15, 0.08))
"""(standard deviation of the logarithm of a trial's own speed, prior weight). docs/accuracy.md compares them,
CONSTANT and JUMP with more sizes, jumps and trends: the coverage is the same."""
CONSTANT: Final = 0.76
"""Prior weight of a constant rate."""
JUMP: Final = 0.1
JUMP_CHANCE: Final = 0.15
"""Standard deviation of the logarithm, and probability, of a change between two trials if the rate is not
constant."""
QUEUE: Final = 0.85
"""Prior weight of a queue, if TTFT is limited. It maximises the likelihood of the trials with seed develop
(expectation maximisation)."""
BIAS: Final = 0.1
"""Relative bias of the misses of all trials together. With 0.05, 89 % of the intervals with seed develop
contained the true rate, with 0.12 91 %; those of perf_search stayed as wide."""
UNMODELLED: Final = 1.1
"""Factor by which the posterior is widened about its median, on a log scale, for effects without a model.
Unwidened intervals contained the true rate in 94 % of searches with seed develop, but in 82 to 90 % of those
with seeds that nothing was tuned on."""
PARTS: Final = 41
"""Number of rates that represent a stored posterior."""
LEVEL: Final = 0.9
"""Probability of the interval."""
ENDS: Final = (0.001, 0.999)
"""Quantiles between which the next grid lies."""


@dataclass(frozen=True)
class RateEstimate:
    """The density of the wanted rate (sum 1) on a grid. ``wanders``: probability that it changed."""

    rates: FloatArray
    density: FloatArray
    wanders: float = 0.0

    @cached_property
    def median(self) -> float:
        return self.quantile(0.5)

    @cached_property
    def lower(self) -> float:
        return self.quantile((1 - LEVEL) / 2)

    @cached_property
    def upper(self) -> float:
        return self.quantile((1 + LEVEL) / 2)

    @property
    def width(self) -> float:
        """Relative half-width of the interval."""
        return (self.upper / self.lower - 1) / 2

    def wider(self, factor: float) -> RateEstimate:
        """Return the estimate widened about its median by the factor, on a log scale."""
        return RateEstimate(self.median * (self.rates / self.median) ** factor, self.density, self.wanders)

    def within(self, rate: float, precision: float) -> float:
        """Return the probability that the wanted rate is within the relative precision of this one."""
        ends = math.log(rate) - math.log1p(precision), math.log(rate) + math.log1p(precision)
        below, above = np.interp(ends, np.log(self.rates), self._shares, left=0.0, right=1.0)
        return float(above - below)

    def quantile(self, share: float) -> float:
        """Return the rate below which this share of the density is."""
        return float(np.interp(share, self._shares, self.rates))

    def equal_parts(self, count: int = PARTS) -> tuple[float, ...]:
        """Return ``count`` equally probable rates, a compact form of the density to store."""
        return tuple(float(f"{self.quantile((part + 0.5) / count):.6g}") for part in range(count))

    @cached_property
    def _shares(self) -> FloatArray:
        """Share of the density below each rate."""
        return np.asarray(np.cumsum(self.density) - self.density / 2, np.float64)


def fit(points: Sequence[RatePoint], low: float, high: float, waiting: Waiting) -> RateEstimate:
    """Return the posterior within [low, high] with a log-uniform prior. Raises ValueError without points.
    ``waiting``: the TTFT headroom."""
    if not points:
        raise ValueError("a fit needs at least one trial")
    rates = [point.rate for point in points] + [p.capacity for p in points if p.capacity is not None]
    low, high = max(low, min(rates) / 100), min(high, max(rates) * 100)
    estimate = None
    for _ in range(PASSES):
        grid = np.asarray(np.geomspace(low, high, GRID), np.float64)
        with _threads().limit(limits=1, user_api="blas"):
            estimate = _posterior_on(points, grid, waiting)
        least, most = (estimate.quantile(share) for share in ENDS)
        span = (most / least) ** 0.1
        low, high = max(low, least / span), min(high, most * span)
    assert estimate is not None
    return estimate.wider(UNMODELLED)


@cache
def _threads() -> ThreadpoolController:
    """Limit BLAS to one thread: several spin on matrices this small, which took four times the CPU time on
    two cores and disturbed measurements on them."""
    return ThreadpoolController()


@dataclass(frozen=True)
class _Kind:
    """One kind of system: log prior weight, and its prior by rate and column (sum 1)."""

    log: float
    prior: FloatArray
    queue: bool
    likelihoods: Likelihoods


@dataclass(frozen=True)
class _Part:
    """One size of the effects: its log weight, its state by rate and column (sum 1)."""

    log: float
    state: FloatArray
    wanders: bool


def _posterior_on(points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting) -> RateEstimate:
    """Return the posterior on one grid."""
    step = math.log(rates[1] / rates[0])
    tops, found = [], []
    for kind in _kinds(points, rates, waiting):
        top, mixed = _mix(list(_parts(kind, rates)))
        likely = np.zeros(1) if kind.queue else kind.likelihoods.line()
        blurred = _blur_by_bias(mixed, kind.likelihoods.steepness(kind.queue, float(rates[GRID // 2])), step)
        tops.append(top + float(likely.max()))
        found.append(blurred * np.exp(likely - likely.max()))
    weights = np.exp(np.array(tops) - max(tops))
    density, wandering = np.tensordot(weights, np.array(found), 1)
    total = max(float(density.sum()), 1e-300)
    return RateEstimate(rates, density / total, float(wandering.sum() / total))


def _mix(parts: Sequence[_Part]) -> tuple[float, FloatArray]:
    """Return the largest log weight, and two weighted sums of states relative to it, shape (2, rates,
    columns): of all parts, and of those whose rate wanders."""
    top = max(part.log for part in parts)
    weights = np.exp([part.log - top for part in parts])
    wandering = [part.wanders for part in parts]
    return top, np.tensordot([weights, weights * wandering], np.array([part.state for part in parts]), 1)


def _kinds(points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting) -> Iterator[_Kind]:
    likelihoods, share = Likelihoods(points, rates, waiting), QUEUE if waiting.headroom_s else 0.0
    if share:
        yield _Kind(math.log(share), likelihoods.queues(), True, likelihoods)
    even = np.full((len(rates), len(STEEPNESS)), 1 / len(STEEPNESS))
    yield _Kind(math.log(1 - share), even, False, likelihoods)


def _parts(kind: _Kind, rates: FloatArray) -> Iterator[_Part]:
    """Yield the state of each effect size, for a constant and a changing rate, after all trials."""
    step, likelihoods = math.log(rates[1] / rates[0]), kind.likelihoods
    jumps = _blur(len(rates), step, JUMP)
    for size, weight in EFFECTS:
        effect = _blur(len(rates), step, size)
        tables = [likelihoods.of(index, kind.queue, size, effect) for index in range(likelihoods.count)]
        for change, likely in ((None, CONSTANT), (jumps, 1 - CONSTANT)):
            gained, state = _filter(tables, kind.prior, change)
            yield _Part(kind.log + math.log(weight * likely) + gained, state, change is not None)


def _filter(
    tables: Sequence[FloatArray], prior: FloatArray, change: FloatArray | None
) -> tuple[float, FloatArray]:
    """Return (log evidence, final state) of tables of likelihoods by rate and column, one per trial.
    ``change``: the matrix of a jump between two trials."""
    log, state = 0.0, prior
    for index, table in enumerate(tables):
        if index and change is not None:
            state = (1 - JUMP_CHANCE) * state + JUMP_CHANCE * (change @ state)
        state = state * table
        total = max(float(state.sum()), 1e-300)
        log += math.log(total)
        state = state / total
    return log, state


def _blur_by_bias(states: FloatArray, steepness: FloatArray, step: float) -> FloatArray:
    """Return densities (states, rates) of states (states, rates, columns), blurred by a common bias."""
    total = np.zeros(states.shape[:2])
    size = states.shape[1]
    for column, steep in enumerate(steepness.tolist()):
        spread = min(BIAS / steep, 0.5)
        shifted = states[:, :, column]
        if _resolved_by_grid(spread, step):
            weights = _shifts(size, step, spread)
            sums = np.convolve(weights, np.ones(size), "valid")
            shifted = np.array([np.convolve(weights, state, "valid") for state in shifted]) / sums
        total += shifted
    return total


def _resolved_by_grid(spread: float, step: float) -> bool:
    """Return whether the grid is fine enough to show this spread."""
    return spread >= 0.3 * step


def _shifts(size: int, step: float, spread: float) -> FloatArray:
    """Return densities of a normal shift by 1 − size to size − 1 rows."""
    away = np.arange(1 - size, size) * (step / spread)
    return np.asarray(np.exp(-0.5 * away * away), np.float64)


def _blur(size: int, step: float, spread: float) -> FloatArray | None:
    """Return the matrix that averages rows over a normal shift, or None if the grid is too coarse."""
    if not _resolved_by_grid(spread, step):
        return None
    weights = sliding_window_view(_shifts(size, step, spread), size)[::-1]
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)
