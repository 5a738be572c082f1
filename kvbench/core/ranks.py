"""Tensor, pipeline and data parallel ranks of one engine instance. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """The ranks of one instance, as vLLM and SGLang count them; each has a GPU of its own. Data parallel
    ranks are engines behind one HTTP port; expert parallelism spreads the experts over the tensor and data
    parallel ranks and takes no more."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.data

    def text(self) -> str:
        """Return ``TP 8`` or ``TP 2 × PP 2 × DP 4, EP``."""
        more = ((self.pipeline, "PP"), (self.data, "DP"))
        words = [f"TP {self.tensor}", *(f"{word} {count}" for count, word in more if count > 1)]
        return " × ".join(words) + (", EP" if self.expert else "")
