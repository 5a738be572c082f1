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

    @property
    def key(self) -> str:
        return f"search {self.seed} {self.index} {self.run_seed}"

    def row(self) -> dict[str, Any]:
        """``Judged`` as JSON."""
        return judge(draw(seed_of(self.seed), self.index), self.true, self.run_seed, self.limit_s).to_json()
