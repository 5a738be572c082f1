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
FURTHEST: Final = 3.0
"""Wait, as a multiple of the TTFT headroom, from which a TTFT shows no queue."""
MEAN_ERROR: Final = 0.15
"""Standard error of a queue's mean against the formula, as a logarithm."""
SLOPES: Final = np.geomspace(0.04, 60.0, 23)
"""Possible slopes of a percentile's score over the rate."""
SCORE_CHANCE: Final = 4.0
"""Variance of a quantile per clump."""
CUT: Final = 0.5
"""Weight of a share of misses that ended its trial early. LAB: 65 of 66 converged answers of the seeds
develop and check were right with it, 69 of 73 without."""
DOUBT: Final = math.exp(-8.0)
"""Lowest likelihood of a trial, relative to the best: no trial excludes a rate."""
OUTLIER: Final = 0.02
"""Likelihood of a score, capacity or verdict that says nothing about the rate."""
_TINY: Final = 1e-9


class Likelihoods:
    """Likelihoods of all points on one grid of ``rates``."""

    def __init__(self, points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting) -> None:
        self._points, self._waiting, self._rates = points, waiting, rates[:, None]
        known = sum(point.n for point in points)
        # A trial without bursts by chance shows small clumps, so all trials share one figure.
        self._clump = (sum(point.n * point.clump**2 for point in points) / known) ** 0.5 if known else 1.0
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
            self._tables[key] = np.exp(np.maximum(log, -200.0))
        table = (self._tables[key] if effect is None else effect @ self._tables[key]) + DOUBT
        variation = VARIATION[None, :] if queue else np.ones((1, len(STEEPNESS)))
        if point.bound:
            chance = variation / max(point.rate * point.end_s, 1.0)
            sign = -1.0 if point.bound == "above" else 1.0
            away = sign * np.log(self._rates / point.rate) / np.sqrt(size**2 + chance)
            table = table * (OUTLIER + (1 - OUTLIER) * _logistic(away))
        if point.capacity is not None:
            # Only the services vary here, not the arrivals.
            chance = np.maximum(variation - 1.0, 0.0) / max(point.capacity_n, 1.0) * bool(point.capacity_n)
            error = np.sqrt((point.capacity_error / point.capacity) ** 2 + size**2 + chance)
            room = np.log(point.capacity / self._rates) / error + 1.0
            table = table * (OUTLIER + (1 - OUTLIER) * _logistic(room))
        return np.asarray(table, np.float64)

    def steepness(self, queue: bool, rate: float) -> FloatArray:
        """Return d ln misses / d ln rate of each column if that rate were the root."""
        steep = self._steepness(np.asarray(rate, np.float64)) if queue else STEEPNESS
        return np.asarray(steep, np.float64)

    def queues(self) -> FloatArray:
        """Return the prior weight of each queue by root and variation; low if misses barely depend on the
        rate, since requests then wait for a few long ones."""
        steep = self._steepness(self._rates)
        return np.asarray(VARIATION_PRIOR[None, :] * steep**2 / (1.0 + steep**2), np.float64)

    def line(self) -> FloatArray:
        """Return the log likelihood of the scores by root: a line of any slope that is 0 at the root."""
        log = np.zeros((len(self._rates), len(SLOPES)))
        for point in self._points:
            if point.score is None or point.score <= -0.9:
                continue
            expected = SLOPES[None, :] * (1.0 - point.rate / self._rates)
            chance = (1 + point.score) * math.sqrt(SCORE_CHANCE * self._clump / point.n)
            error = math.hypot(min(point.score_error, 1.0), chance)
            away = (point.score - expected) / error
            log += np.log(np.exp(-0.5 * away**2) + OUTLIER)
        top = log.max()
        likely = np.exp(log - top).mean(axis=1)
        return np.asarray(np.log(likely + 1e-300) + top, np.float64)

    def _steepness(self, rates: FloatArray) -> FloatArray:
        """Return the steepness of a queue by root and variation."""
        return np.asarray(2.0 * self._waiting.headroom_s * rates / VARIATION, np.float64)

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
        moments = (point.end_s - point.begin_s) / self._waiting.headroom_s / memory(load, depth)
        return load, depth, np.maximum(moments, 1.0)

    def _of_queue(self, point: RatePoint) -> FloatArray:
        allowed = max(1.0 - point.attainment, 1e-6)
        load, depth, most = self._queue(point, -math.log(allowed))
        moments = np.minimum(point.n / self._clump, most)
        time = self._time(point)
        log = _binomial(moments, point.misses / point.n, late_share(load, depth, time))
        level = self._level(point.ttft_s)
        if level is None:
            return log
        late = late_share(load, depth, time, level)
        if level < 1.0:
            # An idle server serves at once, unlike the diffusion.
            late *= np.minimum(load, 1.0) ** (1.0 - level)
        return np.asarray(log + _binomial(moments, allowed, late), np.float64)

    def _level(self, ttft_s: float | None) -> float | None:
        """Return the wait of a TTFT as a multiple of the headroom, or None if it shows no queue."""
        if ttft_s is None:
            return None
        level = max((ttft_s - self._waiting.alone_s) / self._waiting.headroom_s, 0.0)
        return level if level < FURTHEST else None

    def _of_share(self, point: RatePoint) -> FloatArray:
        allowed = -math.log(min(point.attainment, 1 - 1e-6))
        over = STEEPNESS[None, :] * np.log(point.rate / self._rates)
        late = -np.expm1(-np.minimum(allowed * np.exp(np.clip(over, -40, 12)), 50.0))
        return _binomial(point.n / self._clump, point.misses / point.n, late)

    def _of_mean(self, point: RatePoint, mean: float, queue: bool) -> FloatArray:
        """Return the log likelihood by the part of the mean that is waiting; all of it if unknown."""
        limit_s = self._waiting.limit_s
        share = self._waiting.headroom_s / limit_s if limit_s else 1.0
        waited = max((mean - (1.0 - share)) / share, 1e-3)
        if queue:
            load, depth, moments = self._queue(point, 1.0)
            expected = mean_wait(load, depth, self._time(point))
            chance = 1.0 / moments
        else:
            expected = 1.0 / np.maximum(1.0 + STEEPNESS[None, :] * (1.0 - point.rate / self._rates), 1e-2)
            chance = np.zeros_like(expected)
        point_error = min(point.mean_error / share / waited, 1.0)
        error = np.sqrt(point_error**2 + chance + MEAN_ERROR**2)
        away = (math.log(waited) - np.log(np.maximum(expected, 1e-6))) / error
        return np.asarray(-0.5 * np.minimum(away**2, 40.0) + np.log(MEAN_ERROR / error), np.float64)

    def _time(self, point: RatePoint) -> float:
        """Return the middle of the window since the trial's start, in units of the headroom."""
        return max((point.begin_s + point.end_s) / 2 / self._waiting.headroom_s, 1e-3)


def _binomial(n: FloatArray | float, share: float, expected: FloatArray) -> FloatArray:
    """Return the log likelihood of a share of n, relative to its maximum."""
    expected = np.clip(expected, _TINY, 1 - _TINY)
    best = sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
    return np.asarray(n * (share * np.log(expected) + (1 - share) * np.log1p(-expected) - best), np.float64)


def _logistic(z: FloatArray) -> FloatArray:
    """Return an approximation of the normal distribution function."""
    return np.asarray(1 / (1 + np.exp(-1.702 * np.clip(z, -40, 40))), np.float64)
