"""A ceiling probe: what comes out of a system at most, asked without burying it.

The load climbs from what hardly burdens a server that takes one request at a time to what hundreds of places
could hold, doubling again and again, and ends as soon as completions no longer follow. So the work that it
leaves behind is a few times what the system has under way when it is full, whatever the system: some servers
go on with requests that the client has dropped, and a flood at one high rate keeps them busy for minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.arrivals import planned_offsets
from kvbench.core.searchdata import Measured

FloatArray = npt.NDArray[np.float64]

LATENCIES: Final = 8.0
SHORTEST_S: Final = 2.0
"""A ceiling probe lasts for so many latencies of one request alone, and for so many seconds at least."""
DOUBLINGS: Final = 8
CLIMB: Final = 6 / 8
"""So often its rate doubles, during this share of its time; then it stays."""
REQUESTS_MOST: Final = 1600
COMPLETED_LEAST: Final = 3
COMPLETED_SURE: Final = 10
"""Completions before a rate is told, and before it is believed to be a ceiling."""
OVERDUE_LATENCIES: Final = 1.5
OVERDUE_SHARE: Final = 0.5
OVERDUE_LEAST: Final = 3.0
"""A request that is under way for so many latencies is overdue. It is a ceiling if more are overdue than this
share of what is under way at the rate of completions, and more than chance puts there."""
BURIED_SHARE: Final = 3.0
BURIED_LEAST: Final = 8.0
"""With so many overdue the probe ends, told or not."""
SILENT_LATENCIES: Final = 3.0
"""Without any completion for so long, one request alone takes longer than was thought."""


def ceiling_length_s(latency_s: float) -> float:
    """For how long a ceiling probe is offered at most; ``latency_s``: of one request alone, 0 if unknown."""
    return max(SHORTEST_S, LATENCIES * latency_s)


def ceiling_offsets(top_rate: float, latency_s: float, burstiness: float, seed: int) -> FloatArray:
    """Planned sends in seconds, ascending, up to ``top_rate`` requests a second.

    Raises InputError for impossible values.
    """
    length_s = ceiling_length_s(latency_s)
    climb_s, each_s = CLIMB * length_s, CLIMB * length_s / DOUBLINGS
    lowest = top_rate / 2**DOUBLINGS
    # Λ(t) = lowest × each / ln 2 × (2 ** (t / each) − 1) requests until t on the climb; arrivals at rate 1
    # become such ones by its inverse.
    scale = lowest * each_s / math.log(2)
    at_top = scale * (2**DOUBLINGS - 1)
    n = max(1, min(REQUESTS_MOST, round(at_top + top_rate * (length_s - climb_s))))
    even = planned_offsets(1.0, n, burstiness, seed)
    climbing = each_s * np.log2(1 + np.minimum(even, at_top) / scale)
    return np.asarray(climbing + np.maximum(even - at_top, 0.0) / top_rate, np.float64)


def completion_rate(ends_s: FloatArray, until_s: float) -> tuple[float, bool] | None:
    """(completions per second, whether they have stopped rising), over the later part of the time since the
    first completion. None with fewer than 3.
    """
    ends = np.sort(ends_s)
    if len(ends) < COMPLETED_LEAST or until_s <= ends[0]:
        return None
    first_s, last_s = float(ends[0]), float(ends[-1])
    if len(ends) < COMPLETED_SURE:
        return ((len(ends) - 1) / (last_s - first_s), True) if last_s > first_s else None
    start_s = min(until_s - (until_s - first_s) / 3, float(ends[-COMPLETED_SURE]))
    later = ends[ends >= start_s]
    before = int((later < (start_s + until_s) / 2).sum())
    after = len(later) - before
    steady = after - before <= max(2.0 * math.sqrt(after + 1.0), 0.1 * before)
    return len(later) / (until_s - start_s), bool(steady)


def ceiling_measured(
    ends_s: Sequence[float] | FloatArray,
    sent_s: Sequence[float] | FloatArray,
    until_s: float,
    latency_s: float,
) -> Measured:
    """What a ceiling probe tells the search at ``until_s``: of requests sent at ``sent_s``, those that were
    completed, at ``ends_s``. ``latency_s``: of one request alone.

    It is no ceiling (``grows``) while completions still become more, while no more are overdue than must be
    (then the rate is at least what was sent when those were that are not), or with fewer than 10 of them.
    """
    ends = np.asarray(ends_s, np.float64)
    ends = ends[ends <= until_s]
    found = completion_rate(ends, until_s)
    if found is None:
        return Measured(duration_s=until_s)
    rate, steady = found
    latency_s = _corrected(ends, sent_s, latency_s)
    least = max(OVERDUE_LEAST, OVERDUE_SHARE * rate * latency_s)
    flooded = _overdue(ends, sent_s, until_s, latency_s) > least
    if not flooded:
        rate = max(rate, _followed(sent_s, until_s, latency_s))
    sure = len(ends) >= COMPLETED_SURE
    return Measured(completion_rate=rate, grows=not (steady and flooded and sure), duration_s=until_s)


def _followed(sent_s: Sequence[float] | FloatArray, until_s: float, latency_s: float) -> float:
    """Sends per second over half a latency before those that cannot be overdue yet: what was carried."""
    due_s, span_s = until_s - OVERDUE_LATENCIES * latency_s, latency_s / 2
    sent = np.asarray(sent_s, np.float64)
    n = int(((sent > due_s - span_s) & (sent <= due_s)).sum())
    return n / span_s if n >= COMPLETED_SURE else 0.0


def is_over(ends_s: FloatArray, sent_s: FloatArray, now_s: float, latency_s: float) -> bool:
    """Whether a ceiling probe has nothing more to find out, or must not go on."""
    measured = ceiling_measured(ends_s, sent_s, now_s, latency_s)
    rate = measured.completion_rate
    if rate is None or not measured.grows:
        silent = not len(ends_s) and 0 < SILENT_LATENCIES * latency_s < now_s
        return rate is not None or (silent and len(sent_s) > BURIED_LEAST)
    latency_s = _corrected(ends_s, sent_s, latency_s)
    return _overdue(ends_s, sent_s, now_s, latency_s) > max(BURIED_LEAST, BURIED_SHARE * rate * latency_s)


def _corrected(ends_s: FloatArray, sent_s: Sequence[float] | FloatArray, latency_s: float) -> float:
    """The latency of one request alone: the first one's, if that took longer."""
    first_s = float(np.min(ends_s)) - float(sent_s[0]) if len(ends_s) and len(sent_s) else 0.0
    return max(latency_s, first_s)


def _overdue(
    ends_s: FloatArray, sent_s: Sequence[float] | FloatArray, now_s: float, latency_s: float
) -> float:
    """How many should have been completed by now, and were not."""
    due = np.searchsorted(np.asarray(sent_s, np.float64), now_s - OVERDUE_LATENCIES * latency_s, side="right")
    return float(due - len(ends_s))
