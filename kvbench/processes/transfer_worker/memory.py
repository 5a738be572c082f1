"""The buffer of one side of a measured transfer, its blocks' content, and an engine's KV on a GPU. Every
block holds a pattern of seed, side, region, block and offset, so misplaced bytes are detected.
``StagedEndpoint`` registers GPU memory that mirrors the pool in host memory: blocks are copied to the GPU
before the library may read them, and back after arrival. The copies count as preparation, not as transfer."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbench.errors import InputError, TransferError
from kvbench.transfer.base import Endpoint, Layout, Op, Ticket

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

MEMORY_SHARE = 0.9
"""Share of the free memory for a buffer; the rest is for the library and other processes."""
PIECE_BYTES = 1 << 20
"""Patterns are made and compared in pieces that fit a core's cache."""
GOLDEN = 0x9E3779B97F4A7C15
"""Odd, so that its multiples modulo 2⁶⁴ differ: the step of SplitMix64 (Steele, Lea, Flood 2014)."""
MASK = (1 << 64) - 1


# --- memory


class Memory(ABC):
    """``nbytes`` bytes at ``address``, all backed by real pages."""

    address: int
    nbytes: int

    @abstractmethod
    def put(self, offset: int, data: Bytes) -> None:
        """Overwrite ``len(data)`` bytes."""

    @abstractmethod
    def get(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes, as a view or a copy; read only."""

    def rows(self, layout: Layout, region: int, blocks: Sequence[int]) -> Bytes:
        """Return whole blocks of a region: (blocks, bytes); read only."""
        return np.stack([self.get(layout.offset(region, block), layout.block_bytes) for block in blocks])


class HostMemory(Memory):
    """Anonymous memory, in huge pages if possible, every page touched."""

    def __init__(self, nbytes: int) -> None:
        room = available_bytes()
        if room is not None and nbytes > MEMORY_SHARE * room:
            raise InputError(
                f"a buffer of {nbytes:,} bytes does not fit into this machine's memory: "
                f"{room:,} bytes are free",
                hint="take fewer or smaller blocks, or fewer threads",
            )
        self.nbytes = nbytes
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(f"a buffer of {nbytes:,} bytes cannot be allocated: {error}") from error
        with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._bytes[:: mmap.PAGESIZE] = 0

    def put(self, offset: int, data: Bytes) -> None:
        self._bytes[offset : offset + len(data)] = data

    def get(self, offset: int, nbytes: int) -> Bytes:
        return self._bytes[offset : offset + nbytes]

    def rows(self, layout: Layout, region: int, blocks: Sequence[int]) -> Bytes:
        whole = self.get(layout.offset(region, 0), layout.blocks * layout.block_bytes)
        found: Bytes = whole.reshape(layout.blocks, layout.block_bytes)[np.asarray(blocks)]
        return found


class CudaMemory(Memory):
    """Memory of one GPU, through the CUDA driver API (docs.nvidia.com/cuda/cuda-driver-api). Written from
    that documentation; not yet run on a machine with a GPU."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self._cuda = _driver()
        self.nbytes = nbytes
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        self._do("cuDeviceGet", ctypes.byref(handle), device)
        # Other libraries of this process also use the primary context.
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._do("cuCtxSetCurrent", context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        if nbytes > MEMORY_SHARE * free.value:
            raise InputError(
                f"a buffer of {nbytes:,} bytes does not fit into GPU {device}: {free.value:,} bytes are free",
                hint="take fewer or smaller blocks, or fewer threads",
            )
        pointer = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        self.address = int(pointer.value)
        self._do(
            "cuMemsetD8_v2", ctypes.c_uint64(self.address), ctypes.c_ubyte(0), ctypes.c_size_t(max(nbytes, 1))
        )

    def _do(self, call: str, *arguments: Any) -> None:
        _called(self._cuda, call, *arguments)

    def put(self, offset: int, data: Bytes) -> None:
        whole = np.ascontiguousarray(data)
        source = ctypes.c_void_p(whole.ctypes.data)
        self._do(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(self.address + offset), source, ctypes.c_size_t(len(whole))
        )

    def get(self, offset: int, nbytes: int) -> Bytes:
        copy = np.empty(nbytes, dtype=np.uint8)
        target = ctypes.c_void_p(copy.ctypes.data)
        self._do("cuMemcpyDtoH_v2", target, ctypes.c_uint64(self.address + offset), ctypes.c_size_t(nbytes))
        return copy


def gpu_of_turn(turn: int) -> int:
    """Return a worker's GPU, round robin over those that CUDA shows. Raises InputError."""
    cuda, count = _driver(), ctypes.c_int()
    _called(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise InputError("CUDA shows no GPU to this process", hint="see CUDA_VISIBLE_DEVICES")
    return turn % count.value


def _driver() -> ctypes.CDLL:
    """Load and initialise NVIDIA's driver library. Raises InputError without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise InputError(
            "GPU memory needs NVIDIA's driver: libcuda.so.1 does not load", hint=f"{error}"
        ) from error
    _called(cuda, "cuInit", 0)
    return cuda


def _called(cuda: ctypes.CDLL, call: str, *arguments: Any) -> None:
    if code := getattr(cuda, call)(*arguments):
        name = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(name))
        raise TransferError(f"{call} returned {(name.value or b'an unknown error').decode()} ({code})")


def allocate(kind: str, nbytes: int, device: int = 0) -> Memory:
    """Allocate a buffer in ``"host"`` or ``"cuda"`` memory. Raises InputError when it does not fit."""
    if kind == "host":
        return HostMemory(nbytes)
    if kind == "cuda":
        return CudaMemory(nbytes, device)
    raise InputError(f"unknown kind of memory {kind!r}", hint="there are: host, cuda")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory available without swapping: the kernel's estimate, or the cgroup's rest."""
    rooms = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                rooms.append(int(line.split()[1]) * 1024)
        cgroup = (root / "proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
    except (OSError, ValueError):
        return min(rooms, default=None)
    base = root / "sys/fs/cgroup"
    for folder in (base / cgroup, *(base / cgroup).parents):
        if folder != base and base not in folder.parents:
            break
        try:
            limit = int((folder / "memory.max").read_text())
            rooms.append(max(limit - int((folder / "memory.current").read_text()), 0))
        except (OSError, ValueError):
            continue  # "max", or the root, which has no such file
    return min(rooms, default=None)


# --- content


@dataclass(frozen=True)
class Content:
    """Identity of a pattern: ``side`` separates the buffers of a case, ``generation`` their refills."""

    seed: int
    side: int
    generation: int = 0

    def keys(self, region: int, blocks: Words) -> Words:
        """Return a random word per block: SplitMix64's finalizer over the identity, region and block."""
        start = self.seed & MASK
        for part in (self.side, self.generation, region):
            start = _mixed(np.array([(start + (part + 1) * GOLDEN) & MASK], dtype=np.uint64)).item()
        step = np.array([GOLDEN], dtype=np.uint64)
        return _mixed(np.array([start], dtype=np.uint64) + (blocks + np.uint64(1)) * step)


def _mixed(words: Words) -> Words:
    words = (words ^ (words >> np.uint64(30))) * np.array([0xBF58476D1CE4E5B9], dtype=np.uint64)
    words = (words ^ (words >> np.uint64(27))) * np.array([0x94D049BB133111EB], dtype=np.uint64)
    return words ^ (words >> np.uint64(31))


class _Painter:
    """Makes the content of blocks of one size: word ``i`` is the block's key plus ``i`` golden steps."""

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes
        self._steps = np.arange(min(-(-block_bytes // 8), PIECE_BYTES // 8), dtype=np.uint64) * np.array(
            [GOLDEN], dtype=np.uint64
        )

    def pieces(self, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (first, end) of blocks and of the bytes in them, at most PIECE_BYTES each."""
        if self._size >= PIECE_BYTES:
            for block in range(count):
                for low in range(0, self._size, PIECE_BYTES):
                    yield block, block + 1, low, min(low + PIECE_BYTES, self._size)
            return
        group = max(PIECE_BYTES // self._size, 1)
        for first in range(0, count, group):
            yield first, min(first + group, count), 0, self._size

    def paint(self, keys: Words, low: int, high: int) -> Bytes:
        """Return bytes ``low`` to ``high`` of the blocks with these keys: (blocks, bytes)."""
        words = -(-(high - low) // 8)
        shift = np.array([(low // 8 * GOLDEN) & MASK], dtype=np.uint64)
        whole = (keys + shift)[:, None] + self._steps[None, :words]
        return whole.view(np.uint8)[:, : high - low]


def fill(memory: Memory, layout: Layout, content: Content) -> None:
    painter = _Painter(layout.block_bytes)
    blocks = np.arange(layout.blocks, dtype=np.uint64)
    for region in range(layout.regions):
        keys = content.keys(region, blocks)
        for first, end, low, high in painter.pieces(layout.blocks):
            painted = painter.paint(keys[first:end], low, high)
            memory.put(layout.offset(region, first) + low, painted.reshape(-1))


def difference(
    memory: Memory, layout: Layout, blocks: Sequence[int], source: Content, source_blocks: Sequence[int]
) -> str:
    """Compare all bytes: block ``blocks[i]`` must hold ``source_blocks[i]`` of ``source``, in every region.
    Returns a description of the first difference, or an empty string. Raises InputError when the two lists do
    not pair."""
    if len(blocks) != len(source_blocks):
        raise InputError(f"{len(blocks)} blocks cannot be compared with {len(source_blocks)}")
    painter = _Painter(layout.block_bytes)
    theirs = np.asarray(source_blocks, dtype=np.uint64)
    for region in range(layout.regions):
        keys = source.keys(region, theirs)
        for first, end, low, high in painter.pieces(len(blocks)):
            wanted = painter.paint(keys[first:end], low, high)
            if high - low == layout.block_bytes:
                stored = memory.rows(layout, region, blocks[first:end])
            else:
                stored = memory.get(layout.offset(region, blocks[first]) + low, high - low)[None, :]
            if not np.array_equal(stored, wanted):
                row, byte = (int(places[0]) for places in np.nonzero(stored != wanted))
                return f"region {region}, block {blocks[first + row]}: byte {low + byte} is not what was sent"
    return ""


class StagedEndpoint(Endpoint):
    """``inner`` over GPU memory, mirrored at ``address``, the engine's pool of ``layout``. Raises InputError
    without an NVIDIA driver, or if the pool does not fit into the GPU."""

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
        """Yield offset and size of each run of adjacent blocks, in every region."""
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
