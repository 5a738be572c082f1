"""A timer that fires when it should: epoll's own timeout is rounded up to whole milliseconds."""

from __future__ import annotations

import ctypes
import os
from typing import Final

from kvbench.processes.loadgen.sockets.compiled import READS

_CLOCK_MONOTONIC: Final = 1  # linux/time.h; the clock of time.monotonic()
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC have these values
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class TimerFd:
    """A timerfd (os.timerfd_create is in Python from 3.13 on). ``fd`` is readable once the time has come."""

    def __init__(self) -> None:
        self.fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._spec = _Itimerspec()
        self._reference = ctypes.byref(self._spec)

    def set(self, at: float) -> None:
        """Fires at that ``time.monotonic()``, at once if it has passed."""
        self._set(max(int(at * 1e9), 1))

    def clear(self) -> None:
        """Does not fire before it is set again."""
        self._set(0)

    def _set(self, at_ns: int) -> None:
        if READS is not None:  # which does the same, sooner
            READS.set_timer(self.fd, at_ns)
            return
        self._spec.value.seconds, self._spec.value.nanoseconds = divmod(at_ns, 1_000_000_000)
        if _libc.timerfd_settime(self.fd, _ABSOLUTE, self._reference, None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Never fires again."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
