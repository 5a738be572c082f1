"""Several processes on one port: each listens, and the kernel distributes the connections. The workers are
forked before any event loop exists, so that they share the metrics' memory and start at once. The end of one
worker, or of the parent, ends all."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Final

from kvbench.errors import EXIT_FAILED, InputError, PortInUseError

STOP_GRACE_S: Final = 3.0


def listening_sockets(host: str, port: int, count: int) -> list[socket.socket]:
    """Return sockets that share a port (0: any). Raises PortInUseError, InputError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"the spec: host {host!r} has no address: {error}") from error
    found: list[socket.socket] = []
    try:
        # SO_REUSEPORT would let a second router of this user share the port: test without it first.
        with _socket(family) as probe:
            probe.bind(address)
            address = probe.getsockname()
        for _ in range(count):
            sock = _socket(family)
            found.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(address)
    except OSError as error:
        for sock in found:
            sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError.at(host, port) from error
        raise InputError(f"the spec: cannot listen on {host}:{port}: {error}") from error
    return found


def _socket(family: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listener


def fork(count: int, work: Callable[[int], int]) -> dict[int, int]:
    """Fork ``count`` processes that exit with ``work(number)``; return process id → number."""
    workers: dict[int, int] = {}
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            code = EXIT_FAILED
            try:
                code = work(number)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        workers[pid] = number
    return workers


async def watch(workers: Mapping[int, int], stop: asyncio.Event) -> int:
    """Wait for ``stop`` or for the first worker to end, then end them all. Return 0 after ``stop`` and a
    clean end of all, else the first nonzero exit code."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    handles = {pid: os.pidfd_open(pid) for pid in workers}
    try:
        for handle in handles.values():
            loop.add_reader(handle, ended.set)
        waits = {asyncio.ensure_future(event.wait()) for event in (stop, ended)}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        stopped = stop.is_set()
    finally:
        for handle in handles.values():
            loop.remove_reader(handle)
            os.close(handle)
    codes = await _end(workers)
    bad = [code for code in codes if code != 0]
    return bad[0] if bad else 0 if stopped else EXIT_FAILED


async def _end(workers: Mapping[int, int]) -> list[int]:
    """End all workers, by force after a grace; return their exit codes in order of ending."""
    left, codes = set(workers), []
    force_at = time.monotonic() + STOP_GRACE_S
    for pid in left:
        _signal(pid, signal.SIGTERM)
    while left:
        for pid in sorted(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                code = os.waitstatus_to_exitcode(status)
                # As a shell reports it; SIGTERM before its handler exists counts as 0.
                codes.append(0 if code == -signal.SIGTERM else code if code >= 0 else 128 - code)
        if left and time.monotonic() > force_at:
            for pid in left:
                _signal(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)
    return codes


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
