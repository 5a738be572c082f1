"""Which of two highest request rates is the higher one, and by how much, from the posteriors of two searches.

A posterior is a set of equally probable rates. Two searches are independent, so that of all pairs of rates
each is as probable: P(A > B) is the share of pairs in which A's is the higher one, and the interval of the
ratio is that of the pairs' ratios.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

AHEAD: Final = 0.95
"""Who is ahead is said if it is at least as probable."""
LEVEL: Final = 0.9
"""Of an interval of a ratio."""
PARTS: Final = 41


@dataclass(frozen=True)
class PossibleRates:
    """Equally probable rates, in requests per second.

    ``least`` and ``most``: the same, but where nothing bounds a rate from above (most is infinite) or from
    below (least is 0).
    """

    least: tuple[float, ...]
    most: tuple[float, ...]

    def divided(self, count: int) -> PossibleRates:
        """Of one of so many engines or GPUs."""
        least, most = (tuple(rate / count for rate in rates) for rates in (self.least, self.most))
        return PossibleRates(least, most)

    def above(self, other: PossibleRates) -> float:
        """P(this > other), at its least; of equal rates either is as probable."""
        mine, others = _pairs(self.least, other.most)
        return float((mine > others).mean() + (mine == others).mean() / 2)

    def ratio(self, other: PossibleRates) -> tuple[float, float]:
        """The interval of this / other, with a probability of ``LEVEL``; its upper end may be infinite."""
        tail = (1 - LEVEL) / 2
        return _share(tail, *_pairs(self.least, other.most)), _share(
            1 - tail, *_pairs(self.most, other.least)
        )


def known(posterior: Sequence[float]) -> PossibleRates:
    """Of a posterior that a search has kept."""
    return PossibleRates(tuple(posterior), tuple(posterior))


def within(lower: float | None, upper: float | None, level: float | None = None) -> PossibleRates:
    """Of an interval alone: log-normal, with so much of it (``level``) between the ends.

    Without a level it may be anything between them. None for an end: nothing bounds it there.
    """
    if level is None or lower is None or upper is None or not 0 < lower <= upper < math.inf:
        return PossibleRates((lower or 0.0,), (math.inf if upper is None else upper,))
    middle = math.log(lower * upper) / 2
    spread = math.log(upper / lower) / 2 / NormalDist().inv_cdf((1 + level) / 2)
    shares = [(place + 0.5) / PARTS for place in range(PARTS)]
    return known([math.exp(middle + spread * NormalDist().inv_cdf(share)) for share in shares])


def _pairs(one: Sequence[float], other: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    mine, others = np.meshgrid(np.asarray(one, np.float64), np.asarray(other, np.float64))
    return mine.ravel(), others.ravel()


def _share(share: float, mine: FloatArray, others: FloatArray) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(others == 0, np.inf, mine / others)
        found = np.quantile(np.where(np.isnan(ratios), 0.0, ratios), share, method="hazen")
    return math.inf if math.isnan(found) else float(found)  # between two infinite ones
