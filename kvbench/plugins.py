"""What outside packages add: their entry points, looked up once for each state of the import path."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
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
