"""Check that no process is stopped by a signal and that each server responds.

A hung process neither ends nor logs, and its requests run into timeouts of minutes. A thread sends each
server a small request every two seconds on its own connection. Any response counts, even an error. The load
is negligible for a server with hundreds of requests per second."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urljoin, urlsplit

from kvbench.errors import KvbenchError
from kvbench.hosts.procfs import cpu_s, family, is_stopped
from kvbench.launchers.agents.remote_process import RemoteProcess
from kvbench.launchers.base import Process

ASK_EVERY_S: Final = 2.0
LOOK_S: Final = 0.25
"""Interval at which a waiting thread checks for its end, in seconds."""


class Heartbeat:
    """Polls servers from ``start`` to ``close``. ``urls``: name → URL. Raises ValueError for a URL that is
    not plain http."""

    def __init__(self, urls: Mapping[str, str], every_s: float = ASK_EVERY_S) -> None:
        self._every_s = every_s
        self._questions = {name: _question(url) for name, url in urls.items()}
        self._polled = time.monotonic()
        self._answered = dict.fromkeys(urls, self._polled)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start polling; count all servers as having just responded."""
        self._polled = time.monotonic()
        self._answered = dict.fromkeys(self._questions, self._polled)
        if self._questions:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=LOOK_S + 1.0)

    def silent_s(self) -> dict[str, float]:
        """Return name → seconds without a response, about ``every_s`` for a healthy one. Counted up to the
        last poll, so that a stall of this process blames no server."""
        return {name: max(0.0, self._polled - at) for name, at in self._answered.items()}

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                while not self._stop.is_set():
                    following = time.monotonic() + self._every_s
                    # An unanswered request stays open, so that a late response still counts.
                    waiting = {key.data for key in selector.get_map().values()}
                    for name in self._questions.keys() - waiting:
                        self._ask(name, selector)
                    while (left := following - time.monotonic()) > 0 and not self._stop.is_set():
                        if not selector.get_map():
                            self._stop.wait(left)
                            continue
                        for key, events in selector.select(min(left, LOOK_S)):
                            self._advance(key, events, selector)
                        self._polled = time.monotonic()
            finally:
                for key in list(selector.get_map().values()):
                    _close(key, selector)

    def _ask(self, name: str, selector: selectors.BaseSelector) -> None:
        host, port, _ = self._questions[name]
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            sock.setblocking(False)
            sock.connect_ex(address)  # the result shows when it is writable
            selector.register(sock, selectors.EVENT_WRITE, name)

    def _advance(self, key: selectors.SelectorKey, events: int, selector: selectors.BaseSelector) -> None:
        """Take the next step of one request."""
        sock = key.fileobj
        assert isinstance(sock, socket.socket)
        try:
            if events & selectors.EVENT_WRITE:
                sock.send(self._questions[key.data][2])
                selector.modify(sock, selectors.EVENT_READ, key.data)
                return
            if sock.recv(64):
                self._answered[key.data] = time.monotonic()
        except OSError:
            pass  # refused or reset: no answer
        _close(key, selector)


def _question(url: str) -> tuple[str, int, bytes]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"{url} is not a plain http URL")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
    return parts.hostname, parts.port or 80, head.encode()


