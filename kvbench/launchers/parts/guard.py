"""Run a command that dies with its parent process.

``python -I -S guard.py PARENT_PID KIND COMMAND…`` needs no kvbench and starts in milliseconds. It sets
SIGKILL as the parent-death signal, then executes the command. With the kind ``family`` the command's
children die, too: vLLM's engine cores outlive an API server that is killed. A watcher in the process group
kills the group when the parent has ended."""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
TRACKER_GRACE_S = 2.0
"""Seconds for a Python resource tracker to clean up after killed processes; it needs 0.1 s."""


def end_group(group: int) -> None:
    """Kill a process group, Python's resource trackers last: they clean up /dev/shm and then end by
    themselves. This process is killed at the very end if it is a member."""
    members = _members(group)
    trackers = _trackers(members)
    for pid in members - trackers - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_GRACE_S
    while (trackers := _trackers(trackers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> set[int]:
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
            state, _, its_group = file.read().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state != b"Z":
                found.add(int(name))
    return found


def _trackers(pids: set[int]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def _start_watcher(handle: int) -> None:
    """Start the watcher of the process of ``handle`` (a pidfd), without the command's pipes."""
    if os.fork():
        os.close(handle)
        return
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.set_inheritable(handle, True)
    os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, "--watch", str(handle)], {})


def main() -> None:
    if sys.argv[1] == "--watch":
        select.select([int(sys.argv[2])], [], [])
        end_group(os.getpgrp())
        return
    parent = int(sys.argv[1])
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        sys.exit(1)
    if os.getppid() != parent:  # the parent died before prctl
        sys.exit(1)
    if sys.argv[2] == "family":
        _start_watcher(handle)
    command = sys.argv[3:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
