"""Who is ahead, by rule: two rates are ordered only where their intervals are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from kvbench.tables import Answer, Row, number


@dataclass(frozen=True)
class Comparison:
    """Two rows of one input length. ``ratio`` is None where one cannot be told from the other.

    ``ratio`` compares the two rates; ``low`` and ``high`` are what the two intervals allow. A ratio of
    infinity means that no tested rate of the other met the SLO.
    """

    input_len: int
    output_len: int
    ahead: str
    behind: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None

    def text(self) -> str:
        if self.ratio is None:
            return f"{self.ahead} and {self.behind} cannot be told apart"
        if math.isinf(self.ratio):
            return f"{self.ahead} holds a rate, {self.behind} none that was tested"
        if self.high is None or math.isinf(self.high):
            return f"{self.ahead} at least {number(self.low)}× {self.behind}"
        interval = f"[{number(self.low)}, {number(self.high)}]"
        return f"{self.ahead} {number(self.ratio)}× {self.behind} {interval}"


def compare(rows: Sequence[Row]) -> list[Comparison]:
    """Each pair of rows with an answer, per input length: ordered only where their intervals are apart."""
    comparisons = []
    known = [row for row in rows if row.outcome in ("found", "at_least", "none")]
    known.sort(key=lengths)
    for (input_len, output_len), group in groupby(known, key=lengths):
        ranked = sorted(group, key=lambda row: -(row.answer.max_request_rate or 0.0))
        for one, other in combinations(ranked, 2):
            ratios = _ratios(one.answer, other.answer)
            comparisons.append(Comparison(input_len, output_len, one.name, other.name, *ratios))
    return comparisons


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
