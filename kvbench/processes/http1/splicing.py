"""Forwards a stream from socket to socket outside Python, if compiled (``_splice.c``), and checks framing.

A thread without Python's lock forwards the streams, so that a request does not wait behind chunks. A stream
returns to its connection at anything unusual: its end, an odd read, a slow client. ``ChunkWatch`` follows the
framing of RFC 9112 §7.1 without decoding a body, and refuses anything else: after the last chunk a response
is complete and its connection reusable. ``_heads.c`` reads usual heads in one call, httptools all others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from kvbench.processes.common.entry import compiled

if TYPE_CHECKING:
    from kvbench.processes.http1._splice import Splicer


LAST_CHUNK: Final = b"0\r\n\r\n"
MAX_SIZE_LINE_BYTES: Final = 4096
MAX_TRAILER_BYTES: Final = 64 * 1024

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_SIZE_LINE: Final = re.compile(
    rb"([0-9A-Fa-f]{1,15})(?:;%b(?:=(?:%b|\"[\t\x20-\x21\x23-\x5b\x5d-\x7e]*\"))?)*" % (_TOKEN, _TOKEN)
)
_SIZE_BEGUN: Final = re.compile(rb"(?:[0-9A-Fa-f]{1,15}(?:;[\t\x20-\x7e]*)?\r?)?")
_TRAILERS: Final = re.compile(rb"(?:%b:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n" % _TOKEN)
_KNOWN_SIZES: Final = 4096
"""Number of cached size lines: a stream of tokens has a few hundred."""


class FramingError(ValueError):
    """The bytes are not a valid chunked body."""


class ChunkWatch:
    """Follows one chunked body through reads of any size. ``complete`` is true after the last chunk. The last
    chunk is never passed on: the caller decides whether the answer may end and sends ``LAST_CHUNK``; trailers
    are dropped. The forwarder counts in ``reads`` and ``passed_bytes``; ``compiled_reads`` counts those by
    compiled code."""

    __slots__ = ("_begun", "_left", "compiled_reads", "complete", "passed_bytes", "reads")

    _sizes: ClassVar[dict[bytes, int]] = {}  # for all streams: they have the same size lines

    def __init__(self) -> None:
        self._left = 0  # bytes until the next size line, counting the CRLF that ends the chunk
        self._begun = b""  # a size line, or the last chunk, that has not come whole
        self.complete = False
        self.reads = self.compiled_reads = 0
        self.passed_bytes = 0

    @property
    def left(self) -> int | None:
        """Bytes until the next size line, with the CRLF that ends the chunk; None within such a line."""
        return None if self._begun else self._left

    def bypassed(self, left: int, reads: int, passed_bytes: int) -> None:
        """Update the position and counts after the stream was forwarded elsewhere."""
        self._left = left
        self.reads += reads
        self.compiled_reads += reads
        self.passed_bytes += passed_bytes

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that may be passed on now, nearly always all. Raises FramingError."""
        if self._begun:
            data = self._begun + data
            self._begun = b""
        at, end = self._left, len(data)
        if at:
            _check_end(data, at, end)
        while at < end:
            stop = data.find(b"\r\n", at, at + MAX_SIZE_LINE_BYTES)
            if stop < 0:
                return self._hold(data, at)
            size = self._sizes.get(data[at:stop]) or self._size_of(data[at:stop])
            if not size:
                return self._end(data, at, stop + 2)
            at = stop + size + 4
            if at == end:  # the usual read ends with a chunk
                if data[-2:] != b"\r\n":
                    raise FramingError("a chunk is longer than its size says")
                break
            _check_end(data, at, end)
        self._left = at - end
        return data

    def _hold(self, data: bytes, at: int) -> bytes:
        """Keep back an incomplete size line: it may be the last chunk's."""
        line = data[at:]
        if len(line) >= MAX_SIZE_LINE_BYTES or not _SIZE_BEGUN.fullmatch(line):
            raise FramingError(f"invalid chunk size: {line[:40]!r}")
        self._begun, self._left = line, 0
        return data[:at]

    def _end(self, data: bytes, at: int, trailers: int) -> bytes:
        """Handle the last chunk, which begins at ``at``; its trailers begin at ``trailers``."""
        if _TRAILERS.fullmatch(data, trailers):
            self.complete = True
        elif data.find(b"\r\n\r\n", trailers - 2) >= 0:
            raise FramingError("invalid trailers after the last chunk")
        elif len(data) - trailers > MAX_TRAILER_BYTES:
            raise FramingError(f"the trailers exceed {MAX_TRAILER_BYTES} bytes")
        else:
            self._begun, self._left = data[at:], 0
        return data[:at]

    @classmethod
    def _size_of(cls, line: bytes) -> int:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise FramingError(f"invalid chunk size: {line[:40]!r}")
        size = int(match[1], 16)
        if len(cls._sizes) < _KNOWN_SIZES and len(line) <= 8:
            cls._sizes[line] = size
        return size


