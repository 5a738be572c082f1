"""Between kvbench and an agent on another host: the connection, and the frames of JSON that go over it.

Whatever can start a program and carry its stdin and stdout is a channel: ssh, srun, an actor, the pipes of a
local program (``PipeChannel``). A frame is a line. A request is ``{"id": 1, "do": "start", …}``, its response
``{"id": 1, "answer": {…}}`` or ``{"id": 1, "error": {"kind", "message", "hint"}}``. Without an id come
``{"event": …}`` from the agent (hello, beat, exit, log, out) and ``{"do": "beat"}`` or ``{"do": "write"}`` to
it, which have no response. A process's stdin and stdout travel as latin-1 text, contents of files as base64.
"""

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
"""A line that nobody takes for so long ends the channel: whoever is there does not read any more."""
CLOSE_GRACE_S: Final = 10.0
"""What the far end has to notice the end of its stdin, to kill what it started, and to end."""
TAIL_LINES: Final = 20
READ_BYTES: Final = 65_536


class ChannelClosedError(LaunchError):
    """The channel has ended; the message says why."""


class Channel(Protocol):
    """A connection to one agent. ``send`` may be called by any thread, ``receive`` by one at a time."""

    host: str
    """The host's name, as the scenario (or the scheduler) calls it."""

    @property
    def ended(self) -> str:
        """Why it has ended, in words with what the far end said last; empty while it has not."""

    def send(self, line: bytes) -> None:
        """Send one line, without its newline. Raises ChannelClosedError, within ``SEND_DEADLINE_S``."""

    def receive(self, timeout_s: float) -> bytes | None:
        """The next line without its newline; None if none came in time.

        Raises ChannelClosedError when the far end is gone and every line it sent has been received.
        """

    def close(self) -> None:
        """End it, at the latest after ``CLOSE_GRACE_S``. Safe to call twice, and when it has ended."""


class Lines:
    """Whole lines out of chunks of bytes."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that these bytes complete, without their newlines."""
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join((*self._parts, whole[0]))
            self._parts = []
        if rest:
            self._parts.append(rest)
        return whole


class Inbox:
    """What has come over a channel and was not received yet, and why no more will come."""

    def __init__(self, host: str) -> None:
        self.ended = ""
        self._host = host
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def put(self, line: bytes) -> None:
        self._lines.put(line)

    def finish(self, why: str) -> None:
        """The last line has come; the first reason given for an end is the one that counts."""
        self.ended = self.ended or why
        self._lines.put(None)

    def receive(self, timeout_s: float) -> bytes | None:
        """As ``Channel.receive``."""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None
        if line is None:
            self._lines.put(None)  # for whoever asks again
            raise ChannelClosedError(self.ended)
        return line

    def closed(self) -> ChannelClosedError:
        """What who sends over a channel that has ended, or is being closed, gets to hear."""
        return ChannelClosedError(self.ended or f"the connection to {self._host} is closed")

    def stuck(self) -> ChannelClosedError:
        """The same where nobody took a line for ``SEND_DEADLINE_S``, which ends the channel."""
        self.ended = self.ended or f"{self._host} has taken nothing for {SEND_DEADLINE_S:g} s"
        return ChannelClosedError(self.ended)

    def close(self) -> None:
        """It was closed from here, if it had not ended before."""
        self.ended = self.closed().message


class PipeChannel:
    """A channel over the pipes of a program that is started here, in a session of its own.

    ``env`` adds to this process's environment. Raises LaunchError if the program cannot be run at all.
    """

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
        self._said: deque[str] = deque(maxlen=TAIL_LINES)
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
        """The program's process id."""
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
                    self._said.append(text)

    def _why(self) -> str:
        try:
            status: object = self._popen.wait(1.0)
        except subprocess.TimeoutExpired:
            status = "unknown"
        return ended_words(self.host, status, list(self._said))


def ended_words(host: str, status: object, said: Sequence[str]) -> str:
    """Why an agent's program ended: its status, and the last lines of its stderr."""
    words = f"the agent on {host} ended (status {status})"
    return f"{words}: {' | '.join(said[-3:])}" if said else words


PROTOCOL: Final = 2
BEAT_S: Final = 1.0
"""Both sides say so often that they are there."""
LOST_S: Final = 6.0
"""Without a frame for so long the other side is taken for lost. With what the agent then needs to kill its
processes (a fraction of a second, ``TRACKER_GRACE_S`` at most) it is gone 10 s after the last frame."""
CHUNK_BYTES: Final = 192 * 1024
"""Of a file in one frame, before base64."""
ENCODING: Final = "latin-1"
LOST: Final = 255
"""The exit status of a process whose host is lost, as ssh has it."""

_KINDS: Final[Mapping[str, type[KvbenchError]]] = {
    each.__name__: each
    for each in (InputError, LaunchError, MissingLibraryError, PortInUseError, ServerError)
}


class HostLostError(LaunchError):
    """The connection to a host has ended, or nothing has come from there for too long."""


def encode(frame: Mapping[str, Any]) -> bytes:
    """A frame as a line, without its newline."""
    return json.dumps(frame, separators=(",", ":")).encode()


def decode(line: bytes) -> dict[str, Any] | None:
    """The frame in a line; None for what is none, such as a word of the login shell's."""
    try:
        frame = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return frame if isinstance(frame, dict) else None


def error_frame(error: KvbenchError) -> dict[str, str]:
    """An error for the other side."""
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def error_of(frame: Mapping[str, Any], host: str) -> KvbenchError:
    """The error that the agent on ``host`` met."""
    kind = _KINDS.get(str(frame.get("kind")), LaunchError)
    return kind(f"{host}: {frame.get('message', 'failed')}", hint=str(frame.get("hint", "")))
