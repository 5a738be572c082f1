"""What a process of a deployment is, before anybody starts it. Plain data for plan.json and the launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RUN_TAG_ENV = "KVBENCH_RUN_TAG"
"""Environment variable that marks every process a run has started, so that none is ever orphaned."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start. ``spec`` becomes a JSON file whose path is the last argument."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] | None = None
    ready_url: str = ""
    port: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "argv": list(self.argv),
            "env": dict(self.env),
            "spec": dict(self.spec) if self.spec is not None else None,
            "ready_url": self.ready_url,
        }
