"""A request and its response, for a handler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final, NamedTuple, Protocol

from kvbench.processes.http1.splicing import LAST_CHUNK

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
_NO_BODY: Final = frozenset({204, 304})


class Wire(Protocol):
    """Interface of a connection that a response uses."""

    def write(self, data: bytes, bounded: bool = True) -> None: ...

    def write_now(self, data: bytes) -> None: ...

    def descriptor(self) -> int: ...

    def finished(self, keep_alive: bool) -> None: ...

    def abort(self, reset: bool = False) -> None: ...


class ReceivedRequest(NamedTuple):
    """One request; header names are lower case, ``path`` has no query."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    keep_alive: bool = True
    http_1_0: bool = False


class Response:
    """The response to one request: either ``send`` once, or ``start_stream``, ``write``…, ``end``. After the
    client has gone, ``closed`` is true and writes are dropped silently."""

    __slots__ = (
        *("_chunked", "_connection", "_disconnect", "_flow", "_keep_alive", "_request"),
        *("closed", "ended", "started"),
    )

    def __init__(self, connection: Wire, request: ReceivedRequest) -> None:
        self._connection = connection
        self._request = request
        self._chunked = not request.http_1_0
        self._keep_alive = request.keep_alive
        self._disconnect: list[Callable[[], None]] = []
        self._flow: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.closed = False
        self.started = False
        self.ended = False

    def send(
        self,
        status: int,
        body: bytes = b"",
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._begin()
        if self.closed:
            return
        head = head_bytes(status, content_type, headers, self._keep_alive, f"content-length: {len(body)}")
        if self._request.method == "HEAD" or status in _NO_BODY:
            body = b""
        self._connection.write(head + body, bounded=False)
        self._finish()

    def start_stream(
        self,
        content_type: str = "text/event-stream",
        headers: Mapping[str, str] | None = None,
        *,
        until_close: bool = False,
        first: bytes = b"",
    ) -> None:
        """Send the head of a response of unknown length; ``write`` and ``end`` follow. ``until_close``: it
        ends with its connection, as for an HTTP/1.0 client. ``first``: framed bytes that go out with the
        head."""
        self._begin()
        if until_close:
            self._chunked = self._keep_alive = False
        if self.closed:
            return
        framing = "transfer-encoding: chunked" if self._chunked else ""
        head = head_bytes(200, content_type, headers, self._keep_alive, framing)
        self._connection.write_now(head + first)

    @property
    def chunked(self) -> bool:
        return self._chunked

    @property
    def pass_on(self) -> Callable[[bytes], None]:
        """Return a function that writes framed bytes of the stream, immediately if the client keeps up. It
        skips all checks and buffers: for a stream that arrives in chunks. It may be called after the client
        has left."""
        return self._connection.write_now

    @property
    def descriptor(self) -> Callable[[], int]:
        """Return a function that gives the descriptor to write to directly, or -1."""
        return self._connection.descriptor

    def write(self, data: bytes) -> None:
        if self.closed or self.ended or not data:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._connection.write(data)

    def end(self, last: bytes = b"") -> None:
        """Complete the stream. ``last``: framed bytes that go out with its end."""
        if self.closed or self.ended:
            return
        if self._chunked:
            self._connection.write_now(last + LAST_CHUNK)
        self._finish()

    def abort(self) -> None:
        """Drop the connection: the client sees an incomplete response."""
        # If the connection's end is the answer's end, only a reset shows the difference.
        self._connection.abort(reset=self.started and not self._chunked)

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call back once if the client leaves before the response is complete."""
        if self.closed:
            callback()
        else:
            self._disconnect.append(callback)

    def on_congestion(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Call back when the client reads too slowly and when it has caught up."""
        self._flow = (pause, resume)

    def congested(self, yes: bool) -> None:
        if self._flow is not None:
            self._flow[0 if yes else 1]()

    def disconnected(self) -> None:
        self.closed = True
        callbacks, self._disconnect = self._disconnect, []
        for callback in callbacks:
            callback()

    def _begin(self) -> None:
        if self.started:
            raise RuntimeError("the answer has already begun")
        self.started = True

    def _finish(self) -> None:
        self.ended = True
        self._disconnect.clear()
        self._flow = None
        self._connection.finished(self._keep_alive)


def head_bytes(
    status: int, content_type: str, headers: Mapping[str, str] | None, keep_alive: bool, framing: str
) -> bytes:
    lines = [f"content-type: {content_type}"]
    if framing:
        lines.append(framing)
    if not keep_alive:
        lines.append("connection: close")
    for name, value in (headers or {}).items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"header {name} holds a line break")
        lines.append(f"{name}: {value}")
    status_line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
    return status_line + "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


def error_body(status: int, message: str, kind: str = "") -> bytes:
    error = {"message": message, "type": kind or HTTPStatus(status).phrase, "code": status}
    return json.dumps({"error": error}).encode()
