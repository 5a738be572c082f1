"""Queues played forwards (work to departures) and backwards (departures to work).

Arrays are float64 in order of arrival, in seconds; NaN is an unknown departure. The compiled module computes
the same sums in the same order as Python, which is about fifty times slower.
"""

from __future__ import annotations

import heapq
import math
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
NEVER: Final = 1e18

try:
    _queues: Any = import_module("kvbench.core.search.replay._queues")
except ImportError:
    _queues = None

COMPILED: Final = _queues is not None


def doubles(values: npt.ArrayLike) -> FloatArray:
    return np.ascontiguousarray(values, np.float64)


def fifo(arrived_s: FloatArray, work_s: FloatArray, servers: int, *, compiled: bool = COMPILED) -> FloatArray:
    """Return departures from ``servers`` that take the requests in order of arrival."""
    arrived_s, work_s = doubles(arrived_s), doubles(work_s)
    departed_s = np.empty(len(arrived_s))
    if compiled:
        _queues.fifo(arrived_s, work_s, servers, departed_s)
        return departed_s
    free = [-NEVER] * servers
    for index, (arrival, work) in enumerate(zip(arrived_s.tolist(), work_s.tolist(), strict=True)):
        departed = max(arrival, free[0]) + work
        heapq.heapreplace(free, departed)
        departed_s[index] = departed
    return departed_s


def fifo_work(
    arrived_s: FloatArray, departed_s: FloatArray, servers: int, *, compiled: bool = COMPILED
) -> FloatArray:
    """Return the work that explains departures from ``servers`` in order of arrival; NaN if unknown."""
    arrived_s, departed_s = doubles(arrived_s), doubles(departed_s)
    work_s = np.empty(len(arrived_s))
    if compiled:
        _queues.fifo_work(arrived_s, departed_s, servers, work_s)
        return work_s
    free = [-NEVER] * servers
    for index, (arrival, departed) in enumerate(zip(arrived_s.tolist(), departed_s.tolist(), strict=True)):
        until = NEVER if math.isnan(departed) else departed
        unknown = until >= NEVER or free[0] >= NEVER
        work_s[index] = math.nan if unknown else until - max(arrival, free[0])
        heapq.heapreplace(free, until)
    return work_s


def shared(
    arrived_s: FloatArray,
    work: FloatArray,
    servers: float,
    alone: float = 1.0,
    each: float = 0.0,
    *,
    compiled: bool = COMPILED,
) -> FloatArray:
    """Return departures if all requests that are present advance at the same speed. Each of ``present``
    advances by 1 / (alone + each × (present − 1)) a second, times ``servers / present`` if they outnumber the
    servers."""
    arrived_s, work = doubles(arrived_s), doubles(work)
    departed_s = np.empty(len(arrived_s))
    if compiled:
        _queues.shared(arrived_s, work, servers, alone, each, departed_s)
        return departed_s
    heap: list[tuple[float, int]] = []
    arrivals, works = arrived_s.tolist(), work.tolist()
    upcoming, now, clock = 0, 0.0, 0.0
    while upcoming < len(arrivals) or heap:
        speed = 1.0
        if heap:
            speed = 1.0 / (alone + each * (len(heap) - 1))
            if len(heap) > servers:
                speed *= servers / len(heap)
        ends = now + (heap[0][0] - clock) / speed if heap else NEVER
        if upcoming < len(arrivals) and arrivals[upcoming] <= ends:
            if heap:
                clock += (arrivals[upcoming] - now) * speed
            now = arrivals[upcoming]
            heapq.heappush(heap, (clock + works[upcoming], upcoming))
            upcoming += 1
        else:
            clock, index = heapq.heappop(heap)
            now = departed_s[index] = ends
    return departed_s


def engine(
    arrived_s: FloatArray,
    prefill_s: FloatArray,
    tokens: FloatArray,
    alone: float,
    each: float,
    slots: int,
    *,
    compiled: bool = COMPILED,
) -> tuple[FloatArray, FloatArray]:
    """Return first and last tokens of one engine that computes prompts before it decodes. Prompts are
    computed one after another, and decoding pauses meanwhile; each of ``present`` decoding requests gets a
    token in ``alone + each × (present − 1)`` seconds. At most ``slots`` are present at once."""
    arrived_s, prefill_s, tokens = doubles(arrived_s), doubles(prefill_s), doubles(tokens)
    first_s, last_s = np.empty(len(arrived_s)), np.empty(len(arrived_s))
    if compiled:
        _queues.engine(arrived_s, prefill_s, tokens, alone, each, slots, first_s, last_s)
        return first_s, last_s
    heap: list[tuple[float, int]] = []
    arrivals, prefills, lengths = arrived_s.tolist(), prefill_s.tolist(), tokens.tolist()
    upcoming, now, clock = 0, 0.0, 0.0
    while upcoming < len(arrivals) or heap:
        if upcoming < len(arrivals) and arrivals[upcoming] <= now and len(heap) < slots:
            now += prefills[upcoming]
            first_s[upcoming] = now
            heapq.heappush(heap, (clock + lengths[upcoming], upcoming))
            upcoming += 1
            continue
        step = alone + each * (len(heap) - 1)
        ends = now + (heap[0][0] - clock) * step if heap else NEVER
        if upcoming < len(arrivals) and len(heap) < slots and arrivals[upcoming] <= ends:
            if heap:
                clock += (arrivals[upcoming] - now) / step
            now = arrivals[upcoming]
        else:
            clock, index = heapq.heappop(heap)
            now = last_s[index] = ends
    return first_s, last_s


