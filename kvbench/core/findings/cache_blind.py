"""Sessions whose router did not look at prefix caches: their rates show the routing, not the connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from kvbench.core.plan.engine_count import instance_names

CACHE_BLIND: Final = (
    "its router sent a session's turns to any engine, whatever the engines had cached "
    "(deployment.routing: round_robin)"
)
"""Why no winner is named."""


def cache_blind(plan: Mapping[str, Any], label: str) -> str:
    """Return why a deployment of a run (plan.json as data) must not be named a winner; empty if it may be.

    With one engine of each role there is nothing to choose. Older plans without ``routing`` went in turn.
    """
    scenario = _mapping(plan.get("scenario"))
    sessions = _mapping(scenario.get("workload")).get("sessions")
    routing = _mapping(scenario.get("deployment")).get("routing")
    roles = Counter(name.partition("-")[0] for name in instance_names(plan, label))
    chosen = max(roles.values(), default=0) > 1
    return CACHE_BLIND if sessions is not None and chosen and routing != "session" else ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
