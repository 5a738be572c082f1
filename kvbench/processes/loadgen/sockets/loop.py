"""The loop that waits for sockets, and its timer. Its inner part is the hot path of every chunk. The timer is
precise: epoll's timeout has whole milliseconds."""

from __future__ import annotations

import ctypes
import math
import os
import select
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvbench.processes.loadgen.sockets.clock import NEVER_NS, READS, Log
from kvbench.processes.loadgen.sockets.wire import ANCILLARY_BYTES, MORE_FOLLOWS, NO_STAMP, ServerConnection

READABLE: Final = select.EPOLLIN
WRITABLE: Final = select.EPOLLOUT
FAILED: Final = select.EPOLLERR
READ_BYTES: Final = 4096
EVENTS_AT_ONCE: Final = 64
"""Maximum reads between two checks of the clock: about 0.3 ms."""
SLICE_S: Final = 0.001
"""Waiting is divided into slices of this length. Each empty one shows that nothing had arrived before, which
bounds how early the first of several chunks read together came."""
USUAL_END: Final = b"\n\n\r\n"
"""End of a read of whole events in whole chunks that is not the stream's end."""


class StreamOwner(Protocol):
    @property
    def log(self) -> Log: ...

    def noticed(self, what: bytes | OSError) -> None:
        """Handle a read that may be the last (already logged), the end (no bytes), or a failure."""


