"""The client side: one connection, which timestamps what arrives. A request is prepared bytes (``pool.py``);
its answer reaches a ``ReplySink`` as events. Nothing is retried: each error is reported once, in
``on_failure``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import httptools

from kvbench.processes.http1.splicing import ChunkWatch, FramingError, Lane, Splicing, usual_response

MAX_HEAD_BYTES: Final = 256 * 1024
"""Limit of an answer's head, interim answers included: a server could send header lines for ever."""


class ReplySink(Protocol):
    """Callbacks of one request. Exactly one of ``on_end`` and ``on_failure`` is called, last."""

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        """Receive the head; header names are lower case. Stamps are ``time.monotonic()`` at the read."""

    def on_body(self, data: bytes, stamp: float) -> None:
        """Receive body bytes without framing, once per read."""

    def on_end(self) -> None:
        """The answer is complete; the connection is already back in its pool."""

    def on_failure(self, cause: str, malformed: bool) -> None:
        """The connection ended before the answer was complete, or the answer is not HTTP (malformed)."""


class Owner(Protocol):
    def opened(self, connection: ClientConnection) -> None: ...

    def release(self, connection: ClientConnection) -> None: ...

    def lost(self, connection: ClientConnection) -> None: ...

    def splicing(self) -> Splicing | None: ...


