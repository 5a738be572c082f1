"""What was read of one stream, and when, until somebody takes it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvbench.processes.loadgen.sockets.clock import NEVER_NS, TIMES, arrivals
from kvbench.processes.loadgen.sockets.compiled import READS

READ_MEMORY_BYTES: Final = 400
"""About what a read of one token takes that is kept whole, with its times."""

Taken = tuple[list[bytes | int], bytes, bytes, bytes, int, int]
"""Reads, each its bytes or the number of its chunks if it was as expected; then what ``arrivals`` says; and
of the answer's text up to the last read that was as expected, CRC-32 + length · 2³²."""


class Log(Protocol):
    """There is a compiled one and one in Python."""

    @property
    def reads(self) -> list[bytes | int]:
        """What was read and not taken."""

    @property
    def held(self) -> int:
        """About how many bytes of memory that takes."""

    def add(self, data: bytes, stamp: bytes, read_ns: int, since_ns: int = ..., /) -> None:
        """A read, the kernel's stamp of it (``wire.NO_STAMP`` for none), and when it was done (monotonic).

        ``since_ns``: a time at which nothing of it had come yet; by default that of the read.
        """

    def expect(self, begin: bytes, after: bytes, text: int, /) -> None:
        """The next byte begins a chunk: ``begin``, characters that JSON does not escape, and ``after``.

        A read that brings such chunks alone may be kept as their number, up to one that does not. ``text``:
        of the answer's text so far, the CRC-32 and 2³² times the length in bytes.
        """

    def take(self, most: int, sent_ns: int, offset_ns: int, /) -> Taken:
        """Takes out the first reads, at most so many."""

    def __len__(self) -> int: ...


class PythonLog:
    """Keeps all bytes, whatever is expected."""

    __slots__ = ("_times", "reads")

    def __init__(self) -> None:
        self.reads: list[bytes | int] = []
        self._times = bytearray()

    @property
    def held(self) -> int:
        return len(self.reads) * READ_MEMORY_BYTES

    def add(self, data: bytes, stamp: bytes, read_ns: int, since_ns: int = NEVER_NS) -> None:
        self.reads.append(data)
        self._times += TIMES.pack(stamp, read_ns, since_ns)

    def expect(self, begin: bytes, after: bytes, text: int) -> None:
        pass

    def take(self, most: int, sent_ns: int, offset_ns: int) -> Taken:
        reads, times = self.reads[:most], self._times[: most * TIMES.size]
        del self.reads[:most], self._times[: most * TIMES.size]
        return reads, *arrivals(times, sent_ns, offset_ns), 0

    def __len__(self) -> int:
        return len(self.reads)


new_log: Final[Callable[[], Log]] = PythonLog if READS is None else READS.Log
"""Makes an empty log."""
