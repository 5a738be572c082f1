"""How likely what a trial saw is, for each rate that might be the one looked for, and each kind of system."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.queue_model import late_share, mean_wait, memory
from kvbench.core.search.rate_points import RatePoint, Waiting

FloatArray = npt.NDArray[np.float64]

VARIATION: Final = np.geomspace(0.25, 60.0, 12)
"""Squared coefficients of variation of arrivals and services, added: 1 for M/D/1, 2 for M/M/1; batches and
heavy tails have many times that."""
_CENTRE, _SPREAD = 1.5, 1.2
VARIATION_PRIOR: Final = np.exp(-0.5 * (np.log(VARIATION / _CENTRE) / _SPREAD) ** 2)
VARIATION_PRIOR /= VARIATION_PRIOR.sum()
STEEPNESS: Final = np.geomspace(0.15, 100.0, 13)
"""d ln misses / d ln rate at the root of what is no queue."""
TIMES: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
MEAN_TIMES: Final = (0.15, 0.5, 0.85)
"""Of the time in which the counted requests arrived."""
OWN_CLUMP=True
SLOPES=np.geomspace(.4,60,16)
HIGHEST_SCORE=3.
SCORE_ERROR=.05
CURVATURE=.25
RATE_ERROR=.015
SCORE_OUTLIER=.05
CHANCE=2.0
FEW=20.
MOST_TOGETHER=100.
UNEXPLAINED=4.0
OTHER_VARIATION=2.0
TWO=0
KNOWN=.8
LEFT=.15
CAP2=.05
BESIDE: Final = 1.0
FAR: Final = 1.0
"""How much the share at the TTFT that was kept counts beside that at the limit; less, the further that is
from it: by the square of the logarithm, so many times."""
NEAREST, FURTHEST = 0.05, 3.0
MEAN_ERROR: Final = 0.15
"""Of the logarithm of a mean: a queue's mean is not that of the formula."""
BOUND_ERROR: Final = 0.03
"""A mere verdict is sharp only to this."""
DOUBT: Final = math.exp(-8.0)
"""A trial's word is worth no more than this against the best that can be said of it."""
OUTLIER: Final = 0.02
CAPACITY_OUTLIER: Final = 0.01
CAPACITY_ERROR: Final = 0.01
_TINY: Final = 1e-9


