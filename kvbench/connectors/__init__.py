"""How P hands its KV to D: one file per connector, found by its name."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from kvbench.connectors.base import Connector
from kvbench.errors import InputError

_NOT_CONNECTORS = {"base", "plain", "pull", "rooms", "ucx", "versions"}
ENTRY_POINT_GROUP = "kvbench.connectors"


def names() -> tuple[str, ...]:
    """All connectors: the files of this folder and those of outside packages."""
    own = {module.name for module in pkgutil.iter_modules(__path__)} - _NOT_CONNECTORS
    outside = {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}
    return tuple(sorted(own | outside))


def get(name: str) -> Connector:
    """The connector of that name. Raises InputError for an unknown one."""
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            loaded = entry.load()
            assert isinstance(loaded, Connector)
            return loaded
    if name not in names():
        raise InputError(f"no connector is called {name!r}", hint=f"there are: {', '.join(names())}")
    connector = importlib.import_module(f"{__name__}.{name}").CONNECTOR
    assert isinstance(connector, Connector)
    return connector
