"""Processes started by an agent: their logs and output on the way to kvbench, and their end. A separate
thread writes to kvbench, so the agent never waits for its reader."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbench.launchers.agents.channel import ENCODING, encode
from kvbench.launchers.local import LocalProcess

FULL_BYTES: Final = 8 * 2**20
"""Above this many unsent bytes, logs and output are not read."""


class Outbox:
    """Queue of frames to write to ``handle``. Any thread may call ``put``."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unsent = 0
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether the reader has fallen behind."""
        return self._unsent > FULL_BYTES

    def put(self, frame: Mapping[str, Any]) -> None:
        line = encode(frame) + b"\n"
        with self._lock:
            self._unsent += len(line)
        self._lines.put(line)

    def close(self, within_s: float) -> None:
        """Write what is left, if the reader takes it in time."""
        self._lines.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            try:
                while rest:
                    rest = rest[os.write(self._handle, rest) :]
            except OSError:
                return  # the reader has gone; the end of stdin ends the agent
            with self._lock:
                self._unsent -= len(line)


LOG_BYTES_AT_ONCE: Final = 128 * 1024
"""Bytes of one process's log sent in one turn: with ``TURN_S`` 0.1 s, 1.3 MB/s."""
LOG_BEHIND_BYTES: Final = 4 * 2**20
"""Maximum unsent bytes of a log; beyond it the middle is left out, with a note."""
LOG_END_BYTES: Final = 2**20
"""Maximum bytes of a log's end sent after its process has ended."""
LOG_MOST_BYTES: Final = 256 * 2**20
"""Maximum bytes sent of one log."""
PIPE_BYTES: Final = 65_536


class LogFeed:
    """A growing log file and how much of it has been sent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sent = 0

    def take(self, most: int, behind: int = LOG_BEHIND_BYTES) -> str:
        """Return new text of at most ``most`` bytes. A note replaces what was left out."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return ""
        if size <= self._sent or self._sent >= LOG_MOST_BYTES:
            return ""
        note = ""
        if size - self._sent > behind:
            left_out = size - self._sent - behind // 2
            self._sent += left_out
            note = f"\n… {left_out} bytes of this log are left out: it grew too fast\n"
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._sent)
            data = file.read(min(most, size - self._sent))
            self._sent += len(data)
            if self._sent >= LOG_MOST_BYTES:
                return note + data.decode("utf-8", "replace") + "\n… and the rest of this log is not sent\n"
            return note + data.decode("utf-8", "replace")
        return note


@dataclass
class AgentJob:
    """One process and what kvbench receives from it. ``key``: its name on both sides."""

    key: str
    process: LocalProcess
    outbox: Outbox
    piped: bool = field(kw_only=True)

    def __post_init__(self) -> None:
        self.end_reported = False
        self._log = LogFeed(self.process.log_path)
        self._unwritten = bytearray()
        self._closing = False
        self._silent = False
        self._reaping = threading.Lock()
        if self.piped:
            os.set_blocking(self.process.stdin.fileno(), False)
            os.set_blocking(self.process.stdout.fileno(), False)

    @property
    def stdin(self) -> int:
        return self.process.stdin.fileno()

    @property
    def stdout(self) -> int | None:
        """File descriptor of its stdout; None without one, or after its end."""
        return None if not self.piped or self._silent else self.process.stdout.fileno()

    # -- its stdin ----------------------------------------------------------------------------------

    def write(self, text: str) -> None:
        self._unwritten += text.encode(ENCODING)
        self.flush()

    def close_stdin(self) -> None:
        self._closing = True
        self.flush()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unwritten) and not self.end_reported

    def flush(self) -> None:
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self.process.stdin.fileno(), self._unwritten)]
        except BlockingIOError:
            return
        except (OSError, ValueError):  # it has ended, or closed its stdin
            self._unwritten.clear()
        if self._closing:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    # -- its output ---------------------------------------------------------------------------------

    def relay(self) -> None:
        try:
            data = os.read(self.process.stdout.fileno(), PIPE_BYTES)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data = b""
        self._silent = not data
        if data:
            self.outbox.put({"event": "out", "key": self.key, "data": data.decode(ENCODING)})

    def send_log(self) -> None:
        if text := self._log.take(LOG_BYTES_AT_ONCE):
            self.outbox.put({"event": "log", "key": self.key, "text": text})

    def rename(self, name: str) -> None:
        self.process.rename(name)
        self._log.path = self.process.log_path

    # -- its end ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Send the rest of an ended process's output and log, then its exit status."""
        if self.end_reported or not self._reaping.acquire(blocking=False):
            return  # a thread is killing it
        try:
            if not self.process.has_exited:
                return
            self._report_end(killing=False)
        finally:
            self._reaping.release()

    def kill(self) -> None:
        """Kill it and its group; takes at most ``TRACKER_GRACE_S``."""
        with self._reaping:
            if not self.end_reported:
                self._report_end(killing=True)

    def _report_end(self, *, killing: bool) -> None:
        if self.piped:
            self._drain()
        if killing:
            self.process.kill()
        status = self.process.poll()
        self.end_reported = True
        if text := self._log.take(LOG_END_BYTES, LOG_END_BYTES):
            self.outbox.put({"event": "log", "key": self.key, "text": text})
        self.outbox.put({"event": "exit", "key": self.key, "status": status})

    def _drain(self) -> None:
        """Send the rest of its stdout; do not wait for a grandchild that keeps it open."""
        for _ in range(64):
            try:
                data = os.read(self.process.stdout.fileno(), PIPE_BYTES)
            except (OSError, ValueError):
                return
            if not data:
                return
            self.outbox.put({"event": "out", "key": self.key, "data": data.decode(ENCODING)})
