"""A bounded reader of growing logs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from kvbench.core.foreign_text import visible

MAX_READ_BYTES: Final = 64 * 1024
"""Maximum bytes per ``read``: about a hundred lines, so that it takes milliseconds."""
MAX_BEHIND_BYTES: Final = 4 * 2**20
"""If a log is further ahead than this, its middle is skipped."""
MAX_LINE_BYTES: Final = 4096
"""Longer lines are cut: one library writes hundreds of megabytes of descriptors into one line."""
UCX_REPORT: Final = re.compile(r"\[\d+\.\d+\] \[[^]]+\] +([+|]|\S+ UCX +INFO )")
"""Line that UCX writes for information: a message, or a row of a table (``UCX_PROTO_INFO=y``)."""


class LogReader:
    """Reads whole lines appended to a file, which need not exist yet."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        self.path = path
        self._offset = 0 if from_start else size_of(path)
        self._rest = b""
        self._cut = False

    def read(self, max_bytes: int = MAX_READ_BYTES) -> list[str]:
        """Return the lines completed since the last call, of at most ``max_bytes``."""
        size = size_of(self.path)
        if size < self._offset:  # truncated, or a new file of that name
            self._offset, self._rest, self._cut = 0, b"", False
        if size - self._offset > MAX_BEHIND_BYTES:
            # The rest begins in the middle of a line, so drop it.
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
        """``read`` until the end of the file, or up to ``max_bytes``."""
        lines: list[str] = []
        for _ in range(-(-max_bytes // MAX_READ_BYTES)):
            before = self._offset
            lines += self.read()
            if self._offset == before:
                break
        return lines


def size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def tail_of(path: Path, lines: int) -> list[str]:
    """Return the last lines of a text file, from its last 64 KiB, without those that UCX writes for
    information; empty if it does not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - MAX_READ_BYTES))
            text = visible(file.read().decode("utf-8", "replace"))
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip() and not UCX_REPORT.match(line)][-lines:]
