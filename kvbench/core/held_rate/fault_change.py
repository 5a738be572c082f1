"""Is what a fault costs another thing than it was? Two runs' repeats of the same fault, by their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median
from typing import Final, Literal

ChangeWord = Literal["costs more", "costs less", "not told apart"]
ALPHA: Final = 0.05
EXACT_MOST: Final = 400
"""Up to so many pairs of repeats the chance is counted out; beyond it is the normal one."""


@dataclass(frozen=True)
class FaultChange:
    """``chance``: that repeats of one and the same cost come out as far apart."""

    word: ChangeWord
    before: float | None
    after: float | None
    chance: float


def fault_change(before: Sequence[float], after: Sequence[float]) -> FaultChange:
    """Of the goodput that each repeat lost. With fewer than four repeats a side nothing can be told."""
    middle = [median(side) if side else None for side in (before, after)]
    chance = rank_chance(before, after)
    word: ChangeWord = "not told apart"
    if chance < ALPHA and middle[0] is not None and middle[1] is not None:
        word = "costs more" if _wins(after, before) > len(before) * len(after) / 2 else "costs less"
    return FaultChange(word, middle[0], middle[1], chance)


def rank_chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided chance of the rank sum of two samples from one distribution (Mann and Whitney's U)."""
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    wins = _wins(first, second)
    far = abs(wins - n * m / 2)
    values = [*first, *second]
    if n * m <= EXACT_MOST and len(set(values)) == len(values):
        ways = _ways(n, m)
        total = math.comb(n + m, n)
        return min(
            1.0, sum(count for u, count in enumerate(ways) if abs(u - n * m / 2) >= far - 1e-9) / total
        )
    ties = sum(values.count(value) ** 3 - values.count(value) for value in set(values))
    size = n + m
    variance = n * m / 12 * ((size + 1) - ties / (size * (size - 1)))
    if variance <= 0:
        return 1.0
    return 2 * (1 - NormalDist().cdf(max(0.0, far - 0.5) / math.sqrt(variance)))


def _wins(first: Sequence[float], second: Sequence[float]) -> float:
    """Pairs in which the first is larger; a tie is half of one."""
    return sum((a > b) + 0.5 * (a == b) for a in first for b in second)


@lru_cache(64)
def _ways(n: int, m: int) -> tuple[int, ...]:
    """In how many orders of n and m values the first wins so many pairs, from 0 to n × m."""
    if not n or not m:
        return (1,)
    ways = [0] * (n * m + 1)
    for u, count in enumerate(_ways(n - 1, m)):  # the largest is one of the first: it wins all m
        ways[u + m] += count
    for u, count in enumerate(_ways(n, m - 1)):  # the largest is one of the second: it loses to none
        ways[u] += count
    return tuple(ways)
