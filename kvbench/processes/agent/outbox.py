"""What an agent has to say, written by a thread of its own: the agent never waits for its reader."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from typing import Any, Final

from kvbench.launchers.agents.wire import encode

FULL_BYTES: Final = 8 * 2**20
"""With more than this unsent, logs and the processes' own words wait where they are."""


class Outbox:
    """Frames on their way to ``handle``. ``put`` may be called by any thread."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsent = 0
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether whoever reads has fallen behind."""
        return self._unsent > FULL_BYTES

    def put(self, frame: Mapping[str, Any]) -> None:
        """Send a frame after those before it."""
        line = encode(frame) + b"\n"
        with self._lock:
            self._unsent += len(line)
        self._lines.put(line)

    def close(self, within_s: float) -> None:
        """Write what is left, if somebody reads it in time."""
        self._lines.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
            except OSError:
                return  # nobody reads any more; the end of stdin ends the agent
            with self._lock:
                self._unsent -= len(line)
