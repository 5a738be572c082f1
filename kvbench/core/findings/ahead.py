"""Comparison of rows of figures, or the reason why they cannot be compared.

The interval of a ratio comes from repeated runs (Welch's interval of the mean logarithms) or from the
standard errors over single requests; the latter covers only these two runs. Without either nothing is
concluded. A pair's figures hold together with 95 % (Bonferroni)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import NormalDist
from typing import Final, Literal

from kvbench.core.findings.load_row import Axis, LoadRow, figure_text
from kvbench.core.findings.suspicions import burst, not_kept_up
from kvbench.core.plan.engine_count import first_unequal
from kvbench.core.stats import t_quantile

CONFIDENCE: Final = 0.95
AXES: Final = (
    "run", "connector", "mode", "protocol", "nics", "tp", "input_len", "output_len", "concurrency", "rate",
)  # fmt: skip
"""Axes to sort, group and compare by; ``mode`` is router or direct, ``concurrency`` that of a closed loop."""
_FREE: Final = frozenset({"run", "rate"})
"""Axes that may differ between compared rows: rows of one setting in several runs are repeats."""
FIGURES: Final[Mapping[str, tuple[str, Literal["higher", "lower"]]]] = {
    "request_throughput": ("requests completed per second", "higher"),
    "mean_ttft_ms": ("mean TTFT", "lower"),
    "median_ttft_ms": ("median TTFT", "lower"),
    "p99_ttft_ms": ("P99 TTFT", "lower"),
    "mean_tpot_ms": ("mean TPOT", "lower"),
    "p99_tpot_ms": ("P99 TPOT", "lower"),
}
"""Compared figures: label, and which direction is better."""


@dataclass(frozen=True)
class Ratio:
    """Ratio of one figure's geometric means, one / other, with its interval."""

    figure: str
    one: float
    other: float
    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def significant(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 1 or self.high < 1)

    @property
    def first_ahead(self) -> bool:
        return (self.ratio > 1) == (FIGURES[self.figure][1] == "higher")

    def text(self) -> str:
        """Return the better side's text: ``mean TTFT 3.5 % lower [1.2, 5.8]``."""
        words, better = FIGURES[self.figure]
        # The ratio is that of the side ahead to the other, so it is inverted if the second is ahead.
        ends = [self.low or 0.0, self.high or math.inf]
        ratio = self.ratio if self.first_ahead else 1 / self.ratio
        ends = ends if self.first_ahead else sorted(1 / end if end else math.inf for end in ends)
        shares = sorted(abs(end - 1) * 100 for end in ends)
        return f"{words} {abs(ratio - 1):.1%} {better} [{figure_text(shares[0])}, {figure_text(shares[1])}]"


@dataclass(frozen=True)
class Pair:
    """Two levels of one axis: conclusions, or reasons against. ``scope``: "runs" for repeated settings,
    "requests" for single runs, "" without interval."""

    by: str
    one: str
    other: str
    place: str
    ratios: tuple[Ratio, ...] = ()
    scope: Literal["runs", "requests", ""] = ""
    why_not: tuple[str, ...] = ()
    rows: tuple[LoadRow, ...] = field(default=(), repr=False)
    unequal: bool = False
    """Whether engines or GPUs differ in number: then there are no ratios."""

    @property
    def significant(self) -> tuple[Ratio, ...]:
        """Return the figures with a significant difference, if nothing rules out the comparison."""
        return () if self.why_not else tuple(ratio for ratio in self.ratios if ratio.significant)

    def text(self) -> str:
        return f"{self.place}: {self._ahead()}" if self.significant else self.undecided([self.place], [self])

    def _ahead(self) -> str:
        sides = []
        for first, (name, behind) in ((True, (self.one, self.other)), (False, (self.other, self.one))):
            if texts := [ratio.text() for ratio in self.significant if ratio.first_ahead == first]:
                sides.append(f"{name} is ahead of {behind}: {', '.join(texts)}")
        return "; ".join(sides)

    def about(self) -> str:
        """Describe the figures of ``text``: their runs, and the validity of the intervals."""
        of = "these two runs, not for repeated ones" if self.scope == "requests" else "repeated runs"
        return f"these are figures of the whole run; the intervals are for {of}"

    def reason(self) -> str:
        return "; ".join(self.why_not) or "every interval includes equality"

    def undecided(self, places: Sequence[str], alike: Sequence[Pair]) -> str:
        """Return one sentence for all inconclusive places, with the rows' figures."""
        seen = [
            f"{words} {_span(shares)}"
            for figure, (words, _) in FIGURES.items()
            if figure in ("request_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms")
            and (shares := [1 / r.ratio - 1 for pair in alike for r in pair.ratios if r.figure == figure])
        ]
        shown = f". {self.other} against {self.one} in the rows, whole run: {', '.join(seen)}" if seen else ""
        where = "; ".join(dict.fromkeys(places))
        return f"{self.one} or {self.other} at {where}: inconclusive from this data: {self.reason()}{shown}"


