"""What is done in other processes, once for its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..family import draw, seed_of
from ..truth import Truth
from .judged import judge


@dataclass(frozen=True)
class SearchJob:
    """One search of a system of a family, for at most ``limit_s`` of real time."""

    seed: str
    index: int
    true: Truth
    run_seed: int
    limit_s: float
    sets: tuple[str, ...] = ()
    """What else of the scenario is set, as PATH=VALUE."""

    @property
    def key(self) -> str:
        return " ".join(("search", self.seed, str(self.index), str(self.run_seed), *self.sets))

    def row(self) -> dict[str, Any]:
        """``Judged`` as JSON."""
        system = draw(seed_of(self.seed), self.index)
        return judge(system, self.true, self.run_seed, self.limit_s, self.sets).to_json()
