"""Whether a highest request rate changed between runs before and runs after; the ratio is after / before.

One run on each side is compared by the posteriors of the two searches, sets of equally probable rates. The
searches are independent, so each pair of rates is equally probable: P(A > B) is the share of pairs in which
A's is higher, and the interval of the ratio is that of the pairs' ratios.

A search cannot know by how much a repeated run differs, and allows for systems that are less even than most.
So where there are repeats (five runs or more in all), the scatter of their answers decides: Student's t on
the logarithms, with one variance for both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance
from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvbench.core.stats import beta_cdf, t_quantile

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


Became = Literal["better", "worse", "unchanged", "cannot be told"]

SAME: Final = 0.05
"""Rates that surely lie within ± this share of each other are called unchanged."""
FALSE_ALARMS: Final = 0.05
"""How often an alarm may be a false one, of comparisons in which nothing changed."""
MARGIN: Final = 0.6
"""So much of them is spent: answers have longer tails than a normal law, and few runs tell little of it."""
POWER: Final = 0.8
"""How often a loss must be seen to be called one that is."""
LEAST_DEGREES: Final = 3
"""Of the scatter of repeats: runs on both sides, less two."""
MOST_REPEATS: Final = 1000
_LEAST_SCATTER: Final = 1e-3
"""Answers are rounded to four digits; no repeats are taken to differ by less."""
_NORMAL: Final = NormalDist()


class Searched(NamedTuple):
    """One search's answer: its rate, None where no tested one was held, and those that it allows."""

    rate: float | None
    possible: PossibleRates


@dataclass(frozen=True)
class RateChange:
    """``low`` to ``high`` holds the ratio with a probability of 90 %; it is infinite where no rate was held
    before. ``lower``, ``higher``: how probable it is, at least, that the rate is now the lower or the higher.

    ``scatter``: standard deviation of the logarithm of one run's answer; None where nothing bounds it.
    ``degrees``: of that scatter, where repeats tell it; None where the posteriors do.
    """

    ratio: float
    low: float
    high: float
    lower: float
    higher: float
    scatter: float | None
    degrees: int | None = None
    runs: tuple[int, int] = (1, 1)

    @property
    def became(self) -> Became:
        """By rule: sure with 95 %; unchanged if the interval lies within ± 5 %."""
        if self.lower >= AHEAD and self.ratio < 1:
            return "worse"
        if self.higher >= AHEAD and self.ratio > 1:
            return "better"
        return "unchanged" if self.low >= 1 - SAME and self.high <= 1 + SAME else "cannot be told"

    def alarms(self, worse_than: float, cells: int = 1) -> bool:
        """Whether it is surely a loss, and by the estimate one of more than ``worse_than`` (a share).

        ``cells``: how many are looked at together; false alarms are at most ``FALSE_ALARMS`` of them all.
        """
        return self.lower >= sure_of(cells) and self.ratio < 1 - worse_than

    def seen(self, loss: float, worse_than: float, cells: int = 1) -> float | None:
        """How probable an alarm is, where the rate is truly lower by the share ``loss``; None if not known.

        Few repeats may scatter less than the system does by chance: it is the least with 80 %.
        """
        return self._seen(loss, worse_than, cells, self.runs, self.degrees)

    def least_loss(self, cells: int = 1) -> float | None:
        """The smallest estimated loss that is a sure one, as a share; None if not known."""
        if self.scatter is None:
            return None
        error = self.scatter * math.sqrt(sum(1 / count for count in self.runs))
        return -math.expm1(-error * _quantile(cells, self.degrees))

    def repeats_for(self, loss: float, worse_than: float, cells: int = 1) -> int | None:
        """So many repeats on each side show such a loss in 80 of 100 comparisons. None where none do: the
        loss is hardly more than ``worse_than``, or nothing is known of the scatter.
        """
        for repeats in range(LEAST_DEGREES, MOST_REPEATS):
            seen = self._seen(loss, worse_than, cells, (repeats, repeats), 2 * repeats - 2)
            if seen is None or loss <= worse_than:
                return None
            if seen >= POWER:
                return repeats
        return None

    def _seen(
        self, loss: float, worse_than: float, cells: int, runs: tuple[int, int], degrees: int | None
    ) -> float | None:
        if self.scatter is None:
            return None
        most = 1.0 if self.degrees is None else _most_scatter(self.degrees)
        error = max(self.scatter * most, _LEAST_SCATTER) * math.sqrt(sum(1 / count for count in runs))
        least = max(-math.log1p(-worse_than), error * _quantile(cells, degrees))
        return _NORMAL.cdf((-math.log1p(-loss) - least) / error)


