"""Who is ahead, by rule: two rates are ordered only where their intervals are apart.

Rates of unequal numbers of engines (GPUs, where those are known) are no order: of these the rates per engine
are compared, and are called so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from kvbench.core.plan.engine_count import Unit, counted, unequal
from kvbench.report.tables.numbers import number
from kvbench.report.tables.result import Answer, Row


@dataclass(frozen=True)
class RatePair:
    """Two rows of one input length. ``ratio`` is None where one cannot be told from the other.

    ``ratio`` compares the two rates; ``low`` and ``high`` are what the two intervals allow. A ratio of
    infinity means that no tested rate of the other met the SLO. ``per``: "engine" or "GPU" where the two have
    unequal numbers of them, ``counts``, None if not known; the three figures are then of the rates per
    engine or GPU.
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

    def text(self) -> str:
        """One clause, such as ``nixl 1.2× mooncake [1.1, 1.3]``."""
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


def _many(count: int | None, unit: Unit) -> str:
    return f"an unknown number of {unit}s" if count is None else counted(count, unit)


def rate_pairs(rows: Sequence[Row]) -> list[RatePair]:
    """Each pair of rows with an answer, per input length: ordered only where their intervals are apart."""
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


def parted(found: Iterable[RatePair]) -> tuple[list[RatePair], list[RatePair], list[RatePair]]:
    """Those that are ordered, those that cannot be told apart, and those of unequal size."""
    found = list(found)
    fair = [each for each in found if each.per is None]
    return (
        [each for each in fair if each.ratio is not None],
        [each for each in fair if each.ratio is None],
        [each for each in found if each.per is not None],
    )


def _compared(one: Row, other: Row) -> RatePair:
    unit = unequal(one.size, other.size)
    if unit is None:
        return RatePair(*lengths(one), one.name, other.name, *_ratios(one.answer, other.answer))
    # Whoever has the higher rate per engine stands first.
    one, other = sorted((one, other), key=lambda row: -(row.rate_per(unit) or 0.0))
    counts = one.size.count(unit), other.size.count(unit)
    ratios: tuple[float | None, float | None, float | None] = (None, None, None)
    if counts[0] and counts[1]:
        ratios = _ratios(_divided(one.answer, counts[0]), _divided(other.answer, counts[1]))
    return RatePair(*lengths(one), one.name, other.name, *ratios, per=unit, counts=counts)


def _divided(answer: Answer, count: int) -> Answer:
    rate, lower, upper = (
        None if value is None else value / count
        for value in (answer.max_request_rate, answer.lower, answer.upper)
    )
    return replace(answer, max_request_rate=rate, lower=lower, upper=upper)


def _ratios(one: Answer, other: Answer) -> tuple[float | None, float | None, float | None]:
    one_low, one_high = _interval(one)
    other_low, other_high = _interval(other)
    if not one.max_request_rate or one_low <= other_high:
        return None, None, None
    if not other.max_request_rate:
        return math.inf, None, None
    return (
        one.max_request_rate / other.max_request_rate,
        one_low / other_high,
        one_high / other_low if other_low else math.inf,
    )


def _interval(answer: Answer) -> tuple[float, float]:
    """The interval with its open ends filled: nothing known below is 0, nothing known above infinity."""
    if answer.outcome == "none":
        return 0.0, answer.upper if answer.upper is not None else math.inf
    lower = answer.lower if answer.lower is not None else 0.0
    return lower, answer.upper if answer.upper is not None else math.inf


def lengths(row: Row) -> tuple[int, int]:
    return row.cell.input_len, row.cell.output_len
