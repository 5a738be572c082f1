"""The two legs of a request: the whole answer of P, and D's answer spliced through to the client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvbench.http1 import ClientConnection, Reply, ReplyCollector, Response, error_body
from kvbench.router.spec import Backend


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
    connection.send(data, collector)
    try:
        reply = await collector.result
    except ConnectionError as error:
        raise LegError.of(backend, "early_close", 502, f"gave no whole answer: {error}") from error
    finally:
        if not collector.result.done() or collector.result.cancelled():
            connection.abort()
    timing.prefill_answered = time.monotonic()
    if reply.status != 200:
        raise LegError.answered(backend, reply)
    try:
        answer = reply.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise LegError.of(backend, "bad_answer", 502, "answered no JSON object")
    return answer


class Splice(ReplyCollector):
    """Passes a stream on as it comes; an answer of known length (JSON, an error) is gathered instead."""

    def __init__(self, response: Response, headers: dict[str, str], timing: Timing) -> None:
        super().__init__()
        self._response = response
        self._headers = headers
        self._timing = timing
        self.streaming = False

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        super().on_head(status, headers, stamp)
        if status == 200 and "content-length" not in headers:
            self.streaming = True
            content_type = headers.get("content-type", "text/event-stream")
            self._response.start_stream(status, content_type, self._headers)

    def on_body(self, data: bytes, stamp: float) -> None:
        if self._timing.decode_first_byte is None:
            self._timing.decode_first_byte = stamp
        if self.streaming:
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
    splice = Splice(response, headers, timing)
    response.on_congestion(connection.pause_reading, connection.resume_reading)
    timing.decode_sent = time.monotonic()
    connection.send(data, splice)
    try:
        reply = await splice.result
    except ConnectionError as error:
        raise LegError.of(backend, "early_close", 502, f"gave no whole answer: {error}") from error
    finally:
        if not splice.result.done() or splice.result.cancelled():
            connection.abort()
    if reply.status != 200:
        raise LegError.answered(backend, reply)
    return splice
