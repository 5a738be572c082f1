"""Servers side by side on virtual time, and the live rule fed with what comes of them, as by a generator."""

import heapq

import numpy as np

from kvbench.core.search.live_config import Decision, Observation
from kvbench.core.search.sequential_trial import LiveTrial


def first_tokens(offsets: np.ndarray, took: np.ndarray, servers: int | None) -> np.ndarray:
    """When each request leaves one of so many servers (None: one for each), idle at first."""
    free = [0.0] * (servers or len(offsets))
    first = np.empty(len(offsets))
    for index, (arrival, service_s) in enumerate(zip(offsets.tolist(), took.tolist(), strict=True)):
        first[index] = max(arrival, heapq.heappop(free)) + service_s
        heapq.heappush(free, first[index])
    return first


def decided(live: LiveTrial, first: np.ndarray, limit_s: float, decode_s: float, beat_s: float) -> Decision:
    """What the live rule decides; of a late request no more is known than that, once its limit has passed."""
    offsets = np.asarray(live.config.offsets_s)
    ttft = first - offsets
    late = ttft > limit_s
    known = np.where(late, offsets + limit_s, first + decode_s)
    order, done, now_s = np.argsort(known, kind="stable"), 0, 0.0
    while True:
        now_s += beat_s
        upto = int(np.searchsorted(known[order], now_s, side="right"))
        observations: list[Observation] = [
            (index, (float(not late[index]),), (ttft[index] / limit_s,), None if late[index] else ttft[index])
            for index in order[done:upto].tolist()
        ]
        done = upto
        sent = int(np.searchsorted(offsets, now_s, side="right"))
        decision = live.feed(now_s, observations, sent - int((first <= now_s).sum()), sent)
        if decision is not None:
            return decision
