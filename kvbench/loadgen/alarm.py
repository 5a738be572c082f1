"""Timers that fire when they should. uvloop's own are rounded to whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1  # linux/time.h; the clock of time.monotonic()
_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK | TFD_CLOEXEC have these values
_ABSOLUTE: Final = 1  # TFD_TIMER_ABSTIME

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int((seconds - whole) * 1e9))


class Alarm:
    """A timerfd (os.timerfd_create came with Python 3.13) that calls back on the running loop."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._fd: int = _libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._fired)

    def set(self, at: float, interval: float = 0.0) -> None:
        """Fires at that ``time.monotonic()`` (at once if it has passed), then each ``interval`` seconds."""
        # A value of zero would disarm the timer.
        spec = _Itimerspec(_timespec(interval), _timespec(max(at, 1e-9)))
        if _libc.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")

    def close(self) -> None:
        """Never fires again."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _fired(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()
