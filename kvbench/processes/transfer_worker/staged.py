"""An engine's KV on a GPU: the registered memory is the GPU's, the pool in host memory its mirror.

The emulated engine computes on the host. So blocks are copied to the GPU before the library may read them
there (``offer``, or a write that begins), and back once they have arrived (``collect``, or a read that is
done). These copies count as preparation, not as transfer.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvbench.processes.transfer_worker.memory import Bytes, CudaMemory
from kvbench.transfer.base import Endpoint, Layout, Op, Ticket


class StagedEndpoint(Endpoint):
    """``inner`` over GPU memory, mirrored at ``address``, where the engine's own pool of ``layout`` lies.

    Raises InputError without an NVIDIA driver, or where the pool does not fit into the GPU.
    """

    def __init__(self, inner: Endpoint, device: int) -> None:
        self._inner = inner
        self._device = device
        self._reads: dict[int, tuple[Ticket, list[int]]] = {}
        self.poll_interval_s = inner.poll_interval_s
        self.progress_interval_s = inner.progress_interval_s

    def register(self, address: int, layout: Layout) -> None:
        self._layout = layout
        self._gpu = CudaMemory(layout.nbytes, self._device)
        view = memoryview((ctypes.c_char * layout.nbytes).from_address(address)).cast("B")
        self._host: Bytes = np.frombuffer(view, dtype=np.uint8)
        self._inner.native_log = self.native_log
        self._inner.register(self._gpu.address, layout)

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        began = time.perf_counter()
        if op == "write":
            self.offer(local)
        staged_s = time.perf_counter() - began
        ticket = self._inner.prepare(peer, op, local, remote)
        ticket.prepare_s += staged_s
        if op == "read":
            self._reads[id(ticket)] = ticket, list(local)
        return ticket

    def poll(self, ticket: Ticket) -> bool:
        if not self._inner.poll(ticket):
            return False
        if found := self._reads.pop(id(ticket), None):
            began = time.perf_counter()
            self.collect(found[1])
            ticket.prepare_s += time.perf_counter() - began
        return True

    def offer(self, blocks: Sequence[int]) -> None:
        for start, nbytes in self._runs(blocks):
            self._gpu.put(start, self._host[start : start + nbytes])

    def collect(self, blocks: Sequence[int]) -> None:
        for start, nbytes in self._runs(blocks):
            self._host[start : start + nbytes] = self._gpu.get(start, nbytes)

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Offset and size of each run of neighbouring blocks, in every region."""
        known = sorted(set(blocks))
        cuts = [0, *(n for n, (a, b) in enumerate(pairwise(known), 1) if b != a + 1), len(known)]
        for region in range(self._layout.regions if known else 0):
            for first, end in pairwise(cuts):
                size = (end - first) * self._layout.block_bytes
                yield self._layout.offset(region, known[first]), size

    def release(self, ticket: Ticket) -> None:
        self._reads.pop(id(ticket), None)
        self._inner.release(ticket)

    def describe(self) -> dict[str, Any]:
        return self._inner.describe()

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        self._inner.connect(peer, deadline_s)

    def forget(self, peer: str) -> None:
        self._inner.forget(peer)

    def start(self, ticket: Ticket) -> None:
        self._inner.start(ticket)

    def progress(self) -> None:
        self._inner.progress()

    def wait_fds(self) -> Sequence[int]:
        return self._inner.wait_fds()

    def transport(self) -> str:
        return self._inner.transport()

    def library(self) -> dict[str, str]:
        return self._inner.library()

    def close(self) -> None:
        self._inner.close()
