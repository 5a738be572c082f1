"""One NIXL agent with one of its plugins: without a progress thread, with its own lock."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import MissingLibraryError, TransferError
from kvbench.transfer.base import Endpoint, Layout, Op, Ticket
from kvbench.transfer.parts.blocks import BlockSpan
from kvbench.transfer.parts.native import import_native, version_of

# The meta package selects the variant for the machine's CUDA; each variant also works alone.
MODULES = ("nixl", "nixl_cu12", "nixl_cu13")
DISTRIBUTIONS = ("nixl", "nixl-cu12", "nixl-cu13")
INSTALL = "pip install --no-deps nixl-cu12"


def installed() -> list[str]:
    """Return NIXL's installed variants, without importing them."""
    return [name for name in MODULES if importlib.util.find_spec(name) is not None]


def import_api() -> Any:
    """Import NIXL's Python API module from the first variant that loads."""
    problem = MissingLibraryError("nixl is not installed", hint=INSTALL)
    import_native("numpy", "pip install numpy")
    for name in installed():
        try:
            return import_native(f"{name}._api", INSTALL)
        except MissingLibraryError as error:
            problem = error
    raise problem


@contextlib.contextmanager
def nixl_errors(what: str) -> Iterator[None]:
    """Convert NIXL's exceptions to TransferError."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"{what}: {type(error).__name__}: {error}".rstrip(": ")) from error


class NixlAgent:
    """A NIXL agent. Raises TransferError for all errors of NIXL."""

    def __init__(self, plugin: str, params: Mapping[str, str]) -> None:
        api = import_api()
        import numpy

        self._np = numpy
        self._plugins = [plugin]
        self._registered: list[Any] = []
        self._tables: list[Any] = []
        self.lock = threading.RLock()
        self.name = f"kvbench-{os.getpid()}-{os.urandom(6).hex()}"
        with nixl_errors("the NIXL agent does not start"):
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = api.nixl_agent(self.name, config)
            self._agent.create_backend(plugin, dict(params))
        self.progress = self._agent.get_new_notifs

    @property
    def metadata(self) -> str:
        """What a peer's agent needs, as hex digits."""
        return str(self._agent.get_agent_metadata().hex())

    def register(self, address: int, nbytes: int, kind: str, device: int = 0) -> None:
        with nixl_errors(f"cannot register {nbytes} bytes"):
            ranges = [(address, nbytes, device, "")]
            self._registered.append(self._agent.register_memory(ranges, kind, self._plugins))

    def add_peer(self, metadata: str) -> str:
        with self.lock, nixl_errors("cannot reach the peer"):
            name = self._agent.add_remote_agent(bytes.fromhex(metadata))
            return name.decode() if isinstance(name, bytes) else str(name)

    def forget(self, name: str, tables: Sequence[Any]) -> None:
        with self.lock:
            for table in tables:
                self.drop_table(table)
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(name)

    def table(self, owner: str, address: int, layout: Layout, kind: str, device: int = 0) -> Any:
        """Describe every block of every region; row = region · blocks + block."""
        rows = self._np.zeros((layout.regions * layout.blocks, 3), dtype=self._np.uint64)
        rows[:, 0] = address + self._np.arange(len(rows), dtype=self._np.uint64) * layout.block_bytes
        rows[:, 1] = layout.block_bytes
        rows[:, 2] = device
        with self.lock, nixl_errors("cannot describe the blocks"):
            return self._agent.prep_xfer_dlist(owner or "NIXL_INIT_AGENT", rows, kind, self._plugins)

    def drop_table(self, table: Any) -> None:
        with self.lock, contextlib.suppress(Exception):
            self._agent.release_dlist_handle(table)

    def by_block(
        self, op: Op, local: tuple[Any, Layout, Sequence[int]], remote: tuple[Any, Layout, Sequence[int]]
    ) -> tuple[Any, int]:
        """Return a transfer of blocks by index from two tables, and its number of descriptors, as in NIXL's
        debug log. As under vLLM, NIXL merges blocks that are adjacent in both tables."""
        rows = [self._rows(layout, blocks) for _, layout, blocks in (local, remote)]
        with self.lock, nixl_errors(f"NIXL refused the {op}"):
            handle = self._agent.make_prepped_xfer(
                op.upper(), local[0], rows[0], remote[0], rows[1], b"", self._plugins
            )
        gaps = (self._np.diff(rows[0]) != 1) | (self._np.diff(rows[1]) != 1)
        return handle, int(self._np.count_nonzero(gaps)) + (len(rows[0]) > 0)

    def _rows(self, layout: Layout, blocks: Sequence[int]) -> Any:
        regions = self._np.arange(layout.regions, dtype=self._np.int32)[:, None] * layout.blocks
        return (regions + self._np.asarray(blocks, dtype=self._np.int32)).ravel()

    def by_span(
        self, op: Op, spans: Sequence[BlockSpan], local: NixlPlace, remote: NixlPlace, peer: str
    ) -> Any:
        table = self._np.array(spans, dtype=self._np.uint64).reshape(-1, 3)
        sides = []
        for column, place in ((0, local), (1, remote)):
            rows = self._np.stack([table[:, column] + place.address, table[:, 2], table[:, 2]], axis=1)
            rows[:, 2] = place.device
            sides.append(self._agent.get_xfer_descs(rows, place.kind))
        with self.lock, nixl_errors(f"NIXL refused the {op}"):
            return self._agent.initialize_xfer(op.upper(), *sides, peer, b"", self._plugins)

    def start(self, handle: Any) -> bool:
        try:
            with self.lock:
                return self._checked(self._agent.transfer(handle))
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"NIXL refused the transfer: {type(error).__name__}: {error}") from error

    def poll(self, handle: Any) -> bool:
        try:
            with self.lock:
                return self._checked(self._agent.check_xfer_state(handle))
        except TransferError:
            raise
        except Exception as error:
            raise TransferError(f"the transfer failed: {type(error).__name__}: {error}") from error

    def _checked(self, state: str) -> bool:
        if state == "ERR":
            raise TransferError("NIXL reports an error for the transfer")
        return state == "DONE"

    def drop(self, handle: Any) -> None:
        with self.lock, contextlib.suppress(Exception):
            self._agent.release_xfer_handle(handle)

    def unregister(self) -> None:
        with self.lock:
            while self._registered:
                with contextlib.suppress(Exception):
                    self._agent.deregister_memory(self._registered.pop(), self._plugins)


