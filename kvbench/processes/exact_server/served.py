"""A client's connection, and the request that is served over it. Times are seconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvbench.processes.exact_server import wire

MAX_UNSENT_BYTES: Final = 64 * 1024 * 1024
"""A client that leaves more than this unread is dropped. A log may be that long."""


class ExactClient:
    """One client. One request at a time is served; what it sends beyond that waits in ``buffer``."""

    __slots__ = ("buffer", "fd", "head", "kernel", "sock", "stamp", "stream", "then", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.buffer = bytearray()
        self.unsent = bytearray()
        self.head: wire.Head | None = None
        self.stream: ServedStream | None = None
        self.stamp = 0.0
        self.kernel = False
        self.then = "keep"

    def keep(self, data: bytes) -> int:
        """In place of ``send`` while the client does not read."""
        self.unsent += data
        if len(self.unsent) > MAX_UNSENT_BYTES:
            raise ConnectionError("the client does not read")
        return len(data)


class ServedStream:
    """One request from its arrival on; afterwards, what is known of it.

    ``due`` is the deadline of the next write, ``writes`` has the time just before each write, in order.
    """

    __slots__ = (
        "arrival",
        "connection",
        "due",
        "ended",
        "first_due",
        "head",
        "index",
        "kernel",
        "last",
        "last_tokens",
        "outcome",
        "output_len",
        "plain",
        "prompt_tokens",
        "request_id",
        "scripted",
        "send",
        "then",
        "writes",
    )

    def __init__(self, index: int, request_id: str, arrival: float, kernel: bool) -> None:
        self.index = index
        self.request_id = request_id
        self.arrival = arrival
        self.kernel = kernel
        self.connection: ExactClient | None = None
        self.prompt_tokens = self.output_len = self.plain = self.last_tokens = 0
        self.first_due = self.due = self.ended = 0.0
        self.head = self.last = b""
        self.then = "keep"
        self.outcome = "open"
        self.scripted = "complete"
        self.send: Callable[[bytes], int] = len
        self.writes = array("d")

    def row(self, gap_s: float, *, tokens: bool) -> dict[str, Any]:
        """For the log. ``token_write_s`` has the first token's time, too."""
        return {
            "index": self.index,
            "request_id": self.request_id,
            "kernel_stamp": self.kernel,
            "arrival_s": self.arrival,
            "first_due_s": self.first_due,
            "gap_s": gap_s,
            "first_write_s": self.writes[0] if self.writes else None,
            "prompt_tokens": self.prompt_tokens,
            "output_len": self.output_len,
            "outcome": self.outcome,
            "ended_s": self.ended or None,
            **({"token_write_s": self.writes.tolist()} if tokens else {}),
        }

    def lateness(self, gap_s: float) -> Iterator[float]:
        """Write − due of each write, in seconds."""
        due = self.first_due
        for index, written in enumerate(self.writes):
            yield written - due - index * gap_s
