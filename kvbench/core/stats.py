"""Statistics for verdicts: exact binomial bounds, dependent samples, trends, paired differences. Pure.

Shares are counts of "good" requests (``successes`` of ``n``). Requests near capacity depend on their
neighbours, so an interval is of the *effective* number of requests, a real number.

``added`` compares two ways to serve the same plan: request i of one is paired with request i of the other.
Its interval comes from a circular block bootstrap over neighbouring pairs [Künsch 1989, Politis & Romano
1992]. It covers chance among the requests of these trials, not another day's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NORMAL_90: Final = 1.645
"""Half of a normal distribution's 90 % interval, in standard deviations."""
_TINY: Final = 1e-300
_BISECTIONS: Final = 80
"""Halvings of [0, 1]: an error below 1e-24, under double precision."""


def beta_cdf(a: float, b: float, x: float) -> float:
    """Regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's method)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_front = a * math.log(x) + b * math.log1p(-x) - log_beta(a, b)
    # The fraction converges fast on one side of the mean; the other side is its mirror image.
    if x < (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _beta_fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _beta_fraction(b, a, 1.0 - x) / b


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _beta_fraction(a: float, b: float, x: float) -> float:
    c = 1.0
    d = 1.0 / _nonzero(1.0 - (a + b) * x / (a + 1.0))
    value = d
    # It needs O(sqrt(max(a, b))) steps.
    for m in range(1, 200 + 20 * math.isqrt(math.ceil(max(a, b)))):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        change = 1.0
        for term in (even, odd):
            d = 1.0 / _nonzero(1.0 + term * d)
            c = _nonzero(1.0 + term / c)
            change = c * d
            value *= change
        if abs(change - 1.0) < 1e-15:
            break
    return value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


@lru_cache(4096)
def beta_quantile(a: float, b: float, q: float) -> float:
    """Return the x with I_x(a, b) = q, by bisection. Cached for repeated looks."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if beta_cdf(a, b, middle) < q:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X ≤ k) for X ~ Binomial(n, p)."""
    if k < 0:
        return 0.0
    return 1.0 if k >= n else beta_cdf(n - k, k + 1, 1.0 - p)


def lower_bound(successes: float, n: float, confidence: float) -> float:
    """One-sided exact (Clopper-Pearson) lower bound of a share; 0 when nothing is known."""
    if n <= 0 or successes <= 0:
        return 0.0
    return beta_quantile(successes, n - successes + 1, 1.0 - confidence)


def upper_bound(successes: float, n: float, confidence: float) -> float:
    """One-sided exact (Clopper-Pearson) upper bound of a share; 1 when nothing is known."""
    if n <= 0 or successes >= n:
        return 1.0
    return beta_quantile(successes + 1, n - successes, confidence)


def share_interval(successes: float, n: float, confidence: float) -> tuple[float, float]:
    """Two-sided exact (Clopper-Pearson) interval of a share."""
    one_sided = 1.0 - (1.0 - confidence) / 2
    return lower_bound(successes, n, one_sided), upper_bound(successes, n, one_sided)


def autocorrelation_time(values: Sequence[float] | FloatArray) -> float:
    """Return how many neighbours count as one independent value: 1 + 2 × the sum of the lag autocorrelations.
    Lags are summed in pairs until a pair's sum is no longer positive (Geyer's initial positive sequence). 1
    for constant or short series; never below 1 (negative correlation is not used to narrow an interval) and
    never above half the length."""
    data = np.asarray(values, dtype=np.float64)
    n = len(data)
    centred = data - data.mean() if n else data
    variance = float(centred @ centred)
    if n < 4 or variance <= 1e-12:
        return 1.0
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    rho = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n] / variance
    total = -1.0
    for lag in range(0, n - 1, 2):
        pair = float(rho[lag] + rho[lag + 1])
        if pair <= 0.0:
            break
        total += 2.0 * pair
    return min(max(total, 1.0), n / 2)


