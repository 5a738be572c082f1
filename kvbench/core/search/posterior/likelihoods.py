"""How likely what a trial saw is, for each rate that might be the one looked for, and each kind of system.

The constants here and in ``posterior`` were chosen on the systems of ``python -m tools.random_systems`` with
the seed ``develop`` (LAB: 120 searches of them in process, and 68 of ``tools.perf_search``): coverage of the
interval, and how many of the answers called converged lie within 5 %. Other seeds judge them.
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
_USUAL, _SPREAD = 1.5, 1.2
_WEIGHTS: Final = np.exp(-0.5 * (np.log(VARIATION / _USUAL) / _SPREAD) ** 2)
VARIATION_PRIOR: Final = _WEIGHTS / _WEIGHTS.sum()
STEEPNESS: Final = np.geomspace(0.15, 100.0, 13)
"""d ln misses / d ln rate at the root of what is no queue; log-uniform before anything is known."""
TIMES: Final = (0.12, 0.38, 0.62, 0.88)
MEAN_TIMES: Final = (0.15, 0.5, 0.85)
MIDDLE: Final = (0.5,)
"""Of the time in which the counted requests arrived."""
KNOWN: Final = 0.8
LEFT: Final = 0.15
"""How much of the arrivals' part of the chance their luck explains (``queue_rate``), and what of all of it
remains at least."""
FAR: Final = 1.0
"""The share at the TTFT that was kept counts as much as that at the limit; less, the further that TTFT is
from it: by the square of the logarithm, so many times. LAB: with 4, the intervals after six trials are wider
by a tenth, and cover as often."""
NEAREST, FURTHEST = 0.1, 3.0
"""In slacks; a TTFT that is nearer says nothing of a queue."""
UNEXPLAINED: Final = 4.0
UNEXPLAINED_MISSES: Final = 2.0
"""What speaks against a queue (a logarithm), where most of the misses, and more than so many clumps of them,
kept the limit on TTFT: something else was too slow."""
MEAN_ERROR: Final = 0.15
ELSE_ERROR: Final = 0.1
"""Of the logarithm of a mean: a queue's is not that of the formula; and more where there is none."""
FEW: Final = 20.0
MOST_TOGETHER: Final = 100.0
"""With so many clumps of misses they show how large they are; with fewer, as many count as one as are under
way at once, up to so many: a P99.9 of 3,500 requests that decode together is a matter of few moments."""
SLOPES: Final = np.geomspace(0.04, 60.0, 23)
HIGHEST_SCORE: Final = 3.0
SCORE_ERROR: Final = 0.05
CURVATURE: Final = 0.25
SCORE_RATE_ERROR: Final = 0.015
SCORE_CHANCE: Final = 4.0
SCORE_OUTLIER: Final = 0.05
"""Of a percentile's score: slopes of its line; the highest that lies on it; its error, and what is added for
each unit of distance from 0, of the rate, and of a quantile of so few clumps (a variance)."""
BOUND_ERROR: Final = 0.03
"""A mere verdict is sharp only to this."""
CAPACITY_ERROR: Final = 0.01
ELSE_VARIATION: Final = 2.0
"""What stands for the variation of what is no queue."""
FINE: Final = 0.012
PARTS_MOST: Final = 6
"""Between two rates of a grid it is looked in steps of that size of the logarithm, as far as so many go."""
CUT: Final = 0.5
"""What a trial's share of misses counts that was ended by it. LAB: of the answers called converged by
develop and check, 65 of 66 were right with it, 69 of 73 without."""
DOUBT: Final = math.exp(-8.0)
"""A trial's word is worth no more than this against the best that can be said of it."""
OUTLIER: Final = 0.02
CAPACITY_OUTLIER: Final = 0.01
CAPACITY_ELSE: Final = 0.1
"""What a capacity weighs that is higher than a queue's with that root."""
_TINY: Final = 1e-9


class Likelihoods:
    """Of all points on one grid of ``rates``."""

    def __init__(
        self, points: Sequence[RatePoint], rates: FloatArray, waiting: Waiting, *, rough: bool = False
    ) -> None:
        """``rough``: a queue is looked at in the middle of each trial only, at a quarter of the cost."""
        self._points, self._waiting = points, waiting
        self._share_times: Sequence[float] = MIDDLE if rough else TIMES
        self._mean_times: Sequence[float] = MIDDLE if rough else MEAN_TIMES
        step = math.log(rates[-1] / rates[0]) / max(len(rates) - 1, 1)
        self._parts = min(max(math.ceil(step / FINE), 1), PARTS_MOST)
        between = (np.arange(self._parts) + 0.5) / self._parts - 0.5
        self._rates = (rates[:, None] * np.exp(step * between)[None, :]).reshape(-1, 1)
        known = sum(point.n for point in points)
        # A trial that had no bursts by chance shows small clumps, so all trials share one figure.
        self._clump = (sum(each.n * each.clump**2 for each in points) / known) ** 0.5 if known else 1.0
        shown = sum(min(each.misses, each.n - each.misses) / each.clump for each in points)
        together = sum(each.n * each.together for each in points) / known if known else 1.0
        unseen = max(self._clump, min(together, MOST_TOGETHER))
        self._shared = (shown * self._clump + FEW * unseen) / (shown + FEW)
        self._tables: dict[tuple[int, bool], FloatArray] = {}

    @property
    def count(self) -> int:
        """Of the trials."""
        return len(self._points)

    @property
    def lengths_s(self) -> list[float]:
        """Of the trials, in seconds."""
        return [each.end_s for each in self._points]

    def of(self, index: int, queue: bool, size: float, effect: FloatArray | None) -> FloatArray:
        """Of one trial, shape (rates, variations or steepnesses), at most about 1.

        ``size``: standard deviation of the logarithm of its own speed, ``effect`` the average over that,
        None where it is finer than the grid.
        """
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
            # How long so many services took is a matter of chance, too; their arrivals are none here.
            chance = np.maximum(variation - 1.0, 0.0) / max(point.capacity_n, 1.0) * bool(point.capacity_n)
            own = (point.capacity_error / point.capacity) ** 2 + size**2 + CAPACITY_ERROR**2
            error = np.sqrt(own + chance)
            room = np.log(point.capacity / self._rates)
            likely = CAPACITY_OUTLIER + (1 - CAPACITY_OUTLIER) * _logistic(room / error + 1.0)
            if queue and point.capacity_n:
                # What a queue passes on that is never empty is its capacity, no less.
                unused = np.log1p(-math.log(1.0 - point.attainment) / self._steepness(self._rates))
                away = (room - unused) / error
                likely = likely * (
                    CAPACITY_ELSE + (1 - CAPACITY_ELSE) * np.exp(-0.5 * np.maximum(away, 0.0) ** 2)
                )
            table = table * self._by_rate(likely)
        return np.asarray(table, np.float64)

    def steepness(self, queue: bool, rate: float) -> FloatArray:
        """d ln misses / d ln rate of each column, if that rate were the root."""
        steep = self._steepness(np.asarray(rate, np.float64)) if queue else STEEPNESS
        return np.asarray(steep, np.float64)

    def queues(self) -> FloatArray:
        """Prior weight of each queue, by root and variation; one so uneven that its misses hardly depend on
        the rate is none: what few requests wait for is then each other's length."""
        steep = self._steepness(self._rates)
        return self._by_rate(VARIATION_PRIOR[None, :] * steep**2 / (1.0 + steep**2))

    def line(self) -> FloatArray:
        """Log likelihood of the scores, by root: they fall in a line that is 0 there, of whatever slope."""
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
        """Of a queue with each variation, by root."""
        return np.asarray(2.0 * self._waiting.slack_s * rates / VARIATION, np.float64)

    def _by_rate(self, fine: FloatArray) -> FloatArray:
        """The mean over each rate's part of the grid: a peak between two rates is not to be lost."""
        return np.asarray(fine.reshape(-1, self._parts, fine.shape[1]).mean(axis=1), np.float64)

    def _log(self, point: RatePoint, queue: bool) -> FloatArray:
        if point.mean is not None:
            return self._of_mean(point, point.mean, queue)
        if point.n:
            return self._of_queue(point) if queue else self._of_share(point)
        return np.zeros((len(self._rates), len(VARIATION) if queue else len(STEEPNESS)))

    def _queue(self, point: RatePoint, allowed: float) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(load, depth, independent moments) by root and variation. ``allowed``: −ln of the share."""
        steepness = self._steepness(self._rates)
        depth = steepness + allowed
        load = (point.queue_rate or point.rate) / self._rates * steepness / depth
        moments = (point.end_s - point.begin_s) / self._waiting.slack_s / memory(load, depth)
        if point.queue_rate is not None:
            # The arrivals' part of the chance is known.
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
            # An idle server serves at once, which the diffusion does not know.
            late *= np.minimum(load, 1.0) ** (1.0 - level)
        # What makes a request slow without waiting can but raise a TTFT.
        weight = np.where(late > allowed, 1.0, 1.0 / (1.0 + FAR * math.log(level) ** 2))
        return np.asarray(log + weight * _binomial(moments, allowed, late), np.float64)

    def _level(self, ttft_s: float | None) -> float | None:
        """A TTFT's part of waiting in slacks, where that says something."""
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
        """By the part of the mean that is waiting; all of it where nothing is known of it."""
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
        """In slacks since the trial's start, on an axis before those of rates and variations."""
        at_s = point.begin_s + np.asarray(parts, np.float64) * (point.end_s - point.begin_s)
        return np.maximum(at_s / self._waiting.slack_s, 1e-3)[:, None, None]


def _binomial(n: FloatArray | float, share: float, expected: FloatArray) -> FloatArray:
    """Log likelihood of a share of n, against that of the share itself."""
    expected = np.clip(expected, _TINY, 1 - _TINY)
    best = sum(part * math.log(part) for part in (share, 1 - share) if part > 0)
    return np.asarray(n * (share * np.log(expected) + (1 - share) * np.log1p(-expected) - best), np.float64)


def _logistic(z: FloatArray) -> FloatArray:
    """Nearly the normal distribution function."""
    return np.asarray(1 / (1 + np.exp(-1.702 * np.clip(z, -40, 40))), np.float64)
