"""The parts of an open list, such as connectors: this package's modules, and other packages' entry points.

Both are looked up once for each state of the import path."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from kvbench.errors import InputError

Part = TypeVar("Part")


@dataclass(frozen=True)
class OpenList(Generic[Part]):
    """Parts by name: ``attribute`` of each module of ``package``, and its entry points, which go first."""

    package: str
    kind: str
    """What a part is called in a message."""
    attribute: str
    base: type

    def names(self) -> tuple[str, ...]:
        """All parts: the files of the package's folder and those of outside packages."""
        return tuple(sorted(modules(sys.modules[self.package].__path__) | set(outside(self.package))))

    def get(self, name: str) -> Part:
        """The part of that name; imports its file, no native library. Raises InputError."""
        if (entry := outside(self.package).get(name)) is not None:
            part: Part = entry.load()
        elif name in (known := self.names()):
            part = getattr(importlib.import_module(f"{self.package}.{name}"), self.attribute)
        else:
            raise InputError(f"no {self.kind} is called {name!r}", hint=f"there are: {', '.join(known)}")
        assert isinstance(part, self.base)
        return part


def outside(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group by their names; of several with the same name the first on the path."""
    return _found(group, tuple(sys.path))


@lru_cache
def _installed(_path: tuple[str, ...]) -> Any:
    """Entry points of every installed package: their metadata takes some milliseconds to read."""
    return entry_points()


@lru_cache
def _found(group: str, path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for entry in _installed(path).select(group=group):
        found.setdefault(entry.name, entry)
    return found


def modules(folders: Iterable[str]) -> frozenset[str]:
    """Names of the modules in a package's folders (its ``__path__``), without ``base``."""
    return _modules(tuple(folders))


@cache
def _modules(folders: tuple[str, ...]) -> frozenset[str]:
    return frozenset(module.name for module in pkgutil.iter_modules(folders) if not module.ispkg) - {"base"}
