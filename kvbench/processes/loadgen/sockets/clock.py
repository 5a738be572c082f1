"""Times of sends and arrivals from the kernel's stamps, on the monotonic clock; the log of a stream's reads.
``READS`` is the compiled part of this hot path, or None (kvbench.processes.common.entry)."""

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
WAY: Final = "python" if READS is None else "compiled"


_TIMESPEC: Final = struct.Struct("=qq")
TIMES: Final = struct.Struct("=16sqq")
"""Times of one read: the kernel's stamp (seconds and nanoseconds of real time, zeros for none), its end, and
the earliest possible arrival of its bytes (both ``time.monotonic_ns()``)."""
_TIMES: Final = struct.Struct("=qqqq")
_NANOSECONDS: Final = np.array([1_000_000_000, 1, 0, 0], np.int64)
NEVER_NS: Final = 2**63 - 1
SLACK_NS: Final = 100_000
"""Tolerance of a stamp before the send or after the read, for the error of comparing two clocks."""
FEW: Final = 6
LONGEST_NS: Final = 2**31 - 1
"""Lags are 32-bit numbers of nanoseconds."""
STEP_NS: Final = 100_000
"""A larger change of real against monotonic time between two beats means that the clock was set."""


class StampClock:
    """The offset of real time from monotonic time, measured at each beat."""

    def __init__(self) -> None:
        self.offset_ns = measured_offset_ns()
        self.steps = 0

    def stepped(self) -> bool:
        """Whether real time was set since ``follow``. Earlier stamps must be processed first."""
        return abs(measured_offset_ns() - self.offset_ns) > STEP_NS

    def follow(self) -> None:
        offset_ns = measured_offset_ns()
        self.steps += abs(offset_ns - self.offset_ns) > STEP_NS
        self.offset_ns = offset_ns

    def monotonic_ns(self, stamp: bytes) -> int:
        seconds, nanoseconds = _TIMESPEC.unpack_from(stamp)
        return int(seconds * 1_000_000_000 + nanoseconds - self.offset_ns)


def measured_offset_ns() -> int:
    """Return real time − monotonic time, the least disturbed of three measurements."""
    best, offset = None, 0
    for _ in range(3):
        before = time.monotonic_ns()
        real = time.time_ns()
        after = time.monotonic_ns()
        if best is None or after - before < best:
            best, offset = after - before, real - (before + after) // 2
    return offset


def arrivals(times: bytes | bytearray, sent_ns: int, offset_ns: int) -> tuple[bytes, bytes, bytes, int]:
    """Return per read: arrival of the last bytes (int64 ns), delay until the read and how much earlier its
    first bytes may have come (int32 ns); and the number of unusable stamps. ``times``: the ``TIMES`` of each
    read. If a stamp is missing, before the request, or after the read, the read's time is used. For bytes
    read together TCP reports only the last stamp; the others arrived after the last time at which the buffer
    was empty."""
    if len(times) <= FEW * TIMES.size:
        return _few_arrivals(times, sent_ns, offset_ns)
    table = np.frombuffer(times, np.int64).reshape(-1, 4)
    read_ns, since_ns = table[:, 2], np.maximum(table[:, 3], sent_ns)
    came_ns = table @ _NANOSECONDS
    came_ns -= offset_ns
    lags_ns = read_ns - came_ns
    # Errors are rare, and two minima cost less than the comparisons.
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
    """The same without arrays, whose overhead equals fifty reads."""
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
    """Return the seconds (32-bit floats) between consecutive stamps (int64, ns)."""
    times_ns = np.frombuffer(stamps, np.int64)
    return ((times_ns[1:] - times_ns[:-1]) / 1e9).astype(np.float32).tobytes()


gaps: Final = gaps_in_python if READS is None else READS.gaps


READ_MEMORY_BYTES: Final = 400
"""Approximate memory of a stored read of one token with its times."""

Taken = tuple[list[bytes | int], bytes, bytes, bytes, int, int]
"""Reads (bytes, or the number of expected chunks), the results of ``arrivals``, and CRC-32 + length · 2³² of
the answer's text up to the last expected read."""


class Log(Protocol):
    @property
    def reads(self) -> list[bytes | int]:
        """Reads that were not taken."""

    @property
    def held(self) -> int:
        """Approximate memory of the log in bytes."""

    def add(self, data: bytes, stamp: bytes, read_ns: int, since_ns: int = ..., /) -> None:
        """Add a read, its kernel stamp (``wire.NO_STAMP`` for none), and its time (monotonic). ``since_ns``:
        a time at which no byte of it had arrived; by default the read's."""

    def expect(self, begin: bytes, after: bytes, text: int, /) -> None:
        """Announce that a chunk begins next: ``begin``, unescaped characters, and ``after``. Reads of such
        chunks only may be stored as their number, until one differs. ``text``: CRC-32 and 2³² times the
        length in bytes of the answer's text so far."""

    def take(self, most: int, sent_ns: int, offset_ns: int, /) -> Taken:
        """Remove and return at most ``most`` reads."""

    def __len__(self) -> int: ...


class PythonLog:
    """Keeps all bytes, regardless of ``expect``."""

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