def steps(
    arrived_s: FloatArray,
    tokens: FloatArray,
    alone: float,
    each: float,
    prefill: float,
    prompts: float,
    slots: float = math.inf,
    engine: FloatArray | None = None,
    *,
    compiled: bool = COMPILED,
) -> tuple[FloatArray, FloatArray]:
    """Return first and last tokens of engines that work in steps, as continuous batching does.

    A step computes at most ``prompts`` waiting prompts (or a part of one), gives each decoding request a
    token, and lasts ``alone + each × (decoding requests) + prefill × (prompts computed)``. The step that ends
    a prompt gives its first token. At most ``slots`` requests are present at once. ``engine``: number of the
    engine of each request, from 0; None is one engine.
    """
    arrived_s, tokens = doubles(arrived_s), doubles(tokens)
    first_s, last_s = np.empty(len(arrived_s)), np.empty(len(arrived_s))
    if compiled:
        engines = 1 if engine is None else int(engine.max(initial=0)) + 1
        numbers = arrived_s if engine is None else doubles(engine)
        _queues.steps(
            *(arrived_s, tokens, numbers, engines, alone, each, prefill, prompts, slots, first_s, last_s)
        )
        return first_s, last_s
    for number in (0.0,) if engine is None else np.unique(engine):
        rows = slice(None) if engine is None else engine == number
        first_s[rows], last_s[rows] = _steps(
            arrived_s[rows].tolist(), tokens[rows].tolist(), alone, each, prefill, prompts, slots
        )
    return first_s, last_s


def _steps(
    arrivals: list[float],
    lengths: list[float],
    alone: float,
    each: float,
    prefill: float,
    prompts: float,
    slots: float,
) -> tuple[list[float], list[float]]:
    first_s, last_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    heap: list[tuple[float, int]] = []
    count = len(arrivals)
    upcoming, taken, now, clock, left = 0, 0, 0.0, 0.0, 0.0
    while upcoming < count or heap:
        if not heap and taken == upcoming and arrivals[upcoming] > now:
            now = arrivals[upcoming]
        budget, computed, ended = prompts, 0.0, upcoming
        while budget > 1e-9:
            if taken == ended:
                if taken == count or arrivals[taken] > now or len(heap) + taken - upcoming >= slots:
                    break
                left = 1.0
                taken += 1
            part = min(left, budget)
            left -= part
            budget -= part
            computed += part
            if left > 1e-9:
                break
            ended += 1
        if computed > 0.0:
            now += alone + each * len(heap) + prefill * computed
            clock += 1.0
        else:  # nothing changes until a request arrives or ends: many steps at once
            step, many = alone + each * len(heap), heap[0][0] - clock
            if upcoming < count and len(heap) < slots:
                many = min(many, (arrivals[upcoming] - now) / step)
            many = max(1.0, math.ceil(many))
            clock, now = clock + many, now + many * step
        while heap and heap[0][0] <= clock:
            last_s[heapq.heappop(heap)[1]] = now
        for index in range(upcoming, ended):
            first_s[index] = last_s[index] = now
            if lengths[index] > 0.0:
                heapq.heappush(heap, (clock + lengths[index], index))
        upcoming = ended
    return first_s, last_s


def shared_work(
    arrived_s: FloatArray, departed_s: FloatArray, servers: float
) -> tuple[FloatArray, FloatArray]:
    """Return the work that explains departures of requests that share ``servers`` evenly, and the log speed
    at each departure; NaN if unknown."""
    seen = departed_s[~np.isnan(departed_s)]
    times = np.concatenate([arrived_s, seen])
    steps = np.concatenate([np.ones(len(arrived_s)), -np.ones(len(seen))])
    order = np.argsort(times, kind="stable")
    times = times[order]
    present = np.maximum(np.cumsum(steps[order]), 1.0)
    speeds = np.minimum(1.0, servers / present)
    clock = np.concatenate([[0.0], np.cumsum(np.diff(times) * speeds[:-1])])
    known = ~np.isnan(departed_s)
    work = np.full(len(arrived_s), math.nan)
    work[known] = np.interp(departed_s[known], times, clock) - np.interp(arrived_s[known], times, clock)
    log_speed = np.full(len(arrived_s), math.nan)
    before = np.searchsorted(times, departed_s[known], side="left") - 1
    log_speed[known] = np.log(speeds[np.maximum(before, 0)])
    return work, log_speed