class NixlPlace:
    """Location of spans: the address of byte 0, NIXL's kind of memory, and its device."""

    __slots__ = ("address", "device", "kind")

    def __init__(self, address: int, kind: str, device: int = 0) -> None:
        self.address = address
        self.kind = kind
        self.device = device


@dataclass
class NixlRequests:
    """A ticket's state: each agent's request, and the unfinished ones."""

    parts: list[tuple[NixlAgent, Any]] = field(default_factory=list)
    pending: list[tuple[NixlAgent, Any]] = field(default_factory=list)


class AgentsEndpoint(Endpoint):
    """Tickets over agents, common to UCX and files."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._merge = bool(options.get("merge", True))
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._agents: list[NixlAgent] = []

    def ticket(
        self, peer: str, op: Op, count: int, began: float, parts: list[tuple[NixlAgent, Any]]
    ) -> Ticket:
        nbytes = count * self._layout.regions * self._layout.block_bytes
        return Ticket(peer, op, nbytes, 0, time.perf_counter() - began, NixlRequests(parts))

    def start(self, ticket: Ticket) -> None:
        transfer: NixlRequests = ticket.handle
        transfer.pending = [part for part in transfer.parts if not part[0].start(part[1])]

    def poll(self, ticket: Ticket) -> bool:
        pending = ticket.handle.pending
        while pending:
            agent, handle = pending[-1]
            if not agent.poll(handle):
                if len(pending) > 1:
                    self.progress()
                return False
            pending.pop()
        return True

    def release(self, ticket: Ticket) -> None:
        transfer: NixlRequests = ticket.handle
        for agent, handle in transfer.parts:
            agent.drop(handle)
        transfer.parts, transfer.pending = [], []

    def library(self) -> dict[str, str]:
        return version_of(*DISTRIBUTIONS)
