"""What serves tokens: one file per engine, found by its name."""

from __future__ import annotations

import importlib
import pkgutil

from kvbench.engines.base import Engine, EngineOptions
from kvbench.errors import InputError


def names() -> tuple[str, ...]:
    """All engines: the files of this folder."""
    own = {module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg}
    return tuple(sorted(own - {"base"}))


def get(name: str) -> Engine:
    """The engine of that name. Raises InputError for an unknown one."""
    if name not in names():
        raise InputError(f"no engine is called {name!r}", hint=f"there are: {', '.join(names())}")
    engine = importlib.import_module(f"{__name__}.{name}").ENGINE
    assert isinstance(engine, Engine)
    return engine


def options_model(name: str) -> type[EngineOptions]:
    """The pydantic model of an engine's options."""
    return get(name).options_model
