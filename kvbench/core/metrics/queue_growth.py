"""Does the queue for the first token grow? Computed during a trial, and from its records afterwards. Pure.

An idle system holds rate × latency requests that wait for their first token, and their number rises until it
reaches that. So the time in which waiting builds up is left out (twice the wait of the first eighth), and
only requests that have waited longer than the first ones count. Two questions:

1. **Does their number grow?** Its slope, minus the part that clustered arrivals explain, must be
   *significant* (above 4 standard errors of the fit, and above 2 or 3 of a random walk of such arrivals), add
   at least half to the number that wait, and be *material* (in ten minutes it adds more waiting than the TTFT
   limit).
2. **Does the offered rate exceed the completion rate?** While most of them have waited longer than the first
   ones for two latencies, the queue is never empty: the rate of first tokens *is* the capacity.

If a quarter of the later requests is as fast as the first ones, the queue does not count as growing, since
widely varying latencies look like growth. PERF in the docstrings of constants means results of whole searches
on virtual systems (``python -m tools.perf_search --first-seed 400 --seeds 30 --methods kvbench``). GATE means
``grows`` in tests/core/gates/test_queue_growth.py on those systems with 8 seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.metrics.metrics import ended_at, waiting_series
from kvbench.core.records import UNENDED, RequestRecord
from kvbench.core.stats import StepSeries, trend

FloatArray = npt.NDArray[np.float64]

ERRORS: Final = 4.0
"""Threshold in standard errors of the fit. These are too small for a fluctuating queue, where WALKS decides.
With a threshold of 2, with ADDED 0, or with FILL 1, PERF (12 seeds of jitter, md1, slots, bursty) gives the
same rates."""
WALKS: Final = 2.0
"""Threshold for a finished trial, in standard deviations of a random walk's slope. GATE: no alarm in 408
trials at 0.8, 0.9 and 0.97 of the true rate; at 1.15 of it 56 % are detected in trials of ten latencies, 29 %
in four. A threshold of 3 would miss a TTFT that grows by half of the gaps between 100 requests
(tests/core/gates/test_gates.py)."""
WALKS_AT_EACH_LOOK: Final = 3.0
"""Threshold for a running trial, higher because it is tested repeatedly. With 2, PERF has 93 % of the rates
of jitter within 5 %, with 3 97 %; the other systems are not affected."""
HORIZON_S: Final = 600.0
"""Ten minutes: by convention a rate held that long is sustained."""
ADDED: Final = 0.5
"""Least growth relative to the initial queue: latencies that vary look like slow growth."""
EARLY: Final = 8
"""The first 1/8 of a trial is the baseline wait."""
FILL: Final = 2.0
"""Build-up time in multiples of the baseline wait: longer latencies are still to come."""
SPAN_LEAST: Final = 0.2
"""Least remaining share of the time for a slope."""
QUEUED: Final = 0.5
"""The queue counts as non-empty while more than this share has waited longer than the baseline."""
FAST_LEAST: Final = 10
"""Fewest later requests for the comparison with the baseline."""
FAST_SHARE: Final = 0.25
"""Share of later requests as fast as the baseline from which latencies merely vary."""
CAPACITY_REQUESTS: Final = 40
"""Fewest completions while the queue is never empty, to measure the capacity."""
CAPACITY_LATENCIES: Final = 2.0
"""Shortest such time, in latencies."""
CAPACITY_ERRORS: Final = 3.0
"""Standard errors by which the capacity must be below the offered rate."""
CAPACITY_SECTIONS: Final = 8
"""Sections of that part. GATE finds 9 % at 1.05 of the rate in ten latencies."""
SAMPLES: Final = 4000
"""Number of times at which a finished trial's queue is read. With 400 the first requests' waits are too
coarse: GATE then detects 4.4 % instead of 5.2 % of the trials of four latencies that met the SLO above the
true rate."""


@dataclass(frozen=True)
class QueueGrowth:
    """Growth of a queue in requests per second, its standard error, and what chance alone shows.
    ``capacity``: first tokens per second, if growth was measured by them; else it is a slope."""

    per_s: float
    error: float
    by_chance: float
    capacity: float | None = None


@dataclass(frozen=True)
class QueueReadings:
    """Readings of a trial's queue; times in seconds since its start.

    ``rate``: requests per second offered. ``idle_latency_s``: end-to-end latency of one request alone, 0 if
    unknown; ``latency_s``: the median in this trial. ``ttft_limit_s``: 0 if TTFT is not limited.
    ``dispersion``: squared variation of the gaps between arrivals, at least 1. By request: ``offsets_s``, the
    planned sends in order; ``settled_s``, when its outcome was known, nan before; ``ttft_s``, nan if unknown.
    By time: ``waiting``, requests without a first token; ``firsts``, first tokens. ``unbroken``: the trial is
    young and exceeds no criterion, so only certain statements are allowed."""

    rate: float
    idle_latency_s: float
    latency_s: float
    ttft_limit_s: float
    dispersion: float
    offsets_s: FloatArray
    settled_s: FloatArray
    ttft_s: FloatArray
    times_s: FloatArray
    waiting: FloatArray
    firsts: FloatArray
    unbroken: bool = False

    @classmethod
    def of_records(
        cls,
        records: Sequence[RequestRecord],
        end_s: float,
        duration_s: float,
        *,
        rate: float,
        latency_s: float,
        ttft_limit_s: float,
    ) -> QueueReadings | None:
        """Return the readings while load was offered, up to ``end_s``; None without load. ``duration_s``:
        trial's start to end, drain included."""
        offered = [record for record in records if record.scheduled_s <= end_s]
        offered.sort(key=lambda record: record.scheduled_s)
        if len(offered) < 2 or end_s <= 0 or rate <= 0:
            return None
        stopped_s = ended_at(records, duration_s)
        offsets = np.array([record.scheduled_s for record in offered])
        open_s = duration_s if stopped_s is None else stopped_s
        settled = [
            record.last_token_s or record.first_token_s or (open_s if record.error in UNENDED else math.nan)
            for record in offered
        ]
        times = np.asarray(np.linspace(0.0, end_s, SAMPLES + 1)[1:], np.float64)
        waiting = waiting_series(offered, stopped_s).sampled(times)
        return cls(
            rate=rate,
            idle_latency_s=0.0,
            latency_s=latency_s,
            ttft_limit_s=ttft_limit_s,
            dispersion=dispersion(offsets),
            offsets_s=offsets,
            settled_s=np.array(settled),
            ttft_s=np.array([math.nan if record.ttft_s is None else record.ttft_s for record in offered]),
            times_s=times,
            waiting=waiting,
            firsts=np.searchsorted(offsets, times, side="right") - waiting,
        )

    def since(self, begin_s: float) -> QueueReadings:
        """Return the readings as if the load had begun at ``begin_s``: for sessions, whose turns increase
        until the first ones end."""
        sent, seen = self.offsets_s >= begin_s, self.times_s > begin_s
        if not sent.any() or int(seen.sum()) < 2:
            return self
        before = int(np.searchsorted(self.offsets_s, begin_s))
        return replace(
            self,
            offsets_s=self.offsets_s[sent] - begin_s,
            settled_s=self.settled_s[sent] - begin_s,
            ttft_s=self.ttft_s[sent],
            times_s=self.times_s[seen] - begin_s,
            waiting=self.waiting[seen],
            firsts=np.maximum.accumulate(np.maximum(self.firsts[seen] - before, 0.0)),
        )

    @property
    def now_s(self) -> float:
        return float(self.times_s[-1])

    @cached_property
    def early_s(self) -> FloatArray | None:
        """Wait of the first requests for their first tokens, in seconds; None while one still waits, within
        the time of one request alone. First tokens are only counted, so the k-th one is taken as the k-th
        arrival's."""
        early = max(1, int(np.searchsorted(self.offsets_s, self.now_s / EARLY)))
        firsts = np.maximum.accumulate(self.firsts)
        if firsts[-1] < early:
            known = 0 < FILL * self.idle_latency_s < self.now_s
            return np.array([self.idle_latency_s]) if known else None
        came = np.searchsorted(firsts, np.arange(1, early + 1))
        return np.asarray(self.times_s[came] - self.offsets_s[:early], np.float64)

    @cached_property
    def filled_s(self) -> float:
        """Return when the initial waiting has built up; inf if unknown."""
        if self.early_s is None:
            return math.inf
        return FILL * min(float(self.early_s.max()), self.idle_latency_s or math.inf)

    @cached_property
    def queued(self) -> FloatArray:
        """Return how many requests have waited longer than the baseline, at each time."""
        usual_s = 0.0 if self.early_s is None else float(np.median(self.early_s))
        due = np.searchsorted(self.offsets_s, self.times_s - usual_s, side="right")
        return np.asarray(due - self.firsts, np.float64)

    def may_be_slow_alone(self, since_s: float) -> bool:
        """Return whether later arrivals show, or may still show, merely varying latencies."""
        begin = int(np.searchsorted(self.offsets_s, since_s))
        settled, ttft = self.settled_s[begin:], self.ttft_s[begin:]
        known = ~np.isnan(settled)
        if self.early_s is None or int(known.sum()) < FAST_LEAST:
            return self.unbroken
        # A request of which only its lateness is known has waited until that was known.
        later = np.where(np.isnan(ttft), settled - self.offsets_s[begin:], ttft)[known]
        return bool(np.quantile(later, FAST_SHARE) <= self.early_s.max())

    def material(self, per_s: float) -> bool:
        """Return whether this growth breaks the TTFT limit within the horizon."""
        return per_s * HORIZON_S / self.rate > self.ttft_limit_s

    def by_chance(self, span_s: float) -> float:
        """Return the standard deviation of a random walk's slope with these arrivals."""
        return math.sqrt(1.2 * self.dispersion * self.rate / span_s)


