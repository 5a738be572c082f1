"""Copies between memory of this host, for ``memcpy`` and ``shm``.

A peer publishes its process id and the descriptor of a memory file, which this process maps through
``/proc``; without a name nothing can be left behind. Both need the same user (or root) and process namespace,
not the same network namespace. One part is copied at once, in ``start``; with ``streams`` above 1 that many
threads copy, since ``ctypes`` releases the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Endpoint, Layout, Op, Ticket, protocol_of
from kvbench.transfer.parts.blocks import MIN_PART_BYTES, paired_spans, split_spans
from kvbench.transfer.parts.control import Job, Threads

SAME_HOST_FIX = "both sides must run on one host, as the same user and in one process namespace"


class Neighbour:
    """Another process of this host. Raises TransferError if it cannot be reached or has ended."""

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            raise TransferError(f"there is no process {pid} here: {error}", hint=SAME_HOST_FIX) from error
        self._pid = pid
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def check(self) -> None:
        if self._poll.poll(0):
            raise TransferError("the peer's process has ended")

    def open(self, file: Mapping[str, Any]) -> int:
        """Open the file described by ``file_of``; return a descriptor."""
        try:
            fd = os.open(f"/proc/{self._pid}/fd/{file['fd']}", os.O_RDWR)
        except OSError as error:
            raise TransferError(f"cannot open the peer's memory: {error}", hint=SAME_HOST_FIX) from error
        if os.fstat(fd).st_ino != file["inode"]:
            os.close(fd)
            raise TransferError("another process answers instead of the peer", hint=SAME_HOST_FIX)
        return fd

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def file_of(fd: int) -> dict[str, int]:
    """Describe a file of this process for a neighbour."""
    return {"pid": os.getpid(), "fd": fd, "inode": os.fstat(fd).st_ino}


def memory_file(nbytes: int) -> int:
    """Return a memory file without a name."""
    fd = os.memfd_create("kvbench-transfer")
    os.ftruncate(fd, max(nbytes, 1))
    return fd


class MappedFile(contextlib.AbstractContextManager["MappedFile"]):
    def __init__(self, fd: int, nbytes: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            self._map = mmap.mmap(fd, max(nbytes, 1), flags=flags)
        except (OSError, ValueError) as error:
            raise TransferError(f"cannot map {nbytes} bytes of the peer's memory: {error}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def __exit__(self, *_: object) -> None:
        # Freed with the last view; a thread may still be copying.
        del self._map


@dataclass
class _Peer:
    process: Neighbour
    memory: MappedFile
    offset: int
    layout: Layout


@dataclass
class _Copy:
    """A ticket's state: (to, from, bytes) of each part, and the threads' jobs."""

    process: Neighbour
    memory: MappedFile
    parts: list[list[tuple[int, int, int]]]
    calls: list[Callable[[], None]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)


class CopyEndpoint(Endpoint):
    poll_interval_s = 0.0003
    transport_name = ""

    def __init__(self, options: Mapping[str, Any]) -> None:
        protocol_of(options, (self.transport_name,))
        self._merge = bool(options.get("merge", True))
        self._streams = int(options.get("streams", 1))
        self._threads = Threads(self._streams) if self._streams > 1 else None
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._peers: dict[str, _Peer] = {}

    @abstractmethod
    def published(self) -> tuple[int, int]:
        """Return the file that a peer maps, and the offset of the registered bytes in it."""

    def reshape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        fd, offset = self.published()
        return {"memory": file_of(fd), "offset": offset}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        layout = Layout(**peer["layout"])
        process = Neighbour(int(peer["memory"]["pid"]))
        try:
            fd = process.open(peer["memory"])
            try:
                memory = MappedFile(fd, int(peer["offset"]) + layout.nbytes)
            finally:
                os.close(fd)
        except TransferError:
            process.close()
            raise
        self.forget(peer["id"])
        self._peers[peer["id"]] = _Peer(process, memory, int(peer["offset"]), layout)

    def forget(self, peer: str) -> None:
        if (known := self._peers.pop(peer, None)) is not None:
            known.process.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        known = self._peers[peer]
        base, peer_base = self._address, known.memory.address + known.offset
        wanted = paired_spans(local, remote, self._layout, known.layout, self._merge)
        dealt = split_spans(wanted, self._streams, MIN_PART_BYTES)
        parts = [
            [
                (peer_base + span.remote, base + span.local, span.nbytes)
                if op == "write"
                else (base + span.local, peer_base + span.remote, span.nbytes)
                for span in part
            ]
            for part in dealt
        ]
        handle = _Copy(known.process, known.memory, parts)
        handle.calls = [_copier(part) for part in parts]
        nbytes = sum(span.nbytes for span in wanted)
        return Ticket(peer, op, nbytes, sum(map(len, parts)), time.perf_counter() - began, handle)

    def start(self, ticket: Ticket) -> None:
        handle: _Copy = ticket.handle
        handle.process.check()
        if len(handle.calls) == 1 or self._threads is None:
            for call in handle.calls:
                call()
            return
        handle.jobs = [self._threads.start(call) for call in handle.calls]

    def poll(self, ticket: Ticket) -> bool:
        handle: _Copy = ticket.handle
        while handle.jobs:
            if not handle.jobs[-1].finished():
                return False
            handle.jobs.pop()
        return True

    def progress(self) -> None:
        if self._threads is not None:
            self._threads.clear()

    def wait_fds(self) -> Sequence[int]:
        return (self._threads.fd,) if self._threads is not None else ()

    def transport(self) -> str:
        return self.transport_name

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _copier(part: Sequence[tuple[int, int, int]]) -> Callable[[], None]:
    """Return a function that copies these (to, from, bytes)."""
    memmove = ctypes.memmove
    if len(part) == 1:
        to, source, nbytes = part[0]

        def copy_one() -> None:
            memmove(to, source, nbytes)

        return copy_one

    def copy() -> None:
        for to, source, nbytes in part:
            memmove(to, source, nbytes)

    return copy
