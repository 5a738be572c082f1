"""The exact server: one thread, epoll, absolute deadlines, and kernel receive timestamps."""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvbench.errors import PortInUseError
from kvbench.processes.exact_server import wire
from kvbench.processes.exact_server.ledger import ExactClient, Ledger, ServedStream
from kvbench.processes.exact_server.script import Playwright, Timetable
from kvbench.processes.exact_server.spec import ExactSpec

SO_TIMESTAMPING: Final = 37  # asm-generic/socket.h; the control message has the same number
STAMPING_FLAGS: Final = 1 << 3 | 1 << 4  # linux/net_tstamp.h: RX_SOFTWARE | SOFTWARE
TIMESPEC: Final = struct.Struct("qq")
BOTH_CLOCKS_S: Final = 3e-6
"""Maximum duration of reading both clocks (ten times the usual); otherwise read them again."""
OLDEST_STAMP_S: Final = 10.0
"""An older timestamp means that the clock was set."""


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
        sock.bind((host, port))
        sock.listen(4096)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError.at(host, port) from error
        raise
    return sock


def ask_for_stamps(listener: socket.socket) -> bool:
    """Enable kernel receive timestamps, which connections inherit; return whether they are available."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, STAMPING_FLAGS)
    except OSError:
        return False
    return True


def stamp_of(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[float, bool]:
    """Return when the last bytes arrived, on CLOCK_MONOTONIC, and whether the kernel reported it."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPING and len(data) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            now, now_ns = both_clocks()
            age = (now_ns - seconds * 1_000_000_000 - nanoseconds) / 1e9
            if 0.0 <= age < OLDEST_STAMP_S:
                return now - age, True
    return time.monotonic(), False


def both_clocks() -> tuple[float, int]:
    """Read CLOCK_MONOTONIC (seconds) and CLOCK_REALTIME (nanoseconds) at the same moment."""
    for _ in range(5):
        before = time.monotonic()
        real_ns = time.time_ns()
        after = time.monotonic()
        if after - before < BOTH_CLOCKS_S:
            break
    return (before + after) / 2, real_ns


READ_BYTES: Final = 64 * 1024
BURST: Final = 128
"""Maximum tokens sent before looking for new requests."""
PARENT_POLL_S: Final = 0.25
RESET: Final = struct.pack("ii", 1, 0)