def _span(shares: Sequence[float]) -> str:
    low, high = min(shares), max(shares)
    return f"{low:+.1%}" if f"{low:+.1%}" == f"{high:+.1%}" else f"{low:+.1%} to {high:+.1%}"


def pairs(rows: Sequence[LoadRow], by: str = "connector") -> list[Pair]:
    """Return pairs of levels of an axis where all other axes except the rate are equal, at common rates."""
    apart = {by} | ({"protocol", "nics"} if by in ("protocol", "nics") else _constant_within(rows, by))
    groups: dict[tuple[tuple[str, Axis], ...], dict[str, list[LoadRow]]] = {}
    for row in rows:
        rest = tuple((axis, row.axes.get(axis)) for axis in AXES if axis not in apart | _FREE)
        if by != "rate" and row.axes.get(by) is not None:
            groups.setdefault(rest, {}).setdefault(level_text(by, row), []).append(row)
    several = {axis for axis in AXES if len({row.axes.get(axis) for row in rows}) > 1}
    compared: list[Pair] = []
    for rest, levels in groups.items():
        for one, other in combinations(levels, 2):
            if levels[one][0].axes.get(by) != levels[other][0].axes.get(by):
                compared += _at_rates(by, (one, levels[one]), (other, levels[other]), _place(rest, several))
    return compared


def _constant_within(rows: Sequence[LoadRow], by: str) -> set[str]:
    """Return which of protocol and NICs are constant for each level of ``by``."""
    levels = {row.axes.get(by) for row in rows}
    return {
        axis
        for axis in ("protocol", "nics")
        if all(len({row.axes.get(axis) for row in rows if row.axes.get(by) == level}) < 2 for level in levels)
    }


def _place(rest: Iterable[tuple[str, Axis]], several: set[str]) -> str:
    axes = dict(rest)
    words = [f"{axes['input_len']:,.0f} in"] if isinstance(axes.get("input_len"), (int, float)) else []
    for axis, value in axes.items():
        if axis in several and value is not None and axis != "input_len":
            words.append(f"{value}" if axis in ("connector", "protocol") else f"{axis} {_level(value)}")
    return ", ".join(words) or "everywhere"


def _level(value: Axis) -> str:
    return figure_text(value) if isinstance(value, (int, float)) else str(value)


def level_text(by: str, row: LoadRow) -> str:
    """Return a row's level in words: ``nixl``, ``2 NICs``, ``rdma, 2 NICs``, ``tp 4``."""
    value, nics = row.axes.get(by), row.axes.get("nics")
    many = nics if nics is None or isinstance(nics, str) else f"{_level(nics)} NIC{'s' if nics != 1 else ''}"
    if by == "nics":
        return str(many)
    if by == "protocol":
        return f"{value}" if many is None or str(many).lower() == value else f"{value}, {many}"
    return str(value) if isinstance(value, str) else f"{by} {_level(value)}"


