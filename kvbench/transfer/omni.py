"""Connectors of vLLM-Omni's contract: put, get, cleanup, health, close, by stage and key.

Only the contract is used (``OmniConnectorBase`` of vllm-omni 0.30), so any class that implements it can be
measured: ``omni_connector`` names one (``package.module:Class``), ``omni_config`` adds to its configuration.
The protocols are the connectors of an installed vllm-omni, and ``example``, a small connector of kvbench. A
write is the initiator's ``put``, a read its ``get`` of what the target has put. With a pulling connector
(MooncakeTransferEngineConnector) bytes move at ``get``, so its reads are relevant. The contract passes Python
objects one by one, so a read includes the copy into the registered buffer, and without torch a write includes
a copy out of it. Some connectors deliver a key only once: each read has fresh keys."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import KvbenchError, MissingLibraryError, Problem, TransferError
from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.native import VERBS_LIBRARIES, preload, version_of
from kvbench.transfer.parts.stores.keyed import KeyedEndpoint, Notes, Store
from kvbench.transfer.parts.stores.omniexample import ExampleConnector
from kvbench.transfer.parts.stores.servers import Master, free_port

DISTRIBUTION = "vllm-omni"
INSTALL = "pip install vllm-omni, of the same version as vllm"
CONNECTORS = "vllm_omni.distributed.omni_connectors.connectors"
FROM_STAGE, TO_STAGE = "0", "1"
POOL_SPARE_BYTES = 64 << 20
NPU_ONLY = "YuanrongTransferEngineConnector"


@dataclass(frozen=True)
class Kind:
    """A connector class and the configuration it needs here."""

    where: str
    sender_config: Callable[[OmniEndpoint, Layout], dict[str, Any]]
    """Configuration of the putting side; a side that only gets has the same with role ``receiver``."""
    transport: str = ""


def _example(endpoint: OmniEndpoint, layout: Layout) -> dict[str, Any]:
    return {"host": endpoint.host}


def _store(endpoint: OmniEndpoint, layout: Layout) -> dict[str, Any]:
    return {
        "host": endpoint.host,
        "metadata_server": "P2PHANDSHAKE",
        "master": endpoint.master_address(),
        "segment": 4 * layout.nbytes + POOL_SPARE_BYTES,
        "localbuf": 2 * layout.nbytes + POOL_SPARE_BYTES,
    }


def _engine(endpoint: OmniEndpoint, layout: Layout) -> dict[str, Any]:
    pool = 4 * layout.nbytes + POOL_SPARE_BYTES
    return {
        "role": "sender",
        "host": endpoint.host,
        "zmq_port": free_port(endpoint.host),
        "protocol": "tcp",
        "memory_pool_size": pool,
        "memory_pool_device": "cpu",
    }


def _yuanrong(endpoint: OmniEndpoint, layout: Layout) -> dict[str, Any]:
    return {"host": endpoint.host, "port": 35001}


KINDS: dict[str, Kind] = {
    "example": Kind("kvbench.transfer.parts.stores.omniexample:ExampleConnector", _example, "tcp"),
    "SharedMemoryConnector": Kind(
        f"{CONNECTORS}.shm_connector:SharedMemoryConnector",
        lambda endpoint, layout: {"stage_id": 0},
        "shared memory",
    ),
    "MooncakeStoreConnector": Kind(
        f"{CONNECTORS}.mooncake_store_connector:MooncakeStoreConnector", _store, "tcp (configured)"
    ),
    "MooncakeTransferEngineConnector": Kind(
        f"{CONNECTORS}.mooncake_transfer_engine_connector:MooncakeTransferEngineConnector",
        _engine,
        "tcp (configured)",
    ),
    "YuanrongConnector": Kind(
        f"{CONNECTORS}.yuanrong_connector:YuanrongConnector", _yuanrong, "tcp (configured)"
    ),
}


def check() -> Problem | None:
    """No problem: the example connector always works; ``check_protocol`` checks the others."""
    return None


def check_protocol(protocol: str) -> Problem | None:
    """Return what prevents one of the connectors from running here."""
    if protocol == NPU_ONLY:
        return Problem("runs on Ascend NPUs only", "use YuanrongConnector, or a machine with an NPU")
    if protocol != "example" and importlib.util.find_spec("vllm_omni") is None:
        return Problem("vllm-omni is not installed", INSTALL)
    return None


def connector_class(where: str) -> Callable[[dict[str, Any]], Any]:
    """Return the class that ``package.module:Class`` names. Raises MissingLibraryError, TransferError."""
    module, _, name = where.partition(":")
    if not name:
        raise TransferError(f"omni_connector must be package.module:Class, not {where!r}")
    try:
        found: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        raise MissingLibraryError(f"{where} cannot be imported: {error}", hint=INSTALL) from error
    return found


class OmniStore(Store):
    """One connector that puts and one that gets, or one for both."""

    def __init__(self, putter: Any, getter: Any, master: Master | None = None) -> None:
        self.putter = putter
        self._getter = getter
        self._master = master
        # The contract does not promise thread safety.
        self._lock = threading.Lock()

    def put(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> Notes:
        notes: Notes = []
        for key, address in zip(keys, addresses, strict=True):
            with self._lock:
                put = self.putter.put(FROM_STAGE, TO_STAGE, key, _payload(address, nbytes))
            if not put[0]:
                raise TransferError(f"the connector refused a put of {nbytes} bytes under {key}")
            notes.append(put[2])
        return notes

    def get(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int, notes: Notes) -> None:
        for key, address, note in zip(keys, addresses, notes, strict=True):
            with self._lock:
                got = self._getter.get(FROM_STAGE, TO_STAGE, key, note)
            if got is None:
                raise TransferError(f"the connector has nothing under {key}")
            _unload(got[0], address, nbytes, key)

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            with self._lock:
                self.putter.cleanup(key)

    def close(self) -> None:
        self.putter.close()
        if self._getter is not self.putter:
            self._getter.close()
        if self._master is not None:
            self._master.close()


def _payload(address: int, nbytes: int) -> Any:
    """Return the bytes as a tensor that shares their memory (the fastest way), else as a copy."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("vllm_omni") is None:
        return ctypes.string_at(address, nbytes)
    torch: Any = importlib.import_module("torch")
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _unload(obj: Any, address: int, nbytes: int, key: str) -> None:
    """Copy a get's result (bytes, a tensor, or a buffer to release) to its address."""
    tensor = getattr(obj, "tensor", obj)
    data = tensor.cpu().numpy() if hasattr(tensor, "cpu") else tensor
    view = memoryview(data).cast("B")
    if view.nbytes != nbytes:
        raise TransferError(f"the connector returned {view.nbytes} of {nbytes} bytes for {key}")
    memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")[:] = view
    if hasattr(obj, "release"):
        del data, view
        obj.release()


