"""The highest rate at which a model meets an SLO, by replaying long loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from kvbench.core.search.replay.models import Model
from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.search.trial_requests import Latencies, Objective

LONG: Final = 100_000
SHORT: Final = 24_000
SHORTEST: Final = 12_000
"""Requests of the longest load, of one that shows how the rate moves, and of one that finds it roughly."""
SATURATING: Final = 3000
"""Requests of a load that arrives at once."""
FALL: Final = math.log(100)
"""Step down from the capacity, in log rate, to a rate that keeps the SLO; up to three are taken."""
BISECTIONS, SECANTS = 12, 12
"""Largest numbers of trial rates, of the shortest load and of the longest."""
ROUGHLY, EXACTLY = 0.01, 2e-4
"""Relative distance of the first two rates of the longest load, and of two that are near enough."""
ENOUGH: Final = 5e-5
"""A score this near 0 is 0."""


class UnitLoad:
    """Unit gaps and uniform numbers of all replays, which then differ by rate and work only."""

    def __init__(self, burstiness: float, tokens: FloatArray) -> None:
        rng = np.random.default_rng(3)
        self.unit = np.cumsum(rng.gamma(burstiness, 1 / burstiness, LONG))
        self.chance = rng.random((2, LONG))
        self.tokens = tokens[(rng.random(LONG) * len(tokens)).astype(np.int64)]

    def score(self, model: Model, objective: Objective, rate: float, count: int) -> float:
        """Return the worst criterion's score at a rate, in steady state."""
        times = model.times(self.unit[:count] / rate, self.tokens[:count], self.chance[:, :count])
        steady = slice(count // 30, count - count // 60)
        cut = Latencies(times.ttft_s[steady], times.tpot_s[steady], times.e2el_s[steady])
        return objective.worst(cut)

    def capacity(self, model: Model) -> float:
        """Return the highest rate of a model."""
        return model.capacity(self.tokens[:SATURATING])

    def slope(self, model: Model, objective: Objective, rate: float, count: int) -> float:
        """Return by how much the score falls, divided by the relative change of the rate."""
        below, above = (self.score(model, objective, rate * factor, count) for factor in (0.96, 1.04))
        return max((below - above) / 0.08, 1e-3)

    def root(self, model: Model, objective: Objective) -> float:
        """Return the rate at which the SLO is just met: by bisection with a short load between a rate that
        keeps it and the capacity, then by secants with the longest load."""
        top = math.log(self.capacity(model))

        def score(rate: float) -> float:
            return self.score(model, objective, math.exp(rate), SHORTEST)

        for lowest in (top - FALL, top - 2 * FALL, top - 3 * FALL):
            if score(lowest) >= 0:
                break
        low, high = lowest, top
        for _ in range(BISECTIONS):
            rate = (low + high) / 2
            low, high = (rate, high) if score(rate) >= 0 else (low, rate)
        return math.exp(self.log_root_near((low + high) / 2, model, objective, model.longest, EXACTLY))

    def log_root_near(
        self,
        begin: float,
        model: Model,
        objective: Objective,
        count: int = SHORTEST,
        exact: float = ROUGHLY / 10,
    ) -> float:
        """Return the logarithm of that rate, at most that of the capacity, by secants from the logarithm of a
        near one."""
        top = math.log(self.capacity(model))
        begin = min(begin, top)

        def score(rate: float) -> float:
            return self.score(model, objective, math.exp(rate), count)

        return _zero(score, begin, begin - FALL, top, exact)


def _zero(score: Callable[[float], float], begin: float, least: float, most: float, exact: float) -> float:
    """Return where a decreasing score crosses 0, by secants within a bracket around ``begin`` (Illinois)."""
    here, before = begin, begin
    by_here = by_before = score(begin)
    step = math.copysign(ROUGHLY, by_here)
    while (by_here >= 0) == (by_before >= 0):
        if here in (least, most):
            return here
        before, by_before = here, by_here
        here, step = min(max(here + step, least), most), 2 * step
        by_here = score(here)
    for _ in range(SECANTS):
        if abs(here - before) < exact or abs(by_here) < ENOUGH:
            break
        last, by_last = here, by_here
        here -= by_here * (here - before) / (by_here - by_before)
        by_here = score(here)
        if (by_here >= 0) != (by_last >= 0):
            before, by_before = last, by_last
        else:
            by_before /= 2
    return here