class Likelihoods:
    """Of all points on one grid of ``rates``."""

    def __init__(self, points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting) -> None:
        self._points, self._rates, self._waiting = points, rates[:, None], waiting
        known = sum(point.n for point in points)
        # A trial that had no bursts by chance shows small clumps, so all trials share one figure.
        self._clump = (sum(each.n * each.clump**2 for each in points) / known) ** 0.5 if known else 1.0
        # Few misses don't show in what clumps they come: who was under way together may be one.
        misses = sum(min(each.misses, each.n - each.misses) / each.clump for each in points)
        together = sum(each.n * each.together for each in points) / known if known else 1.0
        self._shared = (misses * self._clump + FEW * max(self._clump, min(together, MOST_TOGETHER))) / (misses + FEW)
        shares=[each.attainment for each in points if each.n]
        self._allowed = -math.log(max(1-max(shares),1e-6)) if shares else 1.0
        self._logs: dict[tuple[int, bool], FloatArray] = {}

    def of(self, index: int, queue: bool, size: float, effect: FloatArray) -> FloatArray:
        """Of one trial, shape (rates, variations or steepnesses), at most about 1.

        ``size``: standard deviation of the logarithm of its own speed, ``effect`` the average over that.
        """
        point = self._points[index]
        key = (index, queue)
        if key not in self._logs:
            self._logs[key] = self._log(point, queue)
        table = effect @ np.exp(np.maximum(self._logs[key], -200.0)) + DOUBT
        variation = VARIATION[None, :] if queue else np.full((1, len(STEEPNESS)), OTHER_VARIATION)
        if point.bound:
            chance = variation / max(point.rate * point.end_s, 1.0)
            sign = -1.0 if point.bound == "above" else 1.0
            away = sign * np.log(self._rates / point.rate) / np.sqrt(BOUND_ERROR**2 + size**2 + chance)
            table = table * (OUTLIER + (1 - OUTLIER) * _logistic(away))
        if point.capacity is not None:
            # How long so many services took is a matter of chance, too; their arrivals are none here.
            chance = np.maximum(variation - 1.0, 0.0) / max(point.capacity_n, 1.0) if point.capacity_n else 0.0
            error = np.sqrt((point.capacity_error / point.capacity) ** 2 + size**2 + CAPACITY_ERROR**2 + chance)
            room = np.log(point.capacity / self._rates) / error
            table = table * (CAPACITY_OUTLIER + (1 - CAPACITY_OUTLIER) * _logistic(room + 1.0))
        return np.asarray(table, np.float64)

    def _log(self, point: RatePoint, queue: bool) -> FloatArray:
        if point.mean is not None:
            return self._of_mean(point, queue)
        if point.n:
            return self._of_queue(point) if queue else self._of_share(point)
        return np.zeros((len(self._rates), len(VARIATION) if queue else len(STEEPNESS)))

    def steepness(self, queue: bool, rate: float) -> FloatArray:
        """d ln misses / d ln rate of each column, if that were the root."""
        return 2.0 * self._waiting.slack_s * rate / VARIATION if queue else STEEPNESS

    def _queue(self, point: RatePoint, allowed: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(load, depth, independent moments at most) by root and variation. ``allowed``: −ln of the share."""
        slack_s = self._waiting.slack_s
        steepness = 2.0 * slack_s * self._rates / VARIATION[None, :]
        depth = steepness + allowed
        load = (point.queue_rate or point.rate) / self._rates * steepness / depth
        moments = (point.end_s - point.begin_s) / slack_s / memory(load, depth)
        if point.queue_rate is not None:
            # The arrivals' part of the chance is known.
            moments = moments / np.maximum(1.0 - KNOWN * point.gap_variation / VARIATION, LEFT)[None, :]
        return load, depth, np.maximum(moments, 1.0)

    def _of_queue(self, point: RatePoint) -> FloatArray:
        load, depth, most = self._queue(point, -math.log(max(1.0 - point.attainment, 1e-6)))
        times = [self._time(point, part) for part in TIMES]
        moments = np.minimum(point.n / self._clump if OWN_CLUMP else point.n, most)
        late = np.mean([late_share(load, depth, time) for time in times], axis=0)
        log = _binomial(moments, point.misses / point.n, late)
        level=self._level(point)
        if point.ttft_s is not None and point.ttft_s<self._waiting.limit_s and point.misses/point.n>1.5*(1-point.attainment):
            return log-UNEXPLAINED
        if level is None:
            return log
        weight = BESIDE / (1 + FAR * math.log(level) ** 2)
        late = np.mean([late_share(load, depth, time, level) for time in times], axis=0)
        return np.asarray(log + weight * _binomial(moments, 1.0 - point.attainment, late), np.float64)

    def line(self) -> FloatArray:
        """Log likelihood of the scores, by root: they fall in a line that is 0 there, of whatever slope."""
        log = np.zeros((len(self._rates), len(SLOPES)))
        for point in self._points:
            if point.score is None or not -0.9 < point.score < HIGHEST_SCORE:
                continue
            expected = SLOPES[None, :] * (1.0 - point.rate / self._rates)
            error = math.hypot(min(point.score_error, 1.0), SCORE_ERROR, CURVATURE * point.score, (1 + point.score) * math.sqrt(CHANCE*self._clump / point.n))
            away = (point.score - expected) / np.hypot(error, SLOPES[None, :] * RATE_ERROR)
            log += np.log(np.exp(-0.5 * away**2) + SCORE_OUTLIER)
        top = log.max()
        return np.asarray(np.log(np.exp(log - top).mean(axis=1)) + top, np.float64)

    def _level(self, point: RatePoint) -> float | None:
        if point.ttft_s is None or not self._waiting.slack_s:
            return None
        level = (point.ttft_s - self._waiting.alone_s) / self._waiting.slack_s
        return level if NEAREST < level < FURTHEST else None

    def _of_share(self, point: RatePoint) -> FloatArray:
        allowed = -math.log(min(point.attainment, 1 - 1e-6))
        over = STEEPNESS[None, :] * (point.rate / self._rates - 1.0)
        late = -np.expm1(-np.minimum(allowed * np.exp(np.clip(over, -40, 12)), 50.0))
        return _binomial(point.n / self._shared, point.misses / point.n, late)

    def _of_mean(self, point: RatePoint, queue: bool) -> FloatArray:
        """By the part of the mean that is waiting; all of it where nothing is known of it."""
        assert point.mean is not None
        limit_s = self._waiting.limit_s
        share = self._waiting.slack_s / limit_s if limit_s else 1.0
        waited = max((point.mean - (1.0 - share)) / share, 1e-3)
        if queue:
            load, depth, moments = self._queue(point, 1.0)
            times = [self._time(point, part) for part in MEAN_TIMES]
            expected = np.mean([mean_wait(load, depth, time) for time in times], axis=0)
            chance = np.sqrt(1.0 / moments)
        else:
            expected = 1.0 / np.maximum(1.0 + STEEPNESS[None, :] * (1.0 - point.rate / self._rates), 1e-2)
            chance = np.full_like(expected, 0.1)
        own = min(point.mean_error / share / waited, 1.0)
        error = np.sqrt(own**2 + chance**2 + MEAN_ERROR**2)
        away = (math.log(waited) - np.log(np.maximum(expected, 1e-6))) / error
        return np.asarray(-0.5 * np.minimum(away**2, 40.0) + np.log(MEAN_ERROR / error), np.float64)

    def _time(self, point: RatePoint, part: float) -> float:
        """In slacks since the trial's start."""
        at_s = point.begin_s + part * (point.end_s - point.begin_s)
        return max(at_s / self._waiting.slack_s, 1e-3)


def _binomial(n: FloatArray | float, share: float, expected: FloatArray) -> FloatArray:
    """Log likelihood of a share of n, against that of the share itself."""
    expected = np.clip(expected, _TINY, 1 - _TINY)
    best = sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
    return np.asarray(n * (share * np.log(expected) + (1 - share) * np.log1p(-expected) - best), np.float64)


def _logistic(z: FloatArray) -> FloatArray:
    """Nearly the normal distribution function."""
    return np.asarray(1 / (1 + np.exp(-1.702 * np.clip(z, -40, 40))), np.float64)
