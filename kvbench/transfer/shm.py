"""Shared memory between two processes: the initiator copies directly into, or out of, the target's memory.

The caller owns the registered buffer. If it is already a mapped file, such as an emulated engine's KV pool, a
peer maps that file. Otherwise its pages are replaced by those of a memory file with the same content
(``mmap`` with ``MAP_FIXED``); the buffer must begin at a page. The address stays, so the owner sees what a
peer wrote."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Layout
from kvbench.transfer.parts.copying import CopyEndpoint, memory_file

MAP_FIXED = 0x10  # asm-generic/mman-common.h; the mmap module does not name it
MAP_FAILED = ctypes.c_void_p(-1).value


def mapped_files() -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield shared file mappings of this process, see proc(5): start, end, offset, (device, inode)."""
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            where, permissions, offset, device, inode = line.split()[:5]
            if permissions.endswith("s") and inode != "0":
                start, _, end = where.partition("-")
                major, _, minor = device.partition(":")
                file = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
                yield int(start, 16), int(end, 16), int(offset, 16), file


def descriptor_of(file: tuple[int, int]) -> int | None:
    """Return a descriptor of one of this process's open files, by device and inode."""
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) == file:
                return os.dup(int(name))
        except OSError:
            continue
    return None


def file_below(address: int, nbytes: int) -> tuple[int, int] | None:
    """Return the file mapped at an address, and the address's offset in it, if any."""
    for start, end, offset, file in mapped_files():
        if start <= address and address + nbytes <= end:
            fd = descriptor_of(file)
            return None if fd is None else (fd, offset + address - start)
    return None


def put_below(address: int, nbytes: int) -> int:
    """Replace the pages at an address by a new memory file with the same content. Raises TransferError."""
    if address % mmap.PAGESIZE:
        raise TransferError(f"the buffer at {address:#x} does not begin at a page, so it cannot be shared")
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = memory_file(whole)
    with mmap.mmap(fd, whole) as content:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(content)), address, whole)
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_SHARED | MAP_FIXED | mmap.MAP_POPULATE
    if libc_mmap(address, whole, protection, flags, fd, 0) == MAP_FAILED:
        raise TransferError(f"cannot share {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return fd


class ShmEndpoint(CopyEndpoint):
    """Publishes the file behind the registered memory."""

    transport_name = "shm"

    def register(self, address: int, layout: Layout) -> None:
        self._file = file_below(address, layout.nbytes) or (put_below(address, layout.nbytes), 0)
        self._address, self._layout = address, layout

    def published(self) -> tuple[int, int]:
        return self._file


BACKEND = Backend(
    name="shm",
    title="shared memory (two processes, one host)",
    open=ShmEndpoint,
    protocols=("shm",),
    nics=False,
    loopback_only=True,
)
