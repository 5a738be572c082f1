"""The posterior of a highest rate, from a few noisy trials around it.

Two kinds of system are weighed against each other, since a search does not know which one it has before it:

- **A queue** (``queue_model``), where a TTFT limit leaves a *slack* for waiting. Its capacity and its
  variation (the squared coefficients of variation of arrivals and services, added) are unknown; the highest
  rate is where just as much is late, at last, as is allowed. What a trial saw is compared with what a queue
  shows that was empty when the trial began: a rate above the capacity is not late at once, and the closer a
  queue is to its capacity, the fewer independent moments there are in a trial. The luck of the arrivals is
  taken out (``queue_rate``).
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
from collections.abc import Callable, Iterator, Sequence
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
_Move = Callable[[FloatArray, int], FloatArray]
"""What a state becomes until the trial of that number, or until the end of the last one."""

GRID: Final = 160
PASSES: Final = 3
"""Each on a grid about what the one before found."""
EFFECTS: Final = ((0.004, 0.62), (0.012, 0.2), (0.03, 0.06), (0.07, 0.04), (0.15, 0.08))
"""(standard deviation of the logarithm of a trial's own speed, prior weight). The weights here and of QUEUE
are those that make what develop's trials showed most likely (expectation maximisation), rounded."""
STEADY: Final = 0.66
"""Prior weight of a rate that is always the same."""
WANDERS: Final = ((0.02, 1.0, 0.04), (0.2, 0.08, 0.2))
"""(size, how often, prior weight) of a step of the rate's logarithm between two trials."""
TRENDS: Final = ((-0.02, 0.02), (-0.007, 0.05), (0.01, 0.03))
"""(change of the rate's logarithm in a minute, prior weight)."""
QUEUE: Final = 0.85
"""Prior weight of a queue, where TTFT is limited."""
BIAS: Final = 0.1
"""Relative, of the misses of all trials together. With 0.05, 89 % of develop's intervals held the truth, with
0.12 91 %; those of perf_search stayed as wide."""
UNMODELLED: Final = 1.1
"""By so much wider, about its median and in logarithms, is what is told: systems do what no model here has.
As summed, the intervals held the truth in 94 % of develop's searches, which the weights above were found on,
but in 82 to 90 % of those of seeds that nothing was found on."""
PARTS: Final = 41
"""As many rates stand for a posterior where it is kept."""
LEVEL: Final = 0.9
"""Of the interval."""
ENDS: Final = (0.001, 0.999)
"""Between these quantiles lies nearly all of it: the next grid."""


@dataclass(frozen=True)
class RateEstimate:
    """The density of the rate looked for (sum 1) on a grid of rates; median, 5 and 95 % quantiles of it.

    ``wanders``: the probability that it was not the same all the time.
    """

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
        """The same, each rate further from the median by the factor, in logarithms."""
        return RateEstimate(self.median * (self.rates / self.median) ** factor, self.density, self.wanders)

    def within(self, rate: float, precision: float) -> float:
        """The probability that the rate looked for is no further from this one than so, relatively."""
        ends = math.log(rate) - math.log1p(precision), math.log(rate) + math.log1p(precision)
        below, above = np.interp(ends, np.log(self.rates), self._shares, left=0.0, right=1.0)
        return float(above - below)

    def quantile(self, share: float) -> float:
        """The rate below which such a share of the density lies."""
        return float(np.interp(share, self._shares, self.rates))

    def equal_parts(self, count: int = PARTS) -> tuple[float, ...]:
        """The density in so many rates, each in the middle of an equal part of it: compact enough to keep."""
        return tuple(float(f"{self.quantile((part + 0.5) / count):.6g}") for part in range(count))

    @cached_property
    def _shares(self) -> FloatArray:
        """Of the density, below each rate."""
        return np.asarray(np.cumsum(self.density) - self.density / 2, np.float64)


def fit(
    points: Sequence[RatePoint], low: float, high: float, waitings: Sequence[Waiting] = ()
) -> RateEstimate:
    """The posterior within [low, high], taken for log-uniform before anything is known.

    ``waitings``: what a limit on TTFT may leave for waiting. Raises ValueError without points.
    """
    if not points:
        raise ValueError("a fit needs at least one trial")
    rates = [point.rate for point in points] + [p.capacity for p in points if p.capacity is not None]
    low, high = max(low, min(rates) / 100), min(high, max(rates) * 100)
    estimate = None
    for number in range(PASSES):
        grid = np.asarray(np.geomspace(low, high, GRID), np.float64)
        with _threads().limit(limits=1, user_api="blas"):
            estimate = _summed(points, grid, waitings or [Waiting()], number)
        least, most = (estimate.quantile(share) for share in ENDS)
        span = (most / least) ** 0.1
        low, high = max(low, least / span), min(high, most * span)
    assert estimate is not None
    return estimate.wider(UNMODELLED)


@cache
def _threads() -> ThreadpoolController:
    """Matrices this small are multiplied by one thread: several wait for each other awake, which took four
    times the processor time on two cores, and from what is measured on them."""
    return ThreadpoolController()


@dataclass(frozen=True)
class _Kind:
    """One kind of system: how probable before anything is known, by rate and column (sum 1)."""

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


def _summed(
    points: Sequence[RatePoint], rates: FloatArray, waitings: Sequence[Waiting], number: int
) -> RateEstimate:
    """The posterior on one grid: the first ones only say where to look."""
    step = math.log(rates[1] / rates[0])
    tops, found = [], []
    for kind in _kinds(points, rates, waitings, rough=number < PASSES - 1):
        top, mixed = _mixed(list(_parts(kind, rates, TRENDS if number else ())))
        likely = np.zeros(1) if kind.queue else kind.likelihoods.line()
        smeared = _smeared(mixed, kind.likelihoods.steepness(kind.queue, float(rates[GRID // 2])), step)
        tops.append(top + float(likely.max()))
        found.append(smeared * np.exp(likely - likely.max()))
    weights = np.exp(np.array(tops) - max(tops))
    density, wandering = np.tensordot(weights, np.array(found), 1)
    total = max(float(density.sum()), 1e-300)
    return RateEstimate(rates, density / total, float(wandering.sum() / total))


def _mixed(parts: Sequence[_Part]) -> tuple[float, FloatArray]:
    """The log weight that all are told beside, and two states, shape (2, rates, columns): the weighted sum of
    all parts, and of those whose rate wanders."""
    top = max(part.log for part in parts)
    weights = np.exp([part.log - top for part in parts])
    wandering = [part.wanders for part in parts]
    return top, np.tensordot([weights, weights * wandering], np.array([part.state for part in parts]), 1)


def _kinds(
    points: Sequence[RatePoint], rates: FloatArray, waitings: Sequence[Waiting], *, rough: bool
) -> Iterator[_Kind]:
    share = QUEUE if waitings[0].slack_s else 0.0
    for waiting in waitings:
        likelihoods = Likelihoods(points, rates, waiting, rough=rough)
        if share:
            yield _Kind(math.log(share / len(waitings)), likelihoods.queues(), True, likelihoods)
    even = np.full((len(rates), len(STEEPNESS)), 1 / len(STEEPNESS))
    yield _Kind(math.log(1 - share), even, False, likelihoods)


def _parts(kind: _Kind, rates: FloatArray, trends: Sequence[tuple[float, float]]) -> Iterator[_Part]:
    """Of each size. Trials come in order, as a filter takes them: the last state is the answer."""
    step, likelihoods = math.log(rates[1] / rates[0]), kind.likelihoods
    lengths_s = likelihoods.lengths_s
    moves: list[tuple[_Move, float, bool]] = [(_stays, STEADY, False)]
    moves += [
        (_wandering(likelihoods.count, _blur(len(rates), step, size), often), weight, True)
        for size, often, weight in WANDERS
    ]
    moves += [(_drifting(lengths_s, trend / 60 / step), weight, True) for trend, weight in trends]
    for size, weight in EFFECTS:
        effect = _blur(len(rates), step, size)
        tables = [likelihoods.of(index, kind.queue, size, effect) for index in range(likelihoods.count)]
        for move, likely, wanders in moves:
            gained, state = _filtered(tables, kind.prior, move)
            yield _Part(kind.log + math.log(weight * likely) + gained, state, wanders)


def _stays(state: FloatArray, _: int) -> FloatArray:
    return state


def _wandering(count: int, blur: FloatArray | None, often: float) -> _Move:
    """``often``: how often it steps between two trials."""

    def move(state: FloatArray, index: int) -> FloatArray:
        if blur is None or not 0 < index < count:
            return state
        return (1 - often) * state + often * (blur @ state)

    return move


def _drifting(lengths_s: Sequence[float], cells: float) -> _Move:
    """``cells``: of the grid a second, from the middle of a trial to that of the next, and to the end."""
    ends = [0.0, *(length / 2 for length in lengths_s)]
    starts = [0.0, *(length / 2 for length in lengths_s[1:]), 0.0]

    def move(state: FloatArray, index: int) -> FloatArray:
        return _shifted(state, (ends[index] + starts[index]) * cells)

    return move


def _filtered(tables: Sequence[FloatArray], prior: FloatArray, move: _Move) -> tuple[float, FloatArray]:
    """(log evidence, state at the end) of tables of likelihoods by rate and column, one a trial."""
    log, state = 0.0, prior
    for index, table in enumerate(tables):
        state = move(state, index) * table
        total = max(float(state.sum()), 1e-300)
        log += math.log(total)
        state = state / total
    return log, move(state, len(tables))


def _shifted(state: FloatArray, cells: float) -> FloatArray:
    """By so many rows, up or down; what would leave the grid stays at its end."""
    if cells < 0:
        return _shifted(state[::-1], -cells)[::-1]
    whole = min(math.floor(cells), len(state) - 2)
    part = min(cells - whole, 1.0)
    moved = np.zeros_like(state)
    last = len(state) - 1 - whole
    moved[whole:] = (1 - part) * state[: last + 1]
    moved[whole + 1 :] += part * state[:last]
    moved[-1] += state[last + 1 :].sum(axis=0) + part * state[last]
    return moved


def _smeared(states: FloatArray, steepness: FloatArray, step: float) -> FloatArray:
    """Densities (states, rates) of states (states, rates, columns): what a bias of all trials makes of the
    rate, by column."""
    total = np.zeros(states.shape[:2])
    size = states.shape[1]
    for column, steep in enumerate(steepness.tolist()):
        spread = min(BIAS / steep, 0.5)
        shifted = states[:, :, column]
        if _told(spread, step):
            weights = _shifts(size, step, spread)
            sums = np.convolve(weights, np.ones(size), "valid")
            shifted = np.array([np.convolve(weights, state, "valid") for state in shifted]) / sums
        total += shifted
    return total


def _told(spread: float, step: float) -> bool:
    """Whether rates that far apart are others on the grid."""
    return spread >= 0.3 * step


def _shifts(size: int, step: float, spread: float) -> FloatArray:
    """Densities of a normal shift by so many rows, from 1 − size to size − 1."""
    away = np.arange(1 - size, size) * (step / spread)
    return np.asarray(np.exp(-0.5 * away * away), np.float64)


def _blur(size: int, step: float, spread: float) -> FloatArray | None:
    """Averages over a normal shift of the logarithm, by rows; None if they are no others than before."""
    if not _told(spread, step):
        return None
    weights = sliding_window_view(_shifts(size, step, spread), size)[::-1]
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float64)
