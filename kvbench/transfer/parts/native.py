"""Loading native libraries: what must be in the process before, and what to say when it fails."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbench.errors import MissingLibraryError

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
