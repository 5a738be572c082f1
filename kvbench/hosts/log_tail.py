"""Logs that grow while they are read: a bounded reader of what is new."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from kvbench.core.foreign_text import visible

MAX_READ_BYTES: Final = 64 * 1024
"""Bytes taken by one ``read``: some hundred lines, so that a look at a log costs milliseconds."""
MAX_BEHIND_BYTES: Final = 4 * 2**20
"""A log that has run further ahead is not caught up with: its middle is skipped."""
MAX_LINE_BYTES: Final = 4096
"""Longer lines are cut: one library writes all its descriptors, hundreds of megabytes, into one."""


class LogReader:
    """Reads what is appended to a file, whole lines only. The file need not be there yet."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = 0 if from_start else size_of(path)
        self._rest = b""
        self._cut = False

    def read(self, max_bytes: int = MAX_READ_BYTES) -> list[str]:
        """The lines that have been completed since the last call, of at most ``max_bytes``."""
        size = size_of(self.path)
        if size < self._offset:  # truncated, or a new file of that name
            self._offset, self._rest, self._cut = 0, b"", False
        if size - self._offset > MAX_BEHIND_BYTES:
            # What is left begins in the middle of some line, which says nothing.
            self._offset, self._rest, self._cut = size - MAX_BEHIND_BYTES // 4, b"", True
        if size == self._offset:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(min(max_bytes, size - self._offset))
        except OSError:
            return []
        self._offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        if self._cut and lines:
            lines[0], self._cut = b"", False
        self._rest = rest
        if len(rest) > MAX_LINE_BYTES:
            if not self._cut:
                lines.append(rest)
            self._rest, self._cut = b"", True
        texts = (line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip() for line in lines)
        return [text for text in texts if text]

    def drain(self, max_bytes: int = MAX_BEHIND_BYTES) -> list[str]:
        """``read`` until the end of the file, or until ``max_bytes`` have been taken."""
        lines: list[str] = []
        for _ in range(-(-max_bytes // MAX_READ_BYTES)):
            before = self._offset
            lines += self.read()
            if self._offset == before:
                break
        return lines


def size_of(path: Path) -> int:
    """Bytes in a file; 0 if it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def tail_of(path: Path, lines: int) -> list[str]:
    """The last lines of a text file, read from its last 16 KiB; empty if it is not there."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            text = visible(file.read().decode("utf-8", "replace"))
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
