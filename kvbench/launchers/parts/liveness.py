"""Do processes go on? None may be stopped by a signal, and each server is to answer.

A process that hangs neither ends nor writes a log line, and its requests run into their timeouts, which may
be minutes. So a thread asks each server something small every two seconds, on a connection of its own. Any
answer counts, an error too. One small request in two seconds is no load to a server that answers hundreds a
second.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final
from urllib.parse import urljoin, urlsplit

from kvbench.errors import KvbenchError
from kvbench.hosts.procfs import cpu_s, family, is_stopped
from kvbench.launchers.agents.remote_process import RemoteProcess
from kvbench.launchers.base import Process

ASK_EVERY_S: Final = 2.0
LOOK_S: Final = 0.25
"""How often a waiting thread looks whether it is to end."""


class Heartbeat:
    """Asks servers for a sign of life, from ``start`` to ``close``. ``urls``: what to ask, by name.

    Raises ValueError for a URL that is not plain http.
    """

    def __init__(self, urls: Mapping[str, str], every_s: float = ASK_EVERY_S) -> None:
        self._every_s = every_s
        self._questions = {name: _question(url) for name, url in urls.items()}
        self._looked = time.monotonic()
        self._answered = dict.fromkeys(urls, self._looked)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """All are taken to have answered just now."""
        self._looked = time.monotonic()
        self._answered = dict.fromkeys(self._questions, self._looked)
        if self._questions:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread. Safe to call twice, and when it was never started."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=LOOK_S + 1.0)

    def silent_s(self) -> dict[str, float]:
        """For how many seconds each has not answered, by name; about ``every_s`` for one that is well.

        Up to the last look at the sockets: if this process itself stood still, nobody else is blamed.
        """
        return {name: max(0.0, self._looked - at) for name, at in self._answered.items()}

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            try:
                while not self._stop.is_set():
                    following = time.monotonic() + self._every_s
                    # A question that has no answer yet stays open, so that a late one still counts.
                    waiting = {key.data for key in selector.get_map().values()}
                    for name in self._questions.keys() - waiting:
                        self._ask(name, selector)
                    while (left := following - time.monotonic()) > 0 and not self._stop.is_set():
                        if not selector.get_map():
                            self._stop.wait(left)
                            continue
                        for key, events in selector.select(min(left, LOOK_S)):
                            self._go_on(key, events, selector)
                        self._looked = time.monotonic()
            finally:
                for key in list(selector.get_map().values()):
                    _close(key, selector)

    def _ask(self, name: str, selector: selectors.BaseSelector) -> None:
        host, port, _ = self._questions[name]
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            sock = socket.socket(family, kind)
            sock.setblocking(False)
            sock.connect_ex(address)  # what comes of it is seen when it may be written to
            selector.register(sock, selectors.EVENT_WRITE, name)

    def _go_on(self, key: selectors.SelectorKey, events: int, selector: selectors.BaseSelector) -> None:
        """The next step of one question."""
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
        raise ValueError(f"{url} is no plain http URL")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = f"GET {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n\r\n"
    return parts.hostname, parts.port or 80, head.encode()


def _close(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    selector.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.close()


STATE_S: Final = 0.5
"""How often it is looked whether processes are stopped."""
FAMILY_S: Final = 3.0
"""How often their children are looked up."""
FROZEN_S: Final = 5.0
"""So long stopped is no hiccup: nothing measured beside it is worth anything."""
SILENT_S: Final = 10.0
"""So long without an answer and without CPU time, and a server hangs."""
BUSY_SILENT_S: Final = 60.0
"""A server that computes may have good reasons, such as a compilation: it gets longer."""
IDLE_SHARE: Final = 0.02
"""Of a core; what a hung process's other threads may still take."""