@dataclass(frozen=True)
class StepSeries:
    """A step function of time: ``values[i]`` holds from ``times_s[i]`` on; before the first, it is 0."""

    times_s: FloatArray
    values: FloatArray

    @classmethod
    def of_intervals(cls, starts_s: Sequence[float], ends_s: Sequence[float]) -> StepSeries:
        """Return the number of intervals [start, end) that are open at each time."""
        times = np.concatenate([np.asarray(starts_s, np.float64), np.asarray(ends_s, np.float64)])
        change = np.concatenate([np.ones(len(starts_s)), -np.ones(len(ends_s))])
        moments, where = np.unique(times, return_inverse=True)
        return cls(moments, np.cumsum(np.bincount(where, weights=change, minlength=len(moments))))

    def peak(self) -> int:
        return int(self.values.max()) if len(self.values) else 0

    def sampled(self, times_s: FloatArray) -> FloatArray:
        """Return the values at some times."""
        known = np.concatenate([[0.0], self.values])
        return np.asarray(known[np.searchsorted(self.times_s, times_s, side="right")], np.float64)

    def block_means(self, start_s: float, end_s: float, blocks: int) -> FloatArray:
        """Time-weighted means over equal blocks of [start, end]."""
        edges = np.linspace(start_s, end_s, blocks + 1)
        if not len(self.times_s):
            return np.zeros(blocks)
        # The integral of the step function at each of its moments, then anywhere by interpolation.
        area = np.concatenate([[0.0], np.cumsum(self.values[:-1] * np.diff(self.times_s))])
        at_edges = np.interp(edges, self.times_s, area)
        beyond = np.clip(edges - self.times_s[-1], 0.0, None) * self.values[-1]
        return np.asarray(np.diff(at_edges + beyond) / np.diff(edges), np.float64)


@dataclass(frozen=True)
class Trend:
    """A straight line's slope per second, with its standard error."""

    per_s: float
    error: float


def trend(series: StepSeries, start_s: float, end_s: float, blocks: int = 10) -> Trend | None:
    """Return the least-squares slope over [start, end] from block means, or None for an empty span. The error
    is the residuals' and too small for a wandering queue, so require several errors and more than a random
    walk's slope."""
    if blocks < 3 or end_s <= start_s:
        return None
    means = series.block_means(start_s, end_s, blocks)
    width = (end_s - start_s) / blocks
    x = (np.arange(blocks) - (blocks - 1) / 2) * width
    sxx = float(x @ x)
    slope = float(x @ means) / sxx
    residual = means - means.mean() - slope * x
    return Trend(slope, math.sqrt(float(residual @ residual) / (blocks - 2) / sxx))


def t_quantile(p: float, degrees: float) -> float:
    """Quantile of Student's t distribution, for 0.5 ≤ p < 1 (from the incomplete beta function)."""
    if not 0.5 <= p < 1.0 or degrees <= 0:
        raise ValueError(f"0.5 ≤ p < 1 and degrees > 0 are needed, not {p} and {degrees}")
    x = beta_quantile(degrees / 2, 0.5, 2.0 * (1.0 - p))
    return math.sqrt(degrees * (1.0 - x) / x) if x > 0.0 else math.inf


def sectioned(values: FloatArray, sections: int, share: float | None) -> tuple[float, float]:
    """(figure of all values, its standard error by sections of neighbours). The figure is the mean, or with
    ``share`` that quantile. The spread of the sections' figures about the whole's is used (not about their
    own mean, since a section's quantile is biased), and inflated where neighbouring sections resemble each
    other. Raises ValueError for fewer values than sections."""
    if sections < 2 or len(values) < sections:
        raise ValueError(f"{len(values)} values do not fill {sections} sections")

    def figure(part: FloatArray) -> float:
        return float(part.mean() if share is None else np.quantile(part, share, method="higher"))

    whole = figure(values)
    away = np.array([figure(part) for part in np.array_split(values, sections)]) - whole
    spread = float(away @ away)
    if not math.isfinite(spread) or spread <= 0.0:
        return whole, 0.0 if spread == 0.0 else math.inf
    alike = min(max(float(away[1:] @ away[:-1]) / spread, 0.0), 0.6)
    return whole, math.sqrt(spread / (sections - 1) / sections * (1 + alike) / (1 - alike))


def variance_between(values: FloatArray, variances: FloatArray) -> float:
    """Return the variance of values beyond their own variances (DerSimonian and Laird 1986)."""
    if len(values) < 2:
        return 0.0
    weights = 1 / variances
    scatter = float((weights * (values - np.average(values, weights=weights)) ** 2).sum())
    return max(scatter - len(values) + 1, 0.0) / float(weights.sum() - (weights**2).sum() / weights.sum())


def design_effect(flags: FloatArray, sections: int) -> float:
    """Return the effective number of neighbours per independent flag, at least 1."""
    n = len(flags) // sections * sections
    share = float(flags.mean()) if len(flags) else 0.0
    if n < 2 * sections or not 0.0 < share < 1.0:
        return 1.0
    means = flags[:n].reshape(sections, -1).mean(axis=1)
    return max(1.0, float(means.var(ddof=1)) * (n / sections) / (share * (1.0 - share)))


