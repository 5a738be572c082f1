"""Does one host reach another on the data network, how soon, and how fast is a plain TCP flow?"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any, Final

PINGS: Final = 20
FLOW_S: Final = 0.5
TAKEN_S: Final = 8.0
"""Somebody connects within this, or nobody does."""
_CHUNK: Final = bytes(1 << 18)


def listen(address: str) -> int:
    """Answer one caller at a free port of ``address``: echo its pings, then swallow its flow."""
    listener = socket.create_server((address, 0))
    listener.settimeout(TAKEN_S)
    threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    return int(listener.getsockname()[1])


def _serve(listener: socket.socket) -> None:
    try:
        with listener:
            peer, _ = listener.accept()
        with peer:
            peer.settimeout(TAKEN_S)
            for _ in range(PINGS):
                peer.sendall(peer.recv(1))
            taken = 0
            while data := peer.recv(1 << 18):
                taken += len(data)
            peer.sendall(taken.to_bytes(8, "big"))
    except OSError:
        return  # the caller reports what it met


def call(own: str, address: str, port: int) -> dict[str, Any]:
    """From the address ``own``: round-trip seconds (the median) and bytes a second; or what went wrong."""
    try:
        with socket.create_connection((address, port), TAKEN_S / 2, (own, 0)) as peer:
            peer.settimeout(TAKEN_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            times = []
            for _ in range(PINGS):
                began = time.monotonic()
                peer.sendall(b"x")
                if not peer.recv(1):
                    return {"error": "the connection was closed"}
                times.append(time.monotonic() - began)
            began = time.monotonic()
            while time.monotonic() - began < FLOW_S:
                peer.sendall(_CHUNK)
            peer.shutdown(socket.SHUT_WR)
            taken = int.from_bytes(peer.recv(8), "big")
            return {
                "rtt_s": sorted(times)[len(times) // 2],
                "bytes_per_s": taken / (time.monotonic() - began),
            }
    except OSError as error:
        return {"error": error.strerror or type(error).__name__}
