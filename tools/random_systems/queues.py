"""Queues in work time, which is free of slowdowns and pauses (system.py).

``fifo`` (first come, first served, on parallel servers) and ``shared`` (all share a speed) take arrivals
(ascending), work, and ``gone`` (when a request leaves unserved; inf for never). They return the time at which
each request's work is done; NaN for requests that left.

``closed`` is a closed loop: each user sends the next request when the last one has ended. It supports FIFO
and shared servers with a constant time per token, but neither batching nor co-tenants.

``batching`` is continuous batching by the rules of vLLM's scheduler with chunked prefill. Each step gives one
token to every decoding sequence, and the rest of the token budget to prompts in order, while there are slots
and KV. If the next step's KV does not fit, the sequence admitted last returns to the front of the queue and
is recomputed. Steps between which nothing can change are computed at once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from .system import Batch, FloatArray, System


def fifo(servers: int, arrived: FloatArray, work: FloatArray, gone: FloatArray | None = None) -> FloatArray:
    """Serve first come, first served; each server works at speed 1."""
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
        for index, (at, needs) in enumerate(zip(arrived.tolist(), work.tolist(), strict=True)):
            soonest = free[0]
            end = (at if at > soonest else soonest) + needs
            done[index] = end
            replace(free, end)
        return done
    for index, (at, needs, leaves_at) in enumerate(
        zip(arrived.tolist(), work.tolist(), gone.tolist(), strict=True)
    ):
        start = max(at, free[0])
        end = start + needs
        done[index] = end if end <= leaves_at else math.nan
        if start < leaves_at:
            replace(free, min(end, leaves_at))
    return done


def shared(
    speed: Callable[[int], float], arrived: FloatArray, work: FloatArray, gone: FloatArray | None = None
) -> FloatArray:
    """Serve all present requests at the same ``speed(number)``: processor sharing, or a decode batch.

    One progress counter serves all: a request that arrives at counter v with work w is done at v + w.
    """
    count = len(arrived)
    done = np.full(count, math.nan)
    speeds = [0.0, speed(1)]
    heap: list[tuple[float, int]] = []
    left = [False] * count
    leaving = [] if gone is None else [index for index in np.argsort(gone) if math.isfinite(gone[index])]
    leaves_at = [float(gone[index]) for index in leaving] if gone is not None else []
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
                progress, index = pop(heap)
                now = ends if ends > now else now
                done[index] = now
                left[index] = True
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
            index = int(leaving[next_out])
            next_out += 1
            # Ignore a request that has not arrived yet or has left.
            if index < next_in and not left[index]:
                left[index] = True
                present -= 1


def can_close(system: System) -> bool:
    return system.batch is None and not system.slope_s and not system.disturbances.tenants


def closed(system: System, users: int, work: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return (arrived, first token, last token) of each request, in seconds of work from the start.

    ``work``: relative to a nominal request, in sending order. The users' first requests are spread over the
    idle latency.
    """
    decode_s = (system.workload.output_len - 1) * system.token_s
    idle_latency_s = system.prefill_s + decode_s
    users = min(users, len(work))
    coming = [idle_latency_s * user / users for user in range(users)]
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
            progress, index = heapq.heappop(inside)
            now = first[index] = max(ends, now)
            heapq.heappush(coming, now + decode_s)
            continue
        heapq.heappop(coming)
        progress += (comes - now) * pace if inside else 0.0
        now = comes
        heapq.heappush(inside, (progress + needs[len(arrived)], len(arrived)))
        arrived.append(now)
    return arrived, first


NEVER: Final = 1 << 62


