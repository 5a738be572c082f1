"""Engines that serve tokens: one file per engine, found by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.core.plan.engine_count import engine_name
from kvbench.engines.base import Engine, EngineOptions
from kvbench.plugins import OpenList

_PARTS: OpenList[Engine] = OpenList(__name__, "engine", "ENGINE", Engine)
names, get = _PARTS.names, _PARTS.get


def options_model(name: str) -> type[EngineOptions]:
    return get(name).options_model


def options_model_of(plan: Mapping[str, Any]) -> type[EngineOptions]:
    """Options model of the engine in a plan.json; defaults if it is not installed."""
    name = engine_name(plan)
    return options_model(name) if name in names() else EngineOptions
