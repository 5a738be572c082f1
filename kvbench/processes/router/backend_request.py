"""Requests to P and D behind a client's request: P's whole answer, and D's answer spliced to the client.
Connection events drive them; a normal request needs no task and no future."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final, Protocol

from kvbench.core.records import ROUTER_TIMES, timing_header
from kvbench.processes.http1 import (
    ChunkWatch,
    ClientConnection,
    Gathering,
    MalformedAnswerError,
    Reply,
    Response,
    error_body,
    failure_error,
)
from kvbench.processes.router.spec import RouterBackend

_TIMING_HEADERS: Final = tuple(timing_header(name) for name in ROUTER_TIMES)


class BackendError(Exception):
    """A failed request to P or D: the client's answer, and the class for the counters."""

    def __init__(self, error: str, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"{error} ({status})")
        self.error = error
        self.status = status
        self.body = body
        self.content_type = content_type

    @classmethod
    def of(cls, backend: RouterBackend, kind: str, status: int, message: str) -> BackendError:
        error = f"{backend.role}_{kind}"
        return cls(error, status, error_body(status, f"{backend.name}: {message}", error))

    @classmethod
    def broken(cls, backend: RouterBackend, error: ConnectionError) -> BackendError:
        """The backend's answer is missing or incomplete."""
        kind = "malformed" if isinstance(error, MalformedAnswerError) else "early_close"
        return cls.of(backend, kind, 502, f"gave no complete answer: {error}")

    @classmethod
    def answered(cls, backend: RouterBackend, reply: Reply) -> BackendError:
        content_type = reply.headers.get("content-type", "text/plain")
        return cls(f"{backend.role}_http", reply.status, reply.body, content_type)


@dataclass(slots=True)
class Timing:
    """Seconds on the monotonic clock; None until the event."""

    prefill_sent: float | None = None
    prefill_answered: float | None = None
    decode_sent: float | None = None
    decode_first_byte: float | None = None
    request_id: str = ""
    received: float | None = None
    wanted: bool = False
    """The client wants these times in its answer's headers."""
    stream: ChunkWatch | None = None
    """D's stream, if passed on unchanged."""

    def headers(self) -> dict[str, str]:
        """Return the times so far as headers, if the client requested them."""
        if not self.wanted:
            return {}
        times = (self.received, self.prefill_sent, self.prefill_answered, self.decode_sent)
        headers = {}
        for header, time_s in zip(_TIMING_HEADERS, (*times, self.decode_first_byte), strict=True):
            if time_s is not None:
                headers[header] = f"{time_s:.6f}"
        return headers


class RequestOwner(Protocol):
    """Gets exactly one call at a backend request's end, unless it was dropped."""

    def backend_answered(self, request: BackendRequest) -> None: ...

    def backend_failed(self, failure: BackendError) -> None: ...


class BackendRequest(Gathering):
    """A request to one backend, whose answer is collected."""

    def __init__(self, backend: RouterBackend, owner: RequestOwner) -> None:
        super().__init__()
        self.backend = backend
        self.done = False
        self._owner = owner
        self._connection: ClientConnection | None = None
        self._opening: asyncio.Task[None] | None = None

    def start(self, data: bytes) -> None:
        """Send a prepared request, at once if a connection is idle. Raises BackendError if that fails."""
        connection = self.backend.pool.take()
        if connection is not None:
            self._begin(connection, data)
        else:
            self._opening = asyncio.ensure_future(self._open(data))

    async def _open(self, data: bytes) -> None:
        try:
            connection = await self.backend.pool.connect()
        except OSError as error:
            self._opening = None
            self._owner.backend_failed(
                BackendError.of(self.backend, "connect", 502, f"cannot be reached: {error}")
            )
            return
        self._opening = None
        try:
            self._begin(connection, data)
        except BackendError as failure:
            self._owner.backend_failed(failure)

    def _begin(self, connection: ClientConnection, data: bytes) -> None:
        self._connection = connection
        began = time.monotonic()
        try:
            connection.send(data, self)
        except ConnectionError as error:
            self._connection = None
            raise BackendError.broken(self.backend, error) from error
        self._sent(connection, began)

    def _sent(self, connection: ClientConnection, stamp: float) -> None:
        """Note the send; ``stamp`` was taken just before."""

    def drop(self) -> None:
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()

    def answer(self) -> Reply:
        """Return the finished answer. Raises BackendError unless it is a success."""
        try:
            reply = self.whole()
        except ConnectionError as error:
            raise BackendError.broken(self.backend, error) from error
        if reply.status != 200:
            raise BackendError.answered(self.backend, reply)
        return reply

    def on_end(self) -> None:
        self._connection = None
        self.done = True
        self._owner.backend_answered(self)

    def on_failure(self, cause: str, malformed: bool) -> None:
        self._connection = None
        self._owner.backend_failed(BackendError.broken(self.backend, failure_error(cause, malformed)))


