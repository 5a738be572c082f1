"""What /proc says of processes on this machine: their children, whether they are stopped, their CPU time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

STOPPED = "T"
"""State of a process that a signal has stopped (proc(5)); one that a debugger holds is in state t."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


_KERNEL = 2
"""kthreadd: the parent of all kernel threads."""


@dataclass(frozen=True)
class ProcessReading:
    """A process at one moment. ``started``: ticks since boot, which tell it from a later one of its number.

    ``cpu_s`` is its own; ``ended_s`` that of its children which have ended and been waited for.
    """

    pid: int
    parent: int
    session: int
    name: str
    started: int
    cpu_s: float
    ended_s: float


def processes() -> dict[int, ProcessReading]:
    """All processes by number: one file each, and none of their threads."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            with open(f"/proc/{entry}/stat", errors="replace") as file:
                head, _, tail = file.read().rpartition(")")
            fields = tail.split()  # from field 3 of proc(5) on
            user, system, ended_user, ended_system = (int(value) / _TICKS_PER_S for value in fields[11:15])
            name = head.partition("(")[2]
            reading = ProcessReading(
                int(entry),
                int(fields[1]),
                int(fields[3]),
                name,
                int(fields[19]),
                user + system,
                ended_user + ended_system,
            )
            found[reading.pid] = reading
    return found


def belonging(table: Mapping[int, ProcessReading], roots: Collection[int]) -> set[int]:
    """Those of ``roots`` that are there, all that descend from them, and what shares a session that one of
    them leads: a worker whose parent has ended has another parent now, but still that session.
    """
    found = {pid for pid in roots if pid in table}
    led = {pid for pid in found if table[pid].session == pid}
    found |= {each.pid for each in table.values() if each.session in led}
    children: dict[int, list[int]] = {}
    for each in table.values():
        children.setdefault(each.parent, []).append(each.pid)
    waiting = list(found)
    while waiting:
        fresh = [pid for pid in children.get(waiting.pop(), ()) if pid not in found]
        found.update(fresh)
        waiting += fresh
    return found


def is_kernel_thread(process: ProcessReading) -> bool:
    return _KERNEL in (process.pid, process.parent)


@dataclass(frozen=True)
class Listeners:
    """Who listens at URLs that name this machine.

    ``pids``: the processes that can be seen. ``urls``: the URLs that name this machine. ``unseen``: those of
    them whose listener cannot be seen, as in a container or of another user.
    """

    pids: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def listening(urls: Iterable[str]) -> Listeners:
    """Find the processes that listen on this machine at the ports of URLs that name it."""
    addresses = {each.address for all_of in psutil.net_if_addrs().values() for each in all_of}
    here = {"localhost", "0.0.0.0", *addresses}
    ports = {}
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname in here:
            ports[url] = parts.port or (443 if parts.scheme == "https" else 80)
    if not ports:
        return Listeners()
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        sockets = []
    seen: dict[int, set[int]] = {}
    for each in sockets:
        if each.pid and each.status == psutil.CONN_LISTEN and each.laddr:
            seen.setdefault(each.laddr.port, set()).add(each.pid)
    found = {pid for port in ports.values() for pid in seen.get(port, ())}
    unseen = tuple(url for url, port in ports.items() if port not in seen)
    return Listeners(tuple(sorted(found)), tuple(ports), unseen)


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
