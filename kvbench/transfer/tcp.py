"""The reference: plain sockets with vectored I/O directly from and into the registered memory.

Each stream is a connection with a thread. With NICs, each stream is bound to one NIC's address and connects
to the peer's address of the same index; a transfer's bytes are split evenly over all streams, cutting large
blocks. Wire format, little-endian: a connection opens with the server's 16-byte key, known from ``describe``;
the server repeats it. For another key it sends 16 zeros and closes. Then requests follow: ``op`` (u8: 0 read,
1 write), count of spans (u32), the spans (u64 offset, u64 bytes each, in the server's buffer), and a write's
payload. The server answers a status byte (0 good, 1 refused) and, for a read, the payload."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket, nics_of, protocol_of
from kvbench.transfer.parts.blocks import MIN_PART_BYTES, BlockSpan, paired_spans, split_spans
from kvbench.transfer.parts.control import SWITCH_INTERVAL_S

KEY_BYTES = 16
HELLO_S = 5.0
HEADER = struct.Struct("<BI")
MAX_SPANS = 1 << 20
# Linux's limit of buffers in one sendmsg or recvmsg call (IOV_MAX, limits.h).
MAX_BUFFERS = 1024
# Bytes that fit a send buffer (net.ipv4.tcp_wmem's default) and are sent at once.
SMALL_BYTES = 16 * 1024
OPS: tuple[Op, ...] = ("read", "write")
REFUSED = "the peer refused the request: a span is outside its memory"


def send_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all buffers, in order, without copying them together."""
    pending = [view for view in views if len(view)]
    at = 0
    while at < len(pending):
        sent = sock.sendmsg(pending[at : at + MAX_BUFFERS])
        at = advance(pending, at, sent)


def receive_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all buffers, in order. Raises ConnectionError when the peer ends early."""
    pending = [view for view in views if len(view)]
    at = 0
    while at < len(pending):
        got = sock.recvmsg_into(pending[at : at + MAX_BUFFERS])[0]
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        at = advance(pending, at, got)


def advance(pending: list[memoryview], at: int, done: int) -> int:
    """Skip ``done`` bytes; a partly sent buffer is replaced by its rest."""
    while at < len(pending) and done >= len(pending[at]):
        done -= len(pending[at])
        at += 1
    if done:
        pending[at] = pending[at][done:]
    return at


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    receive_views(sock, [memoryview(data)])
    return bytes(data)


class Exchange:
    """One request and its answer, reusable."""

    def __init__(
        self, op: Op, part: Sequence[BlockSpan], memory: memoryview, done: Callable[[str], None]
    ) -> None:
        head = bytearray(HEADER.pack(OPS.index(op), len(part)))
        head += struct.pack(f"<{2 * len(part)}Q", *(n for span in part for n in (span.remote, span.nbytes)))
        views = [memory[span.local : span.local + span.nbytes] for span in part]
        self.status = bytearray(1)
        self.send = [memoryview(head), *(views if op == "write" else [])]
        self.receive = [memoryview(self.status), *(views if op == "read" else [])]
        self.send_bytes = sum(map(len, self.send))
        self.small = self.send_bytes <= SMALL_BYTES and max(len(self.send), len(self.receive)) <= MAX_BUFFERS
        self.small = self.small and sum(map(len, self.receive)) <= SMALL_BYTES
        self.done = done
        """Receives the outcome, an error or nothing, from any thread."""

    def begin(self) -> None:
        self.status[0] = 1

    def check(self) -> None:
        if self.status[0]:
            raise TransferError(REFUSED)


class TcpStream:
    """One connection to a peer, and the thread that runs its exchanges in order. A small exchange on an idle
    connection avoids the thread, whose overhead is several times its duration: ``start`` sends, ``poll``
    receives, and ``watch`` makes the endpoint's ``fd`` wake the loop."""

    def __init__(self, sock: socket.socket, wake: int, watch: select.epoll) -> None:
        self._sock = sock
        self._wake = wake
        self._watch = watch
        self._watch.register(sock, select.EPOLLONESHOT)
        self._jobs: queue.SimpleQueue[tuple[Exchange, list[memoryview], list[memoryview]] | None] = (
            queue.SimpleQueue()
        )
        # Each has one writing thread, so the idle check needs no lock.
        self._given = self._taken = 0
        self._error = ""
        self._inline: Exchange | None = None
        self._rest: list[memoryview] = []
        threading.Thread(target=self._run, name="tcp-stream", daemon=True).start()

    def close(self) -> None:
        """End the thread and fail its exchanges; nothing is written to memory afterwards."""
        self._hand_over()
        with contextlib.suppress(OSError, ValueError):
            self._watch.unregister(self._sock)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._jobs.put(None)

    def start(self, exchange: Exchange) -> None:
        exchange.begin()
        self._hand_over()
        if exchange.small and self._given == self._taken and not self._error:
            try:
                sent = self._sock.sendmsg(exchange.send, (), socket.MSG_DONTWAIT)
            except OSError:
                sent = 0  # the thread gets the same error, and waits for room or reports it
            if sent == exchange.send_bytes:
                self._inline, self._rest = exchange, exchange.receive
                self._watch.modify(self._sock, select.EPOLLIN | select.EPOLLONESHOT)
                return
            unsent = list(exchange.send)
            self._put(exchange, unsent[advance(unsent, 0, sent) :], exchange.receive)
            return
        self._put(exchange, exchange.send, exchange.receive)

    def poll(self) -> None:
        """Receive available bytes of an exchange without the thread."""
        exchange = self._inline
        if exchange is None:
            return
        error = ""
        try:
            got = self._sock.recvmsg_into(self._rest, 0, socket.MSG_DONTWAIT)[0]
            rest = list(self._rest)
            if got == 0:
                raise ConnectionResetError(
                    REFUSED if self._answered_no() else "the peer closed the connection"
                )
            self._rest = rest[advance(rest, 0, got) :]
            if self._rest and not self._answered_no():
                self._watch.modify(self._sock, select.EPOLLIN | select.EPOLLONESHOT)
                return
            exchange.check()
        except BlockingIOError:
            return
        except (OSError, TransferError) as problem:
            self._error = error = f"{problem}"
        self._inline = None
        exchange.done(error)

    def _answered_no(self) -> bool:
        exchange = self._inline
        return exchange is not None and self._rest is not exchange.receive and bool(exchange.status[0])

    def _hand_over(self) -> None:
        """Give an active exchange to the thread, since another one follows."""
        exchange, self._inline = self._inline, None
        if exchange is not None:
            self._put(exchange, [], self._rest)

    def _put(self, exchange: Exchange, send: list[memoryview], receive: list[memoryview]) -> None:
        self._given += 1
        self._jobs.put((exchange, send, receive))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            exchange, send, receive = job
            if not self._error:
                try:
                    send_views(self._sock, send)
                    if len(receive) and receive[0].obj is exchange.status:
                        receive_views(self._sock, receive[:1])
                        exchange.check()
                        receive_views(self._sock, receive[1:])
                    else:
                        receive_views(self._sock, receive)
                except (OSError, TransferError) as problem:
                    self._error = f"{problem}"
                    with contextlib.suppress(OSError):
                        self._sock.shutdown(socket.SHUT_RDWR)
            self._taken += 1
            exchange.done(self._error)
            os.eventfd_write(self._wake, 1)
        self._sock.close()