class ClientConnection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self, pool: Owner | None = None) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._sink: ReplySink | None = None
        self._body: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._head_complete = self._head_reported = self._complete = self._until_close = False
        self._keep_alive = self._chunked = False
        self._head_tail = b""
        self._head_bytes = 0
        self._watch: ChunkWatch | None = None
        self._lane: Lane | None = None
        self._paused = False
        self._descriptor = -1
        self._pass_on: Callable[[bytes], None] = _nowhere
        self.last_used: float | None = None
        """When its last answer ended (monotonic); None if it was never used."""

    @property
    def usable(self) -> bool:
        return self._transport is not None and self._sink is None and not self._transport.is_closing()

    def send(self, data: bytes, sink: ReplySink) -> None:
        """Send a request while no other is active. Raises ConnectionError."""
        assert self._sink is None
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was lost before the request was sent")
        self._sink = sink
        self._parser = None
        self._headers = {}
        self._head_complete = self._head_reported = self._complete = self._until_close = False
        self._head_tail = b""
        self._head_bytes = 0
        self._write_now(self._transport, data)

    def _write_now(self, transport: asyncio.Transport, data: bytes) -> None:
        """Write with one system call: uvloop's transports write at the end of the loop's turn."""
        if self._descriptor >= 0 and not transport.get_write_buffer_size():
            with contextlib.suppress(OSError):  # the transport reports the error
                data = data[os.write(self._descriptor, data) :]
        if data:
            transport.write(data)

    def pass_on(self, write: Callable[[bytes], None]) -> ChunkWatch:
        """Pass the body's bytes to ``write`` with their framing, except the last chunk. Return the counter.
        Call it in ``on_head`` of a chunked answer (``chunked``), and later to change ``write``. ``on_body``
        is not called; ``on_end`` and ``on_failure`` are: an invalid chunk is a failure."""
        if self._watch is None:
            assert self.chunked
            self._watch = ChunkWatch()
        self._pass_on = write
        return self._watch

    def splice(self, target: Callable[[], int], write: Callable[[bytes], None]) -> Lane | None:
        """Like ``pass_on``, but usual reads may go directly to the descriptor that ``target`` gives.
        ``target`` gives -1 while only ``write`` may write. Returns the lane to leave before that descriptor
        is closed; None if all goes through ``write``."""
        watch = self.pass_on(write)
        splicing = None if self._pool is None else self._pool.splicing()
        if splicing is not None and self._descriptor >= 0 and splicing.splicer() is not None:
            self._lane = Lane(splicing, self, self._descriptor, watch, target, write)
        return self._lane

    @property
    def all_sent(self) -> bool:
        return self._transport is not None and not self._transport.get_write_buffer_size()

    @property
    def chunked(self) -> bool:
        """Whether the answer whose head has come is chunked, without any other coding."""
        return self._chunked

    @property
    def until_close(self) -> bool:
        """Whether the answer whose head has come ends with its connection."""
        return self._until_close

    def abort(self) -> None:
        """Drop the connection; the active request gets no further event."""
        self._sink = None
        self._body.clear()
        self._stop_passing_on()
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing() and self._paused:
            self._paused = False
            self._transport.resume_reading()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (sock := transport.get_extra_info("socket")) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if transport.get_extra_info("sslcontext") is None:
                self._descriptor = sock.fileno()
        if self._pool is not None:
            self._pool.opened(self)

    def data_received(self, data: bytes) -> None:
        watch = self._watch
        if watch is not None:  # a stream that is passed on: the hot path
            try:
                passed = watch.feed(data)
            except FramingError as error:
                self._fail(f"the answer is not a valid chunked body: {error}", malformed=True)
                return
            if passed:
                self._pass_on(passed)
                watch.reads += 1
                watch.passed_bytes += len(passed)
            if watch.complete and watch is self._watch:
                self._finish(time.monotonic())
            elif self._lane is not None:
                self._lane.enter()
            return
        stamp = time.monotonic()
        if self._sink is None:
            # Unrequested bytes: the connection is out of step and unusable.
            self.abort()
            return
        if self._parser is None:
            if (usual := usual_response(data)) is not None:
                self._take_usual(data, usual, stamp)
                return
            self._parser = httptools.HttpResponseParser(self)
        self._take(data, stamp)

    def _take_usual(self, data: bytes, usual: tuple[int, dict[str, str], int], stamp: float) -> None:
        """Handle an answer's first read with its head and its whole body, or the beginning of chunks."""
        sink = self._sink
        assert sink is not None
        status, self._headers, end = usual
        self._chunked = "transfer-encoding" in self._headers
        self._head_complete = self._head_reported = self._keep_alive = True
        sink.on_head(status, self._headers, stamp)
        if sink is not self._sink:
            return
        rest = data[end:]
        if not self._chunked:
            if rest:
                sink.on_body(rest, stamp)
            if sink is self._sink:
                self._finish(stamp)
        elif self._watch is not None:
            if rest:
                self.data_received(rest)
        else:
            self._parser = httptools.HttpResponseParser(self)
            self._parse(data[:end], stamp)
            if rest:
                self._parse(rest, stamp)

    def _take(self, data: bytes, stamp: float) -> None:
        sink = self._sink
        while True:
            rest = b""
            if not self._head_complete:
                data, rest = self._split_head(data)
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._fail(f"the answer's head exceeds {MAX_HEAD_BYTES} bytes", malformed=True)
                    return
            self._parse(data, stamp)
            if not rest:
                return
            if sink is not self._sink:
                self._fail("bytes came after the end of an answer", malformed=True)
                return
            if self._head_complete:
                break
            data = rest  # another head follows an interim answer
        if self._watch is None:
            self._parse(rest, stamp)
        else:
            self.data_received(rest)

    def _split_head(self, data: bytes) -> tuple[bytes, bytes]:
        """Split a read of the head at its end; bytes passed on must stay unparsed."""
        seen = self._head_tail + data
        end = seen.find(b"\r\n\r\n")
        if end < 0:
            self._head_tail = seen[-3:]
            return data, b""
        end += 4 - len(self._head_tail)
        self._head_tail = b""  # another head follows an interim answer
        return data[:end], data[end:]

    def _parse(self, data: bytes, stamp: float) -> None:
        sink = self._sink
        assert sink is not None
        malformed = ""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            malformed = f"the answer is not HTTP/1.1: {error}"
        if self._head_complete:
            self._deliver(sink, stamp)
        if malformed and sink is self._sink:
            self._fail(malformed, malformed=True)

    def _deliver(self, sink: ReplySink, stamp: float) -> None:
        """Deliver one read. A sink may abort the connection in any of its events."""
        if not self._head_reported:
            self._head_reported = True
            sink.on_head(self._parser.get_status_code(), self._headers, stamp)
        body = self._body
        if body and sink is self._sink:
            data = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            sink.on_body(data, stamp)
        if self._complete and sink is self._sink:
            self._finish(stamp)

    def _finish(self, stamp: float) -> None:
        sink, self._sink = self._sink, None
        assert sink is not None
        self._stop_passing_on()
        self.last_used = stamp
        if self._until_close or not self._keep_alive:
            self.close()
        else:
            self.resume_reading()  # the last bytes may have overfilled the client's buffer
            if self._pool is not None:
                self._pool.release(self)
        sink.on_end()

    def _stop_passing_on(self) -> None:
        self._watch = None
        self._pass_on = _nowhere
        lane, self._lane = self._lane, None
        if lane is not None:
            lane.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        sink = self._sink
        self._transport = None
        self._descriptor = -1
        if self._pool is not None:
            self._pool.lost(self)
        if sink is None:
            return
        if exc is None and self._until_close and self._head_reported:
            self._sink = None
            sink.on_end()
        else:
            self._fail(str(exc) if exc else "the connection was closed", malformed=False)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _fail(self, cause: str, malformed: bool) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_failure(cause, malformed)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:  # an interim answer, such as 100 Continue
            self._headers = {}
            return
        self._head_complete = True
        coding = self._headers.get("transfer-encoding", "").strip().lower()
        self._chunked = coding == "chunked"
        framed = "content-length" in self._headers or coding.rpartition(",")[2].strip() == "chunked"
        self._until_close = not framed and self._parser.get_status_code() not in (204, 304)
        self._keep_alive = self._parser.should_keep_alive()  # only true inside this callback

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._head_complete:
            self._complete = True


def _nowhere(data: bytes) -> None:
    """Discard the bytes of a stream without a reader."""
