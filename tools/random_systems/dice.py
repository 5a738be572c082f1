"""Random choices, rounded so that machines that differ in the last bit of a logarithm choose the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

DIGITS: Final = 6
T = TypeVar("T")


@dataclass
class Dice:
    """Random choices from one generator."""

    rng: np.random.Generator

    def between(self, low: float, high: float) -> float:
        return rounded(low + (high - low) * float(self.rng.random()))

    def scale(self, low: float, high: float) -> float:
        """Uniform in the logarithm."""
        return rounded(math.exp(math.log(low) + math.log(high / low) * float(self.rng.random())))

    def one(self, choices: Sequence[T]) -> T:
        return choices[int(float(self.rng.random()) * len(choices))]

    def chance(self, share: float) -> bool:
        return float(self.rng.random()) < share


def rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