Pairs: TypeAlias = tuple[FloatArray, FloatArray]
"""One trial each way, shape (n,) both: index i is the same request."""

RESAMPLES: Final = 1000
CONFIDENCE: Final = 0.95
LEAST_PAIRS: Final = 20
"""Fewest pairs for an interval."""
_SEED: Final = 20

_FIGURES: Final = ("mean", "p50", "p90", "p99")
_AT_ONCE: Final = 2_000_000
"""Most values drawn together, to bound the memory."""


@dataclass(frozen=True)
class Added:
    """One figure both ways, and ``added`` = with − without, between ``lower`` and ``upper``. ``request`` as a
    figure is the median over requests of what the way adds to the same request; it is no difference of two
    figures, so its ``with_`` and ``without`` are None."""

    figure: str
    with_: float | None
    without: float | None
    added: float
    lower: float
    upper: float

    @property
    def seen(self) -> bool:
        """Return whether it differs significantly from zero."""
        return self.lower > 0 or self.upper < 0

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "with": self.with_,
            "without": self.without,
            "added": self.added,
            "lower": self.lower,
            "upper": self.upper,
        }


def added(trials: Sequence[Pairs], confidence: float = CONFIDENCE) -> list[Added]:
    """Mean, P50, P90, P99 and the median of the pairs' differences, over all trials' pairs together. Units
    are those of the values. Empty with fewer than LEAST_PAIRS pairs. Raises ValueError for arrays that are
    not pairs."""
    if any(len(with_) != len(without) for with_, without in trials):
        raise ValueError("each request needs its pair")
    trials = [pair for pair in trials if len(pair[0])]
    if sum(len(with_) for with_, _ in trials) < LEAST_PAIRS:
        return []
    with_, without = (np.concatenate([pair[side] for pair in trials])[None, :] for side in (0, 1))
    a, b, differences = _figures(with_)[0], _figures(without)[0], _differences(with_, without)[0]
    drawn = np.concatenate([_differences(*draw) for draw in _resampled(trials)])
    tail = (1 - confidence) / 2
    lower, upper = np.quantile(drawn, [tail, 1 - tail], axis=0)
    found = [
        Added(name, float(a[index]), float(b[index]), float(differences[index]), *_ends(lower, upper, index))
        for index, name in enumerate(_FIGURES)
    ]
    last = len(_FIGURES)
    return [*found, Added("request", None, None, float(differences[last]), *_ends(lower, upper, last))]


def _ends(lower: FloatArray, upper: FloatArray, index: int) -> tuple[float, float]:
    return float(lower[index]), float(upper[index])


def _figures(values: FloatArray) -> FloatArray:
    return np.column_stack([values.mean(axis=1), *np.percentile(values, [50, 90, 99], axis=1)])


def _differences(with_: FloatArray, without: FloatArray) -> FloatArray:
    """Return per row the differences of the figures, and the median difference of the same request."""
    return np.column_stack([_figures(with_) - _figures(without), np.median(with_ - without, axis=1)])


def _resampled(trials: Sequence[Pairs]) -> Iterator[Pairs]:
    """RESAMPLES rows of as many pairs as there are, in portions; a block reaches into no other trial."""
    random = np.random.default_rng(_SEED)
    lengths = [block_length(with_ - without) for with_, without in trials]
    portion = max(1, _AT_ONCE // sum(len(with_) for with_, _ in trials))
    for begun in range(0, RESAMPLES, portion):
        rows = min(portion, RESAMPLES - begun)
        ones, others = [], []
        for (with_, without), length in zip(trials, lengths, strict=True):
            n = len(with_)
            starts = random.integers(0, n, (rows, math.ceil(n / length), 1))
            indices = ((starts + np.arange(length)) % n).reshape(rows, -1)[:, :n]
            ones.append(with_[indices])
            others.append(without[indices])
        yield np.concatenate(ones, axis=1), np.concatenate(others, axis=1)


def block_length(values: FloatArray) -> int:
    """Successive values to draw together: n^(1/3), or twice the correlation time, at most n / 5."""
    n = len(values)
    wanted = max(n ** (1 / 3), 2 * autocorrelation_time(values))
    return int(max(1, min(math.ceil(wanted), n // 5)))
