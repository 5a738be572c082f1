"""A trial's steady part: the window that figures are taken from, and what is open at each moment.

The window begins after the warm-up and ends with the last arrival. The warm-up is the first 10 % of the
arrivals, or one median end-to-end latency if that is longer, but never more than 30 % of the arrivals.
Fewer than 20 arrivals have no warm-up: there is nothing to spare. A request belongs to the window if it was
*scheduled* in it; a completion or a token counts for a rate if it *happened* in it. So the drain after the
last arrival, in which the load is no longer offered, distorts no rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbench.core.records import UNENDED, RequestRecord
from kvbench.core.stats import StepSeries

WARMUP_SHARE: Final = 0.10
WARMUP_SHARE_MAX: Final = 0.30
WARMUP_MIN_REQUESTS: Final = 20


@dataclass(frozen=True)
class Window:
    """The steady part of a trial, in seconds since its start; both ends belong to it."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return max(0.0, self.end_s - self.start_s)

    def has(self, time_s: float | None) -> bool:
        return time_s is not None and self.start_s <= time_s <= self.end_s


def ended_at(records: Sequence[RequestRecord], duration_s: float) -> float | None:
    """When the trial was stopped, if it was: its end, if any request had to be cancelled."""
    return duration_s if any(record.error == "cancelled" for record in records) else None


def steady_window(records: Sequence[RequestRecord], ended_s: float | None = None) -> Window:
    """The window after the warm-up and up to the last arrival, by the rule in the module's docstring."""
    arrivals = sorted(
        record.scheduled_s for record in records if ended_s is None or record.scheduled_s <= ended_s
    )
    if not arrivals:
        return Window(0.0, 0.0)
    n = len(arrivals)
    if n < WARMUP_MIN_REQUESTS:
        return Window(arrivals[0], arrivals[-1])
    latencies = [record.e2el_s for record in records if record.ok and record.e2el_s is not None]
    latency_s = float(np.median(latencies)) if latencies else 0.0
    by_count = arrivals[math.ceil(WARMUP_SHARE * n)]
    at_most = arrivals[math.floor(WARMUP_SHARE_MAX * n)]
    return Window(min(max(by_count, arrivals[0] + latency_s), at_most), arrivals[-1])


def judged_records(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """The requests that the verdict counts, in the order of their scheduled sends."""
    inside = (record for record in records if window.has(record.scheduled_s))
    return sorted(inside, key=lambda record: record.scheduled_s)


def waiting_series(records: Sequence[RequestRecord], ended_s: float | None = None) -> StepSeries:
    """Number of requests that wait for their first token, from their scheduled send on."""
    return _open_requests(records, ended_s, "first_token_s")


def in_flight_series(records: Sequence[RequestRecord], ended_s: float | None = None) -> StepSeries:
    """Number of requests between their scheduled send and their last token."""
    return _open_requests(records, ended_s, "last_token_s")


def _open_requests(records: Sequence[RequestRecord], ended_s: float | None, until: str) -> StepSeries:
    """What never reached ``until`` is open up to the last moment known of its trial if it timed out or was
    cancelled; a request that failed otherwise is taken to have failed at once.
    """
    known = [time for r in records for time in (r.sent_s, r.last_token_s) if time is not None]
    last_s = ended_s if ended_s is not None else max(known, default=0.0)
    starts, ends = [], []
    for record in records:
        end = getattr(record, until)
        if end is None:
            end = last_s if record.error in UNENDED else record.sent_s
        if end is not None and end > record.scheduled_s:
            starts.append(record.scheduled_s)
            ends.append(end)
    return StepSeries.of_intervals(starts, ends)
