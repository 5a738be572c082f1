"""Compare the highest request rate of runs before and after a change; the ratio is after / before.

Single runs are compared by their searches' posteriors, sets of equally probable rates: P(A > B) is the share
of pairs in which A's rate is higher, and the ratio's interval is that of the pairs. With repeats (five runs
or more) the scatter of their answers decides: Student's t on the logarithms with a common variance, because a
search cannot know the variation between runs."""

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
"""Probability from which a rate is called higher."""
LEVEL: Final = 0.9
"""Probability of a ratio's interval."""
PARTS: Final = 41


@dataclass(frozen=True)
class PossibleRates:
    """Equally probable rates, in requests per second. ``least`` and ``most`` differ only if a rate is
    unbounded: most is infinite, or least is 0."""

    least: tuple[float, ...]
    most: tuple[float, ...]

    def divided(self, count: int) -> PossibleRates:
        least, most = (tuple(rate / count for rate in rates) for rates in (self.least, self.most))
        return PossibleRates(least, most)

    def above(self, other: PossibleRates) -> float:
        """Return the lower bound of P(this > other); equal rates count half."""
        rates, others = _pairs(self.least, other.most)
        return float((rates > others).mean() + (rates == others).mean() / 2)

    def ratio(self, other: PossibleRates) -> tuple[float, float]:
        """Return the interval of this / other with probability LEVEL; its upper end may be infinite."""
        tail = (1 - LEVEL) / 2
        return _share(tail, *_pairs(self.least, other.most)), _share(
            1 - tail, *_pairs(self.most, other.least)
        )


def known(posterior: Sequence[float]) -> PossibleRates:
    return PossibleRates(tuple(posterior), tuple(posterior))


def within(lower: float | None, upper: float | None, level: float | None = None) -> PossibleRates:
    """Return the rates of an interval: log-normal with a ``level``, else anything between the ends."""
    if level is None or lower is None or upper is None or not 0 < lower <= upper < math.inf:
        return PossibleRates((lower or 0.0,), (math.inf if upper is None else upper,))
    middle = math.log(lower * upper) / 2
    spread = math.log(upper / lower) / 2 / NormalDist().inv_cdf((1 + level) / 2)
    shares = [(index + 0.5) / PARTS for index in range(PARTS)]
    return known([math.exp(middle + spread * NormalDist().inv_cdf(share)) for share in shares])


def _pairs(one: Sequence[float], other: Sequence[float]) -> tuple[FloatArray, FloatArray]:
    rates, others = np.meshgrid(np.asarray(one, np.float64), np.asarray(other, np.float64))
    return rates.ravel(), others.ravel()


def _share(share: float, rates: FloatArray, others: FloatArray) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(others == 0, np.inf, rates / others)
        found = np.quantile(np.where(np.isnan(ratios), 0.0, ratios), share, method="hazen")
    return math.inf if math.isnan(found) else float(found)  # NaN: between two infinite ratios


Became = Literal["better", "worse", "unchanged", "inconclusive"]

SAME: Final = 0.05
"""Rates significantly within this relative distance are called unchanged."""
FALSE_ALARMS: Final = 0.05
"""Rate of false alarms among comparisons without a change."""
MARGIN: Final = 0.6
"""Share of FALSE_ALARMS that is used: answers have heavier tails than a normal distribution."""
POWER: Final = 0.8
"""Probability of an alarm for a loss to count as detectable."""
LEAST_DEGREES: Final = 3
"""Fewest degrees of freedom: runs on both sides minus two."""
MOST_REPEATS: Final = 1000
_LEAST_SCATTER: Final = 1e-3
"""Least scatter of repeats: answers are rounded to four digits."""
_NORMAL: Final = NormalDist()


class Searched(NamedTuple):
    """One search's answer: its rate (or None), and its possible rates."""

    rate: float | None
    possible: PossibleRates