def _check_end(data: bytes, at: int, end: int) -> None:
    """Check that a chunk that ends at ``at`` ends with CRLF, as far as ``data[:end]`` shows."""
    if at <= end:
        fine = data[at - 2 : at] == b"\r\n" if at > 1 else data[:1] == b"\n"
    else:
        fine = at - end > 1 or data[end - 1 : end] == b"\r"
    if not fine:
        raise FramingError("a chunk is longer than its size says")


HEADS: Final = compiled("kvbench.processes.http1._heads")


def _unknown(data: bytes) -> None:
    """Fallback without compiled code: no head is usual."""


usual_request: Final[Callable[[bytes], tuple[Any, ...] | None]] = HEADS.request if HEADS else _unknown
"""The first five fields of a Request if a read is exactly one usual request, else None."""
usual_response: Final[Callable[[bytes], tuple[int, dict[str, str], int] | None]] = (
    HEADS.response if HEADS else _unknown
)
"""Status, headers and the head's end if a read begins with a usual answer, else None. Its whole body or the
beginning of chunks follows. The connection may be kept afterwards."""


SPLICE: Final = compiled("kvbench.processes.http1._splice")
TURNS_BACK: Final = 16
"""A stream returned this often stays in Python: each return costs as much as some reads."""


class Splicing:
    """The splicer of a process's streams, opened at first use."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled and SPLICE is not None
        self._splicer: Splicer | None = None
        self._watched: select.epoll | None = None

    def splicer(self) -> Splicer | None:
        """The splicer; None if not compiled or not enabled."""
        if self._splicer is None and self._enabled:
            self._splicer = SPLICE.Splicer()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._splicer.fileno(), self._splicer.collect)
            if (backend := getattr(loop, "_get_backend_id", None)) is not None:
                self._watched = select.epoll.fromfd(os.dup(backend()))
        return self._splicer

    def forget(self, fd: int) -> None:
        """Remove ``fd`` from the event loop, so that reads there no longer wake it. uvloop (libuv) takes a
        paused descriptor out of its epoll set only at its next wake-up. The loop must not wait to write
        there: it would abort when the descriptor has gone."""
        if self._watched is not None:
            with contextlib.suppress(OSError):  # already removed
                self._watched.unregister(fd)

    def close(self) -> None:
        """Close the splicer. Streams must be given up before; it may be opened again."""
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
    """One stream that may be forwarded outside Python. ``target`` gives the descriptor to write to, or -1."""

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
        """Forward further bytes outside Python, if possible."""
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
        """Return the stream; call before either descriptor is closed or used elsewhere."""
        self._turns = 0
        if not self._inside:
            return
        self._inside = False
        if (passed := self._splicer.remove(self._fd)) is not None:
            self._watch.bypassed(*passed)
        self._source.resume_reading()

    def _back(self, left: int, reads: int, passed_bytes: int, read: bytes, unsent: bytes) -> None:
        """Handle something unusual: unprocessed bytes, or bytes that could not be sent."""
        self._inside = False
        self._watch.bypassed(left, reads, passed_bytes)
        self._source.resume_reading()
        if unsent:
            self._write(unsent)
        if read:
            self._source.data_received(read)
