"""Protocol with the process that started the generator: JSON lines out, "go" and "stop" in."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

from kvbench.processes.loadgen.sockets.loop import READABLE, SocketLoop

log = logging.getLogger(__name__)

STDIN: Final = 0
STDOUT: Final = 1
PARENT_POLL_S: Final = 0.25
PREPARING_S: Final = 0.5
"""How often a generator says how far its preparation is, in seconds."""
PREPARED_EACH: Final = 64
"""Number of requests between two looks at the clock."""
_T = TypeVar("_T")


class Reporter:
    """Prints progress lines unless the reader has fallen behind: the trial never waits."""

    def __init__(self) -> None:
        self._poller = select.poll()
        self._poller.register(STDOUT, select.POLLOUT)

    def report(self, event: dict[str, Any]) -> bool:
        """Print a line if that does not block; return whether it did."""
        # A writable pipe takes at least PIPE_BUF bytes, more than any such line.
        if not any(flags & select.POLLOUT for _, flags in self._poller.poll(0)):
            return False
        print_event(event)
        return True


class Preparation:
    """Reports how many requests are prepared; each is counted twice: when planned and when encoded."""

    def __init__(self, every_s: float = PREPARING_S) -> None:
        self._taken = 0
        self._every_s = every_s
        self._report_at = time.monotonic() + every_s

    def watched(self, requests: Iterable[_T]) -> Iterator[_T]:
        """Yield the items, reporting progress."""
        for request in requests:
            yield request
            self._taken += 1
            if not self._taken % PREPARED_EACH and time.monotonic() >= self._report_at:
                self._report_at = time.monotonic() + self._every_s
                print_event({"event": "preparing", "done": self._taken // 2})


def print_event(event: dict[str, Any]) -> None:
    """Print a line, waiting for the reader if it is still there."""
    data = json.dumps(event, separators=(",", ":")).encode() + b"\n"
    try:
        while data:
            data = data[os.write(STDOUT, data) :]
    except OSError:
        return


class Orders:
    """Commands to this process: from stdin (optional), signals, and its parent's death."""

    def __init__(self, loop: SocketLoop) -> None:
        self.start_at: float | None = None
        """``time.monotonic()`` at which to start, if "go" gave one."""
        self._loop = loop
        self._stop = False
        self._buffer = b""
        self._parent = os.getppid()
        self._next_look = 0.0
        mode = os.fstat(STDIN).st_mode
        self._listening = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(STDIN)
        self._go = not self._listening
        if self._listening:
            loop.watch(STDIN, READABLE, self._read)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._signalled)

    def is_set(self) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PARENT_POLL_S
            if not self._stop and os.getppid() != self._parent:
                log.warning("the parent process is gone: stopping")
                self._stop = True
        return self._stop

    def wait_for_go(self) -> None:
        """Return at "go", at "stop", or when the sender has gone."""
        while not self._go and not self.is_set():
            self._loop.turn(PARENT_POLL_S)

    def close(self) -> None:
        if self._listening:
            self._listening = False
            self._loop.unwatch(STDIN)

    def _signalled(self, _number: int, _frame: Any) -> None:
        self._stop = True

    def _read(self, _event: int) -> None:
        try:
            data = os.read(STDIN, 4096)
        except OSError:
            data = b""
        if not data:
            if not self._go:
                self._stop = True
            self.close()
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._obey(line.split())

    def _obey(self, words: list[bytes]) -> None:
        if words == [b"stop"]:
            self._stop = True
        elif words[:1] == [b"go"]:
            self._go = True
            if len(words) > 1:
                try:
                    start_at = float(words[1])
                except ValueError:
                    start_at = math.nan
                if math.isfinite(start_at):
                    self.start_at = start_at
                else:
                    log.warning("not a time: %r; starting at once", words[1])
