"""The schema of run folders: old ones are lifted by a list of upgrade functions, a newer one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from kvbench.errors import NewerSchemaError, StoreError
from kvbench.version import __version__


@dataclass
class Documents:
    """The raw JSON of a run folder: what an upgrade function changes."""

    manifest: dict[str, Any]
    plan: dict[str, Any]
    environment: dict[str, Any]
    trials: list[dict[str, Any]]
    cells: list[dict[str, Any]]


Upgrade: TypeAlias = Callable[[Documents], Documents]

# UPGRADES[k] lifts a folder of schema FIRST_SCHEMA + k by one.
FIRST_SCHEMA: Final = 1
UPGRADES: Final[tuple[Upgrade, ...]] = ()


def schema_of(manifest: Mapping[str, Any], path: Path, newest: int) -> int:
    """The schema of a folder, by its manifest at ``path``. Raises StoreError, NewerSchemaError."""
    schema = manifest.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < FIRST_SCHEMA:
        raise StoreError(f"{path} names no schema that was ever written: {schema!r}")
    if schema > newest:
        raise NewerSchemaError(
            f"{path.parent} was written by kvbench {manifest.get('kvbench', 'of unknown version')} "
            f"with schema {schema}; this is kvbench {__version__}, which reads up to {newest}",
            hint="upgrade kvbench",
        )
    return schema
