"""Queues in work time: first come first served on parallel servers, and sharing of a speed by all.

Each takes arrivals (ascending), work, and ``gone`` (when a request leaves unserved if it is still there; inf
for never), and returns when the work of each is done; NaN for those that left.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

from .system import FloatArray


def fifo(servers: int, arrived: FloatArray, work: FloatArray, gone: FloatArray | None = None) -> FloatArray:
    """First come, first served; each of the servers works at speed 1."""
    if gone is None and servers == 1:
        # Lindley's recursion by its running maximum: done(n) = max over k ≤ n of arrived(k) + work(k … n).
        total = np.cumsum(work)
        return np.asarray(np.maximum.accumulate(arrived - (total - work)) + total)
    if gone is None and servers >= len(arrived):
        return arrived + work
    free = [-math.inf] * servers
    done = np.empty(len(arrived))
    replace = heapq.heapreplace
    if gone is None:
        for place, (at, needs) in enumerate(zip(arrived.tolist(), work.tolist(), strict=True)):
            soonest = free[0]
            end = (at if at > soonest else soonest) + needs
            done[place] = end
            replace(free, end)
        return done
    for place, (at, needs, leaves) in enumerate(
        zip(arrived.tolist(), work.tolist(), gone.tolist(), strict=True)
    ):
        start = max(at, free[0])
        end = start + needs
        done[place] = end if end <= leaves else math.nan
        if start < leaves:
            replace(free, min(end, leaves))
    return done


def shared(
    speed: Callable[[int], float], arrived: FloatArray, work: FloatArray, gone: FloatArray | None = None
) -> FloatArray:
    """All that are there progress at the same ``speed(how many)``: processor sharing, or a decode batch.

    One counter of progress serves all: who comes at counter v with work w is done at v + w.
    """
    count = len(arrived)
    done = np.full(count, math.nan)
    speeds = [0.0, speed(1)]
    heap: list[tuple[float, int]] = []
    left = [False] * count
    leaving = [] if gone is None else [each for each in np.argsort(gone) if math.isfinite(gone[each])]
    leaves_at = [float(gone[each]) for each in leaving] if gone is not None else []
    coming, needs = arrived.tolist(), work.tolist()
    push, pop = heapq.heappush, heapq.heappop
    next_in = next_out = present = 0
    now = coming[0] if count else 0.0
    progress = 0.0
    while True:
        while heap and left[heap[0][1]]:
            pop(heap)
        event = coming[next_in] if next_in < count else math.inf
        removal = leaves_at[next_out] if next_out < len(leaving) else math.inf
        until = event if event <= removal else removal
        if heap:
            pace = speeds[present]
            ends = now + (heap[0][0] - progress) / pace
            if ends <= until:
                progress, place = pop(heap)
                now = ends if ends > now else now
                done[place] = now
                left[place] = True
                present -= 1
                continue
            if until < math.inf:
                progress += (until - now) * pace
        elif until == math.inf:
            return done
        now = until
        if event <= removal:
            push(heap, (progress + needs[next_in], next_in))
            next_in += 1
            present += 1
            if present == len(speeds):
                speeds.append(speed(present))
        else:
            place = int(leaving[next_out])
            next_out += 1
            # Who is gone before he came has not come yet: he leaves as he comes.
            if place < next_in and not left[place]:
                left[place] = True
                present -= 1
