"""AIPerf's default search of a concurrency (smooth isotonic), written from its description and defaults.

From 1 the users are doubled up to the first miss, at most to 1000. Three points fill that bracket. The
margins of all points are made to ascend (PAVA) and interpolated (PCHIP), and the next point is the root;
where there is none, the bracket's middle. It ends when the bracket is narrower than 5 %, after 30 points at
most. What it may do besides, repeats and a guard against cliffs, is off by default, or acts on brackets of
more than 50 users only; both are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from .pipeline import FloatArray
from .roots import pchip_root

MOST_USERS: Final = 1000
MOST_POINTS: Final = 30
PRECISION: Final = 0.05
"""Of the lowest concurrency that missed."""
FEWEST_LEVELS: Final = 3
"""With fewer different margins after PAVA, or fewer than four points, two more are taken, twice at most."""
REFITS: Final = 3
REQUESTS: Final = 1000
WARMUP_S: Final = 60.0
"""Of each point, before its requests; they are not counted."""


def ascending(values: Sequence[float]) -> FloatArray:
    """The nearest values, by least squares, that do not descend (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


@dataclass
class SmoothIsotonic:
    """One search. ``margin`` measures a number of users: below 0 their limits are kept."""

    margin: Callable[[int], float]
    passed: int | None = None
    missed: int | None = None
    points: int = 0
    _margins: dict[int, list[float]] = field(default_factory=dict)

    def run(self) -> int | None:
        """The highest number of users that passed; None if a single one missed."""
        users = 1
        while self._measured(users):
            if users >= MOST_USERS:
                return users
            users = min(2 * users, MOST_USERS)
        if self.passed is None:
            return None
        self._narrow(users)
        return self.passed

    def _narrow(self, again: int) -> None:
        """Fits and measures until the bracket is narrow. ``again``: measured where there is nothing new."""
        queue = self._inside((0.25, 0.5, 0.75))
        fits = 0
        while self.points < MOST_POINTS:
            if queue or not fits:
                self._measured(queue.pop(0) if queue else again)
                if queue:
                    continue
            fits += 1
            candidate = self._root()
            if candidate is None:
                return
            if fits < REFITS and self._too_few():
                queue = self._inside((0.125, 0.625))
                if queue:
                    continue
            if self._gap <= max(1, PRECISION * (self.missed or 0)) or candidate in self._margins:
                return
            queue = [candidate]

    def _measured(self, users: int) -> bool:
        margin = self.margin(users)
        self._margins.setdefault(users, []).append(margin)
        self.points += 1
        if margin < 0:
            if self.missed is None or users < self.missed:
                self.passed = max(users, self.passed or 0)
        elif self.passed is None or users > self.passed:
            self.missed = min(users, self.missed or MOST_USERS)
        return margin < 0

    @property
    def _gap(self) -> int:
        return (self.missed or 0) - (self.passed or 0)

    def _inside(self, shares: Sequence[float]) -> list[int]:
        """Points at these shares of the bracket that have not been measured."""
        low, high = self.passed or 0, self.missed or 0
        places = [min(low + max(1, round(self._gap * share)), high - 1) for share in shares]
        return [each for each in dict.fromkeys(places) if each > low and each not in self._margins]

    def _levels(self) -> tuple[list[int], FloatArray]:
        users = sorted(self._margins)
        return users, ascending([float(np.mean(self._margins[each])) for each in users])

    def _too_few(self) -> bool:
        users, levels = self._levels()
        return len(users) < FEWEST_LEVELS + 1 or len(set(levels.tolist())) < FEWEST_LEVELS

    def _root(self) -> int | None:
        """Where the curve crosses 0 inside the bracket, or its middle; None if there is nothing inside."""
        low, high = self.passed or 0, self.missed or 0
        if high - low <= 1:
            return None
        users, levels = self._levels()
        at_low, at_high = levels[users.index(low)], levels[users.index(high)]
        if not at_low < 0 < at_high:
            return low + (high - low) // 2
        root = pchip_root(np.array(users, np.float64), levels, float(low), float(high))
        return min(max(round(root), low + 1), high - 1)
