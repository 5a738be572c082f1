"""Control connections of endpoints: JSON lines to the other side, and threads for blocking calls. A target
listens (``Door``), an initiator calls (``dial``); on a ``ControlChannel`` one end asks and the other one
serves. Blocking library calls run in threads, so polling never waits."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvbench.errors import KvbenchError, TransferError
from kvbench.transfer.base import Endpoint, Layout

HELLO_S = 5.0
LINE_LIMIT = 1 << 26
# TCP keepalive after this long without data, so that a pulled cable does
# not keep a thread for ever. Seconds, and how often.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class ControlChannel:
    """One connection. Threads that call ``ask`` take turns."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._sock = sock
        self._reader = sock.makefile("rb")
        self._lock = threading.Lock()

    def ask(
        self, message: Mapping[str, Any], deadline_s: float, meanwhile: Callable[[], None] = lambda: None
    ) -> Any:
        """Send one line, call ``meanwhile``, and wait for the answer. Raises TransferError, after which the
        channel is unusable, and the exceptions of ``meanwhile``."""
        with self._lock:
            try:
                self._sock.settimeout(deadline_s)
                self._send(message)
                meanwhile()
                answer = self.receive()
            except TimeoutError:
                self.close()
                raise TransferError(f"the peer gave no answer to {message} within {deadline_s:g} s") from None
            except (OSError, ValueError) as error:
                self.close()
                raise TransferError(f"the peer is gone: {error}") from error
            except Exception:
                self.close()  # a late answer must not be taken for the next one's
                raise
        if answer is None:
            raise TransferError("the peer is gone: it closed the connection")
        if "error" in answer:
            raise TransferError(f"the peer says: {answer['error']}")
        return answer["ok"]

    def serve(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Answer lines until the other end closes; exceptions of ``answer`` go back as errors."""
        self._sock.settimeout(None)
        with contextlib.suppress(OSError, ValueError):
            while (message := self.receive()) is not None:
                try:
                    reply = {"ok": answer(message)}
                except Exception as error:
                    reply = {"error": str(error) or type(error).__name__}
                self._send(reply)

    def wait_for_end(self) -> None:
        """Wait until either end closes, without reading."""
        ended = select.poll()
        ended.register(self._sock, select.POLLRDHUP)
        with contextlib.suppress(OSError):
            ended.poll()

    def receive(self) -> dict[str, Any] | None:
        """Return the next line; None at the end. Raises OSError, ValueError."""
        line = self._reader.readline(LINE_LIMIT)
        if not line:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"expected an object, got {line[:80]!r}")
        return message

    def _send(self, message: Mapping[str, Any]) -> None:
        self._sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        """Close and wake the waiting threads of both ends. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()


class Door:
    """A target's listener. Each caller with the key is handled in its own thread."""

    def __init__(self, host: str, welcome: Callable[[ControlChannel, dict[str, Any]], None]) -> None:
        """``welcome(channel, hello)`` runs until the caller is done. Raises TransferError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family, backlog=128)
        except OSError as error:
            raise TransferError(f"cannot listen on {host}: {error}") from error
        self._host, self._port = host, self._listener.getsockname()[1]
        self._key = os.urandom(16).hex()
        self._welcome = welcome
        self._channels: set[ControlChannel] = set()
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    @property
    def address(self) -> dict[str, Any]:
        """What ``dial`` needs; JSON."""
        return {"host": self._host, "port": self._port, "key": self._key}

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._greet, args=(sock,), name="control", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        channel = ControlChannel(sock)
        self._channels.add(channel)
        try:
            sock.settimeout(HELLO_S)
            hello = channel.receive()
            if hello is not None and hmac.compare_digest(str(hello.pop("key", "")), self._key):
                channel._send({"ok": True})
                self._welcome(channel, hello)
        except Exception:
            pass  # an unknown or lost caller; waiting threads have deadlines
        finally:
            channel.close()
            self._channels.discard(channel)

    def close(self) -> None:
        """Stop listening and end all channels. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for channel in list(self._channels):
            channel.close()


def dial(address: Mapping[str, Any], hello: Mapping[str, Any], deadline_s: float) -> ControlChannel:
    """Call a door and wait until it accepts. Raises TransferError."""
    host, port = str(address["host"]), int(address["port"])
    try:
        sock = socket.create_connection((host, port), timeout=deadline_s)
    except OSError as error:
        raise TransferError(f"cannot reach {host}:{port}: {error}") from error
    channel = ControlChannel(sock)
    try:
        channel.ask({**hello, "key": address["key"]}, deadline_s)
    except TransferError as error:
        channel.close()
        raise TransferError(f"cannot reach {host}:{port}: {error}") from error
    return channel


# Maximum wait of a thread that returns from a library for the interpreter while another one polls;
# Python's own 5 ms would be many times a small transfer. Seconds.
SWITCH_INTERVAL_S = 20e-6


class Job:
    """One blocking call; its thread sets ``done`` once it has returned or failed."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: Exception | None = None
        self.done = False

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error

    def finished(self) -> bool:
        """Whether it is done. Raises TransferError when the call failed."""
        if not self.done:
            return False
        if isinstance(self._error, KvbenchError):
            raise self._error
        if self._error is not None:
            raise TransferError(f"{type(self._error).__name__}: {self._error}") from self._error
        return True


class Threads:
    """Up to ``limit`` daemon threads; ``fd`` becomes readable when a job is done. The threads are never
    joined, since a hanging library must not keep its process alive. A job goes to the last active thread,
    with warm caches: a store's call of 4 KiB then costs 140 to 165 µs more than without a thread, but 205 to
    230 µs if idle threads take turns (medians, two busy cores). When all are busy it waits."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._idle: list[queue.SimpleQueue[Job | None]] = []
        self._waiting: deque[Job] = deque()
        self._started = 0
        self._lock = threading.Lock()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def start(self, call: Callable[[], None]) -> Job:
        """Pass a call to a thread; start a new one when all are busy."""
        job = Job(call)
        with self._lock:
            if self._idle:
                inbox = self._idle.pop()
            elif self._started < self._limit:
                inbox = queue.SimpleQueue()
                self._started += 1
                threading.Thread(target=self._work, args=(inbox,), name="transfer", daemon=True).start()
            else:
                self._waiting.append(job)
                return job
        inbox.put(job)
        return job

    def _work(self, inbox: queue.SimpleQueue[Job | None]) -> None:
        job = inbox.get()
        while job is not None:
            job.run()
            # Idle before the job is marked as done: the next call gets this thread.
            with self._lock:
                following = self._waiting.popleft() if self._waiting else None
                ended = self.fd < 0 and following is None
                if following is None and not ended:
                    self._idle.append(inbox)
            job.done = True
            with contextlib.suppress(OSError):  # closed meanwhile
                os.eventfd_write(self.fd, 1)
            job = None if ended else following or inbox.get()

    def clear(self) -> None:
        """Make ``fd`` unreadable until the next job is done."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        with self._lock:
            if self.fd < 0:
                return
            os.close(self.fd)
            self.fd = -1
            for inbox in self._idle:
                inbox.put(None)
            self._idle.clear()


PeerT = TypeVar("PeerT")


class ThreadedEndpoint(Endpoint, Generic[PeerT]):
    """One side, with up to ``threads`` active calls. The backend defines its peers."""

    def __init__(self, options: Mapping[str, Any], threads: int) -> None:
        self._host = str(options.get("host", "127.0.0.1"))
        self._id = os.urandom(6).hex()
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._threads = Threads(threads)
        self._peers: dict[str, PeerT] = {}
        self._door: Door | None = None

    def wait_fds(self) -> Sequence[int]:
        return (self._threads.fd,)

    def progress(self) -> None:
        self._threads.clear()

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._door is not None:
            self._door.close()
        self._threads.close()

    def _known(self, peer: str) -> PeerT:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        return self._peers[peer]
