"""Likelihood of a trial's figures for each possible rate (the *root*) and each kind of system.

The constants here and in ``posterior`` were chosen on the systems of ``python -m tools.random_systems`` with
the seed ``develop`` (LAB: 120 searches in process, and 68 of ``tools.perf_search``), by coverage of the
interval and by the share of converged answers within 5 %. Other seeds check them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.posterior.queue_model import late_share, mean_wait, memory
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting

FloatArray = npt.NDArray[np.float64]

VARIATION: Final = np.geomspace(0.25, 60.0, 12)
"""Squared coefficients of variation of arrivals and services, added: 1 for M/D/1, 2 for M/M/1; batches and
heavy tails have many times that."""
_TYPICAL, _SPREAD = 1.5, 1.2
_WEIGHTS: Final = np.exp(-0.5 * (np.log(VARIATION / _TYPICAL) / _SPREAD) ** 2)
VARIATION_PRIOR: Final = _WEIGHTS / _WEIGHTS.sum()
STEEPNESS: Final = np.geomspace(0.15, 100.0, 13)
"""Possible steepness of a system without a queue: d ln misses / d ln rate at the wanted rate; log-uniform
prior."""
TIMES: Final = (0.12, 0.38, 0.62, 0.88)
MEAN_TIMES: Final = (0.15, 0.5, 0.85)
MIDDLE: Final = (0.5,)
"""Points of the window at which a queue is evaluated: for shares, for means, and for a first pass."""
KNOWN: Final = 0.8
"""Fraction of the arrival variance that the observed arrivals explain (``queue_rate``)."""
LEFT: Final = 0.15
"""Lower bound on the remaining fraction of the variance."""
FAR: Final = 1.0
"""Loss of weight of the share at the reached TTFT, per squared logarithm of its distance from the limit. LAB:
with 4, the intervals after six trials are 10 % wider, with the same coverage."""
NEAREST, FURTHEST = 0.1, 3.0
"""Range of waits that show a queue, as multiples of the TTFT headroom."""
UNEXPLAINED: Final = 4.0
"""Nats against a queue if most misses kept the limit on TTFT, so something else was too slow."""
UNEXPLAINED_MISSES: Final = 2.0
"""Minimum number of clumps of such misses."""
MEAN_ERROR: Final = 0.15
"""Standard error of a queue's mean against the formula, as a logarithm."""
ELSE_ERROR: Final = 0.1
"""Standard error added without a queue."""
FEW: Final = 20.0
"""Number of clumps of misses that show their own size; with fewer, the requests in flight together count as
one: a P99.9 of 3,500 requests that decode together depends on a few moments."""
MOST_TOGETHER: Final = 100.0
"""Largest size of a clump by the requests in flight."""
SLOPES: Final = np.geomspace(0.04, 60.0, 23)
"""Possible slopes of a percentile's score over the rate."""
HIGHEST_SCORE: Final = 3.0
"""Largest score that is still linear in the rate."""
SCORE_ERROR: Final = 0.05
CURVATURE: Final = 0.25
SCORE_RATE_ERROR: Final = 0.015
SCORE_CHANCE: Final = 4.0
"""Standard errors of a score: at 0; per unit of distance from 0; of the rate; and the variance of a quantile
per clump."""
SCORE_OUTLIER: Final = 0.05
BOUND_ERROR: Final = 0.03
"""Relative error of a rate that is known by a verdict alone."""
CAPACITY_ERROR: Final = 0.01
ELSE_VARIATION: Final = 2.0
"""Assumed variation of a system without a queue."""
FINE: Final = 0.012
"""Step between two rates of a grid, as a logarithm, over which likelihoods are averaged."""
PARTS_MOST: Final = 6
"""Largest number of such steps."""
CUT: Final = 0.5
"""Weight of a share of misses that ended its trial early. LAB: 65 of 66 converged answers of the seeds
develop and check were right with it, 69 of 73 without."""
DOUBT: Final = math.exp(-8.0)
"""Lowest likelihood of a trial, relative to the best: no trial excludes a rate."""
OUTLIER: Final = 0.02
CAPACITY_OUTLIER: Final = 0.01
CAPACITY_ELSE: Final = 0.1
"""Likelihood of a capacity above that of a queue with the root."""
_TINY: Final = 1e-9


