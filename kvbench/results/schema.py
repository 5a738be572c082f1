"""The schema of run folders, a whole number in ``manifest.json``: a newer one is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvbench.core.records import SCHEMA_VERSION
from kvbench.errors import NewerSchemaError, StoreError
from kvbench.version import __version__

FIRST_SCHEMA: Final = 1
"""The oldest schema that a release wrote."""


def schema_of(manifest: Mapping[str, Any], path: Path) -> int:
    """Return the schema of a folder, by its manifest at ``path``. Raises StoreError, NewerSchemaError."""
    schema = manifest.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < FIRST_SCHEMA:
        raise StoreError(f"{path} names no schema that was ever written: {schema!r}")
    if schema > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{path.parent} was written by kvbench {manifest.get('kvbench', 'of unknown version')} "
            f"with schema {schema}; this is kvbench {__version__}, which reads up to {SCHEMA_VERSION}",
            hint="upgrade kvbench",
        )
    return schema
