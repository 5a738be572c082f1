"""What serves tokens: one file per engine, found by its name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvbench.core.plan.engine_count import engine_name
from kvbench.engines.base import Engine, EngineOptions
from kvbench.errors import InputError
from kvbench.plugins import modules, outside

ENTRY_POINT_GROUP = "kvbench.engines"


def names() -> tuple[str, ...]:
    """All engines: the files of this folder and those of outside packages."""
    return tuple(sorted(modules(__path__) | set(outside(ENTRY_POINT_GROUP))))


def get(name: str) -> Engine:
    """The engine of that name. Raises InputError for an unknown one."""
    if (entry := outside(ENTRY_POINT_GROUP).get(name)) is not None:
        loaded = entry.load()
        assert isinstance(loaded, Engine)
        return loaded
    if name not in names():
        raise InputError(f"no engine is called {name!r}", hint=f"there are: {', '.join(names())}")
    engine = importlib.import_module(f"{__name__}.{name}").ENGINE
    assert isinstance(engine, Engine)
    return engine


def options_model(name: str) -> type[EngineOptions]:
    """The pydantic model of an engine's options."""
    return get(name).options_model


def options_model_of(plan: Mapping[str, Any]) -> type[EngineOptions]:
    """The same for the engine of a run folder's plan.json; the contract's own defaults if it is not here."""
    name = engine_name(plan)
    return options_model(name) if name in names() else EngineOptions
