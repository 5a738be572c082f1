"""What a native library writes: caught in the process that hosts it, kept bounded, passed on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence

HEAD_LINES = 200
TAIL_LINES = 200


class NativeLog:
    """Replaces file descriptors 1 and 2 of this process by a pipe that a thread drains.

    The first lines are kept, since libraries name their transport when they start, and the last
    ones, since libraries give their reasons only there. All go on to the old stderr.
    """

    def __init__(self) -> None:
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._count = 0
        self._lock = threading.Lock()
        self._stderr = os.dup(2)
        read_end, write_end = os.pipe()
        os.dup2(write_end, 1)
        os.dup2(write_end, 2)
        os.close(write_end)
        threading.Thread(target=self._drain, args=(read_end,), name="native-log", daemon=True).start()

    def _drain(self, read_end: int) -> None:
        rest = b""
        while chunk := os.read(read_end, 65536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[-65536:]
            texts = [line.decode(errors="replace") for line in lines]
            with self._lock:
                self._count += len(texts)
                self._head += texts[: max(HEAD_LINES - len(self._head), 0)]
                self._tail.extend(texts)
            # If nobody reads our stderr any more, the library must still be able to go on.
            with contextlib.suppress(OSError):
                os.write(self._stderr, b"".join(line + b"\n" for line in lines))

    def mark(self) -> int:
        """A point in the log, for ``since``."""
        return self._count

    def since(self, mark: int) -> list[str]:
        """Lines written after a mark, as far as they are still kept."""
        with self._lock:
            fresh = min(self._count - mark, len(self._tail))
            return list(self._tail)[len(self._tail) - fresh :] if fresh > 0 else []

    def lines(self) -> Sequence[str]:
        """The first and the last lines; those between may be lost, and some may come twice."""
        with self._lock:
            return [*self._head, *self._tail]
