"""The requests of one trial as arrays, their latencies and limits. Times in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvbench.core.slo import METRICS, Criterion

FloatArray = npt.NDArray[np.float64]
COLUMNS: Final = (
    *("scheduled_s", "first_token_s", "last_token_s"),
    *("output_len", "requested_output_len", "untimed_tokens", "error"),
)
"""Columns of a trial's request records that a replay needs."""

CENSORED: Final = 9.0
"""Value / limit of a request without an observed end."""
FEW_FAILED: Final = 0.005
"""Share of failed requests up to which a trial continues after its first one."""


@dataclass(frozen=True, eq=False)
class TrialRequests:
    """The requests of one trial in order of arrival, in seconds since its start; NaN: not observed until
    ``end_s``. Equal by content, so that fits can be cached. ``tokens``: output tokens after the first one.
    ``rate``: requests per second offered. ``burstiness``: the gamma shape of the gaps between arrivals (1 is
    Poisson). ``failed``: requests that ended in an error."""

    rate: float
    end_s: float
    arrived_s: FloatArray
    first_s: FloatArray
    last_s: FloatArray
    tokens: FloatArray
    burstiness: float = 1.0
    failed: int = 0

    def __len__(self) -> int:
        return len(self.arrived_s)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrialRequests) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        columns = self.arrived_s, self.first_s, self.last_s, self.tokens
        return self.rate, self.end_s, self.burstiness, self.failed, *(column.tobytes() for column in columns)

    @classmethod
    def of(
        cls,
        columns: Mapping[str, npt.NDArray[Any]],
        rate: float,
        end_s: float,
        burstiness: float,
    ) -> TrialRequests:
        """Build it from ``COLUMNS`` of the trial's records; NaN is unknown. ``end_s``: when sending stopped;
        what came later is left out, since the load was gone. So are failed requests; if more than
        ``FEW_FAILED`` failed, the trial ends at the first of them."""
        order = np.argsort(columns["scheduled_s"], kind="stable")
        arrived_s, first_s, last_s, got, requested, untimed = (columns[name][order] for name in COLUMNS[:-1])
        errors = columns["error"][order]
        cancelled = errors == "cancelled"
        failed = (errors != "") & ~cancelled
        if failed.sum() > FEW_FAILED * len(failed):
            end_s = min(end_s, float(arrived_s[failed][0]))
        kept = (arrived_s < end_s) & ~failed
        first_s = np.where(first_s <= end_s, first_s, math.nan)
        last_s = np.where((last_s <= end_s) & ~cancelled, last_s, math.nan)
        tokens = np.maximum(np.where(np.isnan(last_s), requested - 1, got - untimed), 0.0)
        whole = arrived_s[kept], first_s[kept], last_s[kept], tokens[kept]
        return cls(rate, end_s, *whole, burstiness, int(failed.sum()))


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
    """One criterion: a share of requests within all ``limits_s``, or a mean (of the first one's metric).
    ``limits_s``: (metric, seconds). ``target``: required share of requests, within the limits or, for a
    mean, answered."""

    kind: Literal["share", "mean"]
    target: float
    limits_s: tuple[tuple[str, float], ...]

    def ratios(self, times: Latencies) -> FloatArray:
        """Return each request's largest value / limit; NaN if unknown. TPOT may be undefined."""
        found = np.full(len(times.ttft_s), -math.inf)
        for metric, limit_s in self.limits_s:
            values = times.of_metric(metric) / limit_s
            if metric == "tpot_ms":
                values = np.where(np.isnan(values) & ~np.isnan(times.e2el_s), -math.inf, values)
            found = np.maximum(found, values)
        return found

    def score(self, ratios: FloatArray) -> float:
        """Return share − target, or 1 − mean / limit: at least 0 if the criterion is met."""
        if not len(ratios):
            return 0.0
        if self.kind == "mean":
            defined = ratios[~np.isneginf(ratios)]
            return 1.0 - float(np.minimum(defined, 50.0).mean()) if len(defined) else 1.0
        return float((ratios <= 1.0).mean()) - self.target

    @property
    def longest_s(self) -> float:
        """Lowest limit on TTFT or end-to-end latency; inf without one."""
        return min((s for metric, s in self.limits_s if metric != "tpot_ms"), default=math.inf)


@dataclass(frozen=True)
class Objective:
    """All criteria of an SLO that a replay can judge."""

    goals: tuple[Goal, ...]

    @classmethod
    def of(cls, criteria: Sequence[Criterion]) -> Objective | None:
        """Return the objective, or None if a criterion is of sessions or nothing is limited."""
        goals = []
        answered = min((criterion.target for criterion in criteria if criterion.kind == "share"), default=1.0)
        for criterion in criteria:
            limits = tuple((limit.metric, limit.limit / 1e3) for limit in criterion.limits)
            if any(metric not in METRICS for metric, _ in limits):
                return None
            if limits:
                target = criterion.target if criterion.kind == "share" else answered
                goals.append(Goal(criterion.kind, target, limits))
        return cls(tuple(goals)) if goals else None

    @property
    def needs_last(self) -> bool:
        """Whether a limit depends on the last token."""
        return any(metric != "ttft_ms" for goal in self.goals for metric, _ in goal.limits_s)

    def worst(self, times: Latencies) -> float:
        return min(goal.score(goal.ratios(times)) for goal in self.goals)
