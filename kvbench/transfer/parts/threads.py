"""Blocking library calls in threads of their own, so that asking whether one is done never waits.

Endpoints of such libraries also share a door for peers, and the peers by their id.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvbench.errors import KvbenchError, TransferError
from kvbench.transfer.base import Endpoint, Layout
from kvbench.transfer.parts.control import Door

# A thread that comes back from a library waits this long at most for the interpreter while another one polls;
# Python's own 5 ms would be many times a small transfer. Seconds.
SWITCH_INTERVAL_S = 20e-6


class Job:
    """One blocking call; its thread sets ``done`` once it has returned or failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: Exception | None = None
        self.done = False

    def run(self) -> None:
        """Make the call and keep what it raised."""
        try:
            self._call()
        except Exception as error:
            self._error = error

    def finished(self) -> bool:
        """Whether it is done. Raises TransferError when the call failed."""
        if not self.done:
            return False
        if isinstance(self._error, KvbenchError):
            raise self._error
        if self._error is not None:
            raise TransferError(f"{type(self._error).__name__}: {self._error}") from self._error
        return True


class Threads:
    """Up to ``limit`` daemon threads; ``fd`` turns readable when a job is done.

    The threads are never waited for: a library that hangs must not keep its process from ending. A job goes
    to the thread that was busy last, whose caches are warm: a store's call of 4 KiB costs 140 to 165 µs more
    than without a thread this way, 205 to 230 µs when idle threads take turns (medians, two busy cores). When
    all are busy it waits its turn.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: list[queue.SimpleQueue[Job | None]] = []
        self._waiting: deque[Job] = deque()
        self._started = 0
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def start(self, call: Callable[[], None]) -> Job:
        """Hand a call to a thread; a new one is started when all are busy."""
        job = Job(call)
        with self._lock:
            if self._idle:
                inbox = self._idle.pop()
            elif self._started < self._limit:
                inbox = queue.SimpleQueue()
                self._started += 1
                threading.Thread(target=self._work, args=(inbox,), name="transfer", daemon=True).start()
            else:
                self._waiting.append(job)
                return job
        inbox.put(job)
        return job

    def _work(self, inbox: queue.SimpleQueue[Job | None]) -> None:
        job = inbox.get()
        while job is not None:
            job.run()
            # Idle before the job is seen to be done: who calls again at once gets this very thread.
            with self._lock:
                following = self._waiting.popleft() if self._waiting else None
                ended = self.fd < 0 and following is None
                if following is None and not ended:
                    self._idle.append(inbox)
            job.done = True
            with contextlib.suppress(OSError):  # closed in the meantime
                os.eventfd_write(self.fd, 1)
            job = None if ended else following or inbox.get()

    def clear(self) -> None:
        """Make ``fd`` unreadable until the next job is done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Let idle threads end. Safe to call twice."""
        with self._lock:
            if self.fd < 0:
                return
            os.close(self.fd)
            self.fd = -1
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()


PeerT = TypeVar("PeerT")


class ThreadedEndpoint(Endpoint, Generic[PeerT]):
    """One side, with up to ``threads`` calls under way. A backend says what its peers are."""

    def __init__(self, options: Mapping[str, Any], threads: int) -> None:
        self._host = str(options.get("host", "127.0.0.1"))
        self._id = os.urandom(6).hex()
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._threads = Threads(threads)
        self._peers: dict[str, PeerT] = {}
        self._door: Door | None = None

    def wait_fds(self) -> Sequence[int]:
        return (self._threads.fd,)

    def progress(self) -> None:
        self._threads.clear()

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._door is not None:
            self._door.close()
        self._threads.close()

    def _known(self, peer: str) -> PeerT:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        return self._peers[peer]
