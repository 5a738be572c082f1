"""Queues in work time, in which a server that is slow or pauses does the same in the same order, only later.

``fifo`` (first come, first served, on parallel servers) and ``shared`` (all share a speed) take arrivals
(ascending), work, and ``gone`` (when a request leaves unserved; inf for never), and return when the work of
each is done; NaN for those that left.

``closed`` has a number of users, each of whom sends the next request when the last one has ended: for servers
in line, or shared ones whose tokens take the same time in any company; not for batching or co-tenants.

``batching`` is continuous batching by the rules of vLLM's scheduler with chunked prefill. Each step gives one
token to every sequence that decodes, and the rest of the token budget to prompts in order, while there are
slots and KV. Where the next step's KV does not fit, the sequence admitted last is dropped to the front of the
queue and computed again. Steps in which nothing can change are done at once.
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


def can_close(system: System) -> bool:
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


NEVER: Final = 1 << 62


class Engine:
    """One simulated engine. ``tokens``: prompt tokens to compute (fewer than ``prompt`` where a cache knows
    some), ``prompt``: those that hold KV, ``output``: tokens to generate; a value for each request.
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
        self._tokens = [max(1, round(each)) for each in tokens.tolist()]
        self._prompt = [int(each) for each in prompt.tolist()]
        self._output = [int(each) for each in output.tolist()]
        finite = [] if gone is None else [each for each in np.argsort(gone) if math.isfinite(gone[each])]
        self._leaving = [(float(gone[each]), int(each)) for each in finite] if gone is not None else []
        count = len(self._coming)
        self.first = np.full(count, math.nan)
        self.last = np.full(count, math.nan)
        self._waiting: deque[int] = deque()
        self._running: dict[int, int] = {}
        """Those admitted, in that order → prompt tokens still to be computed, 0 for those that decode."""
        self._prefilling: deque[int] = deque()
        self._started = [0] * count
        """Of one that decodes: the count of steps at which it would have had no token."""
        self._generated = [0] * count
        """Tokens that one had when it was dropped last."""
        self._over = [False] * count
        self._ends: list[tuple[int, int]] = []
        """Heap of (count of steps at which the last token comes, request); entries of dropped ones stay."""
        self._steps = self._decoding = self._kv = 0
        self.preempted = 0

    def run(self) -> tuple[FloatArray, FloatArray]:
        """(time of the first token, of the last); NaN for those that left, or never fit."""
        now, came, left, count = 0.0, 0, 0, len(self._coming)
        while True:
            while came < count and self._coming[came] <= now:
                if self._prompt[came] + self._output[came] <= self._batch.kv_tokens:
                    self._waiting.append(came)
                else:
                    self._over[came] = True
                came += 1
            while left < len(self._leaving) and self._leaving[left][0] <= now:
                self._leave(self._leaving[left][1])
                left += 1
            next_in = self._coming[came] if came < count else math.inf
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
        # Where those that wait wait for a place, one more that comes changes nothing.
        event = next_out if self._waiting else min(next_in, next_out)
        if event < math.inf:
            steps = min(steps, max(1, math.ceil((event - now) / length)))
        now += steps * length
        self._advance(steps, now)
        return now

    def _make_room(self) -> bool:
        """Drops those admitted last until the next step's KV fits; whether any was."""
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
        """(request, prompt tokens) of this step."""
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
            # What was generated before it was dropped is computed anew, too.
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
        """So many tokens for each that decodes."""
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
    """(first token, last token) of each request; see Engine."""
    first, last = Engine(batch, arrived, tokens, prompt, output, gone).run()
    if gone is not None:  # who left during a step does not get its token
        first[first > gone], last[last > gone] = math.nan, math.nan
    return first, last
