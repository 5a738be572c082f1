"""NIXL's POSIX plugin: blocks to and from a file of the target's."""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Layout, Op, Ticket
from kvbench.transfer.parts.blocks import in_order
from kvbench.transfer.parts.neighbour import Neighbour, file_of
from kvbench.transfer.parts.nixl.nixlagent import AgentsEndpoint, NixlAgent


@dataclass
class _FilePeer:
    process: Neighbour
    fd: int
    layout: Layout
    table: Any


class FileEndpoint(AgentsEndpoint):
    """A file of the target's, which the initiator writes and reads by the POSIX plugin.

    The file has no name, and lies in the folder of the option ``nixl_folder``, the system's for temporary
    files without it. The page cache is not passed by: what is measured is the plugin and the file system,
    not a disk.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self._agents = [NixlAgent("POSIX", {})]
        self._peers: dict[str, _FilePeer] = {}
        folder = options.get("nixl_folder") or None
        try:
            self._file = tempfile.TemporaryFile(prefix="kvbench-nixl-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise TransferError(
                f"cannot make a file in {folder or tempfile.gettempdir()}: {error}"
            ) from error

    def register(self, address: int, layout: Layout) -> None:
        self._memory = memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B")
        self._agents[0].register(address, layout.nbytes, "DRAM")
        os.ftruncate(self._file.fileno(), layout.nbytes)
        self._address, self._layout = address, layout
        self._table = self._agents[0].table("", address, layout, "DRAM")

    def reshape(self, layout: Layout) -> bool:
        self._agents[0].drop_table(self._table)
        self._table = self._agents[0].table("", self._address, layout, "DRAM")
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        return {"memory": file_of(self._file.fileno())}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        self.forget(peer["id"])
        agent, layout = self._agents[0], Layout(**peer["layout"])
        process = Neighbour(int(peer["memory"]["pid"]))
        fd = process.open(peer["memory"])
        agent.register(0, layout.nbytes, "FILE", fd)
        self._peers[peer["id"]] = _FilePeer(
            process, fd, layout, agent.table(agent.name, 0, layout, "FILE", fd)
        )

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            self._agents[0].drop_table(known.table)
            known.process.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        agent, known = self._agents[0], self._peers[peer]
        parts, descriptors = [], 0
        if local:
            ours, theirs = in_order(local, remote) if self._merge else (local, remote)
            here, there = (self._table, self._layout, ours), (known.table, known.layout, theirs)
            handle, descriptors = agent.by_block(op, here, there)
            parts.append((agent, handle))
        ticket = self.ticket(peer, op, len(local), began, parts)
        ticket.descriptors = descriptors
        return ticket

    def start(self, ticket: Ticket) -> None:
        if ticket.peer in self._peers:
            self._peers[ticket.peer].process.check()
        super().start(ticket)

    def collect(self, blocks: Sequence[int]) -> None:
        for view, at in self._views(blocks):
            os.preadv(self._file.fileno(), [view], at)

    def offer(self, blocks: Sequence[int]) -> None:
        for view, at in self._views(blocks):
            os.pwritev(self._file.fileno(), [view], at)

    def _views(self, blocks: Sequence[int]) -> list[tuple[memoryview, int]]:
        offsets = [self._layout.offset(r, b) for r in range(self._layout.regions) for b in blocks]
        return [(self._memory[at : at + self._layout.block_bytes], at) for at in offsets]

    def transport(self) -> str:
        return "posix (file)"

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        self._agents[0].unregister()
        self._file.close()
