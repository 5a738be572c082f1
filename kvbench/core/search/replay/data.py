"""What a replay is given: the requests of a trial, and what they have to keep. Latencies in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.slo import METRICS, Criterion

FAR: Final = 9.0
"""A request that was not seen to end counts as one that took so many times its limit."""


@dataclass(frozen=True)
class Latencies:
    """TTFT, TPOT and end-to-end latency of requests; NaN: unknown or undefined."""

    ttft_s: FloatArray
    tpot_s: FloatArray
    e2el_s: FloatArray

    @classmethod
    def of(
        cls, arrived_s: FloatArray, first_s: FloatArray, last_s: FloatArray, tokens: FloatArray
    ) -> Latencies:
        with np.errstate(invalid="ignore", divide="ignore"):
            tpot_s = np.where(tokens > 0, (last_s - first_s) / tokens, math.nan)
        return cls(first_s - arrived_s, tpot_s, last_s - arrived_s)

    def of_metric(self, metric: str) -> FloatArray:
        return {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "e2el_ms": self.e2el_s}[metric]


@dataclass(frozen=True)
class Goal:
    """One criterion: a share of requests that keep all ``limits_s``, or a mean (of the first one's metric).

    ``limits_s``: (metric, seconds).
    """

    kind: Literal["share", "mean"]
    target: float
    limits_s: tuple[tuple[str, float], ...]

    def ratios(self, times: Latencies) -> FloatArray:
        """Of each request the largest value / limit; NaN if nothing is known. TPOT may be undefined."""
        found = np.full(len(times.ttft_s), -math.inf)
        for metric, limit_s in self.limits_s:
            values = times.of_metric(metric) / limit_s
            if metric == "tpot_ms":
                values = np.where(np.isnan(values) & ~np.isnan(times.e2el_s), -math.inf, values)
            found = np.maximum(found, values)
        return found

    def score(self, ratios: FloatArray) -> float:
        """At least 0 where the criterion is kept: share − target, or 1 − mean / limit."""
        if not len(ratios):
            return 0.0
        if self.kind == "mean":
            return 1.0 - float(np.minimum(ratios, 50.0).mean())
        return float((ratios <= 1.0).mean()) - self.target

    @property
    def longest_s(self) -> float:
        """Up to when a request may keep a limit on TTFT or the whole latency; inf without one."""
        return min((s for metric, s in self.limits_s if metric != "tpot_ms"), default=math.inf)


@dataclass(frozen=True)
class Objective:
    """All criteria of an SLO that a replay can judge."""

    goals: tuple[Goal, ...]

    @classmethod
    def of(cls, criteria: Sequence[Criterion]) -> Objective | None:
        """None where a criterion is of sessions, or nothing is limited."""
        goals = []
        for each in criteria:
            limits = tuple((limit.metric, limit.limit / 1e3) for limit in each.limits)
            if any(metric not in METRICS for metric, _ in limits):
                return None
            if limits:
                target = each.target if each.kind == "share" else 1.0
                goals.append(Goal(each.kind, target, limits))
        return cls(tuple(goals)) if goals else None

    @property
    def needs_last(self) -> bool:
        """Whether the last token matters."""
        return any(metric != "ttft_ms" for goal in self.goals for metric, _ in goal.limits_s)

    def worst(self, times: Latencies) -> float:
        """The lowest score of a criterion."""
        return min(goal.score(goal.ratios(times)) for goal in self.goals)
