"""Which requests of a load are canaries: spread over all of it, and many enough in a trial that ends soon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

_STREAM: Final = 7
"""Sets these random numbers apart from those of arrivals and prompts, so that none moves another."""
SPARES: Final = 8
"""Canaries that are kept for what follows a failure, beside those at their places."""
AFTER_FAILURE: Final = 2
"""So many of the next requests after a failed one are canaries, as long as there are spares."""


@dataclass(frozen=True)
class CanaryPlaces:
    """``at``: place in the load → number of its prompt in the pool, ascending. ``spares``: prompts that take
    the place of the requests after a failure.
    """

    at: dict[int, int] = field(default_factory=dict)
    spares: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        return (*self.at.values(), *self.spares)


def wanted_canaries(requests: int, share: float, least: int) -> int:
    """How many of so many requests: the share, at least ``least``, at most half of them."""
    return min(max(math.ceil(share * requests), least), requests // 2) if share > 0 else 0


def canary_places(requests: int, share: float, least: int, early: int, seed: int) -> list[int]:
    """Places of canaries among 0 … ``requests`` − 1, ascending: one at random in each equal part.

    ``early``: after so many requests the trial may end. ``least`` lie before that if they find room, else in
    all of it, and later ones by the share alone. A function of its arguments.
    """
    early = min(max(1, early), requests)
    first = min(wanted_canaries(early, share, least), requests)
    rest = math.ceil(share * (requests - early)) if share > 0 else 0
    rest = max(rest, wanted_canaries(requests, share, least) - first)
    parts = [(0, early, first), (early, requests, rest)]
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    places = []
    for begin, end, count in parts:
        edges = [begin + (end - begin) * part // count for part in range(count + 1)] if count else []
        places += [int(random.integers(low, high)) for low, high in pairwise(edges) if high > low]
    return places


def placed(places: Sequence[int], numbers: Sequence[int]) -> CanaryPlaces:
    """Puts prompts at places as far as there are any; what is left over are spares.

    With too few of them every place gets its turn: they are thinned out, not cut off at the end, and there
    are spares for one failure.
    """
    few = min(AFTER_FAILURE, max(0, len(numbers) - 1) // 3)
    spares = min(SPARES, max(few, len(numbers) - len(places)))
    usable = len(numbers) - spares
    if usable < len(places):
        kept = np.linspace(0, len(places) - 1, usable).round().astype(int).tolist() if usable > 0 else []
        places = [places[each] for each in kept]
    at = dict(zip(places, numbers, strict=False))
    return CanaryPlaces(at, tuple(numbers[len(at) : len(at) + spares]))