class OmniEndpoint(KeyedEndpoint):
    fresh_reads = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.host = self._host
        self._protocol = str(options.get("protocol", "example"))
        self._user_class = str(options.get("omni_connector", ""))
        self._extra = dict(options.get("omni_config", {}))
        problem = None if self._user_class else check_protocol(self._protocol)
        if problem is not None:
            raise MissingLibraryError(f"{self._protocol}: {problem.reason}", hint=problem.fix)
        if not self._user_class and self._protocol not in KINDS:
            raise TransferError(f"unknown connector {self._protocol!r};  there are: {', '.join(KINDS)}")
        preload(VERBS_LIBRARIES)
        self._master: Master | None = None
        self._joined = ""

    def master_address(self) -> str:
        """Return the store master's address: the peer's, or one that is started here."""
        if self._joined:
            return self._joined
        self._master = Master(self._host)
        return self._master.address

    def _connectors(self, shared: Mapping[str, Any]) -> OmniStore:
        """Return a ready connector; ``shared`` is the target's description."""
        kind = KINDS[self._protocol]
        make = connector_class(self._user_class or kind.where)
        usual = {} if self._user_class else kind.sender_config(self, self._layout)
        config = {**usual, **self._extra, **shared}
        try:
            putter = make(dict(config))
            getter = putter
            if config.get("role") == "sender":
                getter = make({**config, "role": "receiver"})
        except KvbenchError:
            raise
        except Exception as error:
            if self._master is not None:
                self._master.close()
            raise TransferError(f"the connector does not start: {type(error).__name__}: {error}") from error
        store, self._master = OmniStore(putter, getter, self._master), None
        return store

    def provide(self, address: int, layout: Layout) -> tuple[Store, dict[str, Any]]:
        store = self._connectors({})
        self._health(store)
        # What the example or a custom class needs on its other side.
        share: dict[str, Any] = getattr(store.putter, "share", dict)()
        if isinstance(store.putter, ExampleConnector):
            room = 0
        elif self._protocol == "SharedMemoryConnector":
            room = shutil.disk_usage("/dev/shm").free // 2
        else:
            room = 4 * layout.nbytes + POOL_SPARE_BYTES
        master = store._master.address if store._master is not None else ""
        return store, {"config": share, "room": room, "master": master}

    def reach(self, provided: Mapping[str, Any], deadline_s: float) -> Store:
        self._joined = str(provided["master"])
        store = self._connectors({**provided["config"], "segment": 0} if self._joined else provided["config"])
        self._health(store)
        return store

    def _health(self, store: OmniStore) -> None:
        health = store.putter.health()
        if not isinstance(health, dict) or health.get("status", "healthy") not in ("healthy", "ok"):
            raise TransferError(f"the connector is not healthy:  {health}")

    def transport(self) -> str:
        if self._user_class:
            return f"{self._user_class} (configured)"
        return KINDS[self._protocol].transport

    def library(self) -> dict[str, str]:
        if self._user_class:
            return {"name": self._user_class, "version": "unknown"}
        return super().library() if self._protocol == "example" else version_of(DISTRIBUTION)


def env(options: Mapping[str, Any]) -> dict[str, str]:
    variables = {"MC_STORE_CLIENT_SETUP_RETRIES": "1"}
    if "Mooncake" in str(options.get("protocol", "")) and "MC_FORCE_HCA" not in os.environ:
        variables["MC_FORCE_TCP"] = "1"
    return variables


BACKEND = Backend(
    name="omni",
    title="vLLM-Omni connectors",
    check=check,
    open=OmniEndpoint,
    env=env,
    protocols=(*KINDS, NPU_ONLY),
    needs={NPU_ONLY: "npu"},
    nics=False,
    check_protocol=check_protocol,
    optional=True,
    staged=True,
)
