"""Keep-alive connections to one server, opened without waiting."""

from __future__ import annotations

import errno
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvbench.processes.loadgen.sockets.loop import FAILED, READABLE, WRITABLE, SocketLoop
from kvbench.processes.loadgen.sockets.wire import ANCILLARY_BYTES, ServerAddress, ServerConnection, error_of

MAX_IDLE_S: Final = 2.0
"""Maximum idle time of a connection before reuse. uvicorn (vLLM, SGLang) closes idle connections after 5 s,
and a request at that moment would look like a server failure."""
CONNECT_TIMEOUT_S: Final = 5.0
OPENING_AT_ONCE: Final = 64
SPARE_CONNECTIONS: Final = 16
"""Open connections in the background when fewer are idle."""
RETRY_S: Final = 1.0
"""Pause of background connections after a failure, in seconds."""

Opened = Callable[["ServerConnection | None", "OSError | None"], None]


class ConnectionPool:
    """Connections to one server; the last used serves first."""

    def __init__(self, server: ServerAddress, loop: SocketLoop) -> None:
        self.server = server
        self.size = 0
        self._loop = loop
        self._idle: deque[ServerConnection] = deque()
        self._opening: dict[_Opening, None] = {}
        self._growing = 0
        self._failed_at = float("-inf")

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self) -> ServerConnection | None:
        now = time.monotonic()
        while self._idle:
            connection = self._idle.pop()
            if connection.fd < 0:
                continue
            if connection.last_used is None or now - connection.last_used <= MAX_IDLE_S:
                return connection
            self.drop(connection)
        return None

    def open(self, opened: Opened) -> None:
        """Begin to open a connection; ``opened`` is called once, maybe before this returns."""
        opening = _Opening(self, self._loop, opened)
        self._opening[opening] = None
        opening.next_address()

    def opened(self, opening: _Opening, connection: ServerConnection | None, error: OSError | None) -> None:
        self._opening.pop(opening, None)
        if connection is None:
            self._failed_at = time.monotonic()
        else:
            self.size += 1
            connection.ask_for_stamps()
            self._loop.watch(connection.fd, READABLE, self._watcher(connection))
        opening.opened(connection, error)

    def release(self, connection: ServerConnection) -> None:
        self._idle.append(connection)

    def drop(self, connection: ServerConnection) -> None:
        if connection.fd >= 0:
            self._loop.unwatch(connection.fd)
            connection.close()
            self.size -= 1

    def grow(self, remaining: int) -> None:
        """Open spare connections if few are idle, at most ``remaining`` (the requests left)."""
        if self._growing or remaining <= len(self._idle) or len(self._idle) >= SPARE_CONNECTIONS:
            return
        if time.monotonic() - self._failed_at < RETRY_S:
            return
        for _ in range(min(remaining, 2 * SPARE_CONNECTIONS) - len(self._idle)):
            self._growing += 1
            self.open(self._grown)

    def _grown(self, connection: ServerConnection | None, error: OSError | None) -> None:
        self._growing -= 1
        if connection is not None:
            self.release(connection)

    def warm(self, count: int) -> OSError | None:
        """Open connections until ``count`` are idle, before the trial. Return the last failure, if any."""
        failures: list[OSError] = []

        def opened(connection: ServerConnection | None, error: OSError | None) -> None:
            if connection is not None:
                self.release(connection)
            elif error is not None:
                failures.append(error)

        while True:
            while not failures and len(self._idle) + len(self._opening) < count:
                if len(self._opening) >= OPENING_AT_ONCE:
                    break
                self.open(opened)
            if not self._opening:
                return failures[-1] if failures else None
            self._loop.turn(0.05)
            self.expire()

    def expire(self) -> None:
        now = time.monotonic()
        while self._opening and (oldest := next(iter(self._opening))).deadline <= now:
            oldest.give_up(TimeoutError(f"no connection within {CONNECT_TIMEOUT_S:g} s"))

    def close(self) -> None:
        for opening in list(self._opening):
            opening.give_up(error_of(errno.ECANCELED))
        while self._idle:
            self.drop(self._idle.pop())

    def _event(self, connection: ServerConnection, event: int) -> None:
        """Handle events outside the hot path: send stamps, room to write, abnormal ends."""
        owner = connection.owner
        if event & FAILED and (sent := connection.transmitted()) is not None:
            if owner is not None:
                owner.transmitted(*sent)
            event &= ~FAILED
        if event & WRITABLE and connection.flush():
            self._loop.watch(connection.fd, READABLE, self._watcher(connection))
        if event & ~WRITABLE:
            if owner is not None:
                self._loop.read(connection.fd)
            else:
                self._idle_event(connection)

    def _watcher(self, connection: ServerConnection) -> Callable[[int], None]:
        return lambda event: self._event(connection, event)

    def wait_to_write(self, connection: ServerConnection) -> None:
        """Send the rest of a request when there is room."""
        self._loop.watch(connection.fd, READABLE | WRITABLE, self._watcher(connection))

    def _idle_event(self, connection: ServerConnection) -> None:
        """Drop an idle connection that the server closed, or that got unrequested bytes."""
        try:
            connection.read([bytearray(1)], ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            pass
        self.drop(connection)


class _Opening:
    """One connection being opened: tries the host's addresses in turn."""

    def __init__(self, pool: ConnectionPool, loop: SocketLoop, opened: Opened) -> None:
        self.opened = opened
        self._pool = pool
        self._server = server = pool.server
        self._loop = loop
        self._addresses = iter(server.addresses)
        self._connection: ServerConnection | None = None
        self._connected = False
        self._error: OSError = OSError(f"{server.host} has no address")
        self.deadline = time.monotonic() + CONNECT_TIMEOUT_S

    def next_address(self) -> None:
        for family, address in self._addresses:
            try:
                self._start(family, address)
            except OSError as error:
                self._error = error
                continue
            return
        self._pool.opened(self, None, self._error)

    def _start(self, family: int, address: Any) -> None:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            number = sock.connect_ex(address)
            if number not in (0, errno.EINPROGRESS):
                raise error_of(number)
            self._connection = ServerConnection(sock)
        except OSError:
            sock.close()
            raise
        self._connected = False
        self._loop.watch(sock.fileno(), WRITABLE, self._event)

    def _event(self, _event: int) -> None:
        connection = self._connection
        assert connection is not None
        try:
            if not self._connected:
                if number := connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    raise error_of(number)
                self._connected = True
                if self._server.tls is not None:
                    connection.begin_tls(self._server.tls, self._server.host)
            if self._server.tls is not None:
                finished = connection.handshake()
                if not finished:
                    self._loop.watch(connection.fd, READABLE if finished is False else WRITABLE, self._event)
                    return
        except OSError as error:
            self._abandon()
            self._error = error
            self.next_address()
            return
        self._loop.unwatch(connection.fd)
        self._pool.opened(self, connection, None)

    def _abandon(self) -> None:
        if self._connection is not None and self._connection.fd >= 0:
            self._loop.unwatch(self._connection.fd)
            self._connection.close()
        self._connection = None

    def give_up(self, error: OSError) -> None:
        self._abandon()
        self._pool.opened(self, None, error)
