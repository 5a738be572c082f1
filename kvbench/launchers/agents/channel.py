"""Connection between kvbench and an agent on another host, and its JSON frames.

A channel is any program with stdin and stdout: ssh, srun, an actor, a local program (``PipeChannel``). A
frame is a line. Request: ``{"id": 1, "do": "start", …}``; response: ``{"id": 1, "answer": {…}}`` or ``{"id":
1, "error": {"kind", "message", "hint"}}``. Without id and response: ``{"event": …}`` from the agent (hello,
beat, exit, log, out), ``{"do": "beat"}`` and ``{"do": "write"}`` to it. Stdin and stdout are latin-1 text,
files base64."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from kvbench.errors import (
    InputError,
    KvbenchError,
    LaunchError,
    MissingLibraryError,
    PortInUseError,
    ServerError,
)

SEND_DEADLINE_S: Final = 10.0
"""Seconds after which an unread line ends the channel."""
CLOSE_GRACE_S: Final = 10.0
"""Seconds that the remote side gets to notice the end of stdin, kill its processes and exit."""
TAIL_LINES: Final = 20
READ_BYTES: Final = 65_536


class ChannelClosedError(LaunchError):
    """The channel has ended; the message gives the reason."""


class Channel(Protocol):
    """Connection to one agent. Any thread may ``send``; one at a time may ``receive``."""

    host: str
    """Host name of the scenario or scheduler."""

    @property
    def ended(self) -> str:
        """Reason of the end with the last remote output; empty while open."""

    def send(self, line: bytes) -> None:
        """Send one line without its newline. Raises ChannelClosedError, within ``SEND_DEADLINE_S``."""

    def receive(self, timeout_s: float) -> bytes | None:
        """Return the next line, or None after the timeout. Raises ChannelClosedError at the end."""

    def close(self) -> None:
        """Close within ``CLOSE_GRACE_S``. May be called twice, or after the end."""


class Lines:
    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that these bytes complete, without their newlines."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join((*self._parts, whole[0]))
            self._parts = []
        if rest:
            self._parts.append(rest)
        return whole


class Inbox:
    """Received lines that are not yet read, and the reason of the end."""

    def __init__(self, host: str) -> None:
        self.ended = ""
        self._host = host
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, line: bytes) -> None:
        self._lines.put(line)

    def finish(self, why: str) -> None:
        """Mark the end; the first reason counts."""
        self.ended = self.ended or why
        self._lines.put(None)

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)  # for later calls
            raise ChannelClosedError(self.ended)
        return line

    def closed(self) -> ChannelClosedError:
        return ChannelClosedError(self.ended or f"the connection to {self._host} is closed")

    def stuck(self) -> ChannelClosedError:
        """Error after ``SEND_DEADLINE_S`` without a reader, which ends the channel."""
        self.ended = self.ended or f"{self._host} has read nothing for {SEND_DEADLINE_S:g} s"
        return ChannelClosedError(self.ended)

    def close(self) -> None:
        """Mark as closed locally, unless it has ended."""
        self.ended = self.closed().message


class PipeChannel:
    """Channel over the pipes of a local program in its own session. ``env`` extends the environment. Raises
    LaunchError if it cannot run."""

    def __init__(self, host: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.host = host
        self._command = list(command)
        pipe = subprocess.PIPE
        try:
            self._popen = subprocess.Popen(
                self._command,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot run {self._command[0]} for the host {host}: {error.strerror}",
                hint=" ".join(self._command),
            ) from error
        assert self._popen.stdin is not None
        os.set_blocking(self._popen.stdin.fileno(), False)
        self._inbox = Inbox(host)
        self._stderr_lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._sending = threading.Lock()
        self._closing = False
        self._readers = [
            threading.Thread(target=self._read_out, name=f"channel-{host}", daemon=True),
            threading.Thread(target=self._read_err, name=f"channel-{host}-stderr", daemon=True),
        ]
        for thread in reversed(self._readers):  # the first waits for the second at its end
            thread.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def ended(self) -> str:
        return self._inbox.ended

    def send(self, line: bytes) -> None:
        deadline = time.monotonic() + SEND_DEADLINE_S
        with self._sending:
            if self._inbox.ended or self._closing or self._popen.stdin is None:
                raise self._inbox.closed()
            rest = memoryview(line + b"\n")
            handle = self._popen.stdin.fileno()
            while rest:
                try:
                    rest = rest[os.write(handle, rest) :]
                    continue
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise ChannelClosedError(self._inbox.ended or self._why()) from error
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._inbox.stuck()
                select.select([], [handle], [], left)

    def receive(self, timeout_s: float) -> bytes | None:
        return self._inbox.receive(timeout_s)

    def close(self) -> None:
        self._closing = True
        with self._sending, contextlib.suppress(OSError):
            if self._popen.stdin is not None:
                self._popen.stdin.close()
        try:
            self._popen.wait(CLOSE_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait(CLOSE_GRACE_S)
        for thread in self._readers:
            thread.join(timeout=2.0)
        self._inbox.close()

    def _read_out(self) -> None:
        assert self._popen.stdout is not None
        lines = Lines()
        with self._popen.stdout as pipe:
            while data := os.read(pipe.fileno(), READ_BYTES):
                for line in lines.feed(data):
                    self._inbox.put(line)
        self._readers[1].join(timeout=1.0)
        self._inbox.finish(self._inbox.ended or self._why())

    def _read_err(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as pipe:
            for line in pipe:
                if text := line.decode("utf-8", "replace").strip():
                    self._stderr_lines.append(text)

    def _why(self) -> str:
        try:
            status: object = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            status = "unknown"
        return ended_words(self.host, status, list(self._stderr_lines))


def ended_words(host: str, status: object, stderr_lines: Sequence[str]) -> str:
    """Explain the end of an agent's program: its status and last stderr lines."""
    message = f"the agent on {host} ended (status {status})"
    return f"{message}: {' | '.join(stderr_lines[-3:])}" if stderr_lines else message


PROTOCOL: Final = 2
BEAT_S: Final = 1.0
"""Interval of both sides' heartbeats, in seconds."""
LOST_S: Final = 6.0
"""Seconds without a frame after which the other side is lost. An agent then kills its processes within
``TRACKER_GRACE_S``, so all are gone 10 s after the last frame."""
CHUNK_BYTES: Final = 192 * 1024
"""Part of a file per frame, before base64."""
ENCODING: Final = "latin-1"
LOST: Final = 255
"""Exit status of a process on a lost host, as for ssh."""

_KINDS: Final[Mapping[str, type[KvbenchError]]] = {
    kind.__name__: kind
    for kind in (InputError, LaunchError, MissingLibraryError, PortInUseError, ServerError)
}


class HostLostError(LaunchError):
    """The connection to a host has ended or is silent for too long."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """Encode a frame as a line without its newline."""
    return json.dumps(frame, separators=(",", ":")).encode()


def error_frame(error: KvbenchError) -> dict[str, str]:
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def error_of(frame: Mapping[str, Any], host: str) -> KvbenchError:
    kind = _KINDS.get(str(frame.get("kind")), LaunchError)
    return kind(f"{host}: {frame.get('message', 'failed')}", hint=str(frame.get("hint", "")))
