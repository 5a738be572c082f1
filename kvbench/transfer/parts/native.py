"""Loading native libraries, Mooncake's package among them: what to load before, and what to say on failure.

A library's output is caught in the process that hosts it, kept bounded, and passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.errors import MissingLibraryError, Problem

# libibverbs needs the two libnl, so they come first; slim images lack the other two as well.
VERBS_LIBRARIES = (
    "libnl-3.so.200",
    "libnl-route-3.so.200",
    "libibverbs.so.1",
    "libnuma.so.1",
    "libcurl.so.4",
)
VERBS_FIX = (
    "apt-get install libibverbs1, or `make setup`, which unpacks it into this environment without root"
)


def unpacked_folder() -> Path:
    """Where set-up unpacks system libraries that the machine lacks and may not install."""
    return Path(sys.prefix) / "lib" / "kvbench-native"


def preload(names: tuple[str, ...]) -> None:
    """Load shared libraries so that a wheel's extension finds them by name.

    The system's own copy wins; the unpacked one stands in. What neither has is left to the import,
    which then names what is missing.
    """
    folder = unpacked_folder()
    for name in names:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            for path in sorted(folder.rglob(name)):
                with contextlib.suppress(OSError):  # it needs others in turn: the import names them
                    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                break


def import_native(module: str, fix: str) -> ModuleType:
    """Import a native extension. Raises MissingLibraryError with what it lacks."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise MissingLibraryError(f"{module} does not load: {error}", hint=fix) from error


def version_of(*distributions: str) -> dict[str, str]:
    """Name and version of the first of these distributions that is installed."""
    for name in distributions:
        try:
            return {"name": name, "version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"name": distributions[0], "version": "unknown"}


def inherited(name: str, wanted: Any, default: str) -> str:
    """A variable's value: the option if it is given, else what is set already, else the default."""
    return str(wanted) if wanted else os.environ.get(name, default)


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


DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
INSTALL = "pip install mooncake-transfer-engine-non-cuda"


def mooncake_absent() -> Problem | None:
    """Is the package there? Whether it loads is asked in a child process."""
    if importlib.util.find_spec("mooncake") is None:
        return Problem("not installed", INSTALL)
    return None


def mooncake_module(module: str) -> ModuleType:
    """``engine`` or ``store``, in child processes only. Raises MissingLibraryError with what it lacks."""
    preload(VERBS_LIBRARIES)
    return import_native(f"mooncake.{module}", VERBS_FIX)


def mooncake_version() -> dict[str, str]:
    """Name and version of the package that is installed."""
    return version_of(*DISTRIBUTIONS)
