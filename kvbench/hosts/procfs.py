"""Processes of this machine in /proc: children, stopped state, CPU time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil

STOPPED = "T"
"""State of a process that a signal has stopped (proc(5)); under a debugger it is t."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


_KERNEL = 2
"""kthreadd: the parent of all kernel threads."""


def wait_while(condition: Callable[[], object], most_s: float, pause_s: float) -> None:
    """Look every ``pause_s`` seconds until a condition is false, at most ``most_s`` seconds long."""
    deadline = time.monotonic() + most_s
    while condition() and time.monotonic() < deadline:
        time.sleep(pause_s)


@dataclass(frozen=True)
class ProcessReading:
    """A process at one moment. ``started``: ticks since boot, to distinguish reused numbers. ``cpu_s``: its
    CPU time; ``ended_s``: that of its ended children that were waited for."""

    pid: int
    parent: int
    session: int
    name: str
    started: int
    cpu_s: float
    ended_s: float


def processes() -> dict[int, ProcessReading]:
    """Return all processes by number, without their threads: one file read each."""
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
    """Return existing ``roots``, their descendants, and all processes in a session that one of these leads: a
    worker whose parent has ended keeps its session."""
    found = {pid for pid in roots if pid in table}
    led = {pid for pid in found if table[pid].session == pid}
    found |= {process.pid for process in table.values() if process.session in led}
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.parent, []).append(process.pid)
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
    """Listeners at URLs of this machine. ``pids``: visible processes. ``urls``: the URLs of this machine.
    ``unseen``: those with an invisible listener, as in a container or of another user."""

    pids: tuple[int, ...] = ()
    urls: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


def listening(urls: Iterable[str]) -> Listeners:
    """Find the processes that listen at the ports of URLs of this machine."""
    addresses = {entry.address for all_of in psutil.net_if_addrs().values() for entry in all_of}
    local = {"localhost", "0.0.0.0", *addresses}
    ports = {}
    for url in urls:
        parts = urlsplit(url)
        if parts.hostname in local:
            ports[url] = parts.port or (443 if parts.scheme == "https" else 80)
    if not ports:
        return Listeners()
    try:
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        sockets = []
    seen: dict[int, set[int]] = {}
    for socket in sockets:
        if socket.pid and socket.status == psutil.CONN_LISTEN and socket.laddr:
            seen.setdefault(socket.laddr.port, set()).add(socket.pid)
    found = {pid for port in ports.values() for pid in seen.get(port, ())}
    unseen = tuple(url for url, port in ports.items() if port not in seen)
    return Listeners(tuple(sorted(found)), tuple(ports), unseen)


def family(pid: int) -> list[int]:
    """Return a process and its living descendants, itself first. Reads a file per thread: too slow for many
    calls per second."""
    found = [pid]
    for member in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{member}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{member}/task/{thread}/children") as file:
                    found += [int(child) for child in file.read().split()]
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped it (SIGSTOP, Ctrl-Z)."""
    fields = stat(pid)
    return bool(fields) and fields[0] == STOPPED


def cpu_s(pids: Iterable[int]) -> float:
    """Return the total CPU seconds of these processes, without ended ones."""
    ticks = 0
    for pid in pids:
        if fields := stat(pid):
            ticks += int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 of proc(5)
    return ticks / _TICKS_PER_S


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty without the process."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []
