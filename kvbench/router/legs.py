"""The two legs of a request: the whole answer of P, and D's answer spliced through to the client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.records import ROUTER_TIMES, timing_header
from kvbench.http1 import (
    ChunkWatch,
    ClientConnection,
    MalformedAnswerError,
    Reply,
    ReplyCollector,
    Response,
    error_body,
)
from kvbench.router.spec import Backend

_TIMING_HEADERS: Final = tuple(timing_header(name) for name in ROUTER_TIMES)


class LegError(Exception):
    """A leg failed: the answer that the client gets, and the class that is counted."""

    def __init__(self, error: str, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(f"{error} ({status})")
        self.error = error
        self.status = status
        self.body = body
        self.content_type = content_type

    @classmethod
    def of(cls, backend: Backend, kind: str, status: int, message: str) -> LegError:
        error = f"{backend.role}_{kind}"
        return cls(error, status, error_body(status, f"{backend.name}: {message}", error))

    @classmethod
    def broken(cls, backend: Backend, error: ConnectionError) -> LegError:
        """The backend's answer is not whole, or is none."""
        kind = "malformed" if isinstance(error, MalformedAnswerError) else "early_close"
        return cls.of(backend, kind, 502, f"gave no whole answer: {error}")

    @classmethod
    def answered(cls, backend: Backend, reply: Reply) -> LegError:
        """The backend's own error, passed on as it is."""
        content_type = reply.headers.get("content-type", "text/plain")
        return cls(f"{backend.role}_http", reply.status, reply.body, content_type)


@dataclass
class Timing:
    """Seconds on the monotonic clock; None until it happened."""

    prefill_sent: float | None = None
    prefill_answered: float | None = None
    decode_sent: float | None = None
    decode_first_byte: float | None = None
    request_id: str = ""
    received: float | None = None
    asked: bool = False
    """The client wants these times in its answer's headers."""
    stream: ChunkWatch | None = None
    """D's stream, if it was passed on as it came."""

    def headers(self) -> dict[str, str]:
        """What has happened so far, for the client that asked for it."""
        if not self.asked:
            return {}
        times = (self.received, self.prefill_sent, self.prefill_answered, self.decode_sent)
        known = zip(_TIMING_HEADERS, (*times, self.decode_first_byte), strict=True)
        return {header: f"{time_s:.6f}" for header, time_s in known if time_s is not None}


async def _connect(backend: Backend) -> ClientConnection:
    try:
        return await backend.pool.acquire()
    except OSError as error:
        raise LegError.of(backend, "connect", 502, f"cannot be reached: {error}") from error


async def prefill(backend: Backend, data: bytes, timing: Timing) -> dict[str, Any]:
    """P's JSON answer. Raises LegError; cancelling it drops the connection, and so P's request."""
    connection = await _connect(backend)
    collector = ReplyCollector()
    timing.prefill_sent = time.monotonic()
    try:
        connection.send(data, collector)
        reply = await collector.result
    except ConnectionError as error:
        raise LegError.broken(backend, error) from error
    finally:
        if not collector.result.done() or collector.result.cancelled():
            connection.abort()
    timing.prefill_answered = time.monotonic()
    if reply.status != 200:
        raise LegError.answered(backend, reply)
    try:
        answer = reply.json()
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise LegError.of(backend, "bad_answer", 502, "answered no JSON object")
    return answer


class Splice(ReplyCollector):
    """Passes a stream on as it comes; an answer of known length (JSON, an error) is gathered instead.

    A stream in chunks is passed on with its framing, as bytes, and only its last chunk is kept back:
    whether the client's stream may end is not D's to say alone. For a client of HTTP/1.0 the framing
    is taken off. A stream that ends with D's connection ends so for the client too: whether it is
    whole is no more known here than there.
    """

    def __init__(
        self, connection: ClientConnection, response: Response, headers: dict[str, str], timing: Timing
    ) -> None:
        super().__init__()
        self._connection = connection
        self._response = response
        self._headers = headers
        self._timing = timing
        self._content_type = ""
        self.streaming = False

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        super().on_head(status, headers, stamp)
        if status != 200 or "content-length" in headers:
            return
        self.streaming = True
        self._content_type = headers.get("content-type", "text/event-stream")
        # The time of the first byte can only go into the head if the head waits for it.
        if not self._timing.asked:
            self.start()
        if self._connection.chunked and self._response.chunked:
            self._timing.stream = self._connection.pass_on(self._first)

    def start(self, first: bytes = b"") -> None:
        """Begin the client's stream, unless that is done."""
        if not self._response.started:
            headers = {**self._headers, **self._timing.headers()}
            until_close = self._connection.until_close
            self._response.start_stream(
                200, self._content_type, headers, until_close=until_close, first=first
            )
        elif first:
            self._response.pass_on(first)

    def finish(self) -> None:
        """End the client's answer, or give the one that was gathered."""
        if self.streaming:
            self.start()  # an answer without a body has not begun it
            self._response.end()
        else:
            content_type = self.reply.headers.get("content-type", "application/json")
            headers = {**self._headers, **self._timing.headers()}
            self._response.send(self.reply.status, self.reply.body, content_type, headers)

    def _first(self, data: bytes) -> None:
        """The first bytes of a stream in chunks; the others go past this object."""
        self._timing.decode_first_byte = time.monotonic()
        self.start(data)
        response = self._response
        lane = self._connection.splice(response.descriptor, response.pass_on)
        if lane is not None:
            response.on_disconnect(lane.leave)

    def on_body(self, data: bytes, stamp: float) -> None:
        if self._timing.decode_first_byte is None:
            self._timing.decode_first_byte = stamp
        if self.streaming:
            self.start()
            self._response.write(data)
        else:
            super().on_body(data, stamp)


async def decode(
    backend: Backend, data: bytes, response: Response, headers: dict[str, str], timing: Timing
) -> Splice:
    """D's answer: already with the client but for its end if it is a stream, gathered if it is not.

    Raises LegError; cancelling it drops the connection, and so D's request.
    """
    connection = await _connect(backend)
    splice = Splice(connection, response, headers, timing)
    response.on_congestion(connection.pause_reading, connection.resume_reading)
    timing.decode_sent = time.monotonic()
    try:
        connection.send(data, splice)
        reply = await splice.result
    except ConnectionError as error:
        raise LegError.broken(backend, error) from error
    finally:
        if not splice.result.done() or splice.result.cancelled():
            connection.abort()
    if reply.status != 200:
        raise LegError.answered(backend, reply)
    return splice
