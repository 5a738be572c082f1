"""Importers of other tools' results: one file per tool, found by its name."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

from kvbench.errors import InputError
from kvbench.importers.base import Imported
from kvbench.plugins import modules


class Importer(Protocol):
    """The contents of a file in this folder."""

    FORMAT: str
    RANK: int

    def recognise(self, path: Path) -> bool:
        """Whether this is the tool's file or folder. Never raises: unreadable files are not."""

    def read(self, path: Path) -> Imported:
        """Return the file's whole content. Raises InputError, with the line, if there is none."""


def names() -> tuple[str, ...]:
    return tuple(sorted(modules(__path__)))


def get(name: str) -> Importer:
    """Return an importer. Raises InputError for an unknown format."""
    if name not in names():
        raise InputError(f"unknown format {name!r}", hint=f"there are: {', '.join(names())}")
    module: Importer = importlib.import_module(f"{__name__}.{name}")
    return module


def recognise_format(path: Path) -> str | None:
    """Return the format of a file or folder: the lowest rank that recognises it; None without one."""
    found = [(get(name).RANK, name) for name in names() if get(name).recognise(path)]
    return min(found)[1] if found else None
