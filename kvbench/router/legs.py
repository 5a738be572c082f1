"""The two legs of a request: the whole answer of P, and D's answer spliced through to the client."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvbench.core.records import ROUTER_TIMES, timing_header
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
    request_id: str = ""
    received: float | None = None
    asked: bool = False
    """The client wants these times in its answer's headers."""

    def headers(self) -> dict[str, str]:
        """What has happened so far, for the client that asked for it."""
        if not self.asked:
            return {}
        times = (self.received, self.prefill_sent, self.prefill_answered, self.decode_sent)
        known = zip(ROUTER_TIMES, (*times, self.decode_first_byte), strict=True)
        return {timing_header(name): f"{time_s:.6f}" for name, time_s in known if time_s is not None}


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
        self._content_type = ""
        self.streaming = False

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        super().on_head(status, headers, stamp)
        if status == 200 and "content-length" not in headers:
            self.streaming = True
            self._content_type = headers.get("content-type", "text/event-stream")
            # The time of the first byte can only go into the head if the head waits for it.
            if not self._timing.asked:
                self.start()

    def start(self) -> None:
        """Begin the client's stream, unless that is done."""
        if not self._response.started:
            headers = {**self._headers, **self._timing.headers()}
            self._response.start_stream(200, self._content_type, headers)

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
