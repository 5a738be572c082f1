"""openYuanrong's datasystem: set and get of objects through a worker process.

The target starts a ``datasystem_worker`` with its own metastore, without etcd, and both sides are its
clients: on one host they share its memory. For a worker on each of two hosts, start both with ``dscli start``
and one metastore, and give each side the option ``yuanrong_worker`` (host:port). A worker caches what it has
fetched, so a second get would not use the network: each read has fresh keys. A get copies from the worker's
shared memory into the registered buffer, a set the other way. Measured with openyuanrong-datasystem 0.8.1:
the worker needs 6 s to be ready. It must never share a process with nixl (both bundle UCX, and one of them
crashes)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import Problem, TransferError
from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.native import import_native, version_of
from kvbench.transfer.parts.stores.keyed import KeyedEndpoint, Notes, Store
from kvbench.transfer.parts.stores.servers import available_bytes, free_port, start_server

DISTRIBUTION = "openyuanrong-datasystem"
INSTALL = f"pip install {DISTRIBUTION}"
READY_S = 14.0
GET_TIMEOUT_MS = 2000
# The library refuses 2000 or more keys per call.
KEYS_PER_CALL = 1000
SPARE_BYTES = 64 << 20
FOLDER = "kvbench-yuanrong-"


def check() -> Problem | None:
    """Check that the package is installed; a child process checks that it loads."""
    if not package_folder().is_dir():
        return Problem("not installed", f"{INSTALL} (x86-64 and Python 3.9 to 3.11 only)")
    return None


def load() -> dict[str, str]:
    import_native("yr.datasystem.kv_client", INSTALL)
    return version_of(DISTRIBUTION)


def package_folder() -> Path:
    """Return the package's (possible) folder, without importing it."""
    spec = importlib.util.find_spec("yr")
    folders = (spec.submodule_search_locations if spec else None) or ["/nowhere"]
    return Path(next(iter(folders))) / "datasystem"


class YuanrongWorker:
    """A worker with its own metastore and folder, which ends with this process."""

    def __init__(self, host: str, memory_bytes: int) -> None:
        """Raises TransferError when it is not ready within READY_S."""
        sweep_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        self.address = f"{host}:{free_port(host)}"
        home = package_folder()
        options = {
            "worker_address": self.address,
            "metastore_address": f"{host}:{free_port(host)}",
            "start_metastore_service": "true",
            "shared_memory_size_mb": -(-memory_bytes // (1 << 20)),
            "log_dir": "./logs",
            "unix_domain_socket_dir": "./uds",
            "rocksdb_store_dir": "./rocksdb",
            "monitor_config_file": "./config",
            "health_check_path": "./healthy",
            "ready_check_path": "./ready",
        }
        command = [str(home / "datasystem_worker"), *(f"--{name}={value}" for name, value in options.items())]
        self._process = start_server(command, {"LD_LIBRARY_PATH": str(home / "lib")}, self.folder)
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + READY_S
        while not (self.folder / "ready").exists():
            code = self._process.poll()
            if code is not None or time.monotonic() > until:
                self.close()
                how = f"ended with exit code {code}" if code is not None else "was still not ready"
                raise TransferError(f"the datasystem_worker {how} within {READY_S:g} s")
            time.sleep(0.02)

    def close(self) -> None:
        """End it and remove its folder. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def sweep_folders() -> None:
    """Remove folders left by workers of killed processes."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*"):
        owner = folder.name[len(FOLDER) :].partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


class YuanrongStore(Store):
    def __init__(self, address: str, worker: YuanrongWorker | None, deadline_s: float) -> None:
        client: Any = import_native("yr.datasystem.kv_client", INSTALL)
        host, _, port = address.rpartition(":")
        self._worker = worker
        self._client = client.KVClient(host, int(port), connect_timeout_ms=max(int(deadline_s * 1000), 500))
        try:
            self._client.init()
        except RuntimeError as error:
            raise TransferError(f"no worker answers at {address}: {_first_line(error)}") from error

    def put(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> Notes:
        views = [memoryview((ctypes.c_uint8 * nbytes).from_address(at)).cast("B") for at in addresses]
        for some in _portions(len(keys)):
            try:
                failed = self._client.mset(list(keys[some]), views[some])
            except RuntimeError as error:
                raise TransferError(f"set failed: {_first_line(error)}") from error
            if failed:
                raise TransferError(f"set of {len(failed)} of {len(keys)} objects failed")
        return [None] * len(keys)

    def get(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int, notes: Notes) -> None:
        for some in _portions(len(keys)):
            try:
                buffers = self._client.get_read_only_buffers(list(keys[some]), GET_TIMEOUT_MS)
            except RuntimeError as error:
                raise TransferError(f"get failed: {_first_line(error)}") from error
            for key, address, buffer in zip(keys[some], addresses[some], buffers, strict=True):
                if buffer is None:
                    raise TransferError(f"get failed: there is nothing under {key}")
                data = buffer.immutable_data()
                if data.nbytes != nbytes:
                    raise TransferError(f"{key} holds {data.nbytes} of {nbytes} bytes")
                ctypes.memmove(address, _address_of(data), nbytes)

    def remove(self, keys: Sequence[str]) -> None:
        for some in _portions(len(keys)):
            with contextlib.suppress(RuntimeError):  # already removed
                self._client.delete(list(keys[some]))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _address_of(view: memoryview) -> int:
    """Return the address of a read-only buffer; ctypes requires writable ones."""
    numpy: Any = importlib.import_module("numpy")
    return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)


def _portions(count: int) -> list[slice]:
    return [slice(first, first + KEYS_PER_CALL) for first in range(0, count, KEYS_PER_CALL)]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class YuanrongEndpoint(KeyedEndpoint):
    """One side: a client, and at the target the worker."""

    fresh_reads = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._named = str(options.get("yuanrong_worker", ""))
        import_native("yr.datasystem.kv_client", INSTALL)

    def provide(self, address: int, layout: Layout) -> tuple[Store, dict[str, Any]]:
        room = (2 * self._copies + 4) * layout.nbytes + SPARE_BYTES
        room = int(self._options.get("segment_bytes") or min(room, available_bytes() // 4))
        worker = None if self._named else YuanrongWorker(self._host, room)
        place = worker.address if worker else self._named
        try:
            return YuanrongStore(place, worker, READY_S), {"worker": place, "room": room}
        except BaseException:
            if worker is not None:
                worker.close()
            raise

    def reach(self, provided: Mapping[str, Any], deadline_s: float) -> Store:
        return YuanrongStore(self._named or str(provided["worker"]), None, deadline_s)

    def transport(self) -> str:
        # The client does not report it; sharing memory with the worker depends only on the host.
        return "shared memory or tcp (configured)"

    def library(self) -> dict[str, str]:
        return version_of(DISTRIBUTION)


BACKEND = Backend(
    name="yuanrong",
    title="openYuanrong datasystem",
    check=check,
    open=YuanrongEndpoint,
    load=load,
    nics=False,
    optional=True,
    staged=True,
)