class TcpServer:
    """The target's side: one accepting thread per address, one serving thread per connection."""

    def __init__(self, addresses: Sequence[str], key: bytes, memory: memoryview) -> None:
        self._key = key
        self._memory = memory
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        try:
            for address in addresses:
                self._listeners.append(socket.create_server((address, 0), backlog=128))
        except OSError as error:
            self.close()
            raise TransferError(f"cannot listen on {address}: {error}") from error
        self.ports: list[int] = [listener.getsockname()[1] for listener in self._listeners]
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="tcp-accept", daemon=True).start()

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="tcp-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(HELLO_S)
            if not hmac.compare_digest(receive_exactly(sock, KEY_BYTES), self._key):
                sock.sendall(bytes(KEY_BYTES))
                return
            sock.sendall(self._key)
            sock.settimeout(None)
            while True:
                self._answer(sock)
        except OSError:
            pass  # a lost caller only ends this connection
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        """Answer one request. A span outside the memory ends the connection, since its payload follows."""
        op, count = HEADER.unpack(receive_exactly(sock, HEADER.size))
        if count > MAX_SPANS or op >= len(OPS):
            raise ConnectionError("too many spans, or no such operation")
        numbers = struct.unpack(f"<{2 * count}Q", receive_exactly(sock, 16 * count))
        wanted = list(zip(numbers[::2], numbers[1::2], strict=True))
        if any(offset + size > len(self._memory) for offset, size in wanted):
            sock.sendall(b"\1")
            raise ConnectionError("a span is outside the memory")
        views = [self._memory[offset : offset + size] for offset, size in wanted]
        if OPS[op] == "read":
            send_views(sock, [memoryview(b"\0"), *views])
        else:
            receive_views(sock, views)
            sock.sendall(b"\0")


PROTOCOLS = ("tcp",)