def dispersion(offsets_s: FloatArray) -> float:
    """Squared coefficient of variation of the gaps between arrivals, at least 1 (Poisson's)."""
    gaps = np.diff(offsets_s, prepend=0.0)
    mean = float(gaps.mean())
    return max(1.0, float(gaps.var()) / mean**2 if mean > 0 else 1.0)


def queue_growth(readings: QueueReadings, *, walks: float = WALKS) -> QueueGrowth | None:
    """Return the growth of the queue, or None if nothing shows any. ``walks``: threshold,
    ``WALKS_AT_EACH_LOOK`` for repeated tests while the trial runs."""
    if readings.early_s is None or readings.now_s < FILL * readings.idle_latency_s:
        return None
    if (slope := _slope(readings, walks)) is not None:
        return slope
    found = capacity_of(readings)
    if found is None:
        return None
    (capacity, error, _), per_s = found, readings.rate - found[0]
    if readings.rate <= capacity + CAPACITY_ERRORS * error or not readings.material(per_s):
        return None
    return QueueGrowth(per_s, error, readings.by_chance(readings.now_s), capacity)


def _slope(readings: QueueReadings, walks: float) -> QueueGrowth | None:
    """Return a significant and material slope of the queue."""
    start_s = max(readings.now_s / 3, readings.filled_s)
    span = readings.now_s - start_s
    if span < SPAN_LEAST * readings.now_s or readings.may_be_slow_alone(start_s):
        return None
    slope = trend(StepSeries(readings.times_s, readings.queued), start_s, readings.now_s)
    if slope is None:
        return None
    by_chance = readings.by_chance(span)
    needed = max(ERRORS * slope.error, walks * by_chance)
    # Subtract clusters of arrivals: count as if requests had arrived evenly.
    came = np.searchsorted(readings.offsets_s, [start_s, readings.now_s])
    even = slope.per_s - max(0.0, float(came[1] - came[0]) / span - readings.rate)
    waiting = StepSeries(readings.times_s, readings.waiting)
    middle = float(waiting.block_means(start_s, readings.now_s, 1)[0])
    adds = slope.per_s * span >= ADDED * (middle - slope.per_s * span / 2)
    if even <= needed or not adds or not readings.material(slope.per_s):
        return None
    return QueueGrowth(slope.per_s, slope.error, by_chance)