@dataclass(frozen=True)
class RateChange:
    """``low`` to ``high``: 90 % interval of the ratio, infinite without a rate before. ``lower``, ``higher``:
    least probabilities of the direction. ``scatter``: standard deviation of one answer's logarithm, or None.
    ``degrees``: of the scatter of repeats, or None."""

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
        """Return the verdict: 95 % for a direction; unchanged if the interval is within ± 5 %."""
        if self.lower >= AHEAD and self.ratio < 1:
            return "worse"
        if self.higher >= AHEAD and self.ratio > 1:
            return "better"
        return "unchanged" if self.low >= 1 - SAME and self.high <= 1 + SAME else "inconclusive"

    def alarms(self, worse_than: float, cells: int = 1) -> bool:
        """Return whether the loss is significant and its estimate exceeds ``worse_than`` (a share).
        ``cells``: number of comparisons; FALSE_ALARMS holds for all together."""
        return self.lower >= confidence_of(cells) and self.ratio < 1 - worse_than

    def seen(self, loss: float, worse_than: float, cells: int = 1) -> float | None:
        """Return the probability of an alarm for a true ``loss`` (a share), or None."""
        return self._power(loss, worse_than, cells, self.runs, self.degrees)

    def least_loss(self, cells: int = 1) -> float | None:
        """Return the smallest significant loss as a share."""
        if self.scatter is None:
            return None
        error = self.scatter * math.sqrt(sum(1 / count for count in self.runs))
        return -math.expm1(-error * _quantile(cells, self.degrees))

    def repeats_for(self, loss: float, worse_than: float, cells: int = 1) -> int | None:
        """Return the repeats per side that detect the loss in 80 of 100 comparisons, or None."""
        for repeats in range(LEAST_DEGREES, MOST_REPEATS):
            seen = self._power(loss, worse_than, cells, (repeats, repeats), 2 * repeats - 2)
            if seen is None or loss <= worse_than:
                return None
            if seen >= POWER:
                return repeats
        return None

    def _power(
        self, loss: float, worse_than: float, cells: int, runs: tuple[int, int], degrees: int | None
    ) -> float | None:
        if self.scatter is None:
            return None
        most = 1.0 if self.degrees is None else _most_scatter(self.degrees)
        error = max(self.scatter * most, _LEAST_SCATTER) * math.sqrt(sum(1 / count for count in runs))
        least = max(-math.log1p(-worse_than), error * _quantile(cells, degrees))
        return _NORMAL.cdf((-math.log1p(-loss) - least) / error)


def _most_scatter(degrees: int) -> float:
    """Return the ratio of true to observed scatter, at most with 80 % (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * degrees)
    return math.pow(1 - part + _NORMAL.inv_cdf(1 - POWER) * math.sqrt(part), -1.5)


def _quantile(cells: int, degrees: int | None) -> float:
    confidence = confidence_of(cells)
    return _NORMAL.inv_cdf(confidence) if degrees is None else t_quantile(confidence, degrees)


def confidence_of(cells: int) -> float:
    """Return the confidence per loss for FALSE_ALARMS over all (Bonferroni)."""
    return 1 - MARGIN * FALSE_ALARMS / max(1, cells)


def rate_change(before: Sequence[Searched], after: Sequence[Searched]) -> RateChange:
    """Compare the answers of runs before and after; copies count once."""
    sides = _distinct(before), _distinct(after)
    rates = [[math.log(answer.rate) for answer in side if answer.rate] for side in sides]
    runs = len(sides[0]), len(sides[1])
    spreads = [spread_of(answer.possible) for side in sides for answer in side]
    if None not in spreads and sum(map(len, rates)) == sum(runs) >= LEAST_DEGREES + 2:
        return _by_scatter(rates[0], rates[1])
    one, other = (_pool([answer.possible for answer in side]) for side in sides)
    first, last = (math.exp(fmean(side)) if side else None for side in rates)
    ratio = math.inf if first is None else (last or 0.0) / first
    low, high = other.ratio(one)
    scatter = None if None in spreads else math.sqrt(fmean((spread or 0.0) ** 2 for spread in spreads))
    return RateChange(
        ratio, min(low, ratio), max(high, ratio), one.above(other), other.above(one), scatter, None, runs
    )


def _by_scatter(before: Sequence[float], after: Sequence[float]) -> RateChange:
    """Use Student's t for two samples of logarithms with a common variance."""
    degrees = len(before) + len(after) - 2
    squares = pvariance(before) * len(before) + pvariance(after) * len(after)
    scatter = max(math.sqrt(squares / degrees), _LEAST_SCATTER)
    error = scatter * math.sqrt(1 / len(before) + 1 / len(after))
    away = fmean(after) - fmean(before)
    half = t_quantile((1 + LEVEL) / 2, degrees) * error
    beyond = beta_cdf(degrees / 2, 0.5, degrees / (degrees + (away / error) ** 2)) / 2
    higher = 1 - beyond if away > 0 else beyond
    ratio, low, high = (math.exp(away + shift) for shift in (0.0, -half, half))
    return RateChange(ratio, low, high, 1 - higher, higher, scatter, degrees, (len(before), len(after)))


def _distinct(side: Sequence[Searched]) -> list[Searched]:
    """Return each answer once: equal posteriors come from the same trials."""
    return list(dict.fromkeys(side))


def _pool(repeats: Sequence[PossibleRates]) -> PossibleRates:
    """Return the pooled rates of a side with too few repeats; the first repeat's if any is unbounded."""
    spreads = [spread_of(repeat) for repeat in repeats]
    if len(repeats) == 1 or None in spreads:
        return repeats[0]
    middle = fmean(fmean(map(math.log, repeat.least)) for repeat in repeats)
    spread = math.sqrt(fmean((width or 0.0) ** 2 for width in spreads) / len(repeats))
    shares = [(index + 0.5) / PARTS for index in range(PARTS)]
    return known([math.exp(middle + spread * _NORMAL.inv_cdf(share)) for share in shares])


def spread_of(rates: PossibleRates) -> float | None:
    """Return the standard deviation of the rate's logarithm."""
    if rates.least != rates.most or not all(0 < rate < math.inf for rate in rates.least):
        return None
    return math.sqrt(pvariance([math.log(rate) for rate in rates.least]))
