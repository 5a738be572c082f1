"""The timed loop: starts prepared transfers repeatedly and times each from its start to its observed end.

Waiting has three phases: 1. busy-wait for ``EAGER_NS``, since 4 KiB take microseconds; 2. yield the processor
between polls until ``SPIN_NS``, since the library's threads need it; 3. sleep for ``SLEEP_SHARE`` of the time
waited, which bounds the added error. An endpoint with ``wait_fds`` wakes the loop.

Measured with mooncake over loopback on two busy cores, methods alternating: 4 KiB take 2 to 3 µs more than
the library's blocking call (median); 389 µs with sleeps of 300 µs. Polling without sleep moves 0.58 (write)
and 0.82 (read) of the bytes of 8 × 1 MiB for 1.8 times the CPU time. Sleeping until nine tenths of the
shortest recent call saves a tenth of the CPU time, but moves 0.86 to 0.96 of the bytes at one block of 16
MiB: not done."""

from __future__ import annotations

import base64
import ctypes
import gc
import os
import select
import time
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvbench.errors import TransferError
from kvbench.transfer.base import Endpoint, Ticket

EAGER_NS = 20_000
SPIN_NS = 100_000
SLEEP_SHARE = 1 / 30
MAX_SLEEP_S = 500e-6
START_SPIN_S = 1e-3
PR_SET_TIMERSLACK = 29  # linux/prctl.h
"""Linux delays a thread's wake-ups by its timer slack, 50 µs by default: as long as a small transfer."""


@dataclass(frozen=True)
class Limits:
    """Duration of a measurement: at least ``min_calls`` calls and ``seconds`` seconds, at most ``max_calls``
    and ``max_seconds``; a single call at most ``call_deadline_s``."""

    seconds: float
    min_calls: int
    max_calls: int
    max_seconds: float
    call_deadline_s: float
    repeats: int | None = None
    """Maximum starts of each transfer; None: no limit."""


@dataclass(frozen=True)
class MeasuredCalls:
    """Times in nanoseconds of CLOCK_MONOTONIC; ``call_ns`` in the order of the calls' ends."""

    started_ns: int
    ended_ns: int
    call_ns: array[int]
    cpu_s: float
    """CPU time of this process, all threads, in the window."""


def sharp_sleeps() -> None:
    """Let sleeps of this thread, and of threads it starts later, end on time."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Waiter:
    """Waits for an event of an endpoint, by the phases above."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._progress = endpoint.progress
        self._pause_s = endpoint.poll_interval_s
        self._epoll = None
        if fds := endpoint.wait_fds():
            self._epoll = select.epoll()
            for fd in fds:
                self._epoll.register(fd, select.EPOLLIN)

    def wait(self, waited_ns: int) -> None:
        """Return when it is time to poll again; ``waited_ns`` is the time without an event."""
        if self._epoll is not None:
            self._epoll.poll(self._pause_s)
            self._progress()
        elif waited_ns < EAGER_NS:
            return
        elif waited_ns < SPIN_NS:
            os.sched_yield()
        else:
            time.sleep(min(waited_ns * 1e-9 * SLEEP_SHARE, MAX_SLEEP_S))
            self._progress()

    def close(self) -> None:
        if self._epoll is not None:
            self._epoll.close()


def measure(
    endpoint: Endpoint, tickets: Sequence[Ticket], limits: Limits, start_at_ns: int = 0
) -> MeasuredCalls:
    """Keep all ``tickets`` active until the limits are reached, then let them end. ``start_at_ns`` is a
    moment of CLOCK_MONOTONIC that several initiators share. Raises TransferError when a transfer fails or
    exceeds its deadline; the caller always releases the tickets."""
    waiter = Waiter(endpoint)
    times = array("q", bytes(8 * max(limits.max_calls, 1)))
    loop = _one_at_a_time if len(tickets) == 1 else _several
    try:
        with _quiet():
            while (left := start_at_ns - time.perf_counter_ns()) > 0:
                time.sleep(left / 1e9 - START_SPIN_S if left > 2e9 * START_SPIN_S else 0)
            cpu = time.process_time_ns()
            started = time.perf_counter_ns()
            calls = loop(endpoint, tickets, limits, waiter, times)
            ended = time.perf_counter_ns()
            cpu = time.process_time_ns() - cpu
    finally:
        waiter.close()
    del times[calls:]
    return MeasuredCalls(started, ended, times, cpu / 1e9)


def _one_at_a_time(
    endpoint: Endpoint, tickets: Sequence[Ticket], limits: Limits, waiter: Waiter, times: array[int]
) -> int:
    """Run one transfer after another: the shortest path of a call."""
    start, poll, wait, clock = endpoint.start, endpoint.poll, waiter.wait, time.perf_counter_ns
    ticket = tickets[0]
    deadline = int(limits.call_deadline_s * 1e9)
    now = clock()
    end_at, stop_at = now + int(limits.seconds * 1e9), now + int(limits.max_seconds * 1e9)
    min_calls = limits.min_calls
    max_calls = min(limits.max_calls, limits.repeats or limits.max_calls)
    calls = 0
    for calls in range(1, max_calls + 1):
        began = clock()
        start(ticket)
        while not poll(ticket):
            waited = clock() - began
            if waited > deadline:
                raise _late(ticket, limits)
            wait(waited)
        now = clock()
        times[calls - 1] = now - began
        if now >= end_at and (calls >= min_calls or now >= stop_at):
            break
    return calls


def _several(
    endpoint: Endpoint, tickets: Sequence[Ticket], limits: Limits, waiter: Waiter, times: array[int]
) -> int:
    """Run all tickets at once; restart each as soon as its end is seen."""
    start, poll, clock = endpoint.start, endpoint.poll, time.perf_counter_ns
    deadline = int(limits.call_deadline_s * 1e9)
    now = clock()
    end_at, stop_at = now + int(limits.seconds * 1e9), now + int(limits.max_seconds * 1e9)
    room = min(len(tickets), limits.max_calls)
    began = [0] * room
    for slot in range(room):
        began[slot] = clock()
        start(tickets[slot])
    busy = list(range(room))
    repeats = [limits.repeats or limits.max_calls] * room
    started, calls, last_end = room, 0, clock()
    while busy:
        moved = False
        for slot in tuple(busy):
            if not poll(tickets[slot]):
                continue
            last_end = now = clock()
            times[calls] = now - began[slot]
            calls += 1
            moved = True
            goes_on = now < end_at or (started < limits.min_calls and now < stop_at)
            repeats[slot] -= 1
            if goes_on and repeats[slot] and started < limits.max_calls:
                began[slot] = clock()
                start(tickets[slot])
                started += 1
            else:
                busy.remove(slot)
        if not moved:
            now = clock()
            oldest = min(busy, key=began.__getitem__)
            if now - began[oldest] > deadline:
                raise _late(tickets[oldest], limits)
            waiter.wait(now - last_end)
    return calls


def _late(ticket: Ticket, limits: Limits) -> TransferError:
    return TransferError(
        f"the {ticket.op} of {ticket.nbytes} bytes did not end within {limits.call_deadline_s:g} s"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def pack_times(times: array[int]) -> str:
    """Return nanoseconds as text: eight bytes each in this machine's order, zlib, base 64."""
    return base64.b64encode(zlib.compress(times.tobytes(), 1)).decode()


def unpack_times(text: str) -> array[int]:
    times = array("q")
    times.frombytes(zlib.decompress(base64.b64decode(text)))
    return times
