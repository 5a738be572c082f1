"""Logs that grow without end are cut short: their beginning and their end are kept.

A process writes straight into its log file, which costs nobody anything. One thread looks at all of a
launcher's logs twice a second; of one that has grown beyond the bound it gives the middle back to the disk
(fallocate(2), a hole), while the process writes on at the end. When the process has ended the hole is closed
and a line says how much is missing. On a file system without holes the log is cut off at its beginning's end,
and what comes later is kept. The thread ends with the last process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

HEAD_BYTES: Final = 16 * 2**20
TAIL_BYTES: Final = 48 * 2**20
LOOK_S: Final = 0.5
_KEEP_SIZE: Final = 1  # linux/falloc.h
_PUNCH_HOLE: Final = 2
_COPY_BYTES: Final = 2**20
_BLOCK: Final = 4096


class Logged(Protocol):
    """Whoever writes a log; its path may change."""

    @property
    def log_path(self) -> Path: ...


@dataclass
class _Log:
    hole_ends: int = 0
    missing: int = 0
    """Bytes."""


class LogBound:
    """Keeps the logs of processes within ``head`` + ``tail`` bytes, and what half a second adds to them."""

    def __init__(self, head: int = HEAD_BYTES, tail: int = TAIL_BYTES) -> None:
        self._head = head - head % _BLOCK
        self._tail = tail
        self._lock = threading.Lock()
        self._logs: dict[Logged, _Log] = {}
        self._none_left = threading.Event()

    def watch(self, process: Logged) -> None:
        """From now on its log is bounded."""
        with self._lock:
            if not self._logs:
                self._none_left = threading.Event()
                threading.Thread(target=self._run, args=(self._none_left,), name="logs", daemon=True).start()
            self._logs[process] = _Log()

    def ended(self, process: Logged) -> None:
        """Nothing writes that log any more. Safe to call twice."""
        with self._lock:
            if process not in self._logs:
                return
            self._cut(process)
            log = self._logs.pop(process)
            if not self._logs:
                self._none_left.set()
        if log.missing:
            with contextlib.suppress(OSError):  # a full disk: the hole stays, and costs nothing
                self._close(process.log_path, log)

    def _run(self, none_left: threading.Event) -> None:
        while not none_left.wait(LOOK_S):
            with self._lock:
                for process in self._logs:
                    self._cut(process)

    def _cut(self, process: Logged) -> None:
        """Gives the middle of a log that is too long back to the disk."""
        log, path = self._logs[process], process.log_path
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            begin = log.hole_ends or self._head
            end = (size - self._tail) // _BLOCK * _BLOCK
            if end <= begin:
                return
            try:
                _punch(path, begin, end - begin)
                log.hole_ends = end
                log.missing += end - begin
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                os.truncate(path, self._head)  # whoever appends goes on from there
                log.missing += size - self._head

    def _close(self, path: Path, log: _Log) -> None:
        """Writes the file anew without its hole, renamed into place."""
        rest_from = log.hole_ends or self._head
        short = path.with_name(f".{path.name}.short")
        try:
            with path.open("rb") as old, short.open("wb") as new:
                _copy(old.fileno(), new.fileno(), 0, self._head)
                new.write(f"\n[kvbench: {log.missing} bytes of this log were not kept]\n".encode())
                new.flush()
                _copy(old.fileno(), new.fileno(), rest_from, os.fstat(old.fileno()).st_size)
            short.replace(path)
        finally:
            short.unlink(missing_ok=True)


def _punch(path: Path, offset: int, length: int) -> None:
    """Raises OSError, also on a file system that cannot do it."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    number = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if fallocate(number, _KEEP_SIZE | _PUNCH_HOLE, offset, length) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    finally:
        os.close(number)


def _copy(source: int, target: int, begin: int, end: int) -> None:
    while begin < end and (data := os.pread(source, min(_COPY_BYTES, end - begin), begin)):
        begin += len(data)
        while data:
            data = data[os.write(target, data) :]
