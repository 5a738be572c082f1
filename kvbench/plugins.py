"""The parts of an open list, such as connectors: this package's modules, and other packages' entry points.

Both are looked up once for each state of the import path.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points


def outside(group: str) -> Mapping[str, EntryPoint]:
    """Entry points of a group by their names; the first one on the path has a name."""
    return _found(group, tuple(sys.path))


@lru_cache
def _found(group: str, _path: tuple[str, ...]) -> Mapping[str, EntryPoint]:
    # A look-up reads the metadata of every installed package: some milliseconds.
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        found.setdefault(entry.name, entry)
    return found


def modules(folders: Iterable[str]) -> frozenset[str]:
    """Names of the modules in a package's folders (its ``__path__``), without ``base``."""
    return _modules(tuple(folders))


@cache
def _modules(folders: tuple[str, ...]) -> frozenset[str]:
    return frozenset(each.name for each in pkgutil.iter_modules(folders) if not each.ispkg) - {"base"}
