"""Mooncake Store: put and get of objects, zero copy, in batches.

The target starts a ``mooncake_master`` and provides the only segment, so a write moves initiator → segment
and a read segment → initiator; the initiator is a pure client. Design, and its reasons (measured with the
non-CUDA wheel 0.3.13 over TCP on two cores):

- Calls block and release the interpreter: each active transfer has a thread.
- A second put of a key returns success and keeps the old value: each put has a fresh key.
- ``remove`` fails during the lease (10 s) after a get unless forced: it is forced.
- A pure client without a local hot cache gets from the segment each time: reads may repeat a key.
- A missing master costs 20 tries of 4.4 s: check the target first, then try once.
- A page's first write takes several times as long as a later one: all pages are written first.
- The holder's ``close`` takes 2.4 s: it is not called, and the process's end frees the memory.
- A missing metadata server makes setup fail without a message: it is checked first.
- A metadata server ``redis://`` ends the process if that plug-in is not built in: it is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from kvbench.core.plan.processes import unproxied
from kvbench.errors import Problem, TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout
from kvbench.transfer.parts import native
from kvbench.transfer.parts.native import variable_value
from kvbench.transfer.parts.stores.keyed import KeyedEndpoint, Notes, Store
from kvbench.transfer.parts.stores.servers import Master, available_bytes, master_binary

# mooncake-store/include/types.h, ErrorCode
NAMES = {
    -1: "INTERNAL_ERROR",
    -10: "BUFFER_OVERFLOW",
    -101: "SEGMENT_NOT_FOUND",
    -102: "SEGMENT_ALREADY_EXISTS",
    -103: "CLIENT_NOT_FOUND",
    -200: "NO_AVAILABLE_HANDLE",
    -400: "INVALID_KEY",
    -500: "WRITE_FAIL",
    -600: "INVALID_PARAMS",
    -601: "ILLEGAL_CLIENT",
    -700: "INVALID_WRITE",
    -701: "INVALID_READ",
    -702: "INVALID_REPLICA",
    -703: "REPLICA_IS_NOT_READY",
    -704: "OBJECT_NOT_FOUND",
    -705: "OBJECT_ALREADY_EXISTS",
    -706: "OBJECT_HAS_LEASE",
    -707: "LEASE_EXPIRED",
    -712: "REPLICA_IS_GONE",
    -800: "TRANSFER_FAIL",
    -801: "CHECKSUM_MISMATCH",
    -900: "RPC_FAIL",
    -901: "RPC_TIMEOUT",
    -1010: "UNAVAILABLE_IN_CURRENT_STATUS",
}
HINTS = {
    -200: "the segment is full: raise the target's option segment_bytes",
    -704: "it was never put, or was evicted for lack of space",
    -800: "the process that holds the segment is gone, or an address is not registered",
    -900: "the master is gone, or does not answer",
}
OBJECT_NOT_FOUND = -704


def describe_code(code: int) -> str:
    """Return the name and usual cause of an error code."""
    name = f"{NAMES.get(code, 'unknown code')} ({code})"
    return f"{name}: {HINTS[code]}" if code in HINTS else name


def require_all(what: str, codes: Sequence[int], wanted: int) -> None:
    """Raise TransferError with the first code that differs from the wanted one."""
    for code in codes:
        if code != wanted:
            wrong = sum(other != wanted for other in codes)
            reason = describe_code(code) if code < 0 else f"{code} of {wanted} bytes"
            raise TransferError(f"{what} of {wrong} of {len(codes)} objects failed: {reason}")


# The segment holds offered objects, the last write, the current write and what it replaces.
GENERATIONS = 4
SPARE_BYTES = 64 << 20
# Maximum active objects. The library's queue per peer is limited, and more objects fail
# (TRANSFER_FAIL, seen with 2048 objects a call and 8 calls).
MAX_UNDER_WAY = 256
TOUCH_BYTES = 4 << 20
TOUCH_S = 3.0
METADATA_S = 3.0
# The library's buffer, unused by zero copy; without one, gets of small objects fail.
LOCAL_BUFFER_BYTES = 16 << 20


def check() -> Problem | None:
    """Check that the package and its master are installed; a child process checks that it loads."""
    if problem := native.mooncake_absent():
        return problem
    binary = master_binary()
    if not os.access(binary, os.X_OK):
        return Problem(f"the package has no program {binary.name}", f"{native.INSTALL} --force-reinstall")
    return None


def load() -> dict[str, str]:
    native.mooncake_module("store")
    return native.mooncake_version()


def env(options: Mapping[str, Any]) -> dict[str, str]:
    """Return short timeouts for a lost master, and the transport, forced by a variable's presence."""
    host = urlsplit(str(options.get("mooncake_store_metadata_server", ""))).hostname
    return {
        "MC_TCP_BIND_ADDRESS": variable_value("MC_TCP_BIND_ADDRESS", _address(options), "127.0.0.1"),
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": variable_value("MC_RPC_TIMEOUT_MS", None, "3000"),
        "MC_RPC_CONNECT_TIMEOUT_MS": variable_value("MC_RPC_CONNECT_TIMEOUT_MS", None, "3000"),
        "MC_FORCE_HCA" if options.get("protocol", "tcp") == "rdma" else "MC_FORCE_TCP": "1",
        # libcurl, used for an HTTP metadata server, would use a proxy from the environment.
        **unproxied(os.environ, [host] if host else []),
    }


