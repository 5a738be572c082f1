"""What kvbench and its agents say to each other: frames of JSON, one a line, over any ``Channel``.

Asked is ``{"id": 1, "do": "start", …}``; answered ``{"id": 1, "answer": {…}}`` or ``{"id": 1, "error":
{"kind", "message", "hint"}}``. Without an id come ``{"event": …}`` from the agent (hello, beat, exit, log,
out) and ``{"do": "beat"}`` or ``{"do": "write"}`` to it, which nobody answers.

A process's stdin and stdout travel as latin-1 text, which is any bytes and readable where they are ASCII;
contents of files as base64.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from kvbench.errors import (
    InputError,
    KvbenchError,
    LaunchError,
    MissingLibraryError,
    PortInUseError,
    ServerError,
)

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
