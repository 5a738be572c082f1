"""What a process may ask of Linux that waits for the network or the clock and then has little to do.

A process that wakes on a busy core waits until the other one's slice is over, 3 ms by default. From Linux
6.12 on a process may ask for a slice of its own (``sched_attr.sched_runtime`` of SCHED_OTHER, 0.1 to 100 ms);
one with a shorter slice goes first when it wakes. It gets no more CPU time for that, and needs no privilege.

A sleep may end 50 µs late by default, so that the timers of several processes can fire together.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

SLICE_S: Final = 0.0001
"""The shortest that Linux grants."""
_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, by machine (Linux's syscall tables); glibc has no function for it."""


_PR_SET_TIMERSLACK: Final = 29  # linux/prctl.h
_LEAST_SLACK_NS: Final = 1


class _SchedAttr(ctypes.Structure):
    """``struct sched_attr`` of linux/sched/types.h, its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def shorten_slice(seconds: float = SLICE_S) -> bool:
    """Asks for a slice of that length for the calling thread; False where the system knows no such thing.

    Threads and processes that it starts afterwards have it, too. An older kernel takes the call and
    changes nothing.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _SchedAttr(size=ctypes.sizeof(_SchedAttr), nice=nice, runtime=int(seconds * 1e9))
    try:
        return int(ctypes.CDLL(None, use_errno=True).syscall(number, 0, ctypes.byref(attr), 0)) == 0
    except (OSError, AttributeError):
        return False


def sleep_exactly() -> bool:
    """The calling thread's sleeps end when they should, if it gets a core then. False if that is refused."""
    try:
        return int(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _LEAST_SLACK_NS, 0, 0, 0)) == 0
    except (OSError, AttributeError):
        return False


def run_queue_wait_s() -> float:
    """Seconds this process was ready to run but had no core (second field of schedstat, nanoseconds)."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