def _address(options: Mapping[str, Any]) -> str:
    """Return the address that a side publishes: the requested NIC's, else the host's."""
    nics = options.get("nics") or [{}]
    if options.get("protocol", "tcp") == "tcp" and len(nics) > 1:
        raise TransferError("over tcp the store uses one address: request one NIC, or protocol rdma")
    return str(nics[0].get("address") or options.get("host", "127.0.0.1"))


class Budget:
    """Limit of concurrent objects over all threads."""

    def __init__(self, objects: int) -> None:
        self._free = objects
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def of(self, objects: int) -> Iterator[None]:
        """Wait until ``objects`` more fit; at most the whole budget."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= objects)
            self._free -= objects
        try:
            yield
        finally:
            with self._changed:
                self._free += objects
                self._changed.notify_all()


class MooncakeObjectStore(Store):
    """One client; it holds the segment if ``segment_bytes`` is not 0."""

    def __init__(self, settings: Mapping[str, Any], address: int, nbytes: int, segment_bytes: int) -> None:
        """``settings``: host, metadata_server, protocol, devices, master. Raises TransferError."""
        self._client = native.mooncake_module("store").MooncakeDistributedStore()
        self.master: Master | None = None
        self._budget = Budget(MAX_UNDER_WAY)
        code = self._client.setup(
            settings["host"],
            settings["metadata_server"],
            segment_bytes,
            LOCAL_BUFFER_BYTES,
            settings["protocol"],
            settings["devices"],
            settings["master"],
        )
        if code != 0:
            raise TransferError(
                f"the store at {settings['master']} cannot be joined: setup gave {describe_code(code)}"
            )
        code = self._client.register_buffer(address, nbytes)
        if code != 0:
            raise TransferError(f"register_buffer of {nbytes} bytes gave {describe_code(code)}")

    def put(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> Notes:
        self._in_portions(self._client.batch_put_from, "put", (keys, addresses, nbytes), 0)
        return [None] * len(keys)

    def get(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int, notes: Notes) -> None:
        self._in_portions(self._client.batch_get_into, "get", (keys, addresses, nbytes), nbytes)

    def _in_portions(
        self,
        call: Callable[[Sequence[str], Sequence[int], list[int]], list[int]],
        what: str,
        objects: tuple[Sequence[str], Sequence[int], int],
        wanted: int,
    ) -> None:
        keys, addresses, nbytes = objects
        for first in range(0, len(keys), MAX_UNDER_WAY):
            some = slice(first, first + MAX_UNDER_WAY)
            names = keys[some]
            with self._budget.of(len(names)):
                codes = call(names, addresses[some], [nbytes] * len(names))
            require_all(what, codes, wanted)

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            codes = self._client.batch_remove(keys, True)
            require_all("remove", [0 if code == OBJECT_NOT_FOUND else code for code in codes], 0)

    def touch(self, room: int) -> None:
        """Write once to most of the segment: a page's first write is slow. Stops after TOUCH_S."""
        until = time.monotonic() + TOUCH_S
        scratch = mmap.mmap(-1, TOUCH_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(scratch))
        code = self._client.register_buffer(address, TOUCH_BYTES)
        if code != 0:
            raise TransferError(f"register_buffer of {TOUCH_BYTES} bytes gave {describe_code(code)}")
        keys: list[str] = []
        # Not quite all: the master evicts objects when the segment is full.
        for number in range(room * 9 // 10 // TOUCH_BYTES):
            if time.monotonic() > until:
                break
            keys.append(f"kvbench-touch-{number}")
            self.put(keys[-1:], [address], TOUCH_BYTES)
        self.remove(keys)
        self._client.unregister_buffer(address)

    def close(self) -> None:
        if self.master is not None:
            self.master.close()
        else:
            self._client.close()


def _require_metadata_server(server: str, deadline_s: float) -> None:
    """Raise TransferError if no http metadata server answers."""
    url = urlsplit(server)
    if url.scheme not in ("http", "https"):
        return
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname or "", port), timeout=deadline_s).close()
    except OSError as error:
        raise TransferError(
            f"no metadata server answers at {server}: {error}; start it (`mooncake_http_metadata_server "
            f"--host {url.hostname} --port {port}`), or leave it out: the store works without one"
        ) from error


