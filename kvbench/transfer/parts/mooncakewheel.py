"""The Python package that holds Mooncake's engine and its store."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from kvbench.errors import Problem
from kvbench.transfer.parts.native import VERBS_FIX, VERBS_LIBRARIES, import_native, preload, version_of

DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
INSTALL = "pip install mooncake-transfer-engine-non-cuda"


def absent() -> Problem | None:
    """Is the package there? Whether it loads is asked in a child process."""
    if importlib.util.find_spec("mooncake") is None:
        return Problem("not installed", INSTALL)
    return None


def imported(module: str) -> ModuleType:
    """``engine`` or ``store``, in child processes only. Raises MissingLibraryError with what it lacks."""
    preload(VERBS_LIBRARIES)
    return import_native(f"mooncake.{module}", VERBS_FIX)


def version() -> dict[str, str]:
    """Name and version of the package that is installed."""
    return version_of(*DISTRIBUTIONS)