def capacity_of(readings: QueueReadings) -> tuple[float, float, float] | None:
    """Return (first tokens/s, standard error, count) of the latest stretch with a queue."""
    times, queued, firsts = readings.times_s, readings.queued, readings.firsts
    floor = np.maximum(max(6.0, 0.25 * float(queued.max(initial=0.0))), QUEUED * readings.waiting)
    low = np.flatnonzero((queued < floor) | (times < readings.filled_s))
    start = int(low[-1]) + 1 if len(low) else 0
    if start >= len(times) - 2 * CAPACITY_SECTIONS:
        return None
    since_s, length_s = float(times[start]), readings.now_s - float(times[start])
    edges = np.linspace(since_s, readings.now_s, CAPACITY_SECTIONS + 1)
    counts = np.diff(np.interp(edges, times[start:], firsts[start:]))
    if length_s < CAPACITY_LATENCIES * readings.latency_s or counts.sum() < CAPACITY_REQUESTS:
        return None
    if readings.may_be_slow_alone(since_s):
        return None
    per_s = counts / (edges[1] - edges[0])
    # Counts are integers: sections of a deterministic server differ by one.
    error = max(float(per_s.std(ddof=1)) / math.sqrt(len(counts)), 1.0 / length_s)
    return float(per_s.mean()), error, float(counts.sum())
