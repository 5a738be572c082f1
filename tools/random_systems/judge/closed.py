"""A number of users on a drawn system, each of whom sends the next request when the last one has ended.

In work time, as queues.py: a server that is slow or pauses does the same in the same order, only later. For
servers in line or shared ones whose tokens take the same time in any company; not for batching, nor with
co-tenants.
"""

from __future__ import annotations

import heapq
import math

import numpy as np

from ..system import FloatArray, System


def can_close(system: System) -> bool:
    """Whether a closed loop on it can be simulated here."""
    return system.batch is None and not system.slope_s and not system.disturbances.tenants


def closed(system: System, users: int, work: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(arrived, first token, last token) of each request in seconds of work from the start on.

    ``work``: relative to a nominal request, in the order in which they are sent. The users begin spread over
    the latency of one request alone.
    """
    decode_s = (system.workload.output_len - 1) * system.token_s
    alone_s = system.prefill_s + decode_s
    users = min(users, len(work))
    coming = [alone_s * each / users for each in range(users)]
    needs = (work * system.prefill_s).tolist()
    loop = _in_line if system.discipline == "fifo" else _shared
    arrived, first = loop(system.servers, coming, needs, decode_s)
    return np.array(arrived), np.array(first), np.array(first) + decode_s


def _in_line(
    servers: int, coming: list[float], needs: list[float], decode_s: float
) -> tuple[list[float], list[float]]:
    free = [0.0] * servers
    arrived, first = [], []
    for need in needs:
        at = heapq.heappop(coming)
        done = max(at, free[0]) + need
        heapq.heapreplace(free, done)
        heapq.heappush(coming, done + decode_s)
        arrived.append(at)
        first.append(done)
    return arrived, first


def _shared(
    servers: int, coming: list[float], needs: list[float], decode_s: float
) -> tuple[list[float], list[float]]:
    arrived: list[float] = []
    first = [0.0] * len(needs)
    inside: list[tuple[float, int]] = []
    now = progress = 0.0
    while inside or len(arrived) < len(needs):
        pace = min(1.0, servers / len(inside)) if inside else 1.0
        comes = coming[0] if coming and len(arrived) < len(needs) else math.inf
        ends = now + (inside[0][0] - progress) / pace if inside else math.inf
        if ends <= comes:
            progress, place = heapq.heappop(inside)
            now = first[place] = max(ends, now)
            heapq.heappush(coming, now + decode_s)
            continue
        heapq.heappop(coming)
        progress += (comes - now) * pace if inside else 0.0
        now = comes
        heapq.heappush(inside, (progress + needs[len(arrived)], len(arrived)))
        arrived.append(now)
    return arrived, first
