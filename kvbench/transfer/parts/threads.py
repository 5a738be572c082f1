"""Blocking library calls in threads of their own, so that asking whether one is done never waits."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

from kvbench.errors import KvbenchError, TransferError

# A thread that comes back from a library waits this long at most for the interpreter while another one polls;
# Python's own 5 ms would be many times a small transfer. Seconds.
SWITCH_INTERVAL_S = 20e-6


class Job:
    """One blocking call; ``done`` once it has returned or failed."""

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
        self.done = True

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
    """Up to ``limit`` daemon threads that take jobs in order; ``fd`` turns readable when one is done.

    The threads are never waited for: a library that hangs must not keep its process from ending.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._started = 0
        self._busy = 0
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def start(self, call: Callable[[], None]) -> Job:
        """Hand a call to a thread; a new one is started when all are busy."""
        job = Job(call)
        with self._lock:
            self._busy += 1
            if self._busy > self._started and self._started < self._limit:
                self._started += 1
                threading.Thread(target=self._work, name="transfer", daemon=True).start()
        self._jobs.put(job)
        return job

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            with self._lock:
                self._busy -= 1
            with contextlib.suppress(OSError):  # closed in the meantime
                os.eventfd_write(self.fd, 1)

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
            for _ in range(self._started):
                self._jobs.put(None)
