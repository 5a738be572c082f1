"""Whose results can be read: one file per tool, found by its name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

from kvbench.errors import InputError
from kvbench.importers.base import Imported
from kvbench.plugins import modules


class Importer(Protocol):
    """What a file of this folder has."""

    FORMAT: str
    RANK: int

    def recognise(self, path: Path) -> bool:
        """Whether this is a file, or folder, of the tool's.

        Raises nothing: what cannot be read is not its.
        """

    def read(self, path: Path) -> Imported:
        """Everything the file says. Raises InputError where that is nothing, with the line."""


def names() -> tuple[str, ...]:
    """All formats, in the order of their names."""
    return tuple(sorted(modules(__path__)))


def get(name: str) -> Importer:
    """The importer of that name. Raises InputError for an unknown one."""
    if name not in names():
        raise InputError(f"no format is called {name!r}", hint=f"there are: {', '.join(names())}")
    module: Importer = importlib.import_module(f"{__name__}.{name}")
    return module


def recognised(path: Path) -> str | None:
    """The format of a file or folder: the one of lowest rank that takes it for its own; None if none does."""
    found = [(get(name).RANK, name) for name in names() if get(name).recognise(path)]
    return min(found)[1] if found else None
