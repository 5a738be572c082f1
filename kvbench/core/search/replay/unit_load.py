"""The highest rate at which a model meets an SLO, by replaying long loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np

from kvbench.core.search.replay.models import Model
from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.search.trial_requests import Latencies, Objective

LATE: Final = 3000
LONG: Final = (200_000, 1_000_000)
"""Late requests that the longest load has at the rate, and bounds on its length: a load of 100,000 requests
has only 100 late ones if an SLO allows 0.1 %, and gives rates of an M/D/1 queue that are 3 % off."""
SHORT: Final = 24_000
SHORTEST: Final = 12_000
"""Requests of a load that shows how the score falls, and of one that finds the rate roughly or for a
bootstrap sample."""
SECTIONS: Final = 10
"""Parts of the longest load whose scores are compared."""
SATURATING: Final = 3000
"""Requests of a load that arrives at once."""
FALL: Final = math.log(100)
"""Step down from the capacity, in log rate, to a rate that keeps the SLO; up to three are taken."""
BISECTIONS, SECANTS = 12, 12
"""Largest numbers of rates that bisection and secants try."""
ROUGHLY, NEARLY, EXACTLY = 0.01, 1e-3, 2e-4
"""Relative distance of the first two rates that secants try, and of two that are near enough for a bootstrap
sample and for the answer."""
ENOUGH: Final = 5e-5
"""A score this near 0 is 0."""
FLAT, STEEP = 0.06, 12.5
"""Slopes of the score over the rate's logarithm: below the first, the longest load decides, since a queue of
many servers grows slowly; the second applies where even that one meets the SLO at the capacity."""


class UnitLoad:
    """Unit gaps and uniform numbers of all replays, which then differ by rate and work only."""

    def __init__(self, burstiness: float, tokens: FloatArray, objective: Objective) -> None:
        allowed = min((1 - goal.target for goal in objective.goals if goal.kind == "share"), default=1.0)
        count = int(np.clip(LATE / max(allowed, 1e-9), *LONG))
        rng = np.random.default_rng(3)
        self.unit = np.cumsum(rng.gamma(burstiness, 1 / burstiness, count))
        self.chance = rng.random((2, count))
        self.tokens = tokens[(rng.random(count) * len(tokens)).astype(np.int64)]

    def score(self, model: Model, objective: Objective, rate: float, count: int) -> float:
        """Return the worst criterion's score at a rate, in steady state."""
        (score,) = self._scores(model, objective, rate, count, 1)
        return score

    def error(self, model: Model, objective: Objective, rate: float, slope: float) -> float:
        """Return the relative standard error of the rate, since the longest load is finite."""
        scores = self._scores(model, objective, rate, self._longest(model), SECTIONS)
        return float(np.std(scores, ddof=1)) / math.sqrt(SECTIONS) / slope

    def _scores(
        self, model: Model, objective: Objective, rate: float, count: int, sections: int
    ) -> list[float]:
        times = model.times(self.unit[:count] / rate, self.tokens[:count], self.chance[:, :count])
        edges = np.linspace(count // 30, count - count // 60, sections + 1).astype(np.int64).tolist()
        parts = (slice(begin, end) for begin, end in pairwise(edges))
        return [
            objective.worst(Latencies(times.ttft_s[part], times.tpot_s[part], times.e2el_s[part]))
            for part in parts
        ]

    def _longest(self, model: Model) -> int:
        return min(model.longest, len(self.unit))

    def capacity(self, model: Model) -> float:
        """Return the highest rate of a model."""
        return model.capacity(self.tokens[:SATURATING])

    def slope(self, model: Model, objective: Objective, rate: float) -> float:
        """Return by how much the score falls at the rate, divided by the relative change of the rate."""
        slope = self._slope(model, objective, rate, SHORT)
        if slope < FLAT:
            slope = self._slope(model, objective, rate, self._longest(model))
        return max(slope, STEEP) if math.isclose(rate, self.capacity(model)) else slope

    def _slope(self, model: Model, objective: Objective, rate: float, count: int) -> float:
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
        return self._root_near(model, objective, math.exp((low + high) / 2), self._longest(model), EXACTLY)

    def root_of_sample(self, model: Model, objective: Objective, rate: float) -> float:
        """Return that rate of a bootstrap sample's model, by a short load. ``rate``: that of all requests."""
        return self._root_near(model, objective, rate, SHORTEST, NEARLY)

    def _root_near(self, model: Model, objective: Objective, rate: float, count: int, exact: float) -> float:
        """Return the rate, at most the capacity, by secants from one near it."""
        top = math.log(self.capacity(model))
        begin = min(math.log(rate), top)

        def score(log_rate: float) -> float:
            return self.score(model, objective, math.exp(log_rate), count)

        return math.exp(_zero(score, begin, begin - FALL, top, exact))


def _zero(score: Callable[[float], float], begin: float, least: float, most: float, exact: float) -> float:
    """Return where a decreasing score crosses 0, by secants within a bracket around ``begin`` (Illinois
    method). ``exact``: distance of two values that are near enough."""
    current, before = begin, begin
    by_current = by_before = score(begin)
    step = math.copysign(ROUGHLY, by_current)
    while (by_current >= 0) == (by_before >= 0):
        if current in (least, most):
            return current
        before, by_before = current, by_current
        current, step = min(max(current + step, least), most), 2 * step
        by_current = score(current)
    for _ in range(SECANTS):
        if abs(current - before) < exact or abs(by_current) < ENOUGH:
            break
        last, by_last = current, by_current
        current -= by_current * (current - before) / (by_current - by_before)
        by_current = score(current)
        if (by_current >= 0) != (by_last >= 0):
            before, by_before = last, by_last
        else:
            by_before /= 2
    return current
