"""Do the servers still answer? Asked every two seconds, beside whatever they are measured with.

A process that hangs neither ends nor writes a log line, and its requests run into their timeouts, which may
be minutes. So a thread asks each server something small on a connection of its own. Any answer counts, an
error too: the question is whether it lives, not how it feels. One small request in two seconds is no load to
a server that answers hundreds a second, and the thread sleeps in between.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

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
