"""A ceiling probe: measures the highest completion rate without building up a long backlog.

1. A few requests, a light load for a server with many slots, and a pause.
2. If most of them end soon, a saturation probe follows that fills hundreds of slots. Otherwise it is skipped:
   a server that handles requests one by one would take minutes, even after the client has dropped them.
3. The saturation ends when completions show a steady rate, or when the backlog is many latencies of work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.search.data import TrialFigures

FloatArray = npt.NDArray[np.float64]

FIRST_REQUESTS: Final = 24
"""Number of first requests."""
FIRST_LATENCIES: Final = 0.5
FIRST_LEAST_S: Final = 0.25
"""Time in which they are sent: in latencies, and at least in seconds."""
PAUSED_LATENCIES: Final = 2.5
PAUSED_LEAST_S: Final = 1.0
"""Start of the saturation: in latencies, and at least in seconds."""
LOOKED_AT: Final = 0.7
DONE_SHARE: Final = 0.5
"""Share of the first requests that must have ended after this part of the time before it (progress is
reported four times a second)."""
SATURATION_LATENCIES: Final = 5.0
SATURATION_LEAST_S: Final = 2.0
SATURATION_REQUESTS: Final = 1600
STEADY_COMPLETIONS: Final = 40
"""Minimum number of completions before a steady rate ends the saturation."""
STEADY_LATENCIES: Final = 3.0
STEADY_LEAST_S: Final = 1.5
"""Minimum time since its first completion, in latencies and in seconds: if all slots were filled at once,
completions come in waves of one latency."""
BURIED_LATENCIES: Final = 16.0
"""Backlog that ends the saturation, in latencies of work at the measured completion rate."""
COMPLETIONS: Final = 10
SATURATED: Final = 1.5
SATURATED_ERRORS: Final = 3.0
"""The system was saturated if the backlog exceeds this multiple of the requests that must be in flight, and
this many standard errors above them: of 0.4 on average (15 a second of 26 ms) one or two are common."""


@dataclass(frozen=True)
class SaturationProbe:
    """The plan of one probe; times in seconds since its start. ``offsets_s``: planned sends, ascending;
    ``rate``: requests per second of the saturation."""

    offsets_s: FloatArray
    begins_s: float
    ends_s: float
    latency_s: float
    rate: float

    def is_over(self, ends_s: FloatArray, now_s: float) -> bool:
        """Return whether the probe can end."""
        if now_s >= self.ends_s:
            return True
        if self._skips_saturation(ends_s, now_s):
            return True
        if now_s <= self.begins_s:
            return False
        found = self.measured(ends_s, now_s)
        rate = found.completion_rate
        if rate is None:
            return False
        saturation = ends_s[ends_s >= self.begins_s]
        if now_s - float(saturation.min()) < max(STEADY_LATENCIES * self.latency_s, STEADY_LEAST_S):
            return False
        left = int(np.searchsorted(self.offsets_s, now_s)) - len(ends_s)
        is_steady = len(saturation) >= STEADY_COMPLETIONS and not found.grows
        return is_steady or left > BURIED_LATENCIES * max(rate * self.latency_s, 1.0)

    def _skips_saturation(self, ends_s: FloatArray, now_s: float) -> bool:
        """Return whether the saturation is skipped, since the first requests were slow already."""
        first = int(np.searchsorted(self.offsets_s, self.begins_s))
        done = int((ends_s <= self.begins_s).sum())
        return now_s >= LOOKED_AT * self.begins_s and done < DONE_SHARE * first

    def measured(self, ends_s: Sequence[float] | FloatArray, until_s: float) -> TrialFigures:
        """Return the figures by the completions until then; without saturation, a rate to start from.
        ``grows`` (no ceiling): completions still increased, or the backlog was no larger than usual."""
        ends = np.asarray(ends_s, np.float64)
        ends = ends[ends <= until_s]
        if len(ends) and (until_s <= self.begins_s or self._skips_saturation(ends, until_s)):
            return TrialFigures(completion_rate=len(ends) / until_s, grows=True, duration_s=until_s)
        found = completion_rate(ends[ends >= self.begins_s] - self.begins_s, until_s - self.begins_s)
        if found is None:
            return TrialFigures(duration_s=until_s)
        rate, steady = found
        left = int(np.searchsorted(self.offsets_s, until_s, side="right")) - len(ends)
        under_way = rate * self.latency_s
        saturated = left > max(
            SATURATED * under_way, under_way + SATURATED_ERRORS * math.sqrt(under_way) + 1.0
        )
        if not saturated and until_s >= min(self.ends_s, self.offsets_s[-1]):
            rate = max(rate, self.rate)  # all offered requests were completed
        return TrialFigures(completion_rate=rate, grows=not (steady and saturated), duration_s=until_s)


def plan_saturation(rate: float, latency_s: float, burstiness: float, seed: int) -> SaturationProbe:
    """Return a probe that offers up to ``rate`` requests a second. Raises InputError for impossible values.
    ``latency_s``: latency of a single request, 0 if unknown."""
    first_s = max(FIRST_LEAST_S, FIRST_LATENCIES * latency_s)
    first_rate = min(rate, FIRST_REQUESTS / first_s)
    first = planned_offsets(first_rate, max(1, round(first_rate * first_s)), math.inf, seed)
    begins_s = max(PAUSED_LEAST_S, PAUSED_LATENCIES * latency_s)
    length_s = max(SATURATION_LEAST_S, SATURATION_LATENCIES * latency_s)
    n = max(1, min(SATURATION_REQUESTS, round(rate * length_s)))
    saturation = begins_s + planned_offsets(rate, n, burstiness, seed)
    offsets = np.concatenate([np.minimum(first, begins_s), saturation])
    return SaturationProbe(offsets, begins_s, begins_s + length_s, latency_s, rate)


def completion_rate(ends_s: Sequence[float] | FloatArray, until_s: float) -> tuple[float, bool] | None:
    """Return completions per second of a load from time 0, and whether they were steady; None if too few.
    Counted over the later two thirds of the time from the first completion to ``until_s``. Not steady: they
    still increased, or the time was too short, so the capacity is higher."""
    ends = np.sort(np.asarray(ends_s, np.float64))
    ends = ends[ends <= until_s]
    if len(ends) < COMPLETIONS or until_s <= ends[0]:
        return None
    edges = np.linspace(float(ends[0]), until_s, 4)
    counts = np.histogram(ends, edges)[0]
    noise = 2.0 * math.sqrt(float(counts[2]) + 1.0)
    steady = until_s >= 2.0 * ends[0] and counts[2] - counts[1] <= max(noise, 0.1 * counts[1])
    return float(counts[1] + counts[2]) / (2.0 * float(edges[1] - edges[0])), bool(steady)
