"""What /proc says of processes on this machine: their children, whether they are stopped, their CPU time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

STOPPED = "T"
"""State of a process that a signal has stopped (proc(5)); one that a debugger holds is in state t."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and all that descend from it, itself first; those that have ended are left out.

    It reads a file for each of their threads, so it is nothing to do many times a second.
    """
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{each}/task/{thread}/children") as file:
                    found += [int(child) for child in file.read().split()]
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it (SIGSTOP, Ctrl-Z): it does nothing until it is continued."""
    fields = stat(pid)
    return bool(fields) and fields[0] == STOPPED


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have taken together; of those that have ended, none."""
    ticks = 0
    for pid in pids:
        fields = stat(pid)
        if fields:
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 of proc(5)
    return ticks / _TICKS_PER_S


def stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
