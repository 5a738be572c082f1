"""The server side of HTTP/1: keep-alive, pipelining (served in order), chunked streams, bounded buffers.

``server = await serve(handler, "127.0.0.1", 0)``; later ``await server.close()``. ``handler(request,
response)`` may be a function or a coroutine function. It may pass the response on and return: the response is
complete after ``send`` or ``end``."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

import httptools

from kvbench.errors import PortInUseError
from kvbench.processes.http1.response import ReceivedRequest, Response, error_body, head_bytes
from kvbench.processes.http1.splicing import usual_request

log = logging.getLogger(__name__)

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
MAX_UNSENT_BYTES: Final = 4 * 1024 * 1024
"""A stream whose client leaves more than this unread is dropped."""
HIGH_WATER_BYTES: Final = 256 * 1024
STALLED_CLIENT_S: Final = 30.0
"""A client whose buffer stays above the high-water mark this long is dropped."""
HALF_REQUEST_S: Final = 60.0
"""Limit from a request's first byte to its last."""
MAX_PIPELINED: Final = 16
LINGER_S: Final = 1.0
"""A refused request is read this long, since a reset could destroy the answer."""


Handler = Callable[[ReceivedRequest, Response], Awaitable[None] | None]


@dataclass
class _Partial:
    url: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    header_bytes: int = 0
    body: list[bytes] = field(default_factory=list)
    body_bytes: int = 0
    in_headers: bool = True