class Liveness:
    """Do a deployment's processes go on? None may be stopped by a signal, and each server is to answer.

    What it costs them is one small request in two seconds (``Heartbeat``). Processes on other hosts are
    looked at by the agents there, which report what they see (``processes/agent/agent.py``).
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        # No page of this name need be there, and nobody works for it: an engine's health page may generate
        # a token, a router's asks everybody behind it.
        asked = [each.spec for each in _here(processes) if each.spec.ready_url]
        self._heartbeat = Heartbeat({each.name: urljoin(each.ready_url, "/version") for each in asked})
        self._far: dict[str, list[RemoteProcess]] = {}
        for each in processes:
            if isinstance(each, RemoteProcess):
                self._far.setdefault(each.host, []).append(each)
        self._families: dict[str, list[int]] = {}
        self._families_at = -math.inf
        self._looked_at = -math.inf
        self._stopped_at: dict[int, tuple[float, float]] = {}
        self._taken: dict[str, tuple[float, float]] = {}

    def start(self) -> None:
        self._heartbeat.start()
        self._tell_agents("watch")

    def close(self) -> None:
        self._heartbeat.close()
        self._tell_agents("unwatch")

    def _tell_agents(self, what: str) -> None:
        for processes in self._far.values():
            keys = [each.key for each in processes]
            with contextlib.suppress(KvbenchError):  # a host that is lost is reported by others
                processes[0].agent.say(what, watch=keys[0], keys=keys)

    def problem(self, processes: Sequence[Process]) -> tuple[Process, str, str] | None:
        """Which process does nothing any more, why, and what to do; None while all is well, and at most
        twice a second anything else.
        """
        now = time.monotonic()
        if now - self._looked_at < STATE_S:
            return None
        if now - self._looked_at > 4 * STATE_S:  # what went on meanwhile is not known
            self._stopped_at, self._taken = {}, {}
        self._looked_at = now
        if now - self._families_at > FAMILY_S:
            self._families_at = now
            self._families = {each.name: family(each.pid) for each in _here(processes)}
        return self._reported() or self._stopped(processes, now) or self._silent(processes, now)

    def _reported(self) -> tuple[Process, str, str] | None:
        for process in (each for processes in self._far.values() for each in processes):
            if process.hung is not None and process.poll() is None:
                what, fix = process.hung
                return process, f"on the host {process.host}: {what}", f"on {process.host}: {fix}"
        return None

    def _stopped(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        for process in processes:
            for pid in self._families.get(process.name, ()):
                if not is_stopped(pid):
                    self._stopped_at.pop(pid, None)
                    continue
                taken_s = cpu_s([pid])
                since, before_s = self._stopped_at.setdefault(pid, (now, taken_s))
                if taken_s > before_s:  # it went on between two looks
                    self._stopped_at[pid] = now, taken_s
                elif now - since >= FROZEN_S:
                    whose = process.name if pid == process.pid else f"{process.name}'s child process"
                    return (
                        process,
                        f"{whose} {pid} is frozen: a signal has stopped it, for {FROZEN_S:g} s now",
                        f"find out who stops it; `kill -CONT {pid}` lets it go on",
                    )
        return None

    def _silent(self, processes: Sequence[Process], now: float) -> tuple[Process, str, str] | None:
        silent = self._heartbeat.silent_s()
        for process in processes:
            seconds = silent.get(process.name, 0.0)
            if seconds < SILENT_S / 2:
                self._taken.pop(process.name, None)
                continue
            members = self._families.get(process.name)
            taken_s = cpu_s(members) if members else math.inf
            since, before_s = self._taken.setdefault(process.name, (now, taken_s))
            idle = members is not None and taken_s - before_s <= IDLE_SHARE * (now - since)
            if seconds >= (SILENT_S if idle else BUSY_SILENT_S):
                busy = "takes no CPU time" if idle else "is busy with something else"
                return (
                    process,
                    f"{process.name} hangs: it has not answered for {seconds:.0f} s and {busy}",
                    "look into its log, and at its stacks with `py-spy dump` or gdb while it hangs",
                )
        return None


def _here(processes: Sequence[Process]) -> list[Process]:
    """Those of this machine."""
    return [each for each in processes if not isinstance(each, RemoteProcess)]