class MooncakeStoreEndpoint(KeyedEndpoint):
    """One side: the holder of a segment with its own master, or a pure client, or both."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._host = _address(options)
        self._protocol = str(options.get("protocol", "tcp"))
        server = str(options.get("mooncake_store_metadata_server", "P2PHANDSHAKE"))
        if server.startswith("redis"):
            raise TransferError(
                f"metadata server {server!r}: a library without its redis plug-in would end the process; "
                "use P2PHANDSHAKE, http:// or etcd://"
            )
        nics = options.get("nics") or ()
        self._settings = {
            "host": self._host,
            "metadata_server": server,
            "protocol": self._protocol,
            "devices": ",".join(str(nic["name"]) for nic in nics) if self._protocol == "rdma" else "",
        }

    def provide(self, address: int, layout: Layout) -> tuple[Store, dict[str, Any]]:
        default = GENERATIONS * layout.nbytes + SPARE_BYTES
        room = int(self._options.get("segment_bytes") or default)
        if room > available_bytes():
            raise TransferError(
                f"a segment of {room} bytes does not fit into the {available_bytes()} bytes of memory "
                "that are free; use smaller or fewer blocks, or the option segment_bytes"
            )
        _require_metadata_server(self._settings["metadata_server"], METADATA_S)
        master = Master(self._host)
        try:
            settings = {**self._settings, "master": master.address}
            store = MooncakeObjectStore(settings, address, layout.nbytes, room)
            store.touch(room)
        except BaseException:
            master.close()
            raise
        store.master = master
        return store, {"master": master.address, "room": room}

    def reach(self, provided: Mapping[str, Any], deadline_s: float) -> Store:
        host, _, port = str(provided["master"]).rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=deadline_s).close()
        except OSError as error:
            raise TransferError(f"no mooncake_master answers at {provided['master']}: {error}") from error
        _require_metadata_server(self._settings["metadata_server"], deadline_s)
        settings = {**self._settings, "master": str(provided["master"])}
        return MooncakeObjectStore(settings, self._address, self._layout.nbytes, 0)

    def transport(self) -> str:
        for line in self.native_log():
            if "TcpTransport" in line:
                return "tcp"
            if "RdmaTransport" in line or "type=rdma" in line:
                return "rdma"
        return f"{self._protocol} (configured)"

    def library(self) -> dict[str, str]:
        return native.mooncake_version()


def open_endpoint(options: Mapping[str, Any]) -> Endpoint:
    return MooncakeStoreEndpoint(options)


BACKEND = Backend(
    name="mooncake_store",
    title="Mooncake Store",
    check=check,
    open=open_endpoint,
    env=env,
    load=load,
    protocols=("tcp", "rdma"),
    needs={"rdma": "rdma"},
    one_nic=("tcp",),
    staged=True,
)
