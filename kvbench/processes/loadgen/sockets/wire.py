"""Sockets to one server: its address, and connections that keep the kernel's stamps."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from kvbench.core.access import ServerAccess
from kvbench.errors import InputError, ServerError
from kvbench.hosts.server_access import tls_context

_SO_TIMESTAMPING: Final = 37  # asm-generic/socket.h; not in Python's socket module
_TX_SOFTWARE, _RX_SOFTWARE, _SOFTWARE = 1 << 1, 1 << 3, 1 << 4  # linux/net_tstamp.h
_OPT_ID, _OPT_TSONLY = 1 << 7, 1 << 11
_RECEIVE: Final = _RX_SOFTWARE | _SOFTWARE
_BOTH: Final = _RECEIVE | _TX_SOFTWARE | _OPT_ID | _OPT_TSONLY

STAMP_BYTES: Final = 48
"""``struct scm_timestamping``: three timespecs; the first is the software stamp in real time."""
NO_STAMP: Final = bytes(STAMP_BYTES)
ANCILLARY_BYTES: Final = socket.CMSG_SPACE(STAMP_BYTES)
_ERROR_ANCILLARY_BYTES: Final = 512
_ORIGIN_TIMESTAMPING: Final = 4  # SO_EE_ORIGIN_TIMESTAMPING
_EXTENDED_ERROR: Final = struct.Struct("=IBBBBII")

MORE_FOLLOWS: Final = 1
"""Replaces a read's flags: more can be read, but epoll will not report it."""


class ServerAddress:
    """Where requests go. Raises InputError for a URL that is not http(s), or an unusable CA file."""

    def __init__(self, base_url: str, access: ServerAccess | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"{base_url!r} is not an http:// or https:// URL")
        self.url = base_url
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.tls = tls_context(access or ServerAccess()) if parts.scheme == "https" else None
        self.addresses: list[tuple[int, Any]] = []
        self._base_path = parts.path.rstrip("/")
        self._host_header = parts.netloc.rpartition("@")[2]

    def resolve(self) -> None:
        """Resolve the host's name once, before the run. Raises ServerError."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ServerError(f"cannot find the host of {self.url}: {error}") from error
        self.addresses = [(int(family), address) for family, _, _, _, address in found]

    def head(self, path: str, headers: Mapping[str, str], length: int) -> bytes:
        """Return the head of a POST. Raises InputError for a header with a line break."""
        lines = [f"POST {self._base_path}{path} HTTP/1.1", f"host: {self._host_header}"]
        for name, value in headers.items():
            if any(mark in name + value for mark in "\r\n"):
                raise InputError(f"header {name!r} holds a line break")
            lines.append(f"{name}: {value}")
        lines.append(f"content-length: {length}")
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"


def error_of(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Sender(Protocol):
    """The user of a connection."""

    def transmitted(self, written: int, stamp: bytes, /) -> None:
        """Receive the kernel's stamp of the moment when ``written`` bytes of the connection had been sent."""


class ServerConnection:
    """A socket that is open or opening. ``read`` is its recvmsg_into or an equivalent."""

    __slots__ = ("_stamping", "_tls", "fd", "last_used", "owner", "read", "sock", "unsent", "written")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.read: Any = sock.recvmsg_into
        self.owner: Sender | None = None
        self.last_used: float | None = None
        """When its last answer ended (monotonic); None if it was never used."""
        self.unsent: list[memoryview] = []
        self.written = 0
        self._tls: ssl.SSLSocket | None = None
        self._stamping = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def plain(self) -> bool:
        return self._tls is None

    def ask_for_stamps(self) -> None:
        """Enable kernel stamps of sends and arrivals; call before the first byte."""
        if self._tls is not None or struct.calcsize("l") != 8:  # where timespecs are smaller than expected
            return
        for wanted in (_BOTH, _RECEIVE):
            try:
                self.sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, wanted)
            except OSError:
                continue
            self._stamping = wanted
            return

    def begin_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Begin TLS; ``handshake`` must succeed first."""
        self._tls = context.wrap_socket(self.sock, server_hostname=host, do_handshake_on_connect=False)
        self.sock = self._tls
        self.read = self._read_tls

    def handshake(self) -> bool | None:
        """Return True when done; else try again when readable (False) or writable (None). Raises OSError."""
        assert self._tls is not None
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            return None
        return True

    def send(self, parts: Sequence[bytes]) -> bool:
        """Write as much as possible without waiting; False if something is left for ``flush``. Bytes for a
        broken connection are dropped: the next read shows the end."""
        self.unsent = [memoryview(part) for part in parts]
        return self.flush()

    def flush(self) -> bool:
        try:
            while self.unsent:
                count = self._write()
                self.written += count
                while self.unsent and count >= len(self.unsent[0]):
                    count -= len(self.unsent.pop(0))
                if count:
                    self.unsent[0] = self.unsent[0][count:]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        except OSError:
            self.unsent = []
        return True

    def _write(self) -> int:
        return self.sock.sendmsg(self.unsent) if self._tls is None else self._tls.send(self.unsent[0])

    def transmitted(self) -> tuple[int, bytes] | None:
        """Return how many bytes had been sent at this stamp, or None."""
        if self._stamping != _BOTH:
            return None
        try:
            _, ancillary, _, _ = self.sock.recvmsg(0, _ERROR_ANCILLARY_BYTES, socket.MSG_ERRQUEUE)
        except OSError:
            return None
        stamp, position = b"", -1
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPING and len(data) == STAMP_BYTES:
                stamp = data
            elif len(data) >= _EXTENDED_ERROR.size:
                number, origin, _, _, _, _, position_found = _EXTENDED_ERROR.unpack_from(data)
                if number == errno.ENOMSG and origin == _ORIGIN_TIMESTAMPING:
                    position = position_found
        return (position + 1, stamp) if stamp and position >= 0 else None

    def close(self) -> None:
        """Drop the connection; the kernel notifies the server."""
        self.unsent = []
        self.sock.close()
        self.fd = -1

    def _read_tls(self, buffers: Sequence[memoryview], _ancillary: int) -> tuple[int, tuple[()], int, None]:
        assert self._tls is not None
        try:
            count = self._tls.recv_into(buffers[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        # The rest of a decrypted record is no longer in the socket.
        return count, (), MORE_FOLLOWS if self._tls.pending() else 0, None