class PrefillRequest(BackendRequest):
    def __init__(self, backend: RouterBackend, owner: RequestOwner, timing: Timing) -> None:
        super().__init__(backend, owner)
        self._timing = timing

    def _sent(self, connection: ClientConnection, stamp: float) -> None:
        self._timing.prefill_sent = stamp


class Splice(BackendRequest):
    """The request to D, whose stream is passed on as it comes; an answer of known length is collected. A
    chunked stream is passed on with its framing, except the last chunk: D alone does not decide whether the
    client's stream may end. An HTTP/1.0 client gets it without framing. A stream that ends with D's
    connection ends the same way for the client: neither knows whether it is complete."""

    def __init__(
        self,
        backend: RouterBackend,
        owner: RequestOwner,
        response: Response,
        headers: dict[str, str],
        timing: Timing,
    ) -> None:
        super().__init__(backend, owner)
        self._response = response
        self._headers = headers
        self._timing = timing
        self._content_type = ""
        self._until_close = self.streaming = False
        self._tail = b""

    def _sent(self, connection: ClientConnection, stamp: float) -> None:
        self._timing.decode_sent = stamp
        self._response.on_congestion(connection.pause_reading, connection.resume_reading)

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        super().on_head(status, headers, stamp)
        if status != 200 or "content-length" in headers:
            return
        connection = self._connection
        assert connection is not None
        self.streaming = True
        self._content_type = headers.get("content-type", "text/event-stream")
        self._until_close = connection.until_close
        # The head waits for the first byte, whose time it contains.
        if not self._timing.wanted:
            self.start_answer()
        if connection.chunked and self._response.chunked:
            self._timing.stream = connection.pass_on(self._first)

    def start_answer(self, first: bytes = b"") -> None:
        """Begin the client's stream, unless that is done."""
        if not self._response.started:
            headers = {**self._headers, **self._timing.headers()}
            self._response.start_stream(
                self._content_type, headers, until_close=self._until_close, first=first
            )
        elif first:
            self._response.pass_on(first)

    def finish(self) -> None:
        """End the client's stream, or send the collected answer."""
        if self.streaming:
            self.start_answer()  # an answer without a body has not begun it
            self._response.end(self._tail)
        else:
            content_type = self.reply.headers.get("content-type", "application/json")
            headers = {**self._headers, **self._timing.headers()}
            self._response.send(self.reply.status, self.reply.body, content_type, headers)

    def flush(self) -> None:
        """Pass on what came with the end of D's stream, without ending the client's."""
        tail, self._tail = self._tail, b""
        if tail:
            self._response.pass_on(tail)

    def _pass(self, data: bytes) -> None:
        stream = self._timing.stream
        if stream is not None and stream.complete:
            self._tail = data
        else:
            self._response.pass_on(data)

    def _first(self, data: bytes) -> None:
        self._timing.decode_first_byte = time.monotonic()
        self.start_answer(data)
        if self._connection is not None:  # the client may have been lost during the write
            self._connection.splice(self._response.descriptor, self._pass)

    def on_body(self, data: bytes, stamp: float) -> None:
        if self._timing.decode_first_byte is None:
            self._timing.decode_first_byte = stamp
        if self.streaming:
            self.start_answer()
            self._response.write(data)
        else:
            super().on_body(data, stamp)
