"""Loads native libraries, among them Mooncake's package: prerequisites, error messages, captured output."""

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
    """Return the folder where set-up unpacks system libraries that the machine lacks."""
    return Path(sys.prefix) / "lib" / "kvbench-native"


def preload(names: tuple[str, ...]) -> None:
    """Load shared libraries so that a wheel's extension finds them by name. The system's copy is preferred
    over the unpacked one. The later import reports missing ones."""
    folder = unpacked_folder()
    for name in names:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            for path in sorted(folder.rglob(name)):
                with contextlib.suppress(OSError):  # it needs other libraries: the import names them
                    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
                break


def import_native(module: str, fix: str) -> ModuleType:
    """Import a native extension. Raises MissingLibraryError with what it lacks."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise MissingLibraryError(f"{module} does not load: {error}", hint=fix) from error


def version_of(*distributions: str) -> dict[str, str]:
    """Return name and version of the first installed one of these distributions."""
    for name in distributions:
        try:
            return {"name": name, "version": importlib.metadata.version(name)}
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"name": distributions[0], "version": "unknown"}


def variable_value(name: str, wanted: Any, default: str) -> str:
    """Return a variable's value: the option if given, else the current value, else the default."""
    return str(wanted) if wanted else os.environ.get(name, default)


HEAD_LINES = 200
TAIL_LINES = 200


class NativeLog:
    """Replaces file descriptors 1 and 2 of this process by a pipe that a thread drains. It keeps the first
    lines (libraries name their transport at the start) and the last ones (reasons of errors), and copies all
    to the old stderr."""

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
            # The library must continue even if stderr has no reader.
            with contextlib.suppress(OSError):
                os.write(self._stderr, b"".join(line + b"\n" for line in lines))

    def mark(self) -> int:
        """Return a point in the log for ``since``."""
        return self._count

    def since(self, mark: int) -> list[str]:
        with self._lock:
            fresh = min(self._count - mark, len(self._tail))
            return list(self._tail)[len(self._tail) - fresh :] if fresh > 0 else []

    def lines(self) -> Sequence[str]:
        """Return the first and the last lines; some may be missing or appear twice."""
        with self._lock:
            return [*self._head, *self._tail]


DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
INSTALL = "pip install mooncake-transfer-engine-non-cuda"


def mooncake_absent() -> Problem | None:
    """Check that the package is installed; a child process checks that it loads."""
    if importlib.util.find_spec("mooncake") is None:
        return Problem("not installed", INSTALL)
    return None


def mooncake_module(module: str) -> ModuleType:
    """Import ``engine`` or ``store``, in child processes only. Raises MissingLibraryError."""
    preload(VERBS_LIBRARIES)
    return import_native(f"mooncake.{module}", VERBS_FIX)


def mooncake_version() -> dict[str, str]:
    return version_of(*DISTRIBUTIONS)
