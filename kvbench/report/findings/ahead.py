"""Who is ahead, by rule: two rates are ordered only where the posteriors of their searches put one above the
other almost surely, and both searches have converged.

Rates of unequal numbers of engines (GPUs, where those are known) are no order: of these the rates per engine
are compared, and are called so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import NamedTuple

from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.plan.engine_count import Unit, counted, unequal
from kvbench.report.tables.numbers import number
from kvbench.report.tables.result import Row


@dataclass(frozen=True)
class RatePair:
    """Two rows of one input length. ``ratio`` is None where one cannot be told from the other.

    ``ratio`` compares the two rates, which are ordered as said with the probability ``sure``; ``low`` to
    ``high`` holds it with a probability of 90 %. A ratio of infinity means that no tested rate of the other
    met the SLO. ``per``: "engine" or "GPU" where the two have unequal numbers of them, ``counts``, None if
    not known; the figures are then of the rates per engine or GPU. ``unconverged``: which of the two
    searches did not come to their end; then there are no figures. ``no_winner``: why neither may be named the
    winner; then there are no figures either.
    """

    input_len: int
    output_len: int
    ahead: str
    behind: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    per: Unit | None = None
    counts: tuple[int | None, int | None] = (None, None)
    sure: float | None = None
    unconverged: tuple[str, ...] = ()
    no_winner: tuple[str, ...] = ()

    def text(self) -> str:
        """One clause, such as ``nixl 1.2× mooncake [1.1, 1.3]``."""
        if self.no_winner:
            return no_winner_text([self])
        if self.unconverged:
            return unconverged_text([self])
        return self.relation() if self.per is None else unequal_text([self])

    def relation(self) -> str:
        """The same without a word on what the rates are divided by."""
        if self.ratio is None:
            return f"{self.ahead} and {self.behind} cannot be told apart"
        if math.isinf(self.ratio):
            return f"{self.ahead} holds a rate, {self.behind} none that was tested"
        if self.high is None or math.isinf(self.high):
            return f"{self.ahead} at least {number(self.low)}× {self.behind}"
        interval = f"[{number(self.low)}, {number(self.high)}]"
        return f"{self.ahead} {number(self.ratio)}× {self.behind} {interval}"


def unequal_text(found: Sequence[RatePair]) -> str:
    """What is said of all pairs of one length and unequal size: why not the rates, and the rates per engine.

    ``cannot be compared directly: 2 engines (nixl) against 1 engine (aggregated); per engine: aggregated
    1.16× nixl [1.03, 1.29]``.
    """
    clauses = []
    for unit in dict.fromkeys(each.per for each in found if each.per is not None):
        mine = [each for each in found if each.per == unit]
        named: dict[int | None, dict[str, None]] = {}
        for each in mine:
            for name, count in zip((each.ahead, each.behind), each.counts, strict=True):
                named.setdefault(count, {})[name] = None
        ordered = sorted(named, key=lambda count: -(count or 0))
        sides = [f"{_many(count, unit)} ({', '.join(named[count])})" for count in ordered]
        known = [each.relation() for each in mine if None not in each.counts]
        divided = f"; per {unit}: {'; '.join(known)}" if known else ""
        clauses.append(f"cannot be compared directly: {' against '.join(sides)}{divided}")
    return "; ".join(clauses)


def unconverged_text(found: Sequence[RatePair]) -> str:
    """What is said of all pairs of one length of which a search did not converge."""
    names = list(dict.fromkeys(name for each in found for name in each.unconverged))
    searches = "the search" if len(names) == 1 else "the searches"
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"cannot be told: {searches} of {listed} did not converge"


def no_winner_text(found: Sequence[RatePair]) -> str:
    """Return why no winner is named in any of these pairs."""
    reasons = dict.fromkeys(reason for each in found for reason in each.no_winner)
    return f"no winner is named: {'; '.join(reasons)}"


def _many(count: int | None, unit: Unit) -> str:
    return f"an unknown number of {unit}s" if count is None else counted(count, unit)


def rate_pairs(rows: Sequence[Row]) -> list[RatePair]:
    """Each pair of rows with an answer, per input length: ordered only where that is almost sure."""
    found = []
    known = [row for row in rows if row.outcome in ("found", "at_least", "none")]
    known.sort(key=lengths)
    for _, group in groupby(known, key=lengths):
        ranked = sorted(group, key=lambda row: -(row.answer.max_request_rate or 0.0))
        found += [_compared(one, other) for one, other in combinations(ranked, 2)]
    return found


def by_lengths(found: Iterable[RatePair]) -> dict[tuple[int, int], list[RatePair]]:
    """The pairs by input and output length."""
    groups: dict[tuple[int, int], list[RatePair]] = {}
    for each in found:
        groups.setdefault((each.input_len, each.output_len), []).append(each)
    return groups


class Parted(NamedTuple):
    """Pairs by what can be said of them."""

    ordered: list[RatePair]
    alike: list[RatePair]
    """Of equal size, and neither is surely ahead."""
    unequal: list[RatePair]
    unconverged: list[RatePair]
    no_winner: list[RatePair]


def parted(found: Iterable[RatePair]) -> Parted:
    """The pairs by what can be said of them."""
    parts = Parted([], [], [], [], [])
    for each in found:
        if each.no_winner:
            parts.no_winner.append(each)
        elif each.unconverged:
            parts.unconverged.append(each)
        elif each.per is not None:
            parts.unequal.append(each)
        else:
            (parts.alike if each.ratio is None else parts.ordered).append(each)
    return parts


def _compared(one: Row, other: Row) -> RatePair:
    unit = unequal(one.size, other.size)
    if unit is not None:
        # Whoever has the higher rate per engine stands first.
        one, other = sorted((one, other), key=lambda row: -(row.rate_per(unit) or 0.0))
    pair = RatePair(*lengths(one), one.name, other.name, per=unit)
    if no_winner := tuple(f"{row.name}: {row.no_winner}" for row in (one, other) if row.no_winner):
        return replace(pair, no_winner=no_winner)
    if unconverged := tuple(row.name for row in (one, other) if not row.answer.sure):
        return replace(pair, unconverged=unconverged)
    counts = (1, 1) if unit is None else (one.size.count(unit), other.size.count(unit))
    pair = pair if unit is None else replace(pair, counts=counts)
    return _with_ratio(pair, one, other, counts[0] or 0, counts[1] or 0)


def _with_ratio(pair: RatePair, one: Row, other: Row, count: int, other_count: int) -> RatePair:
    """With the ratio of the rates of one unit, if the first is surely ahead. 0: its units are not known."""
    if not count or not other_count or not one.answer.max_request_rate:
        return pair
    mine, others = one.answer.possible.divided(count), other.answer.possible.divided(other_count)
    sure = mine.above(others)
    if sure < AHEAD:
        return pair
    if not other.answer.max_request_rate:
        return replace(pair, ratio=math.inf, sure=sure)
    ratio = one.answer.max_request_rate / count / (other.answer.max_request_rate / other_count)
    low, high = mine.ratio(others)
    if ratio <= 1:
        return pair
    return replace(pair, ratio=ratio, low=min(low, ratio), high=max(high, ratio), sure=sure)


def lengths(row: Row) -> tuple[int, int]:
    return row.cell.input_len, row.cell.output_len
