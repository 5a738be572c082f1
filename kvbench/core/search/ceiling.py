"""A ceiling probe: what comes out of a system at most, asked without burying it.

First some requests that hardly burden a server with places for many, and a pause. Where most of them are
done soon, a flood follows, which fills hundreds of places. Where not, it is spared a server that takes its
requests one after the other, and would be at it for minutes, also when the client has dropped them. The flood
ends as soon as its completions show a steady rate, or when its rest is many latencies' work.
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

FIRST_LATENCIES: Final = 0.5
FIRST_LEAST_S: Final = 0.25
FIRST_REQUESTS: Final = 24
"""So many come first, in so many latencies, and at least so many seconds."""
PAUSED_LATENCIES: Final = 2.5
PAUSED_LEAST_S: Final = 1.0
LOOKED_AT: Final = 0.7
DONE_SHARE: Final = 0.5
"""When the flood begins, in latencies and at least in seconds; and from which part of that time on it is
looked (progress is reported four times a second) whether this share of the first requests is done."""
FLOOD_LATENCIES: Final = 5.0
FLOOD_LEAST_S: Final = 2.0
FLOOD_REQUESTS: Final = 1600
SURE_COMPLETIONS: Final = 40
SURE_LATENCIES: Final = 3.0
SURE_LEAST_S: Final = 1.5
"""Completions before a steady rate ends the flood; and latencies, and at least seconds, since the first one
before anything does: where all places were filled at once, they come in waves of one latency."""
BURIED_LATENCIES: Final = 16.0
"""The flood ends when what it leaves is more work than that at the rate of its completions."""
COMPLETIONS: Final = 10
FLOODED: Final = 1.5
FLOODED_ERRORS: Final = 3.0
"""It was a flood if it leaves more than so many times what must be under way, and more than chance puts
there: of 0.4 requests on average (15 a second of 26 ms) one or two are often just under way."""


@dataclass(frozen=True)
class Flood:
    """The plan of one probe; times in seconds since its start. ``offsets_s``: planned sends, ascending;
    ``rate``: requests per second of the flood.
    """

    offsets_s: FloatArray
    begins_s: float
    ends_s: float
    latency_s: float
    rate: float

    def is_over(self, ends_s: FloatArray, now_s: float) -> bool:
        """Whether there is nothing more to find out, or it must not go on; ``ends_s``: completions so far."""
        if now_s >= self.ends_s:
            return True
        if self._spared(ends_s, now_s):
            return True
        if now_s <= self.begins_s:
            return False
        found = self.measured(ends_s, now_s)
        rate = found.completion_rate
        if rate is None:
            return False
        flood = ends_s[ends_s >= self.begins_s]
        if now_s - float(flood.min()) < max(SURE_LATENCIES * self.latency_s, SURE_LEAST_S):
            return False
        left = int(np.searchsorted(self.offsets_s, now_s)) - len(ends_s)
        sure = len(flood) >= SURE_COMPLETIONS and not found.grows
        return sure or left > BURIED_LATENCIES * max(rate * self.latency_s, 1.0)

    def _spared(self, ends_s: FloatArray, now_s: float) -> bool:
        """Whether the system is spared the flood: it was slow with the first requests already."""
        first = int(np.searchsorted(self.offsets_s, self.begins_s))
        done = int((ends_s <= self.begins_s).sum())
        return now_s >= LOOKED_AT * self.begins_s and done < DONE_SHARE * first

    def measured(self, ends_s: Sequence[float] | FloatArray, until_s: float) -> TrialFigures:
        """What it measured, by the completions until then; without a flood, a rate to begin with.

        No ceiling (``grows``): completions still became more, or no more was left than must be under way.
        """
        ends = np.asarray(ends_s, np.float64)
        ends = ends[ends <= until_s]
        if len(ends) and (until_s <= self.begins_s or self._spared(ends, until_s)):
            return TrialFigures(completion_rate=len(ends) / until_s, grows=True, duration_s=until_s)
        found = completion_rate(ends[ends >= self.begins_s] - self.begins_s, until_s - self.begins_s)
        if found is None:
            return TrialFigures(duration_s=until_s)
        rate, steady = found
        left = int(np.searchsorted(self.offsets_s, until_s, side="right")) - len(ends)
        under_way = rate * self.latency_s
        flooded = left > max(FLOODED * under_way, under_way + FLOODED_ERRORS * math.sqrt(under_way) + 1.0)
        if not flooded and until_s >= min(self.ends_s, self.offsets_s[-1]):
            rate = max(rate, self.rate)  # all that was offered was carried; by chance a little less came out
        return TrialFigures(completion_rate=rate, grows=not (steady and flooded), duration_s=until_s)


def plan_flood(rate: float, latency_s: float, burstiness: float, seed: int) -> Flood:
    """A probe that offers up to ``rate`` requests a second; ``latency_s``: of one alone, 0 if unknown.

    Raises InputError for impossible values.
    """
    first_s = max(FIRST_LEAST_S, FIRST_LATENCIES * latency_s)
    first_rate = min(rate, FIRST_REQUESTS / first_s)
    first = planned_offsets(first_rate, max(1, round(first_rate * first_s)), math.inf, seed)
    begins_s = max(PAUSED_LEAST_S, PAUSED_LATENCIES * latency_s)
    length_s = max(FLOOD_LEAST_S, FLOOD_LATENCIES * latency_s)
    n = max(1, min(FLOOD_REQUESTS, round(rate * length_s)))
    flood = begins_s + planned_offsets(rate, n, burstiness, seed)
    offsets = np.concatenate([np.minimum(first, begins_s), flood])
    return Flood(offsets, begins_s, begins_s + length_s, latency_s, rate)


def completion_rate(ends_s: Sequence[float] | FloatArray, until_s: float) -> tuple[float, bool] | None:
    """(completions per second while a load was offered, whether that was steady), for a flood from time 0.

    Of the later two thirds of the time from the first completion to ``until_s``. Not steady: they still
    became more, or came for too short a time, so that the capacity is above it. None with fewer than 10.
    """
    ends = np.sort(np.asarray(ends_s, np.float64))
    ends = ends[ends <= until_s]
    if len(ends) < COMPLETIONS or until_s <= ends[0]:
        return None
    edges = np.linspace(float(ends[0]), until_s, 4)
    counts = np.histogram(ends, edges)[0]
    noise = 2.0 * math.sqrt(float(counts[2]) + 1.0)
    steady = until_s >= 2.0 * ends[0] and counts[2] - counts[1] <= max(noise, 0.1 * counts[1])
    return float(counts[1] + counts[2]) / (2.0 * float(edges[1] - edges[0])), bool(steady)