def _at_rates(
    by: str, one: tuple[str, Sequence[LoadRow]], other: tuple[str, Sequence[LoadRow]], place: str
) -> Iterable[Pair]:
    names = one[0], other[0]
    if (sizes := first_unequal(row.size for _, rows in (one, other) for row in rows)) is not None:
        # This includes latencies at one rate: with twice the engines, each has half the load.
        why = f"they have unequal size, {sizes[0].text()} against {sizes[1].text()}"
        yield Pair(by, *names, place, (), "", (why,), (*one[1], *other[1]), unequal=True)
        return
    rates = [sorted({row.request_rate or 0.0 for row in rows}) for _, rows in (one, other)]
    common = [rate for rate in rates[0] if rate in rates[1]]
    if not common:
        texts = [" or ".join(figure_text(rate) for rate in offered) for offered in rates]
        why = f"different rates were offered, {texts[0]} and {texts[1]} req/s"
        ratios = _ratios(one[1], other[1], "") if len(one[1]) == len(other[1]) == 1 else ()
        yield Pair(by, *names, place, ratios, "", (why,), (*one[1], *other[1]))
    for rate in common:
        left, right = ([row for row in rows if (row.request_rate or 0.0) == rate] for _, rows in (one, other))
        at = f"{place}, {figure_text(rate)} req/s" if rate else place
        scope = _scope(left, right)
        yield Pair(
            by,
            *names,
            at,
            _ratios(left, right, scope),
            scope,
            tuple(_why_not(left, right, scope)),
            (*left, *right),
        )


def _scope(left: Sequence[LoadRow], right: Sequence[LoadRow]) -> Literal["runs", "requests", ""]:
    if len(_distinct(left)) > 1 and len(_distinct(right)) > 1:
        return "runs"
    return "requests" if all(row.errors for row in (*left, *right)) else ""


def _distinct(rows: Sequence[LoadRow]) -> list[LoadRow]:
    """Return rows without exact duplicates, which are one run shown twice."""
    return list({tuple(sorted(row.figures.items())): row for row in rows}.values())


def _why_not(left: Sequence[LoadRow], right: Sequence[LoadRow], scope: str) -> Iterable[str]:
    if differing := left[0].setting.differing(right[0].setting):
        yield f"the conditions differ ({'; '.join(differing)})"
    if scope == "":
        counts = len(_distinct(left)), len(_distinct(right))
        runs = "one run each" if counts == (1, 1) else f"{counts[0]} and {counts[1]} runs"
        yield f"{runs}, so the difference between repeated runs is unknown"
    both = (*left, *right)
    yield from dict.fromkeys(f"{row.cell.connector}: {row.no_winner}" for row in both if row.no_winner)
    if any(burst(row) for row in both):
        yield "the load was a burst, so figures describe one batch"
    elif any(not_kept_up(row) for row in both):
        yield "more requests arrived than completed, so latencies depend on the trial's length"
    fewest = min((row.requests or 0 for row in both), default=0)
    if 0 < fewest < 20:
        yield f"{fewest} requests are not enough"


def _ratios(left: Sequence[LoadRow], right: Sequence[LoadRow], scope: str) -> tuple[Ratio, ...]:
    known = [
        name
        for name in FIGURES
        if all((value := row.get(name)) is not None and value > 0 for row in (*left, *right))
    ]
    ratios = []
    for name in known:
        one, other = ([math.log(row.get(name) or 1.0) for row in _distinct(rows)] for rows in (left, right))
        means = sum(one) / len(one), sum(other) / len(other)
        half = _half_width(one, other, left, right, name, len(known)) if scope else None
        ratio = math.exp(means[0] - means[1])
        ends = (None, None) if half is None else (ratio * math.exp(-half), ratio * math.exp(half))
        ratios.append(Ratio(name, math.exp(means[0]), math.exp(means[1]), ratio, *ends))
    return tuple(ratios)


def _half_width(
    one: Sequence[float],
    other: Sequence[float],
    left: Sequence[LoadRow],
    right: Sequence[LoadRow],
    name: str,
    figures: int,
) -> float | None:
    """Return half the interval of the log ratio."""
    level = 1 - (1 - CONFIDENCE) / (2 * figures)
    if len(one) > 1 and len(other) > 1:
        parts = [(_variance(values) / len(values), len(values) - 1) for values in (one, other)]
        total = sum(part for part, _ in parts)
        if total <= 0:
            return None
        degrees = total**2 / sum(part**2 / free for part, free in parts if part > 0)
        return t_quantile(level, degrees) * math.sqrt(total)
    shares = [row.errors[name] / (row.get(name) or 1.0) for row in (left[0], right[0]) if name in row.errors]
    return NormalDist().inv_cdf(level) * math.hypot(*shares) if len(shares) == 2 else None


def _variance(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / (len(values) - 1)
