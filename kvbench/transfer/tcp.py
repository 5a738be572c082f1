"""The plain reference: ordinary sockets, vectored I/O straight from and into the registered memory.

Each stream is a connection with a thread of its own (``parts.tcpwire``). With NICs, each stream
is bound to the address of one, and goes to the peer's address of the same index; the bytes of a transfer
are split evenly over all streams, so that large blocks are cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket, nics_of, protocol_of
from kvbench.transfer.parts.blocks import MIN_PART_BYTES, paired_spans, split_spans
from kvbench.transfer.parts.tcpwire import KEY_BYTES, OPS, Exchange, TcpServer, TcpStream, receive_exactly
from kvbench.transfer.parts.threads import SWITCH_INTERVAL_S

PROTOCOLS = ("tcp",)


class _Transfer:
    """What a ticket stands for: exchanges on streams, those still under way, and the first error."""

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
    """Sockets; their threads report through an eventfd, so that the loop need not poll."""

    poll_interval_s = 1.0

    def __init__(self, options: Mapping[str, Any]) -> None:
        protocol_of(options, PROTOCOLS)
        host = str(options.get("host", "127.0.0.1"))
        self._own = [nic.address for nic in nics_of(options)]
        self._addresses = self._own or [host]
        # As many per NIC as it takes to have all that are asked for.
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
                source = (self._own[number % len(self._own)], 0) if self._own else None
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
        # What was given up must not land in memory later: only closing its connections ensures it.
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
    name="tcp",
    title="plain TCP sockets (reference)",
    ops=OPS,
    check=lambda: None,
    open=TcpEndpoint,
    env=lambda options: {},
    protocols=PROTOCOLS,
)
