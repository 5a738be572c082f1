"""Where a chunked body ends, found without taking it apart. Pure.

A router passes a stream on as it came. All it must know of it is whether the last chunk was seen: only
then is the answer whole, and the connection fit for another one. So this follows the framing of RFC 9112
§7.1 from size line to size line, and refuses everything that is none, so that nothing cut short or
garbled can pass for complete.

Usual heads in one call, where that was compiled (``_heads.c``); all others are httptools' to read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final

from kvbench.processes.common.compiled import compiled

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
"""Size lines whose value is remembered: a stream of tokens has a few hundred."""


class FramingError(ValueError):
    """The bytes are no chunked body."""


class ChunkWatch:
    """Follows one chunked body through reads of any size.

    ``complete`` is true once the last chunk has come. That chunk is never passed on: whether the
    answer may end is for the caller to say, who then sends ``LAST_CHUNK``; trailers are dropped.
    ``reads`` and ``passed_bytes`` are for who passes on to count in; ``compiled_reads`` are those of them
    that compiled code did.
    """

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
        """The stream went another way for a while (splicing.py): where it is now, and what was passed on."""
        self._left = left
        self.reads += reads
        self.compiled_reads += reads
        self.passed_bytes += passed_bytes

    def feed(self, data: bytes) -> bytes:
        """What of these bytes may be passed on now: nearly always all of them. Raises FramingError."""
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
        """Keep back a size line that has not come whole: it may be the last chunk's."""
        line = data[at:]
        if len(line) >= MAX_SIZE_LINE_BYTES or not _SIZE_BEGUN.fullmatch(line):
            raise FramingError(f"no chunk's size: {line[:40]!r}")
        self._begun, self._left = line, 0
        return data[:at]

    def _end(self, data: bytes, at: int, trailers: int) -> bytes:
        """The last chunk has begun at ``at``; its trailers begin at ``trailers``."""
        if _TRAILERS.fullmatch(data, trailers):
            self.complete = True
        elif data.find(b"\r\n\r\n", trailers - 2) >= 0:
            raise FramingError("bytes after the last chunk that are no trailers")
        elif len(data) - trailers > MAX_TRAILER_BYTES:
            raise FramingError(f"the trailers exceed {MAX_TRAILER_BYTES} bytes")
        else:
            self._begun, self._left = data[at:], 0
        return data[:at]

    @classmethod
    def _size_of(cls, line: bytes) -> int:
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise FramingError(f"no chunk's size: {line[:40]!r}")
        size = int(match[1], 16)
        if len(cls._sizes) < _KNOWN_SIZES and len(line) <= 8:
            cls._sizes[line] = size
        return size


def _check_end(data: bytes, at: int, end: int) -> None:
    """A chunk that ends at ``at`` ends with CRLF, as far as that has come: ``data[:end]``."""
    if at <= end:
        fine = data[at - 2 : at] == b"\r\n" if at > 1 else data[:1] == b"\n"
    else:
        fine = at - end > 1 or data[end - 1 : end] == b"\r"
    if not fine:
        raise FramingError("a chunk is longer than its size says")


HEADS: Final = compiled("kvbench.processes.http1._heads")
"""The module, or None."""


def _unknown(data: bytes) -> None:
    """No head is a usual one where nothing was compiled."""


usual_request: Final[Callable[[bytes], tuple[Any, ...] | None]] = HEADS.request if HEADS else _unknown
"""The first five fields of a Request if that is all that was read, and usual; else None."""
usual_response: Final[Callable[[bytes], tuple[int, dict[str, str], int] | None]] = (
    HEADS.response if HEADS else _unknown
)
"""Status, headers and the head's end if a read begins with the usual head of an answer; else None.

What follows is its whole body, or begins one in chunks. The connection may be kept after it.
"""
