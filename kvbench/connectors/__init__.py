"""Ways P hands its KV to D: one file per connector, found by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvbench.connectors.base import Connector
from kvbench.errors import InputError
from kvbench.plugins import OpenList

_PARTS: OpenList[Connector] = OpenList(__name__, "connector", "CONNECTOR", Connector)
names, get = _PARTS.names, _PARTS.get


def profile(name: str, version: str, options: Mapping[str, Any], where: str) -> Connector:
    """Return the connector for an engine's version (empty: newest) and JSON options. Raises InputError,
    naming ``where``, for unknown options."""
    connector = get(name)
    try:
        checked = connector.options_model.model_validate_json(json.dumps(options))
    except ValidationError as error:
        raise InputError(f"{where}: {error.errors()[0]['msg']}") from error
    return connector.profile(version, checked)
