"""The exact server's sockets: listening, and the kernel's stamps of what arrives."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from kvbench.errors import PortInUseError

SO_TIMESTAMPING: Final = 37  # asm-generic/socket.h; the control message has the same number
STAMPING_FLAGS: Final = 1 << 3 | 1 << 4  # linux/net_tstamp.h: RX_SOFTWARE | SOFTWARE
TIMESPEC: Final = struct.Struct("qq")
BOTH_CLOCKS_S: Final = 3e-6
"""Reading them takes a tenth of this; if it took longer, something came between."""
OLDEST_STAMP_S: Final = 10.0
"""A stamp from longer ago is taken for a jump of the clock."""


def listen(host: str, port: int) -> socket.socket:
    """Raises PortInUseError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
        sock.bind((host, port))
        sock.listen(4096)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"port {host}:{port} is in use", hint="choose another port, or stop what listens there"
            ) from error
        raise
    return sock


def ask_for_stamps(listener: socket.socket) -> bool:
    """Whether the kernel stamps what arrives; connections inherit it from the listener."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPING, STAMPING_FLAGS)
    except OSError:
        return False
    return True


def stamp_of(ancillary: Sequence[tuple[int, int, bytes]]) -> tuple[float, bool]:
    """When the last bytes arrived, on CLOCK_MONOTONIC, and whether the kernel said so."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPING and len(data) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            now, now_ns = both_clocks()
            age = (now_ns - seconds * 1_000_000_000 - nanoseconds) / 1e9
            if 0.0 <= age < OLDEST_STAMP_S:
                return now - age, True
    return time.monotonic(), False


def both_clocks() -> tuple[float, int]:
    """CLOCK_MONOTONIC in seconds and CLOCK_REALTIME in nanoseconds, of one moment."""
    for _ in range(5):
        before = time.monotonic()
        real_ns = time.time_ns()
        after = time.monotonic()
        if after - before < BOTH_CLOCKS_S:
            break
    return (before + after) / 2, real_ns
