"""A copy within the initiator's process, buffer to buffer: the machine's upper limit. The second buffer
replaces the peer's. It is a memory file that the peer made, to compare the bytes: ``collect`` copies them to
the peer's buffer, ``offer`` copies the peer's into it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.copying import CopyEndpoint, MappedFile, memory_file


class MemcpyEndpoint(CopyEndpoint):
    """The registered memory, and a second buffer of its size."""

    transport_name = "memcpy"

    def register(self, address: int, layout: Layout) -> None:
        self._address, self._layout = address, layout
        self._fd = memory_file(layout.nbytes)
        self._mirror = MappedFile(self._fd, layout.nbytes)

    def published(self) -> tuple[int, int]:
        return self._fd, 0

    def collect(self, blocks: Sequence[int]) -> None:
        for at in self._offsets(blocks):
            ctypes.memmove(self._address + at, self._mirror.address + at, self._layout.block_bytes)

    def offer(self, blocks: Sequence[int]) -> None:
        for at in self._offsets(blocks):
            ctypes.memmove(self._mirror.address + at, self._address + at, self._layout.block_bytes)

    def _offsets(self, blocks: Sequence[int]) -> list[int]:
        return [self._layout.offset(r, b) for r in range(self._layout.regions) for b in blocks]


BACKEND = Backend(
    name="memcpy",
    title="memcpy (within one process; the machine's limit)",
    open=MemcpyEndpoint,
    protocols=("memcpy",),
    nics=False,
    loopback_only=True,
    staged=True,
)