class ExactServer:
    """Listens from construction on. ``run`` returns after SIGTERM, SIGINT or the parent's death."""

    def __init__(self, spec: ExactSpec) -> None:
        self._spec = spec
        self._playwright = Playwright(spec)
        trouble = spec.troubles()
        self._refuse_after = trouble.connections if trouble and trouble.kind == "refuse" else None
        self._epoll = select.epoll()
        self._listener = listen(spec.host, spec.port)
        self.kernel_stamps = ask_for_stamps(self._listener)
        self.port: int = self._listener.getsockname()[1]
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._connections: dict[int, ExactClient] = {}
        self._timetable = Timetable(spec)
        self._ledger = Ledger(spec, self.kernel_stamps)
        self._stopping = False
        self._parent = os.getppid()
        self._wake, self._woken = socket.socketpair()
        for sock in (self._wake, self._woken):
            sock.setblocking(False)
        self._epoll.register(self._woken.fileno(), select.EPOLLIN)
        self._next_look = 0.0

    def run(self) -> None:
        """Serve until stopped, then drop open requests and write the log."""
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            while not self._stopping:
                self._poll(self._send_due())
        finally:
            signal.set_wakeup_fd(-1)
            if self._spec.log_path:
                self._ledger.write(Path(self._spec.log_path))
            for connection in list(self._connections.values()):
                self._close(connection, "server stopped")
            for sock in (self._listener, self._wake, self._woken):
                sock.close()
            self._epoll.close()

    def _stop(self, number: int, frame: object) -> None:
        self._stopping = True

    # sending

    def _send_due(self) -> float:
        """Write what is due, at most a burst; return the next deadline."""
        gaps, firsts, clock = self._timetable.gaps, self._timetable.firsts, time.monotonic
        token, gap_s, keeps = self._playwright.token, self._spec.gap_s, self._spec.log_tokens
        size = len(token)
        for _ in range(BURST):
            if firsts and (not gaps or firsts[0][0] <= gaps[0].due):
                if firsts[0][0] > clock():
                    return firsts[0][0]
                self._first(heapq.heappop(firsts)[2])
                continue
            if not gaps:
                return math.inf
            stream = gaps[0]
            now = clock()
            if stream.due > now:
                return stream.due
            gaps.popleft()
            if stream.plain == 0:
                self._last(stream, b"")
                continue
            try:
                sent = stream.send(token)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._lost(stream)
                continue
            if keeps:
                stream.writes.append(now)
            self._ledger.chunks += 1
            if sent != size:
                self._hold(stream, token[sent:])
            stream.plain -= 1
            stream.due += gap_s
            gaps.append(stream)
        return 0.0

    def _first(self, stream: ServedStream) -> None:
        if stream.connection is None:
            return
        if stream.plain == 0:
            self._last(stream, stream.head)
            return
        stream.writes.append(time.monotonic())
        self._ledger.chunks += 1
        if not self._write(stream.connection, stream.head + self._playwright.token):
            return
        stream.plain -= 1
        stream.due += self._spec.gap_s
        self._timetable.go_on(stream)

    def _last(self, stream: ServedStream, head: bytes) -> None:
        connection = stream.connection
        if connection is None:
            return
        if stream.last_tokens:
            if self._spec.log_tokens or not stream.writes:
                stream.writes.append(time.monotonic())
            self._ledger.chunks += 1
            self._ledger.more_tokens += stream.last_tokens - 1
        data = head + stream.last
        if data and not self._write(connection, data):
            return
        connection.then = stream.then
        self._end(stream, stream.scripted)
        if connection.then == "keep":
            self._serve_next(connection)
        elif not connection.unsent or connection.then == "reset":
            self._close(connection, "")

    def _write(self, connection: ExactClient, data: bytes) -> bool:
        try:
            sent = connection.keep(data) if connection.unsent else connection.sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close(connection, "client closed")
            return False
        if sent != len(data):
            self._keep_rest(connection, data[sent:])
        return True

    def _hold(self, stream: ServedStream, rest: bytes) -> None:
        if stream.connection is not None:
            self._keep_rest(stream.connection, rest)

    def _keep_rest(self, connection: ExactClient, rest: bytes) -> None:
        connection.unsent += rest
        self._epoll.modify(connection.fd, select.EPOLLIN | select.EPOLLOUT)
        if connection.stream is not None:
            connection.stream.send = connection.keep

    def _flush(self, connection: ExactClient) -> None:
        try:
            sent = connection.sock.send(connection.unsent)
        except BlockingIOError:
            return
        except OSError:
            self._close(connection, "client closed")
            return
        del connection.unsent[:sent]
        if connection.unsent:
            return
        self._epoll.modify(connection.fd, select.EPOLLIN)
        if connection.stream is not None:
            connection.stream.send = connection.sock.send
        elif connection.then == "close":
            self._close(connection, "")

    def _lost(self, stream: ServedStream) -> None:
        if stream.connection is not None:
            self._close(stream.connection, "client closed")

    def _end(self, stream: ServedStream, outcome: str) -> None:
        connection, stream.connection = stream.connection, None
        if connection is not None:
            connection.stream = None
        stream.send = len
        stream.outcome = outcome
        stream.ended = time.monotonic()
        stream.head = stream.last = b""
        self._ledger.ended(outcome)

    def _close(self, connection: ExactClient, why: str) -> None:
        if self._connections.pop(connection.fd, None) is None:
            return
        if (stream := connection.stream) is not None:
            self._end(stream, why)
            self._timetable.drop(stream)
        with contextlib.suppress(OSError):
            if connection.then == "reset":
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sock.close()

    # receiving

    def _poll(self, until: float) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + PARENT_POLL_S
            if os.getppid() != self._parent:
                self._stopping = True
                return
        wait = min(until, self._next_look) - now - self._spec.spin_s
        if wait > 0:
            # epoll's own timeout has whole milliseconds only.
            select.select([self._epoll.fileno()], (), (), wait)
        asking: list[ExactClient] = []
        for fd, events in self._epoll.poll(0):
            connection = self._connections.get(fd)
            if connection is None:
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._woken.fileno():
                    self._woken.recv(64)
                continue
            if events & select.EPOLLOUT:
                self._flush(connection)
            if events & ~select.EPOLLOUT and fd in self._connections and self._read(connection):
                asking.append(connection)
        # A queue serves in order of arrival, not in the order of reading connections.
        asking.sort(key=lambda connection: connection.stamp)
        for connection in asking:
            self._serve_next(connection)

    def _accept(self) -> None:
        while True:
            if self._refuse_after is not None and self._ledger.connections >= self._refuse_after:
                self._epoll.unregister(self._listener.fileno())
                self._listener.close()
                self._listener = socket.socket()  # an unbound socket, so that closing it again is harmless
                return
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.setblocking(False)
            connection = ExactClient(sock)
            self._ledger.connections += 1
            self._connections[connection.fd] = connection
            self._epoll.register(connection.fd, select.EPOLLIN)

    def _read(self, connection: ExactClient) -> bool:
        """Read from a client; True if a whole request may be there."""
        while True:
            try:
                data, ancillary, _, _ = connection.sock.recvmsg(READ_BYTES, 128)
            except BlockingIOError:
                break
            except OSError:
                self._close(connection, "client closed")
                return False
            if not data:
                self._close(connection, "client closed")
                return False
            connection.buffer += data
            connection.stamp, connection.kernel = stamp_of(ancillary)
            if len(data) < READ_BYTES:
                break
        return connection.stream is None

    def _serve_next(self, connection: ExactClient) -> None:
        """Serve a connection's next whole request unless one is being served."""
        while connection.stream is None and connection.buffer and connection.then == "keep":
            try:
                if connection.head is None:
                    connection.head = wire.parse_head(connection.buffer)
                head = connection.head
                if head is None or len(connection.buffer) < head.size + head.length:
                    return
                body = bytes(connection.buffer[head.size : head.size + head.length])
                del connection.buffer[: head.size + head.length]
                connection.head = None
                self._answer(connection, head, body)
            except wire.BadRequestError as error:
                connection.then = "close"
                body = wire.error_body(error.status, str(error))
                if (
                    self._write(connection, wire.plain(error.status, body, close=True))
                    and not connection.unsent
                ):
                    self._close(connection, "")
                return

    def _answer(self, connection: ExactClient, head: wire.Head, body: bytes) -> None:
        path, _, query = head.target.decode("latin-1").partition("?")
        if head.method == b"POST" and path == "/v1/completions":
            self._admit(connection, head, wire.parse_body(body))
            return
        now = time.monotonic()
        status, kind, data = self._ledger.page(
            head.method, path, query, (self._timetable.waiting(now), self._timetable.busy(now))
        )
        if head.close:
            connection.then = "close"
        data = wire.plain(status, data, kind=kind, close=head.close)
        if self._write(connection, data) and head.close and not connection.unsent:
            self._close(connection, "")

    def _admit(self, connection: ExactClient, head: wire.Head, wanted: wire.WantedAnswer) -> None:
        stream = ServedStream(len(self._ledger.streams), head.request_id, connection.stamp, connection.kernel)
        stream.output_len = wanted.output_len or self._spec.output_len
        stream.prompt_tokens = wanted.prompt_tokens
        script = self._playwright.script(
            stream.index, wanted, stream.output_len, close=head.close, in_flight=self._ledger.open + 1
        )
        self._ledger.began(stream)
        connection.stream, stream.connection = stream, connection
        stream.send = connection.sock.send
        self._timetable.admit(stream, script)
        if script.early:
            self._write(connection, script.early)