def _most_scatter(degrees: int) -> float:
    """True scatter by the one found, at most with 80 % (by Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return math.pow(1 - part + _NORMAL.inv_cdf(1 - POWER) * math.sqrt(part), -1.5)


def _quantile(cells: int, degrees: int | None) -> float:
    sure = sure_of(cells)
    return _NORMAL.inv_cdf(sure) if degrees is None else t_quantile(sure, degrees)


def sure_of(cells: int) -> float:
    """How sure one of so many losses must be for ``FALSE_ALARMS`` to hold of all together (Bonferroni)."""
    return 1 - MARGIN * FALSE_ALARMS / max(1, cells)


def rate_change(before: Sequence[Searched], after: Sequence[Searched]) -> RateChange:
    """``before`` and ``after``: the answers of a run or of its repeats, one at least; copies count once."""
    sides = _distinct(before), _distinct(after)
    rates = [[math.log(each.rate) for each in side if each.rate] for side in sides]
    runs = len(sides[0]), len(sides[1])
    if sum(map(len, rates)) == sum(runs) >= LEAST_DEGREES + 2:
        return _by_scatter(rates[0], rates[1])
    one, other = (_pooled([each.possible for each in side]) for side in sides)
    first, last = (math.exp(fmean(side)) if side else None for side in rates)
    ratio = math.inf if first is None else (last or 0.0) / first
    low, high = other.ratio(one)
    spreads = [spread_of(each.possible) for side in sides for each in side]
    scatter = None if None in spreads else math.sqrt(fmean((each or 0.0) ** 2 for each in spreads))
    return RateChange(
        ratio, min(low, ratio), max(high, ratio), one.above(other), other.above(one), scatter, None, runs
    )


def _by_scatter(before: Sequence[float], after: Sequence[float]) -> RateChange:
    """By Student's t of two samples of logarithms with one variance."""
    degrees = len(before) + len(after) - 2
    squares = pvariance(before) * len(before) + pvariance(after) * len(after)
    scatter = max(math.sqrt(squares / degrees), _LEAST_SCATTER)
    error = scatter * math.sqrt(1 / len(before) + 1 / len(after))
    away = fmean(after) - fmean(before)
    half = t_quantile((1 + LEVEL) / 2, degrees) * error
    beyond = beta_cdf(degrees / 2, 0.5, degrees / (degrees + (away / error) ** 2)) / 2
    higher = 1 - beyond if away > 0 else beyond
    ratio, low, high = (math.exp(away + each) for each in (0.0, -half, half))
    return RateChange(ratio, low, high, 1 - higher, higher, scatter, degrees, (len(before), len(after)))


def _distinct(side: Sequence[Searched]) -> list[Searched]:
    """Each answer once: two with the same posterior are of the same trials."""
    return list(dict.fromkeys(side))


def _pooled(repeats: Sequence[PossibleRates]) -> PossibleRates:
    """The rate of a side from too few repeats to know their scatter; of some without bounds the first."""
    spreads = [spread_of(each) for each in repeats]
    if len(repeats) == 1 or None in spreads:
        return repeats[0]
    middle = fmean(fmean(map(math.log, each.least)) for each in repeats)
    spread = math.sqrt(fmean((each or 0.0) ** 2 for each in spreads) / len(repeats))
    shares = [(place + 0.5) / PARTS for place in range(PARTS)]
    return known([math.exp(middle + spread * _NORMAL.inv_cdf(share)) for share in shares])


def spread_of(rates: PossibleRates) -> float | None:
    """Standard deviation of the rate's logarithm; None where nothing bounds it, or it is not known."""
    if rates.least != rates.most or not all(0 < rate < math.inf for rate in rates.least):
        return None
    return math.sqrt(pvariance([math.log(rate) for rate in rates.least]))