class _Transfer:
    """A ticket's state: exchanges on streams, the active ones, and the first error."""

    def __init__(self) -> None:
        self.jobs: list[tuple[TcpStream, Exchange]] = []
        self.parts = 0
        self.error = ""
        self._lock = threading.Lock()

    def part_done(self, error: str) -> None:
        with self._lock:
            self.error = self.error or error
            self.parts -= 1


class TcpEndpoint(Endpoint):
    """Sockets; their threads report through an eventfd, so the loop need not poll."""

    poll_interval_s = 1.0

    def __init__(self, options: Mapping[str, Any]) -> None:
        protocol_of(options, PROTOCOLS)
        host = str(options.get("host", "127.0.0.1"))
        self._sources = [nic.address for nic in nics_of(options)]
        self._addresses = self._sources or [host]
        # Streams per NIC, so that the total is at least the requested number.
        self._streams = -(-int(options.get("streams", 1)) // len(self._addresses)) * len(self._addresses)
        self._merge = bool(options.get("merge", True))
        self._layout = Layout(0, 0, 0)
        self._memory = memoryview(b"")
        self._server: TcpServer | None = None
        self._peers: dict[str, tuple[Layout, list[TcpStream]]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._watch = select.epoll()
        self._watch.register(self._wake, select.EPOLLIN)
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def register(self, address: int, layout: Layout) -> None:
        self._layout = layout
        self._memory = memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B")
        self._key = os.urandom(KEY_BYTES)
        self._server = TcpServer(self._addresses, self._key, self._memory)

    def reshape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        assert self._server is not None
        listeners = [list(pair) for pair in zip(self._addresses, self._server.ports, strict=True)]
        return {"listeners": listeners, "key": self._key.hex()}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        key = bytes.fromhex(peer["key"])
        until = time.monotonic() + deadline_s
        socks: list[socket.socket] = []
        try:
            for number in range(self._streams):
                host, port = peer["listeners"][number % len(self._addresses) % len(peer["listeners"])]
                source = (self._sources[number % len(self._sources)], 0) if self._sources else None
                left_s = max(until - time.monotonic(), 0.001)
                sock = socket.create_connection((host, port), timeout=left_s, source_address=source)
                socks.append(sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(key)
                if receive_exactly(sock, KEY_BYTES) != key:
                    raise TransferError(f"another endpoint listens on {host}:{port}")
                sock.settimeout(None)
        except (OSError, TransferError) as error:
            for sock in socks:
                sock.close()
            raise TransferError(f"cannot reach {host}:{port}: {error}") from error
        self.forget(peer["id"])
        streams = [TcpStream(sock, self._wake, self._watch) for sock in socks]
        self._peers[peer["id"]] = (Layout(**peer["layout"]), streams)

    def forget(self, peer: str) -> None:
        _, streams = self._peers.pop(peer, (None, []))
        for stream in streams:
            stream.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        layout, streams = self._peers[peer]
        wanted = paired_spans(local, remote, self._layout, layout, self._merge)
        parts = split_spans(wanted, len(streams), MIN_PART_BYTES) if wanted else []
        transfer = _Transfer()
        transfer.jobs = [
            (stream, Exchange(op, part, self._memory, transfer.part_done))
            for stream, part in zip(streams, parts, strict=False)
        ]
        nbytes = sum(span.nbytes for span in wanted)
        return Ticket(peer, op, nbytes, sum(map(len, parts)), time.perf_counter() - began, transfer)

    def start(self, ticket: Ticket) -> None:
        transfer: _Transfer = ticket.handle
        transfer.parts = len(transfer.jobs)
        for stream, exchange in transfer.jobs:
            stream.start(exchange)

    def poll(self, ticket: Ticket) -> bool:
        transfer: _Transfer = ticket.handle
        if transfer.parts:
            for stream, _ in transfer.jobs:
                stream.poll()
            if transfer.parts:
                return False
        if transfer.error:
            raise TransferError(transfer.error)
        return True

    def release(self, ticket: Ticket) -> None:
        # Only closed connections ensure that an abandoned transfer writes nothing later.
        if ticket.handle.parts:
            self.forget(ticket.peer)

    def progress(self) -> None:
        for fd, _ in self._watch.poll(0):
            if fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)

    def wait_fds(self) -> Sequence[int]:
        return (self._watch.fileno(),)

    def transport(self) -> str:
        return "tcp"

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._server is not None:
            self._server.close()
            self._server = None


BACKEND = Backend(
    name="tcp", title="plain TCP sockets (reference)", ops=OPS, open=TcpEndpoint, protocols=PROTOCOLS
)