class Engine:
    """One simulated engine. ``tokens``: prompt tokens to compute (fewer than ``prompt`` after a cache hit),
    ``prompt``: prompt tokens in the KV cache, ``output``: tokens to generate; one value per request.
    """

    def __init__(
        self,
        batch: Batch,
        arrived: FloatArray,
        tokens: FloatArray,
        prompt: FloatArray,
        output: FloatArray,
        gone: FloatArray | None = None,
    ) -> None:
        self._batch = batch
        self._coming: list[float] = arrived.tolist()
        self._tokens = [max(1, round(count)) for count in tokens.tolist()]
        self._prompt = [int(count) for count in prompt.tolist()]
        self._output = [int(count) for count in output.tolist()]
        finite = [] if gone is None else [index for index in np.argsort(gone) if math.isfinite(gone[index])]
        self._leaving = [(float(gone[index]), int(index)) for index in finite] if gone is not None else []
        count = len(self._coming)
        self.first = np.full(count, math.nan)
        self.last = np.full(count, math.nan)
        self._waiting: deque[int] = deque()
        self._running: dict[int, int] = {}
        """Request, in order of admission → prompt tokens left to compute, 0 while it decodes."""
        self._prefilling: deque[int] = deque()
        self._started = [0] * count
        """Step at which a decoding request would have had no token."""
        self._generated = [0] * count
        """Tokens of a request when it was last preempted."""
        self._over = [False] * count
        self._ends: list[tuple[int, int]] = []
        """Heap of (step of the last token, request); may hold outdated entries of preempted requests."""
        self._steps = self._decoding = self._kv = 0
        self.preempted = 0

    def run(self) -> tuple[FloatArray, FloatArray]:
        """Return (times of the first tokens, of the last); NaN for requests that left or never fit."""
        now, arrived, left, count = 0.0, 0, 0, len(self._coming)
        while True:
            while arrived < count and self._coming[arrived] <= now:
                if self._prompt[arrived] + self._output[arrived] <= self._batch.kv_tokens:
                    self._waiting.append(arrived)
                else:
                    self._over[arrived] = True
                arrived += 1
            while left < len(self._leaving) and self._leaving[left][0] <= now:
                self._leave(self._leaving[left][1])
                left += 1
            next_in = self._coming[arrived] if arrived < count else math.inf
            next_out = self._leaving[left][0] if left < len(self._leaving) else math.inf
            if not self._running and not self._waiting:
                if next_in == math.inf:
                    return self.first, self.last
                now = max(now, next_in)
                continue
            now = self._step(now, next_in, next_out)

    def _step(self, now: float, next_in: float, next_out: float) -> float:
        batch = self._batch
        dropped = self._make_room()
        chunks = self._chunks(admit=not dropped)
        decoding = self._decoding
        length = batch.step_s + batch.sequence_s * decoding
        if chunks:
            now += length + batch.token_s * sum(chunk for _, chunk in chunks)
            self._advance(1, now)
            self._prefilled(chunks, now)
            return now
        steps = max(1, self._until_end())
        steps = min(steps, max(1, (batch.kv_tokens - self._kv) // max(decoding, 1)))
        # While requests wait for a slot or KV, an arrival changes nothing.
        event = next_out if self._waiting else min(next_in, next_out)
        if event < math.inf:
            steps = min(steps, max(1, math.ceil((event - now) / length)))
        now += steps * length
        self._advance(steps, now)
        return now

    def _make_room(self) -> bool:
        """Preempt the last admitted requests until the next step's KV fits; return whether any was."""
        dropped = False
        while self._kv + self._decoding > self._batch.kv_tokens:
            last = next(reversed(self._running))
            self._release(last)
            self._waiting.appendleft(last)
            self.preempted += 1
            dropped = True
        return dropped

    def _release(self, request: int) -> None:
        left = self._running.pop(request)
        if left:
            self._prefilling.remove(request)
            self._kv -= self._prompt[request] + self._generated[request]
            return
        self._decoding -= 1
        self._generated[request] = self._steps - self._started[request]
        self._started[request] = NEVER
        self._kv -= self._prompt[request] + self._generated[request]

    def _leave(self, request: int) -> None:
        if self._over[request]:
            return
        self._over[request] = True
        if request in self._running:
            self._release(request)
        elif request in self._waiting:
            self._waiting.remove(request)

    def _chunks(self, admit: bool) -> list[tuple[int, int]]:
        """Return (request, prompt tokens) of this step."""
        batch = self._batch
        budget = batch.token_budget - self._decoding
        chunks: list[tuple[int, int]] = []
        for request in self._prefilling:
            if budget <= 0:
                return chunks
            chunk = min(budget, self._running[request])
            budget -= chunk
            chunks.append((request, chunk))
        while admit and budget > 0 and self._waiting and len(self._running) < batch.slots:
            request = self._waiting[0]
            held = self._prompt[request] + self._generated[request]
            if self._kv + held + self._decoding > batch.kv_tokens:
                break
            self._waiting.popleft()
            self._kv += held
            # Tokens generated before a preemption are recomputed, too.
            needs = self._tokens[request] + self._generated[request]
            self._running[request] = needs
            self._prefilling.append(request)
            chunk = min(budget, needs)
            budget -= chunk
            chunks.append((request, chunk))
        return chunks

    def _prefilled(self, chunks: list[tuple[int, int]], now: float) -> None:
        for request, chunk in chunks:
            left = self._running[request] - chunk
            self._running[request] = left
            if left:
                continue
            self._prefilling.remove(request)
            generated = self._generated[request] + 1
            if generated == 1:
                self.first[request] = now
            self._decoding += 1
            self._kv += 1
            self._started[request] = self._steps - generated
            end = self._started[request] + self._output[request]
            if generated >= self._output[request]:
                self._finish(request, now)
            else:
                heapq.heappush(self._ends, (end, request))

    def _until_end(self) -> int:
        ends = self._ends
        while ends and not self._valid(ends[0]):
            heapq.heappop(ends)
        return ends[0][0] - self._steps if ends else NEVER

    def _valid(self, entry: tuple[int, int]) -> bool:
        end, request = entry
        return not self._over[request] and self._started[request] + self._output[request] == end

    def _advance(self, steps: int, now: float) -> None:
        """Generate ``steps`` tokens for each decoding request."""
        self._steps += steps
        self._kv += steps * self._decoding
        ends = self._ends
        while ends and ends[0][0] <= self._steps:
            entry = heapq.heappop(ends)
            if self._valid(entry):
                self._finish(entry[1], now)

    def _finish(self, request: int, now: float) -> None:
        self.last[request] = now
        self._release(request)
        self._over[request] = True


def batching(
    batch: Batch,
    arrived: FloatArray,
    tokens: FloatArray,
    prompt: FloatArray,
    output: FloatArray,
    gone: FloatArray | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Return (first token, last token) of each request; see Engine."""
    first, last = Engine(batch, arrived, tokens, prompt, output, gone).run()
    if gone is not None:  # a request that leaves during a step does not get its token
        first[first > gone], last[last > gone] = math.nan, math.nan
    return first, last
