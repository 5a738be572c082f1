"""When bytes came and went, by the kernel's stamps on the monotonic clock; and the log of one stream's reads.

``READS`` is the compiled part of this hot path, or None (kvbench.processes.common.entry).
"""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvbench.processes.common.entry import compiled

READS: Final = compiled("kvbench.processes.loadgen.sockets._reads")
"""The module, or None."""
WAY: Final = "python" if READS is None else "compiled"
"""How what arrives is read, as the records' client figures name it."""


_TIMESPEC: Final = struct.Struct("=qq")
TIMES: Final = struct.Struct("=16sqq")
"""Of one read: the kernel's stamp (seconds and nanoseconds of real time, zeros for none), when it was done,
and since when bytes of it may have lain there (both ``time.monotonic_ns()``)."""
_TIMES: Final = struct.Struct("=qqqq")
_NANOSECONDS: Final = np.array([1_000_000_000, 1, 0, 0], np.int64)
NEVER_NS: Final = 2**63 - 1
SLACK_NS: Final = 100_000
"""A stamp may be so much before the sending, or after the reading, for the error of comparing two clocks."""
FEW: Final = 6
LONGEST_NS: Final = 2**31 - 1
"""Lags are given in 32 bits."""
STEP_NS: Final = 100_000
"""Real time that moves so much against monotonic time from one beat to the next has been set."""


class StampClock:
    """The distance of real time from monotonic time, measured again at each beat."""

    def __init__(self) -> None:
        self.offset_ns = measured_offset_ns()
        self.steps = 0

    def stepped(self) -> bool:
        """Whether real time has been set since ``follow``. What was stamped before must be taken in first."""
        return abs(measured_offset_ns() - self.offset_ns) > STEP_NS

    def follow(self) -> None:
        """Measure again."""
        offset_ns = measured_offset_ns()
        self.steps += abs(offset_ns - self.offset_ns) > STEP_NS
        self.offset_ns = offset_ns

    def monotonic_ns(self, stamp: bytes) -> int:
        """One ``struct scm_timestamping`` on the monotonic clock."""
        seconds, nanoseconds = _TIMESPEC.unpack_from(stamp)
        return int(seconds * 1_000_000_000 + nanoseconds - self.offset_ns)


def measured_offset_ns() -> int:
    """Real time − monotonic time; of three tries the one that was disturbed least."""
    best, offset = None, 0
    for _ in range(3):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best:
            best, offset = after - before, real - (before + after) // 2
    return offset


def arrivals(times: bytes | bytearray, sent_ns: int, offset_ns: int) -> tuple[bytes, bytes, bytes, int]:
    """When each read's last bytes came, how long they lay before they were read, how much earlier its first
    bytes may have come, and how many stamps are useless.

    ``times``: the ``TIMES`` of each read. Gives an int64 (monotonic ns) and two int32 (ns) a read. A stamp
    that is missing, from before the request was sent, or from after the read, gives way to the read's own
    time. Of bytes that came one after the other and are read together, TCP gives the last stamp alone: the
    others came after the last time at which nothing lay there, and that is all that is known of them.
    """
    if len(times) <= FEW * TIMES.size:
        return _few_arrivals(times, sent_ns, offset_ns)
    table = np.frombuffer(times, np.int64).reshape(-1, 4)
    read_ns, since_ns = table[:, 2], np.maximum(table[:, 3], sent_ns)
    came_ns = table @ _NANOSECONDS
    came_ns -= offset_ns
    lags_ns = read_ns - came_ns
    # Seldom is any of them wrong, and two minima cost less than the comparisons.
    if np.minimum.reduce(lags_ns) >= 0 and np.minimum.reduce(came_ns) >= sent_ns:
        return came_ns.tobytes(), _clipped(lags_ns), _clipped(came_ns - np.minimum(since_ns, came_ns)), 0
    useless = (lags_ns < -SLACK_NS) | (came_ns < sent_ns - SLACK_NS)
    came_ns = np.minimum(np.where(useless, read_ns, came_ns), read_ns)
    doubts_ns = came_ns - np.minimum(since_ns, came_ns)
    return (
        came_ns.tobytes(),
        _clipped(read_ns - came_ns),
        _clipped(doubts_ns),
        int(np.count_nonzero(useless)),
    )


def _clipped(times_ns: NDArray[np.int64]) -> bytes:
    return np.minimum(times_ns, LONGEST_NS).astype(np.int32).tobytes()


def _few_arrivals(times: bytes | bytearray, sent_ns: int, offset_ns: int) -> tuple[bytes, bytes, bytes, int]:
    """The same without arrays, which cost as much for one read as for fifty."""
    came, lags, doubts, useless = array("q"), array("i"), array("i"), 0
    for seconds, nanoseconds, read_ns, since_ns in _TIMES.iter_unpack(times):
        came_ns = seconds * 1_000_000_000 + nanoseconds - offset_ns
        if came_ns - read_ns > SLACK_NS or came_ns < sent_ns - SLACK_NS:
            came_ns = read_ns
            useless += 1
        came.append(min(came_ns, read_ns))
        lags.append(min(read_ns - came[-1], LONGEST_NS))
        doubts.append(max(0, min(came[-1] - max(since_ns, sent_ns), LONGEST_NS)))
    return came.tobytes(), lags.tobytes(), doubts.tobytes(), useless


def gaps_in_python(stamps: array[int]) -> bytes:
    """The seconds (32-bit floats) from each of the stamps (int64, ns) to the next."""
    times_ns = np.frombuffer(stamps, np.int64)
    return ((times_ns[1:] - times_ns[:-1]) / 1e9).astype(np.float32).tobytes()


gaps: Final = gaps_in_python if READS is None else READS.gaps


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
