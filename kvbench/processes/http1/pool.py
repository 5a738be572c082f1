"""A client's request as bytes, a keep-alive pool of connections to one server, and ``fetch``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from kvbench.errors import InputError
from kvbench.processes.http1.client import ClientConnection
from kvbench.processes.http1.splicing import Splicing


def request_bytes(
    method: str, path: str, host: str, headers: Mapping[str, str] | None = None, body: bytes = b""
) -> bytes:
    """Return a whole request. ``host`` is the Host header's value."""
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}"]
    for name, value in (headers or {}).items():
        lines.append(f"{name}: {value}")
    if body or method not in ("GET", "HEAD"):
        lines.append(f"content-length: {len(body)}")
    head = "\r\n".join(lines)
    breaks = len(lines) - 1
    if head.count("\r") != breaks or head.count("\n") != breaks:
        culprit = next((line for line in lines if "\r" in line or "\n" in line), "")
        raise InputError(f"header {culprit.partition(':')[0]!r} holds a line break")
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + body


MAX_IDLE_S: Final = 2.0
"""Maximum idle time of a connection before reuse. uvicorn (vLLM, SGLang) closes idle connections after 5 s,
and a request at that moment would look like a server failure."""
CONNECT_TIMEOUT_S: Final = 5.0
CLOSE_TIMEOUT_S: Final = 1.0
CONNECTING_AT_ONCE: Final = 64
MAX_REPLY_BYTES: Final = 64 * 1024 * 1024


class Pool:
    """Keep-alive connections to one server. Raises OSError or TimeoutError when it cannot connect."""

    def __init__(
        self,
        base_url: str,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_idle_s: float = MAX_IDLE_S,
        splicing: Splicing | None = None,
    ) -> None:
        """``splicing`` may forward streams outside Python; its creator closes it later."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{base_url!r} is not an http:// or https:// URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._addresses: list[str] = []
        self._connect_timeout_s = connect_timeout_s
        self._max_idle_s = max_idle_s
        self._splicing = splicing if self._ssl is None else None
        self._idle: deque[ClientConnection] = deque()
        self._all: set[ClientConnection] = set()
        self._gate = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self.base_path = parts.path.rstrip("/")
        self.host_header = parts.netloc.rpartition("@")[2]

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def size(self) -> int:
        return len(self._all)

    def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> bytes:
        return request_bytes(method, self.base_path + path, self.host_header, headers, body)

    async def resolve(self) -> None:
        """Resolve the host's name once, so that no connection later waits for a name server."""
        found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        self._addresses = [str(entry[4][0]) for entry in found]

    def take(self) -> ClientConnection | None:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            stale = connection.last_used is not None and now - connection.last_used > self._max_idle_s
            if connection.usable and not stale:
                return connection
            connection.close()
        return None

    async def acquire(self) -> ClientConnection:
        return self.take() or await self.connect()

    async def connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        if not self._addresses:
            await self.resolve()
        async with self._gate:
            error: Exception = OSError(f"{self._host} has no address")
            for address in self._addresses:
                try:
                    _, connection = await asyncio.wait_for(
                        loop.create_connection(
                            lambda: ClientConnection(self),
                            address,
                            self._port,
                            ssl=self._ssl,
                            server_hostname=self._host if self._ssl else None,
                        ),
                        self._connect_timeout_s,
                    )
                except asyncio.TimeoutError:
                    error = TimeoutError(f"no connection within {self._connect_timeout_s:g} s")
                except OSError as failure:
                    error = failure
                else:
                    if connection.usable:
                        return connection
                    error = ConnectionResetError("the connection was dropped as soon as it was made")
        raise error

    async def warm(self, count: int) -> None:
        """Open connections until ``count`` are idle. Raises the first failure, after trying all."""
        missing = max(0, count - len(self._idle))
        opened = await asyncio.gather(*(self.connect() for _ in range(missing)), return_exceptions=True)
        for outcome in opened:
            if isinstance(outcome, ClientConnection):
                self.release(outcome)
        for outcome in opened:
            if isinstance(outcome, BaseException):
                raise outcome

    def release(self, connection: ClientConnection) -> None:
        """Make a connection available again after its answer, or unused."""
        if connection.usable:
            self._idle.append(connection)

    def opened(self, connection: ClientConnection) -> None:
        """Note an open connection: it may be lost before ``connect`` returns."""
        self._all.add(connection)

    def lost(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def splicing(self) -> Splicing | None:
        """Forwards these connections' streams outside Python, if enabled."""
        return self._splicing

    async def close(self) -> None:
        self._idle.clear()
        for connection in list(self._all):
            connection.abort()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._all and time.monotonic() < deadline:
            await asyncio.sleep(0)


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


_NO_REPLY: Final = Reply()


class MalformedAnswerError(ConnectionError):
    """The server's response is not a valid HTTP/1.1 answer."""


class Gathering:
    """Collects an answer, up to ``MAX_REPLY_BYTES``; base of sinks."""

    def __init__(self) -> None:
        self.reply = _NO_REPLY
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        self.reply = Reply(status, headers)

    def on_body(self, data: bytes, stamp: float) -> None:
        self._size += len(data)
        if self._size <= MAX_REPLY_BYTES:
            self._parts.append(data)

    def whole(self) -> Reply:
        """Return the complete answer. Raises ConnectionError if it was too large."""
        if self._size > MAX_REPLY_BYTES:
            raise ConnectionError(f"the answer exceeds {MAX_REPLY_BYTES} bytes")
        self.reply.body = b"".join(self._parts)
        return self.reply


def failure_error(cause: str, malformed: bool) -> ConnectionError:
    """Turn the arguments of ``on_failure`` into an error."""
    return MalformedAnswerError(cause) if malformed else ConnectionError(cause)


class ReplyCollector(Gathering):
    """A sink that collects the whole answer; ``result`` raises ConnectionError if it ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.result: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def on_end(self) -> None:
        if self.result.done():
            return
        try:
            self.result.set_result(self.whole())
        except ConnectionError as error:
            self.result.set_exception(error)

    def on_failure(self, cause: str, malformed: bool) -> None:
        if not self.result.done():
            self.result.set_exception(failure_error(cause, malformed))


async def fetch(pool: Pool, data: bytes) -> Reply:
    """Send one request and return its whole answer; cancelling drops the connection. Raises OSError (as
    ConnectionError or TimeoutError) without a whole answer. The answer has no deadline: use
    ``asyncio.wait_for``."""
    return await answer_of(await pool.acquire(), data)


async def answer_of(connection: ClientConnection, data: bytes) -> Reply:
    """Return the whole answer to one request over a connection; cancelling drops the connection. Raises
    ConnectionError without a whole answer."""
    collector = ReplyCollector()
    connection.send(data, collector)
    try:
        return await collector.result
    finally:
        if not collector.result.done() or collector.result.cancelled():
            connection.abort()
