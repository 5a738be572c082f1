"""Lines of JSON between two endpoints, beside the library that moves the bytes: keys, spans, who is ready.

A target listens (``Door``), an initiator calls (``dial``); on a standing ``ControlChannel`` one end asks and
the other one serves, whichever of the two it is.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvbench.errors import TransferError

HELLO_S = 5.0
LINE_LIMIT = 1 << 26
# Asked whether the other host is still there after this long without a word, so that a pulled cable does
# not keep a thread for ever. Seconds, and how often.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class ControlChannel:
    """One connection. ``ask`` may be called from several threads; they take turns."""

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
        """Send one line, do what is to be done ``meanwhile``, and wait for the answer.

        Raises TransferError, after which the channel is of no more use, and what ``meanwhile`` raises.
        """
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
                self.close()  # its answer may come late, and must not be taken for the next one's
                raise
        if answer is None:
            raise TransferError("the peer is gone: it closed the connection")
        if "error" in answer:
            raise TransferError(f"the peer says: {answer['error']}")
        return answer["ok"]

    def serve(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        """Answer lines until the other end closes; what ``answer`` raises goes back as an error."""
        self._sock.settimeout(None)
        with contextlib.suppress(OSError, ValueError):
            while (message := self.receive()) is not None:
                try:
                    reply = {"ok": answer(message)}
                except Exception as error:
                    reply = {"error": str(error) or type(error).__name__}
                self._send(reply)

    def wait_for_end(self) -> None:
        """Until the other end, or this one, closes; reads nothing."""
        ended = select.poll()
        ended.register(self._sock, select.POLLRDHUP)
        with contextlib.suppress(OSError):
            ended.poll()

    def receive(self) -> dict[str, Any] | None:
        """The next line; None at the end. Raises OSError, ValueError."""
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
        """End it; whoever waits at either end wakes. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._sock.close()


class Door:
    """A target's listener. Each caller that knows the key is welcomed in a thread of its own."""

    def __init__(self, host: str, welcome: Callable[[ControlChannel, dict[str, Any]], None]) -> None:
        """``welcome(channel, hello)`` runs until the caller is done with. Raises TransferError."""
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
            pass  # a stranger, or a caller that went away; whoever waits for it has a deadline
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
    """Call a door and wait until it has let us in. Raises TransferError."""
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
