"""The timed loop: prepared transfers, started again and again, each timed from its start to its seen end.

How it waits: first without any pause, for ``EAGER_NS``, since 4 KiB take microseconds; then it gives up the
processor between two questions, until ``SPIN_NS``, since the library's own threads need it; then it sleeps
for a ``SLEEP_SHARE`` of the time waited, which bounds what a late look adds. An endpoint with ``wait_fds``
wakes the loop.

Measured with mooncake over loopback on two busy cores, ways taken in turns: 4 KiB take 2 to 3 µs more than
the library's blocking call (median); 389 µs with sleeps of 300 µs. Asking without sleep moves 0.58 (write)
and 0.82 (read) of the bytes of 8 × 1 MiB for 1.8 times the CPU time. Sleeping until nine tenths of the
shortest of the last calls saves a tenth of the CPU time, but moves 0.86 to 0.96 at one block of 16 MiB: not
done.
"""

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
"""Linux rounds a thread's sleeps up by its timer slack, 50 µs by default: as long as a whole small
transfer."""


@dataclass(frozen=True)
class Limits:
    """How long to measure. At least ``min_calls`` calls and ``seconds`` seconds, at most ``max_calls`` and
    ``max_seconds``; a single call at most ``call_deadline_s``."""

    seconds: float
    min_calls: int
    max_calls: int
    max_seconds: float
    call_deadline_s: float
    repeats: int | None = None
    """How often each transfer may be started; None: without end."""


@dataclass(frozen=True)
class MeasuredCalls:
    """Clock readings in nanoseconds of CLOCK_MONOTONIC; ``call_ns`` in the order of the calls' ends."""

    started_ns: int
    ended_ns: int
    call_ns: array[int]
    cpu_s: float
    """CPU time of this process, all threads, in the window."""


def sharp_sleeps() -> None:
    """Let this thread's sleeps, and those of threads it starts from now on, end when they are due."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


class Waiter:
    """Waits for something to happen at an endpoint, by the rules above."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._progress = endpoint.progress
        self._pause_s = endpoint.poll_interval_s
        self._epoll = None
        if fds := endpoint.wait_fds():
            self._epoll = select.epoll()
            for fd in fds:
                self._epoll.register(fd, select.EPOLLIN)

    def wait(self, waited_ns: int) -> None:
        """Come back when it is time to ask again; ``waited_ns`` is how long nothing has happened."""
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
    """Keep all ``tickets`` under way until the limits are reached, then let them end.

    ``start_at_ns`` is a moment of CLOCK_MONOTONIC that several initiators share. Raises TransferError when a
    transfer fails or exceeds its deadline; the tickets are the caller's to release, in any case.
    """
    waiter = Waiter(endpoint)
    times = array("q", bytes(8 * max(limits.max_calls, 1)))
    loop = _one_at_a_time if len(tickets) == 1 else _several
    try:
        with _quiet():
            _wait_until(start_at_ns)
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
    """One transfer after another; the shortest path that a call can take."""
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
    """All tickets under way at once; each is started again as soon as its end is seen."""
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


def _wait_until(moment_ns: int) -> None:
    while (left := moment_ns - time.perf_counter_ns()) > 0:
        time.sleep(left / 1e9 - START_SPIN_S if left > 2e9 * START_SPIN_S else 0)


@contextmanager
def _quiet() -> Iterator[None]:
    """No garbage collection meanwhile."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def pack_times(times: array[int]) -> str:
    """Nanoseconds as text: eight bytes each in this machine's order, zlib, base 64."""
    return base64.b64encode(zlib.compress(times.tobytes(), 1)).decode()


def unpack_times(text: str) -> array[int]:
    """The inverse of ``pack_times``."""
    times = array("q")
    times.frombytes(zlib.decompress(base64.b64decode(text)))
    return times
