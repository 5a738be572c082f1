"""Does the queue for the first token grow? By what a load generator counts while a trial runs.

Waiting alone is no queue: an idle system holds rate × latency requests that wait for their first token, and
until it does, their number climbs like that of a queue which grows. So the time in which waiting builds up is
left out (twice what the first eighth of the requests waited), and of those that wait, only those count which
have waited longer than the first ones did. Two questions:

1. **Do they become more?** Their number must show a slope, less what a mere cluster of arrivals explains,
   that is *significant* (above 4 standard errors of the fit, and above 3 of the slope that a random walk of
   such arrivals shows by chance: a queue at its capacity wanders like one), that adds at least half to all
   that wait, and that is *material* (in ten minutes it adds more waiting than the TTFT limit). The number in
   flight is no guide: it is correlated over a whole latency.
2. **Is more offered than comes out?** While most of those that wait have waited longer than the first ones,
   for two latencies, the queue is never empty: there the rate of first tokens *is* the capacity, known far
   better than a slope.

A queue that grows delays all later requests. Where a quarter of them is as fast as the first ones, neither is
said: latencies that vary widely, with nobody waiting for anybody, look like growth until the slowest come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.stats import StepSeries, trend

FloatArray = npt.NDArray[np.float64]

ERRORS: Final = 4.0
WALKS: Final = 3.0
HORIZON_S: Final = 600.0
ADDED: Final = 0.5
"""Growth adds at least so much to what waited at the beginning. A system without a queue whose latencies vary
widely fills for a long time after most of its requests are answered, but ever slower."""
EARLY: Final = 8
"""The first so-manyth part of a trial tells how long requests wait where hardly anybody waits before them."""
FILL: Final = 2.0
"""Waiting has built up after so many times what the first requests waited: those whose latency is longer than
average are still to come."""
SPAN_LEAST: Final = 0.2
"""The share of the time so far that must be left for a slope."""
QUEUED: Final = 0.5
"""The queue is not empty while more than this share of those that wait have waited longer than the first."""
FAST_LEAST: Final = 10
FAST_SHARE: Final = 0.25
"""Of so many later requests at least, less than this share must be as fast as the first ones."""
CAPACITY_REQUESTS: Final = 40
CAPACITY_SECTIONS: Final = 8


@dataclass(frozen=True)
class Seen:
    """What is known of a trial so far; times in seconds since its start.

    ``rate``: requests per second offered. ``alone_s``: end-to-end latency of one request alone, 0 if unknown;
    ``latency_s``: the median in this trial. ``ttft_limit_s``: 0 if TTFT is not limited. ``clumping``: squared
    variation of the gaps between arrivals, at least 1. By request: ``offsets_s``, the planned sends in order;
    ``settled_s``, when its outcome was known, nan before; ``ttft_s``, nan where unknown. By the times when
    the generator told: ``waiting``, requests without a first token; ``firsts``, first tokens so far.
    ``unbroken``: it is early, and no criterion was broken yet, so that only what is sure may be said.
    """

    rate: float
    alone_s: float
    latency_s: float
    ttft_limit_s: float
    clumping: float
    offsets_s: FloatArray
    settled_s: FloatArray
    ttft_s: FloatArray
    times_s: FloatArray
    waiting: FloatArray
    firsts: FloatArray
    unbroken: bool

    @property
    def now_s(self) -> float:
        return float(self.times_s[-1])

    @cached_property
    def early_s(self) -> FloatArray | None:
        """How long the first requests waited for their first tokens; None while one of them still does, but
        not for longer than one alone may have to.

        First tokens are counted, not told apart, so the k-th one is taken to be the k-th arrival's.
        """
        early = max(1, int(np.searchsorted(self.offsets_s, self.now_s / EARLY)))
        firsts = np.maximum.accumulate(self.firsts)
        if firsts[-1] < early:
            return np.array([self.alone_s]) if 0 < FILL * self.alone_s < self.now_s else None
        came = np.searchsorted(firsts, np.arange(1, early + 1))
        return np.asarray(self.times_s[came] - self.offsets_s[:early], np.float64)

    @cached_property
    def filled_s(self) -> float:
        """When all waiting has built up that is no queue; inf while that is not known."""
        if self.early_s is None:
            return math.inf
        return FILL * min(float(self.early_s.max()), self.alone_s or math.inf)

    @cached_property
    def queued(self) -> FloatArray:
        """At each time, how many have waited for longer than the first requests did."""
        usual_s = 0.0 if self.early_s is None else float(np.median(self.early_s))
        due = np.searchsorted(self.offsets_s, self.times_s - usual_s, side="right")
        return np.asarray(due - self.firsts, np.float64)

    def may_be_slow_alone(self, since_s: float) -> bool:
        """Whether later arrivals tell, or could not tell yet, of latencies that merely vary."""
        begin = int(np.searchsorted(self.offsets_s, since_s))
        settled, ttft = self.settled_s[begin:], self.ttft_s[begin:]
        known = ~np.isnan(settled)
        if self.early_s is None or int(known.sum()) < FAST_LEAST:
            return self.unbroken
        # A request that is known to be late, and no more, has waited until that was known.
        later = np.where(np.isnan(ttft), settled - self.offsets_s[begin:], ttft)[known]
        return bool(np.quantile(later, FAST_SHARE) <= self.early_s.max())

    def material(self, per_s: float) -> bool:
        """Whether a queue that grows by so many requests a second will break the TTFT limit."""
        return per_s * HORIZON_S / self.rate > self.ttft_limit_s


def why_it_grows(seen: Seen) -> str:
    """In words; empty where nothing says that the queue grows."""
    if seen.early_s is None:
        return ""
    growth = _slope(seen)
    if growth is not None:
        return f"the queue grows by {growth:.3g} requests a second of {seen.rate:.3g} offered"
    found = capacity_of(seen)
    if found is not None and seen.rate > found[0] + 3.0 * found[1] and seen.material(seen.rate - found[0]):
        return f"{found[0]:.4g} first tokens a second from a queue never empty, {seen.rate:.4g}/s offered"
    return ""


def _slope(seen: Seen) -> float | None:
    """By how many requests a second the queue grows, where that is significant and material."""
    start_s = max(seen.now_s / 3, seen.filled_s)
    rate, span = seen.rate, seen.now_s - start_s
    if span < SPAN_LEAST * seen.now_s or seen.may_be_slow_alone(start_s):
        return None
    slope = trend(StepSeries(seen.times_s, seen.queued), start_s, seen.now_s)
    if slope is None:
        return None
    by_chance = math.sqrt(1.2 * seen.clumping * rate / span)
    needed = max(ERRORS * slope.error, WALKS * by_chance)
    # Without what is merely a cluster of arrivals: as if they had come evenly.
    came = np.searchsorted(seen.offsets_s, [start_s, seen.now_s])
    even = slope.per_s - max(0.0, float(came[1] - came[0]) / span - rate)
    middle = float(StepSeries(seen.times_s, seen.waiting).block_means(start_s, seen.now_s, 1)[0])
    adds = slope.per_s * span >= ADDED * (middle - slope.per_s * span / 2)
    return slope.per_s if even > needed and adds and seen.material(slope.per_s) else None


def capacity_of(seen: Seen) -> tuple[float, float] | None:
    """(first tokens per second, standard error) over the latest stretch with a queue never empty."""
    times, queued = seen.times_s, seen.queued
    floor = np.maximum(max(6.0, 0.25 * float(queued.max(initial=0.0))), QUEUED * seen.waiting)
    low = np.flatnonzero((queued < floor) | (times < seen.filled_s))
    start = int(low[-1]) + 1 if len(low) else 0
    if start >= len(times) - 2 * CAPACITY_SECTIONS:
        return None
    since_s, length_s = float(times[start]), seen.now_s - float(times[start])
    edges = np.linspace(since_s, seen.now_s, CAPACITY_SECTIONS + 1)
    counts = np.diff(np.interp(edges, times[start:], seen.firsts[start:]))
    if length_s < 2.0 * seen.latency_s or counts.sum() < CAPACITY_REQUESTS or seen.may_be_slow_alone(since_s):
        return None
    per_s = counts / (edges[1] - edges[0])
    # A count is whole: a deterministic server's sections differ by one.
    error = max(float(per_s.std(ddof=1)) / math.sqrt(len(counts)), 1.0 / length_s)
    return float(per_s.mean()), error
