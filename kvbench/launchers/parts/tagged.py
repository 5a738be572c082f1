"""Processes with a run's tag in their environment: running ones and leftovers of a crash."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbench.core.plan.processes import RUN_TAG_ENV

GRACE_S: Final = 3.0
_PROC: Final = Path("/proc")


@dataclass(frozen=True)
class Tagged:
    """One local process of a run and this user. ``age_s``: seconds since its start."""

    pid: int
    tag: str
    command: str
    age_s: float


def tagged(but: Collection[str] = ()) -> list[Tagged]:
    """This user's tagged processes, except tags ``but`` and this process."""
    boot_s, tick = time.clock_gettime(time.CLOCK_BOOTTIME), os.sysconf("SC_CLK_TCK")
    found = []
    for path in _PROC.iterdir():
        if not path.name.isdigit() or int(path.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            tag = tag_of(int(path.name))
            if not tag or tag in but:
                continue
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                words = (path / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode("utf-8", "replace").strip()
                age_s = boot_s - int(fields[19]) / tick
                found.append(Tagged(int(path.name), tag, command, round(age_s, 1)))
    return sorted(found, key=lambda process: (process.tag, process.pid))


def tag_of(pid: int) -> str:
    """Run tag of a process; empty if it has none, is another user's, or has ended."""
    try:
        if (_PROC / str(pid)).stat().st_uid != os.getuid():
            return ""
        for item in (_PROC / str(pid) / "environ").read_bytes().split(b"\0"):
            name, _, value = item.partition(b"=")
            if name == RUN_TAG_ENV.encode():
                return value.decode("utf-8", "replace")
    except OSError:
        pass
    return ""


def end(wanted: Iterable[tuple[int, str]]) -> int:
    """Terminate processes, wait ``GRACE_S`` in total, kill; return their number. Each is given with its tag,
    so that a reused process id is never signalled."""
    handles = []
    for pid, tag in wanted:
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            if tag_of(pid) == tag:
                handles.append(handle)
            else:
                os.close(handle)
    try:
        for handle in handles:
            _signal(handle, signal.SIGTERM)
        deadline, left = time.monotonic() + GRACE_S, list(handles)
        while left and (wait_s := deadline - time.monotonic()) > 0:
            exited, _, _ = select.select(left, [], [], wait_s)
            left = [handle for handle in left if handle not in exited]
        for handle in left:
            _signal(handle, signal.SIGKILL)
    finally:
        for handle in handles:
            os.close(handle)
    return len(handles)


def _signal(handle: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)