def _close(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    selector.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.close()


STATE_S: Final = 0.5
"""Interval of checks for stopped processes, in seconds."""
FAMILY_S: Final = 3.0
"""Interval of lookups of their children, in seconds."""
FROZEN_S: Final = 5.0
"""Seconds stopped after which a process counts as frozen and the trial as invalid."""
SILENT_S: Final = 10.0
"""A server with no response and no CPU use for this many seconds is considered hung."""
BUSY_SILENT_S: Final = 60.0
"""Longer limit for a server that uses CPU, for example for a compilation, in seconds."""
IDLE_SHARE: Final = 0.02
"""Share of a core that other threads of a hung process may use."""


class Liveness:
    """Detects stopped processes and silent servers of a deployment, with a small request every two seconds
    (``Heartbeat``). Agents check processes on other hosts (``processes/agent/agent.py``)."""

    def __init__(self, processes: Sequence[Process]) -> None:
        # The page need not exist, and causes no work: an engine's health page may generate
        # a token, and a router's queries all servers behind it.
        specs = [process.spec for process in _local_processes(processes) if process.spec.ready_url]
        self._heartbeat = Heartbeat({spec.name: urljoin(spec.ready_url, "/version") for spec in specs})
        self._remote: dict[str, list[RemoteProcess]] = {}
        for process in processes:
            if isinstance(process, RemoteProcess):
                self._remote.setdefault(process.host, []).append(process)
        self._families: dict[str, list[int]] = {}
        self._families_at = -math.inf
        self._checked_at = -math.inf
        self._stopped_at: dict[int, tuple[float, float]] = {}
        self._cpu_s: dict[str, tuple[float, float]] = {}

    def start(self) -> None:
        self._heartbeat.start()
        self._notify_agents("watch")

    def close(self) -> None:
        self._heartbeat.close()
        self._notify_agents("unwatch")

    def _notify_agents(self, what: str) -> None:
        for processes in self._remote.values():
            keys = [process.key for process in processes]
            with contextlib.suppress(KvbenchError):  # a host that is lost is reported by others
                processes[0].agent.say(what, watch=keys[0], keys=keys)

    def problem(self, processes: Sequence[Process]) -> tuple[Process, str, str] | None:
        """Return (process, symptom, hint) of a frozen or hung process, or None."""
        now = time.monotonic()
        if now - self._checked_at < STATE_S:
            return None
        if now - self._checked_at > 4 * STATE_S:  # states in between are unknown
            self._stopped_at, self._cpu_s = {}, {}
        self._checked_at = now
        if now - self._families_at > FAMILY_S:
            self._families_at = now
            self._families = {process.name: family(process.pid) for process in _local_processes(processes)}
        return self._reported() or self._find_stopped(processes, now) or self._find_silent(processes, now)

    def _reported(self) -> tuple[Process, str, str] | None:
        for process in (process for processes in self._remote.values() for process in processes):
            if process.hung is not None and process.poll() is None:
                what, fix = process.hung
                return process, f"on the host {process.host}: {what}", f"on {process.host}: {fix}"
        return None

    def _find_stopped(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        for process in processes:
            for pid in self._families.get(process.name, ()):
                if not is_stopped(pid):
                    self._stopped_at.pop(pid, None)
                    continue
                used_s = cpu_s([pid])
                since, before_s = self._stopped_at.setdefault(pid, (now, used_s))
                if used_s > before_s:  # it ran between two checks
                    self._stopped_at[pid] = now, used_s
                elif now - since >= FROZEN_S:
                    owner = process.name if pid == process.pid else f"{process.name}'s child process"
                    return (
                        process,
                        f"{owner} {pid} is frozen: stopped by a signal for {FROZEN_S:g} s",
                        f"find out what stops it; `kill -CONT {pid}` continues it",
                    )
        return None

    def _find_silent(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        silent = self._heartbeat.silent_s()
        for process in processes:
            seconds = silent.get(process.name, 0.0)
            if seconds < SILENT_S / 2:
                self._cpu_s.pop(process.name, None)
                continue
            members = self._families.get(process.name)
            used_s = cpu_s(members) if members else math.inf
            since, before_s = self._cpu_s.setdefault(process.name, (now, used_s))
            idle = members is not None and used_s - before_s <= IDLE_SHARE * (now - since)
            if seconds >= (SILENT_S if idle else BUSY_SILENT_S):
                busy = "uses no CPU time" if idle else "is busy with something else"
                return (
                    process,
                    f"{process.name} hangs: no response for {seconds:.0f} s and {busy}",
                    "see its log, and its stacks with `py-spy dump` or gdb while it hangs",
                )
        return None


def _local_processes(processes: Sequence[Process]) -> list[Process]:
    return [process for process in processes if not isinstance(process, RemoteProcess)]
