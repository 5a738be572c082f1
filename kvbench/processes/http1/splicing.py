"""A stream's way around Python, from socket to socket, where it was compiled (``_splice.c``).

A thread that needs no Python does it: it waits for the streams by itself, so that a request does not wait
behind chunks. A stream goes that way while all is as usual, and is its connection's own again as soon as
anything is not: its end, an odd read, a client that does not keep up. The event loop hears by a descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from kvbench.processes.common.compiled import compiled
from kvbench.processes.http1.framing import ChunkWatch

if TYPE_CHECKING:
    from kvbench.processes.http1._splice import Splicer

SPLICE: Final = compiled("kvbench.processes.http1._splice")
"""The module, or None."""
TURNS_BACK: Final = 16
"""A stream that was given back this often stays with Python: each time costs as much as some reads."""


class Splicing:
    """The splicer of a process's streams beside the running loop: opened when first asked for."""

    def __init__(self, enabled: bool = True) -> None:
        """Not ``enabled``: there is none."""
        self._enabled = enabled and SPLICE is not None
        self._splicer: Splicer | None = None
        self._watched: select.epoll | None = None

    def splicer(self) -> Splicer | None:
        """None if it was not compiled, or is not wanted."""
        if self._splicer is None and self._enabled:
            self._splicer = SPLICE.Splicer()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._splicer.fileno(), self._splicer.collect)
            backend = getattr(loop, "_get_backend_id", None)
            if backend is not None:
                self._watched = select.epoll.fromfd(os.dup(backend()))
        return self._splicer

    def forget(self, fd: int) -> None:
        """Nobody reads ``fd`` in the event loop any more: no read there shall wake it.

        uvloop (libuv) takes a paused descriptor out of its epoll set only when that wakes it once more.
        It must not be waiting to write there: it would abort when it finds the descriptor gone.
        """
        if self._watched is not None:
            with contextlib.suppress(OSError):  # it was out already
                self._watched.unregister(fd)

    def close(self) -> None:
        """Its streams, which must be given up, hear nothing. It may be opened again."""
        splicer, self._splicer = self._splicer, None
        if splicer is not None:
            asyncio.get_running_loop().remove_reader(splicer.fileno())
            splicer.close()
        if self._watched is not None:
            self._watched.close()
            self._watched = None


class SpliceSource(Protocol):
    """The connection whose answer is the stream."""

    @property
    def all_sent(self) -> bool: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def data_received(self, data: bytes) -> None: ...


class Lane:
    """One stream that may go around Python. ``target`` gives the descriptor to write to, -1 for not now."""

    __slots__ = (
        "_fd",
        "_inside",
        "_source",
        "_splicer",
        "_splicing",
        "_target",
        "_turns",
        "_watch",
        "_write",
    )

    def __init__(
        self,
        splicing: Splicing,
        source: SpliceSource,
        fd: int,
        watch: ChunkWatch,
        target: Callable[[], int],
        write: Callable[[bytes], None],
    ) -> None:
        """``fd`` is the descriptor of ``source``; ``write`` takes what could not be sent at once."""
        splicer = splicing.splicer()
        assert splicer is not None
        self._splicing = splicing
        self._splicer = splicer
        self._source = source
        self._fd = fd
        self._watch = watch
        self._target = target
        self._write = write
        self._inside = False
        self._turns = TURNS_BACK

    def enter(self) -> None:
        """Lets what comes next go around Python, if that can be."""
        left = self._watch.left
        if self._inside or left is None or not self._turns or not self._source.all_sent:
            return
        target = self._target()
        if target < 0:
            return
        self._turns -= 1
        self._inside = True
        self._source.pause_reading()
        self._splicing.forget(self._fd)
        self._splicer.add(self._fd, target, left, self._back)

    def leave(self) -> None:
        """Before either descriptor is closed or used by others, by who gives the stream up or has it back."""
        self._turns = 0
        if not self._inside:
            return
        self._inside = False
        passed = self._splicer.remove(self._fd)
        if passed is not None:
            self._watch.bypassed(*passed)
        self._source.resume_reading()

    def _back(self, left: int, reads: int, passed_bytes: int, read: bytes, unsent: bytes) -> None:
        """Something is not as usual: what was read but not judged, or what could not be sent."""
        self._inside = False
        self._watch.bypassed(left, reads, passed_bytes)
        self._source.resume_reading()
        if unsent:
            self._write(unsent)
        if read:
            self._source.data_received(read)
