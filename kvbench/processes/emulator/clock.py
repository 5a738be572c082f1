"""Waiting for a moment to within some 50 µs: the event loop's own timers count whole milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import Final

_TFD_FLAGS: Final = os.O_NONBLOCK | os.O_CLOEXEC
_TFD_TIMER_ABSTIME: Final = 1


class _TimerSpec(ctypes.Structure):
    """struct itimerspec: interval and first expiry, each seconds and nanoseconds."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """A timerfd on the monotonic clock, for one waiter at a time."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._rang)

    async def until(self, moment_s: float) -> None:
        """Returns at ``moment_s`` of ``time.monotonic()``, or after one turn of the loop if that is past."""
        if moment_s <= time.monotonic():
            await asyncio.sleep(0)
            return
        waiter = self._waiter = self._loop.create_future()
        seconds = int(moment_s)
        spec = _TimerSpec(0, 0, seconds, int((moment_s - seconds) * 1e9) + 1)
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None) != 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime failed")
        await waiter

    def _rang(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self.ring()

    def ring(self) -> None:
        """Ends the wait now."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
