"""A small connector of vLLM-Omni's contract, to test the adapter and as a template. The side that is
configured without an address stores and serves the objects; the other one puts and gets over a socket.
Nothing is left behind when either ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

Put = tuple[bool, int, "dict[str, Any] | None"]


class ExampleConnector:
    """put, get, cleanup, health, close; ``share`` is the other side's configuration. ``config``: host (of
    this side), and address and key of the serving side, from its ``share``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._objects: dict[str, bytes] = {}
        self._counts = {"puts": 0, "gets": 0}
        self._connection: Connection | None = None
        self._listener: Listener | None = None
        if "address" in config:
            host, port = config["address"]
            self._connection = Client((host, port), authkey=bytes.fromhex(config["key"]))
            _without_delay(self._connection)
            return
        self._key = os.urandom(16)
        self._listener = Listener((str(config.get("host", "127.0.0.1")), 0), authkey=self._key)
        threading.Thread(target=self._accept, name="example", daemon=True).start()

    def share(self) -> dict[str, Any]:
        """Configuration of the other side."""
        return {"address": list(self._listener.address), "key": self._key.hex()} if self._listener else {}

    def put(self, from_stage: str, to_stage: str, put_key: str, data: bytes) -> Put:
        """Keep ``data`` under the key, for one get."""
        name = f"{put_key}@{from_stage}_{to_stage}"
        if self._connection is None:
            self._objects[name] = bytes(data)
        else:
            self._connection.send_bytes(json.dumps(["put", name]).encode())
            self._connection.send_bytes(data)
            self._connection.recv_bytes()
        self._counts["puts"] += 1
        return True, len(data), None

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[bytes, int] | None:
        name = f"{get_key}@{from_stage}_{to_stage}"
        if self._connection is None:
            data = self._objects.pop(name, None)
        else:
            self._connection.send_bytes(json.dumps(["get", name]).encode())
            there = self._connection.recv_bytes() == b"1"
            data = self._connection.recv_bytes() if there else None
        self._counts["gets"] += 1
        return None if data is None else (data, len(data))

    def cleanup(self, request_id: str) -> None:
        if self._connection is None:
            for name in [name for name in list(self._objects) if name.startswith(f"{request_id}@")]:
                self._objects.pop(name, None)
        else:
            self._connection.send_bytes(json.dumps(["cleanup", request_id]).encode())
            self._connection.recv_bytes()

    def health(self) -> dict[str, Any]:
        return {"status": "healthy", **self._counts}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._connection is not None:
                self._connection.close()
            if self._listener is not None:
                self._listener.close()
        self._objects.clear()

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                caller = self._listener.accept()
            except OSError:
                return  # closed
            except Exception:  # a caller without the key
                continue
            threading.Thread(target=self._serve, args=(caller,), name="example", daemon=True).start()

    def _serve(self, caller: Connection) -> None:
        _without_delay(caller)
        with contextlib.suppress(OSError, EOFError, ValueError), caller:
            while True:
                command, name = json.loads(caller.recv_bytes())
                if command == "put":
                    self._objects[name] = caller.recv_bytes()
                    caller.send_bytes(b"1")
                elif command == "get":
                    data = self._objects.pop(name, None)
                    caller.send_bytes(b"0" if data is None else b"1")
                    if data is not None:
                        caller.send_bytes(data)
                else:
                    self.cleanup(name)
                    caller.send_bytes(b"1")


def _without_delay(connection: Connection) -> None:
    """Send small messages at once: otherwise each put would wait for a delayed acknowledgement."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