class Likelihoods:
    """Likelihoods of all points on one grid of ``rates``."""

    def __init__(
        self, points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting, *, rough: bool = False
    ) -> None:
        """``rough``: evaluate a queue only in the middle of each trial, at a quarter of the cost."""
        self._points, self._waiting = points, waiting
        self._share_times: Sequence[float] = MIDDLE if rough else TIMES
        self._mean_times: Sequence[float] = MIDDLE if rough else MEAN_TIMES
        step = math.log(rates[-1] / rates[0]) / max(len(rates) - 1, 1)
        self._parts = min(max(math.ceil(step / FINE), 1), PARTS_MOST)
        between = (np.arange(self._parts) + 0.5) / self._parts - 0.5
        self._rates = (rates[:, None] * np.exp(step * between)[None, :]).reshape(-1, 1)
        known = sum(point.n for point in points)
        # A trial without bursts by chance shows small clumps, so all trials share one figure.
        self._clump = (sum(each.n * each.clump**2 for each in points) / known) ** 0.5 if known else 1.0
        shown = sum(min(each.misses, each.n - each.misses) / each.clump for each in points)
        together = sum(each.n * each.together for each in points) / known if known else 1.0
        unseen = max(self._clump, min(together, MOST_TOGETHER))
        self._shared = (shown * self._clump + FEW * unseen) / (shown + FEW)
        self._tables: dict[tuple[int, bool], FloatArray] = {}

    @property
    def count(self) -> int:
        return len(self._points)

    def of(self, index: int, queue: bool, size: float, effect: FloatArray | None) -> FloatArray:
        """Return one trial's likelihood, shape (rates, variations or steepnesses), at most about 1. ``size``:
        standard deviation of the logarithm of the trial's own speed; ``effect``: average over it, None if
        finer than the grid."""
        point = self._points[index]
        key = (index, queue)
        if key not in self._tables:
            log = self._log(point, queue) * (CUT if point.cut else 1.0)
            self._tables[key] = self._by_rate(np.exp(np.maximum(log, -200.0)))
        table = (self._tables[key] if effect is None else effect @ self._tables[key]) + DOUBT
        variation = VARIATION[None, :] if queue else np.full((1, len(STEEPNESS)), ELSE_VARIATION)
        if point.bound:
            chance = variation / max(point.rate * point.end_s, 1.0)
            sign = -1.0 if point.bound == "above" else 1.0
            away = sign * np.log(self._rates / point.rate) / np.sqrt(BOUND_ERROR**2 + size**2 + chance)
            table = table * self._by_rate(OUTLIER + (1 - OUTLIER) * _logistic(away))
        if point.capacity is not None:
            # Only the services vary here, not the arrivals.
            chance = np.maximum(variation - 1.0, 0.0) / max(point.capacity_n, 1.0) * bool(point.capacity_n)
            own = (point.capacity_error / point.capacity) ** 2 + size**2 + CAPACITY_ERROR**2
            error = np.sqrt(own + chance)
            room = np.log(point.capacity / self._rates)
            likely = CAPACITY_OUTLIER + (1 - CAPACITY_OUTLIER) * _logistic(room / error + 1.0)
            if queue and point.capacity_n:
                # The throughput of a queue that is never empty equals its capacity.
                unused = np.log1p(-math.log(1.0 - point.attainment) / self._steepness(self._rates))
                away = (room - unused) / error
                likely = likely * (
                    CAPACITY_ELSE + (1 - CAPACITY_ELSE) * np.exp(-0.5 * np.maximum(away, 0.0) ** 2)
                )
            table = table * self._by_rate(likely)
        return np.asarray(table, np.float64)

    def steepness(self, queue: bool, rate: float) -> FloatArray:
        """Return d ln misses / d ln rate of each column if that rate were the root."""
        steep = self._steepness(np.asarray(rate, np.float64)) if queue else STEEPNESS
        return np.asarray(steep, np.float64)

    def queues(self) -> FloatArray:
        """Return the prior weight of each queue by root and variation; low if misses barely depend on the
        rate, since requests then wait for a few long ones."""
        steep = self._steepness(self._rates)
        return self._by_rate(VARIATION_PRIOR[None, :] * steep**2 / (1.0 + steep**2))

    def line(self) -> FloatArray:
        """Return the log likelihood of the scores by root: a line of any slope that is 0 at the root."""
        log = np.zeros((len(self._rates), len(SLOPES)))
        for point in self._points:
            if point.score is None or not -0.9 < point.score < HIGHEST_SCORE:
                continue
            expected = SLOPES[None, :] * (1.0 - point.rate / self._rates)
            chance = (1 + point.score) * math.sqrt(SCORE_CHANCE * self._clump / point.n)
            error = math.hypot(min(point.score_error, 1.0), SCORE_ERROR, CURVATURE * point.score, chance)
            away = (point.score - expected) / np.hypot(error, SLOPES[None, :] * SCORE_RATE_ERROR)
            log += np.log(np.exp(-0.5 * away**2) + SCORE_OUTLIER)
        top = log.max()
        likely = self._by_rate(np.exp(log - top)).mean(axis=1)
        return np.asarray(np.log(likely + 1e-300) + top, np.float64)

    def _steepness(self, rates: FloatArray) -> FloatArray:
        """Return the steepness of a queue by root and variation."""
        return np.asarray(2.0 * self._waiting.slack_s * rates / VARIATION, np.float64)

    def _by_rate(self, fine: FloatArray) -> FloatArray:
        """Return the mean over each rate's part of the grid, to keep peaks between two rates."""
        return np.asarray(fine.reshape(-1, self._parts, fine.shape[1]).mean(axis=1), np.float64)

    def _log(self, point: RatePoint, queue: bool) -> FloatArray:
        if point.mean is not None:
            return self._of_mean(point, point.mean, queue)
        if point.n:
            return self._of_queue(point) if queue else self._of_share(point)
        return np.zeros((len(self._rates), len(VARIATION) if queue else len(STEEPNESS)))

    def _queue(self, point: RatePoint, allowed: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return (load, depth, independent moments) by root and variation. ``allowed``: −ln of the share."""
        steepness = self._steepness(self._rates)
        depth = steepness + allowed
        load = (point.queue_rate or point.rate) / self._rates * steepness / depth
        moments = (point.end_s - point.begin_s) / self._waiting.slack_s / memory(load, depth)
        if point.queue_rate is not None:
            # The observed arrivals explain part of the variance.
            moments = moments / np.maximum(1.0 - KNOWN * point.gap_variation / VARIATION, LEFT)[None, :]
        return load, depth, np.maximum(moments, 1.0)

    def _of_queue(self, point: RatePoint) -> FloatArray:
        allowed = max(1.0 - point.attainment, 1e-6)
        load, depth, most = self._queue(point, -math.log(allowed))
        times = self._times(point, self._share_times)
        moments = np.minimum(point.n / self._clump, most)
        late = late_share(load, depth, times).mean(axis=0)
        log = _binomial(moments, point.misses / point.n, late)
        others = 0.0 if point.late is None else point.misses - point.late
        if others > max(point.misses / 2, UNEXPLAINED_MISSES * self._clump):
            return log - UNEXPLAINED
        level = self._level(point.ttft_s)
        if level is None:
            return log
        late = late_share(load, depth, times, level).mean(axis=0)
        if level < 1.0:
            # An idle server serves at once, unlike the diffusion.
            late *= np.minimum(load, 1.0) ** (1.0 - level)
        # Requests that are slow without waiting can only raise the TTFT.
        weight = np.where(late > allowed, 1.0, 1.0 / (1.0 + FAR * math.log(level) ** 2))
        return np.asarray(log + weight * _binomial(moments, allowed, late), np.float64)

    def _level(self, ttft_s: float | None) -> float | None:
        """Return the wait of a TTFT as a multiple of the headroom, or None if it shows no queue."""
        if ttft_s is None:
            return None
        level = max((ttft_s - self._waiting.alone_s) / self._waiting.slack_s, NEAREST)
        return level if level < FURTHEST else None

    def _of_share(self, point: RatePoint) -> FloatArray:
        allowed = -math.log(min(point.attainment, 1 - 1e-6))
        over = STEEPNESS[None, :] * np.log(point.rate / self._rates)
        late = -np.expm1(-np.minimum(allowed * np.exp(np.clip(over, -40, 12)), 50.0))
        return _binomial(point.n / self._shared, point.misses / point.n, late)

    def _of_mean(self, point: RatePoint, mean: float, queue: bool) -> FloatArray:
        """Return the log likelihood by the part of the mean that is waiting; all of it if unknown."""
        limit_s = self._waiting.limit_s
        share = self._waiting.slack_s / limit_s if limit_s else 1.0
        waited = max((mean - (1.0 - share)) / share, 1e-3)
        if queue:
            load, depth, moments = self._queue(point, 1.0)
            expected = mean_wait(load, depth, self._times(point, self._mean_times)).mean(axis=0)
            chance = np.sqrt(1.0 / moments)
        else:
            expected = 1.0 / np.maximum(1.0 + STEEPNESS[None, :] * (1.0 - point.rate / self._rates), 1e-2)
            chance = np.full_like(expected, ELSE_ERROR)
        own = min(point.mean_error / share / waited, 1.0)
        error = np.sqrt(own**2 + chance**2 + MEAN_ERROR**2)
        away = (math.log(waited) - np.log(np.maximum(expected, 1e-6))) / error
        return np.asarray(-0.5 * np.minimum(away**2, 40.0) + np.log(MEAN_ERROR / error), np.float64)

    def _times(self, point: RatePoint, parts: Sequence[float]) -> FloatArray:
        """Return times since the trial's start in units of the headroom, as a new first axis."""
        at_s = point.begin_s + np.asarray(parts, np.float64) * (point.end_s - point.begin_s)
        return np.maximum(at_s / self._waiting.slack_s, 1e-3)[:, None, None]


def _binomial(n: FloatArray | float, share: float, expected: FloatArray) -> FloatArray:
    """Return the log likelihood of a share of n, relative to its maximum."""
    expected = np.clip(expected, _TINY, 1 - _TINY)
    best = sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
    return np.asarray(n * (share * np.log(expected) + (1 - share) * np.log1p(-expected) - best), np.float64)


def _logistic(z: FloatArray) -> FloatArray:
    """Return an approximation of the normal distribution function."""
    return np.asarray(1 / (1 + np.exp(-1.702 * np.clip(z, -40, 40))), np.float64)
