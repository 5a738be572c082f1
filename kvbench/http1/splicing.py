"""A stream's way past Python, from socket to socket, where it was compiled (``_splice.c``).

The event loop watches the splicer's epoll descriptor as it would any socket, and calls one C function when
some streams have something to read. A stream goes that way while all is as usual, and is its connection's
own again as soon as anything is not: its end, an odd read, a client that does not keep up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from kvbench.compiled import compiled
from kvbench.http1.framing import ChunkWatch

if TYPE_CHECKING:
    from kvbench.http1._splice import Splicer

SPLICE: Final = compiled("kvbench.http1._splice")
"""The module, or None."""
TURNS_BACK: Final = 16
"""A stream that was given back this often stays with Python: each time costs as much as some reads."""


def open_splicer() -> Splicer | None:
    """One that works beside the running loop until ``close_splicer``. None if it was not compiled."""
    if SPLICE is None:
        return None
    made: Splicer = SPLICE.Splicer()
    asyncio.get_running_loop().add_reader(made.fileno(), made.turn)
    return made


def close_splicer(splicer: Splicer) -> None:
    """Its streams, which must be given up, are told nothing."""
    asyncio.get_running_loop().remove_reader(splicer.fileno())
    splicer.close()


class Source(Protocol):
    """The connection whose answer is the stream."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def data_received(self, data: bytes) -> None: ...


class Lane:
    """One stream that may go past Python. ``target`` gives the descriptor to write to, -1 for not now."""

    __slots__ = ("_fd", "_inside", "_source", "_splicer", "_target", "_turns", "_watch", "_write")

    def __init__(
        self,
        splicer: Splicer,
        source: Source,
        fd: int,
        watch: ChunkWatch,
        target: Callable[[], int],
        write: Callable[[bytes], None],
    ) -> None:
        """``fd`` is the descriptor of ``source``; ``write`` takes what could not be sent at once."""
        self._splicer = splicer
        self._source = source
        self._fd = fd
        self._watch = watch
        self._target = target
        self._write = write
        self._inside = False
        self._turns = TURNS_BACK

    def enter(self) -> None:
        """Lets what comes next go past Python, if that can be."""
        left = self._watch.left
        if self._inside or left is None or not self._turns:
            return
        target = self._target()
        if target < 0:
            return
        self._turns -= 1
        self._inside = True
        self._source.pause_reading()
        self._splicer.add(self._fd, target, left, self._back)

    def leave(self) -> None:
        """Before either descriptor is closed or used by others. The stream is its connection's own again."""
        self._turns = 0
        if not self._inside:
            return
        self._inside = False
        passed = self._splicer.remove(self._fd)
        if passed is not None:
            self._watch.went_past(*passed)
        self._source.resume_reading()

    def _back(self, left: int, reads: int, passed_bytes: int, read: bytes, unsent: bytes) -> None:
        """Something is not as usual: what was read but not judged, or what could not be sent."""
        self._inside = False
        self._watch.went_past(left, reads, passed_bytes)
        self._source.resume_reading()
        if unsent:
            self._write(unsent)
        if read:
            self._source.data_received(read)