class SocketLoop:
    """epoll over streams, which are read and logged, and other descriptors, which have callbacks. The
    ``compiled`` reader is used if available; the Python one also reads TLS. Both give the same results."""

    def __init__(self, compiled: Any = READS) -> None:
        self._epoll = select.epoll()
        self._streams: dict[int, tuple[Any, Log, StreamOwner, bool]] = {}
        self._empty_ns: dict[int, int] = {}
        """Time at which a stream read by Python had no unread bytes."""
        self._looked_ns = self._scanned_ns = 0
        """Python: the last check for readable streams, and the last one that reported and served all."""
        self._plain = None if compiled is None else compiled.Streams()
        self._watchers: dict[int, Callable[[int], None]] = {}
        self._left = False
        """Whether a read of this turn filled the buffer."""
        # Shared: a new buffer per read, cut to size, would fragment the heap.
        self._buffers = [memoryview(bytearray(READ_BYTES))]

    @property
    def compiled(self) -> bool:
        return self._plain is not None

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call back with a descriptor's events; for a stream, with events other than reads."""
        if fd in self._watchers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._watchers[fd] = callback

    def unwatch(self, fd: int) -> None:
        """Remove a descriptor; call before it is closed."""
        if self._watchers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
        self.end_stream(fd)

    def stream(self, connection: ServerConnection, reading: StreamOwner) -> None:
        """Read and log everything that arrives on a connection."""
        self._streams[connection.fd] = (connection.read, reading.log, reading, connection.plain)
        if self._plain is not None and connection.plain:
            self._plain.add(connection.fd, reading.log, reading)
        else:
            self._empty_ns[connection.fd] = time.monotonic_ns()

    def end_stream(self, fd: int) -> None:
        self._empty_ns.pop(fd, None)
        if self._streams.pop(fd, None) is not None and self._plain is not None:
            self._plain.remove(fd)

    def turn(self, timeout_s: float = -1.0, until_s: float = math.inf) -> int:
        """Wait for events and handle them; return their number. A signal may end the wait. The compiled
        reader stops after the first read past ``until_s`` (``time.monotonic()``)."""
        noticed: list[tuple[StreamOwner, bytes | OSError]] = []
        if self._plain is None:
            others = self._look(timeout_s)
            count = len(others)
        else:
            others = []
            timeout_ms = -1 if timeout_s < 0 else math.ceil(timeout_s * 1e3)
            until_ns = NEVER_NS if until_s == math.inf else int(until_s * 1e9)
            count = self._plain.turn(
                self._epoll.fileno(), timeout_ms, EVENTS_AT_ONCE, until_ns, noticed, others
            )
        if others:
            others, more = self._read_all(others, noticed)
        else:
            more = []
        for reading, what in noticed:
            reading.noticed(what)
        for fd in more:
            self.read(fd)
        for fd, event in others:
            # An earlier callback may have closed it.
            if (callback := self._watchers.get(fd)) is not None:
                callback(event)
        if count < EVENTS_AT_ONCE and not self._left:  # all others had nothing to read then
            self._scanned_ns = self._looked_ns
        return count

    def _look(self, timeout_s: float) -> list[tuple[int, int]]:
        """Return ready events; wait in slices."""
        until = math.inf if timeout_s < 0 else time.monotonic() + timeout_s
        self._left = False
        while True:
            self._looked_ns = time.monotonic_ns()
            left = until - self._looked_ns / 1e9
            found = self._epoll.poll(max(0.0, min(left, SLICE_S)), EVENTS_AT_ONCE)
            if found or left <= SLICE_S:
                return found
            self._scanned_ns = self._looked_ns

    def _since_ns(self, fd: int) -> int:
        """Return a time at which a stream had no unread bytes."""
        scanned_ns: int = self._scanned_ns if self._plain is None else self._plain.empty_ns(fd)
        return max(self._empty_ns.get(fd, 0), scanned_ns)

    def _read_all(
        self, events: list[tuple[int, int]], noticed: list[tuple[StreamOwner, bytes | OSError]]
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Read in Python what is readable; return all other events, and descriptors with more to read."""
        streams, monotonic_ns = self._streams, time.monotonic_ns
        buffers, view = self._buffers, self._buffers[0]
        others: list[tuple[int, int]] = []
        more: list[int] = []
        for fd, event in events:
            if event != READABLE:
                others.append((fd, event))
                continue
            try:
                read, log, reading, plain = streams[fd]
            except KeyError:
                others.append((fd, event))
                continue
            try:
                got = read(buffers, ANCILLARY_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                # Its traceback makes a reference cycle, and garbage collection is off.
                noticed.append((reading, error.with_traceback(None)))
                continue
            try:
                count, ((_, _, stamp),), _, _ = got
            except ValueError:  # no stamp
                count, stamp = got[0], NO_STAMP
                if got[2] == MORE_FOLLOWS:
                    more.append(fd)
            if not count:
                noticed.append((reading, b""))
                continue
            data = view[:count].tobytes()
            log.add(data, stamp, monotonic_ns(), self._since_ns(fd))
            if count == READ_BYTES:  # more bytes of the same age may be waiting
                self._left = True
            elif plain and self._plain is None:
                self._empty_ns[fd] = self._looked_ns
            if data[-4:] != USUAL_END:
                noticed.append((reading, data))
        return others, more

    def read(self, fd: int) -> None:
        """Read a stream whose descriptor has other events too."""
        stream = self._streams.get(fd)
        if stream is None:
            return
        read, log, reading, _ = stream
        flags = MORE_FOLLOWS
        while flags == MORE_FOLLOWS and fd in self._streams:
            try:
                count, ancillary, flags, _ = read(self._buffers, ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                reading.noticed(error.with_traceback(None))
                return
            data = self._buffers[0][:count].tobytes()
            if data:
                stamp = ancillary[0][2] if ancillary else NO_STAMP
                log.add(data, stamp, time.monotonic_ns(), self._since_ns(fd))
            reading.noticed(data)

    def close(self) -> None:
        self._epoll.close()


_CLOCK_MONOTONIC: Final = 1  # linux/time.h; the clock of time.monotonic()
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC have these values
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A timerfd (os.timerfd_create needs Python 3.13). ``fd`` is readable at the set time."""

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)

    def set(self, at: float) -> None:
        """Fire at that ``time.monotonic()``, at once if it has passed."""
        self._set(max(int(at * 1e9), 1))

    def clear(self) -> None:
        self._set(0)

    def _set(self, at_ns: int) -> None:
        if READS is not None:  # which does the same, sooner
            READS.set_timer(self.fd, at_ns)
            return
        self._spec.value.seconds, self._spec.value.nanoseconds = divmod(at_ns, 1_000_000_000)
        if _libc.timerfd_settime(self.fd, _ABSOLUTE, self._reference, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