class Connection(asyncio.Protocol):
    """One client connection. The parser's callbacks only set flags, on which ``data_received`` acts."""

    def __init__(self, handler: Handler, connections: set[Connection]) -> None:
        self._handler = handler
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._parser: Any = None
        self._partial: _Partial | None = None
        self._queue: deque[ReceivedRequest] = deque()
        self._response: Response | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: tuple[int, str] | None = None
        self._refused = False
        self._continue = False
        self._reading_paused = False
        self._stall: asyncio.TimerHandle | None = None
        self._half: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._descriptor = -1
        self._queued = False

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._socket = transport.get_extra_info("socket")
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._descriptor = self._socket.fileno()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._response is None and self._partial is None and not self._queue and self._refusal is None:
            usual = usual_request(data)
            if usual is not None:
                self._serve(ReceivedRequest(*usual))
                return
        try:
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An upgrade may be ignored: answer the request, then close.
            if self._queue:
                self._queue[-1] = self._queue[-1]._replace(keep_alive=False)
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or (400, f"malformed request: {error}")
        if (partial := self._partial) is not None:
            if self._half is None:
                self._half = self._loop.call_later(HALF_REQUEST_S, self.abort)
            if partial.in_headers:
                partial.header_bytes += len(data)
                if partial.header_bytes > MAX_HEADER_BYTES:
                    self._refusal = self._refusal or (431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
        self._next()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._queue.clear()
        for timer in (self._stall, self._half):
            if timer is not None:
                timer.cancel()
        response, self._response = self._response, None
        self._transport = self._socket = None
        self._descriptor = -1
        if response is not None:
            response.disconnected()

    def pause_writing(self) -> None:
        self._stall = self._loop.call_later(STALLED_CLIENT_S, self.abort)
        if self._response is not None:
            self._response.congested(True)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._response is not None:
            self._response.congested(False)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._partial = _Partial()

    def on_url(self, url: bytes) -> None:
        assert self._partial is not None
        self._partial.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        partial = self._partial
        assert partial is not None
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        old = partial.headers.get(key)
        partial.headers[key] = text if old is None else f"{old}, {text}"
        partial.header_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        partial = self._partial
        assert partial is not None
        partial.in_headers = False
        if partial.header_bytes + len(partial.url) > MAX_HEADER_BYTES:
            self._refusal = (431, f"the headers exceed {MAX_HEADER_BYTES} bytes")
        length = partial.headers.get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            self._refusal = (413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        elif partial.headers.get("expect", "").lower() == "100-continue":
            self._continue = True

    def on_body(self, body: bytes) -> None:
        partial = self._partial
        assert partial is not None
        partial.body_bytes += len(body)
        if partial.body_bytes > MAX_BODY_BYTES:
            partial.body.clear()
            self._refusal = (413, f"the body exceeds {MAX_BODY_BYTES} bytes")
        else:
            partial.body.append(body)

    def on_message_complete(self) -> None:
        partial, self._partial = self._partial, None
        assert partial is not None
        self._continue = False
        if self._half is not None:
            self._half.cancel()
            self._half = None
        if self._refusal is not None:
            return
        path, _, query = partial.url.decode("latin-1").partition("?")
        http_1_0 = self._parser.get_http_version() == "1.0"
        self._queue.append(
            ReceivedRequest(
                method=self._parser.get_method().decode("latin-1"),
                path=path,
                query=query,
                headers=partial.headers,
                body=partial.body[0] if len(partial.body) == 1 else b"".join(partial.body),
                keep_alive=self._parser.should_keep_alive() and not http_1_0,
                http_1_0=http_1_0,
            )
        )

    # for the response

    def write(self, data: bytes, bounded: bool = True) -> None:
        transport = self._transport
        if transport is None:
            return
        if bounded and self._stall is not None and transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("a client left %d bytes unread: dropped", transport.get_write_buffer_size())
            self.abort()
            return
        self._queued = True
        transport.write(data)

    def write_now(self, data: bytes) -> None:
        """Write with one system call if nothing is buffered; buffer the rest. A transport collects the writes
        of one turn of the loop: the stream served last would wait for all others."""
        descriptor = self.descriptor()
        if self._queued:
            self.write(data)
            return
        try:
            sent = os.write(descriptor, data)
        except BlockingIOError:
            sent = 0
        except OSError:  # closed or lost: the transport reports it
            self.abort()
            return
        if sent < len(data):
            self.write(data[sent:])

    def descriptor(self) -> int:
        """The socket's descriptor if nothing is buffered, else -1."""
        if self._queued:
            if self._transport is None or self._transport.get_write_buffer_size():
                return -1
            self._queued = False
        return self._descriptor

    def finished(self, keep_alive: bool) -> None:
        self._response = None
        self._task = None
        if self._transport is None:
            return
        if not keep_alive:
            self._queue.clear()
            self._refused = True
            self._transport.close()
        elif self._queue or self._refusal or self._continue:
            self._loop.call_soon(self._next)

    def abort(self, reset: bool = False) -> None:
        """Drop the connection. ``reset``: the client sees an abnormal end."""
        if self._transport is not None:
            if reset and self._socket is not None:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    @property
    def busy(self) -> bool:
        return self._response is not None or bool(self._queue)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # serving

    def _next(self) -> None:
        self._pause_reading(len(self._queue) > MAX_PIPELINED)
        if self._response is not None or self._transport is None:
            return
        if self._queue:
            self._serve(self._queue.popleft())
        elif self._refusal is not None and not self._refused:
            self._refuse(*self._refusal)
        elif self._continue:
            self._continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _pause_reading(self, pause: bool) -> None:
        if pause == self._reading_paused or self._transport is None:
            return
        self._reading_paused = pause
        (self._transport.pause_reading if pause else self._transport.resume_reading)()

    def _serve(self, request: ReceivedRequest) -> None:
        response = self._response = Response(self, request)
        try:
            result = self._handler(request, response)
        except Exception:
            self._failed(request, response)
            return
        if result is not None:
            self._task = asyncio.ensure_future(self._await(result, request, response))

    async def _await(self, result: Awaitable[None], request: ReceivedRequest, response: Response) -> None:
        try:
            await result
        except Exception:
            self._failed(request, response)

    def _failed(self, request: ReceivedRequest, response: Response) -> None:
        log.exception("the handler of %s %s failed", request.method, request.path)
        if response.closed or response.ended:
            return
        if response.started:
            response.abort()
        else:
            response.send(500, error_body(500, "internal error; see the server's log"))

    def _refuse(self, status: int, message: str) -> None:
        assert self._transport is not None
        self._refused = True
        body = error_body(status, message)
        head = head_bytes(status, "application/json", None, False, f"content-length: {len(body)}")
        self._transport.write(head + body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._loop.call_later(LINGER_S, self.close)


BACKLOG: Final = 4096


class Server:
    """A listening server; ``port`` is the real one if 0 was requested."""

    def __init__(
        self, servers: Sequence[asyncio.AbstractServer], port: int, connections: set[Connection]
    ) -> None:
        self._servers = servers
        self._connections = connections
        self.port = port

    async def close(self, grace_s: float = 0.5) -> None:
        """Stop listening, let active answers finish for ``grace_s``, then drop the rest."""
        for server in self._servers:
            server.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        for connection in list(self._connections):
            if not connection.busy:
                connection.close()
        while any(connection.busy for connection in self._connections) and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        while self._connections and loop.time() < deadline + 1.0:
            await asyncio.sleep(0.001)


async def serve(handler: Handler, host: str, port: int, *, listening: Sequence[socket.socket] = ()) -> Server:
    """Listen on ``host:port`` (0 takes any free port), or on bound sockets. Raises PortInUseError."""
    connections: set[Connection] = set()
    loop = asyncio.get_running_loop()

    def accept() -> Connection:
        return Connection(handler, connections)

    if listening:
        servers = [await loop.create_server(accept, sock=sock, backlog=BACKLOG) for sock in listening]
        return Server(servers, listening[0].getsockname()[1], connections)
    try:
        server = await loop.create_server(accept, host, port, backlog=BACKLOG, reuse_address=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError.at(host, port) from error
        raise
    return Server([server], server.sockets[0].getsockname()[1], connections)
