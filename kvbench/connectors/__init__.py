"""How P hands its KV to D: one file per connector, found by its name."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvbench.connectors.base import Connector
from kvbench.errors import InputError
from kvbench.plugins import modules, outside

ENTRY_POINT_GROUP = "kvbench.connectors"


def names() -> tuple[str, ...]:
    """All connectors: the files of this folder and those of outside packages."""
    return tuple(sorted(modules(__path__) | set(outside(ENTRY_POINT_GROUP))))


def get(name: str) -> Connector:
    """The connector of that name. Raises InputError for an unknown one."""
    if (entry := outside(ENTRY_POINT_GROUP).get(name)) is not None:
        loaded = entry.load()
        assert isinstance(loaded, Connector)
        return loaded
    if name not in names():
        raise InputError(f"no connector is called {name!r}", hint=f"there are: {', '.join(names())}")
    connector = importlib.import_module(f"{__name__}.{name}").CONNECTOR
    assert isinstance(connector, Connector)
    return connector


def profile(name: str, version: str, options: Mapping[str, Any], where: str) -> Connector:
    """The connector as it is for an engine's version (empty: the newest) and for options as JSON has them.

    Raises InputError, with ``where`` the options stand, for any that the connector does not take.
    """
    connector = get(name)
    try:
        checked = connector.options_model.model_validate_json(json.dumps(options))
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']}") from error
    return connector.profile(version, checked)
