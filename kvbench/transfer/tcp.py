"""The plain reference: ordinary sockets, vectored I/O straight from and into the registered memory.

Wire format, little-endian. A connection opens with the 16-byte id of the peer that the caller
wants; the server answers with its own. Then one request after another: ``op`` (u8: 0 read,
1 write), count of spans (u32), the spans (u64 offset, u64 bytes each, in the server's buffer). A
write carries its payload next. The server answers a status byte (0 good, 1 refused) and, for a
read, the payload.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket
from kvbench.transfer.blocks import Span, merge_runs, spans

ID_BYTES = 16
HEADER = struct.Struct("<BI")
MAX_SPANS = 1 << 20
# Linux refuses more buffers in one sendmsg or recvmsg call (IOV_MAX, limits.h).
MAX_BUFFERS = 1024
OPS: tuple[Op, ...] = ("read", "write")


def send_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all buffers, in order, without copying them together."""
    pending = [view for view in views if len(view)]
    at = 0
    while at < len(pending):
        sent = sock.sendmsg(pending[at : at + MAX_BUFFERS])
        at = _advance(pending, at, sent)


def receive_views(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Fill all buffers, in order. Raises ConnectionError when the peer ends before."""
    pending = [view for view in views if len(view)]
    at = 0
    while at < len(pending):
        got = sock.recvmsg_into(pending[at : at + MAX_BUFFERS])[0]
        if got == 0:
            raise ConnectionResetError("the peer closed the connection")
        at = _advance(pending, at, got)


def _advance(pending: list[memoryview], at: int, done: int) -> int:
    """Step over ``done`` bytes; a buffer moved in part is replaced by its rest."""
    while at < len(pending) and done >= len(pending[at]):
        done -= len(pending[at])
        at += 1
    if done:
        pending[at] = pending[at][done:]
    return at


def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Exactly ``count`` bytes."""
    data = bytearray(count)
    receive_views(sock, [memoryview(data)])
    return bytes(data)


def split_spans(wanted: Sequence[Span], parts: int) -> list[list[Span]]:
    """Spans dealt out to at most ``parts`` lists of about equal bytes; a span may be cut."""
    if parts == 1:
        return [list(wanted)]
    total = sum(span.nbytes for span in wanted)
    share = max(-(-total // parts), 1)
    dealt: list[list[Span]] = [[]]
    room = share
    for span in wanted:
        local, remote, left = span
        while left:
            if room == 0:
                dealt.append([])
                room = share
            take = min(left, room)
            dealt[-1].append(Span(local, remote, take))
            local, remote, left, room = local + take, remote + take, left - take, room - take
    return dealt


@dataclass
class _Transfer:
    """What a ticket stands for: parts still under way on the streams, and the first error."""

    parts: int
    error: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def part_done(self, error: str = "") -> None:
        with self.lock:
            self.error = self.error or error
            self.parts -= 1


_Job = tuple[Op, list[Span], _Transfer]


class _Stream:
    """One connection to a peer and the thread that works off its jobs, in order."""

    def __init__(self, sock: socket.socket, memory: memoryview, wake: int) -> None:
        self._sock = sock
        self._memory = memory
        self._wake = wake
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tcp-stream", daemon=True).start()

    def close(self) -> None:
        """End the thread and fail what it has not done; nothing arrives in memory after that."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.jobs.put(None)

    def _run(self) -> None:
        error = ""
        while (job := self.jobs.get()) is not None:
            op, part, transfer = job
            if not error:
                try:
                    self._move(op, part)
                except (OSError, TransferError) as problem:
                    error = f"{problem}"
                    self._sock.close()
            transfer.part_done(error)
            os.eventfd_write(self._wake, 1)
        self._sock.close()

    def _move(self, op: Op, part: list[Span]) -> None:
        """One request and its answer."""
        head = bytearray(HEADER.pack(OPS.index(op), len(part)))
        head += struct.pack(f"<{2 * len(part)}Q", *(n for span in part for n in (span.remote, span.nbytes)))
        views = [self._memory[span.local : span.local + span.nbytes] for span in part]
        payload = views if op == "write" else []
        send_views(self._sock, [memoryview(head), *payload])
        if receive_exactly(self._sock, 1) != b"\0":
            raise TransferError("the peer refused the request: a span lies outside its memory")
        if op == "read":
            receive_views(self._sock, views)


class _Server:
    """The target's side: one thread accepts, one serves each connection."""

    def __init__(self, host: str, own_id: bytes, memory: memoryview) -> None:
        self._own_id = own_id
        self._memory = memory
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="tcp-accept", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="tcp-serve", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wanted = receive_exactly(sock, ID_BYTES)
            sock.sendall(self._own_id)
            while wanted == self._own_id:
                self._answer(sock)
        except OSError:
            pass  # the caller went away, which ends this connection and nothing else
        finally:
            with self._lock:
                self._open.discard(sock)
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        """One request. A span outside the memory ends the connection, since its payload follows."""
        op, count = HEADER.unpack(receive_exactly(sock, HEADER.size))
        if count > MAX_SPANS:
            raise ConnectionError("too many spans")
        numbers = struct.unpack(f"<{2 * count}Q", receive_exactly(sock, 16 * count))
        wanted = list(zip(numbers[::2], numbers[1::2], strict=True))
        if any(offset + size > len(self._memory) for offset, size in wanted):
            sock.sendall(b"\1")
            raise ConnectionError("a span lies outside the memory")
        views = [self._memory[offset : offset + size] for offset, size in wanted]
        if OPS[op] == "read":
            send_views(sock, [memoryview(b"\0"), *views])
        else:
            receive_views(sock, views)
            sock.sendall(b"\0")


class TcpEndpoint(Endpoint):
    """Sockets; the streams' threads report through an eventfd, so that the loop need not poll."""

    poll_interval_s = 1.0

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._host = str(options.get("host", "127.0.0.1"))
        self._streams = int(options.get("streams", 1))
        self._layout = Layout(0, 0, 0)
        self._memory = memoryview(b"")
        self._server: _Server | None = None
        self._peers: dict[str, tuple[Layout, list[_Stream]]] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def register(self, address: int, layout: Layout) -> None:
        self._layout = layout
        self._memory = memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B")
        self._own_id = os.urandom(ID_BYTES)
        try:
            self._server = _Server(self._host, self._own_id, self._memory)
        except OSError as error:
            raise TransferError(f"cannot listen on {self._host}: {error}") from error

    def describe(self) -> dict[str, Any]:
        assert self._server is not None
        return {"host": self._host, "port": self._server.port, "key": self._own_id.hex()}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        key = bytes.fromhex(peer["key"])
        address = (str(peer["host"]), int(peer["port"]))
        until = time.monotonic() + deadline_s
        socks: list[socket.socket] = []
        try:
            for _ in range(self._streams):
                sock = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.001))
                socks.append(sock)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(key)
                if receive_exactly(sock, ID_BYTES) != key:
                    raise TransferError(f"another endpoint listens on {address[0]}:{address[1]}")
                sock.settimeout(None)
        except (OSError, TransferError) as error:
            for sock in socks:
                sock.close()
            raise TransferError(f"cannot reach {address[0]}:{address[1]}: {error}") from error
        self.forget(peer["id"])
        streams = [_Stream(sock, self._memory, self._wake) for sock in socks]
        self._peers[peer["id"]] = (Layout(**peer["layout"]), streams)

    def forget(self, peer: str) -> None:
        _, streams = self._peers.pop(peer, (None, []))
        for stream in streams:
            stream.close()

    def submit(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        layout, streams = self._peers[peer]
        wanted = spans(merge_runs(local, remote), self._layout, layout)
        parts = split_spans(wanted, len(streams)) if wanted else []
        transfer = _Transfer(len(parts))
        prepare_s = time.perf_counter() - began
        for stream, part in zip(streams, parts, strict=False):
            stream.jobs.put((op, part, transfer))
        return Ticket(peer, op, sum(span.nbytes for span in wanted), len(wanted), prepare_s, transfer)

    def poll(self, ticket: Ticket) -> bool:
        transfer: _Transfer = ticket.handle
        if transfer.parts == 0 and transfer.error:
            raise TransferError(transfer.error)
        return transfer.parts == 0

    def release(self, ticket: Ticket) -> None:
        # What was given up must not land in memory later: only closing its connections ensures it.
        if ticket.handle.parts:
            self.forget(ticket.peer)

    def progress(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def wait_fds(self) -> Sequence[int]:
        return (self._wake,)

    def transport(self) -> str:
        return "tcp"

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._server is not None:
            self._server.close()
            self._server = None


BACKEND = Backend(
    name="tcp",
    title="plain TCP sockets (reference)",
    ops=OPS,
    check=lambda: None,
    open=TcpEndpoint,
    env=lambda options: {},
)
