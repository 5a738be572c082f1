"""Comparison of searched rates by rule, and a run's answer in a sentence or two.

Two rates are ordered only if the posteriors of two searches put one above the other with probability AHEAD.
A search that used all trials or all of its time takes part with its wider interval; one that invalid trials
ended does not. The rates count as independent, which is cautious: connectors at one length have the same
arrivals (``TrialPlan.seed``), so their errors are alike in part. With unequal numbers of engines (or GPUs, if
known) the rates per engine are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby
from typing import Final, NamedTuple

from kvbench.core.findings.findings import Statement
from kvbench.core.findings.rate_change import AHEAD
from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.core.plan.engine_count import Unit, counted, unequal
from kvbench.report.tables.result import Row
from kvbench.report.tables.table import number, percent


@dataclass(frozen=True)
class RatePair:
    """Two rows of one input length. ``ratio``: of the two rates, None if inconclusive, infinite if no tested
    rate of the other met the SLO; ``low`` to ``high``: its 90 % interval; ``sure``: probability of the order.
    ``per`` and ``counts``: unit and numbers of unequal sizes; the figures are then rates per unit.
    ``unconverged``, ``no_winner``: searches or reasons that rule out a comparison."""

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
        """Return one clause, such as ``nixl 1.2× mooncake [1.1, 1.3]``."""
        if self.no_winner:
            return no_winner_text([self])
        if self.unconverged:
            return unconverged_text([self])
        return self.relation() if self.per is None else unequal_text([self])

    def relation(self) -> str:
        """Return the clause without the unit."""
        if self.ratio is None:
            return f"{self.ahead} and {self.behind}: no significant difference"
        if math.isinf(self.ratio):
            return f"{self.ahead} sustains a rate, {self.behind} none of the tested rates"
        if self.high is None or math.isinf(self.high):
            return f"{self.ahead} at least {number(self.low)}× {self.behind}"
        interval = f"[{number(self.low)}, {number(self.high)}]"
        return f"{self.ahead} {number(self.ratio)}× {self.behind} {interval}"


def unequal_text(found: Sequence[RatePair]) -> str:
    """Describe all pairs of one length and unequal size, for example ``not directly comparable: 2 engines
    (nixl) against 1 engine (aggregated); per engine: aggregated 1.16× nixl [1.03, 1.29]``."""
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
        clauses.append(f"not directly comparable: {' against '.join(sides)}{divided}")
    return "; ".join(clauses)


def unconverged_text(found: Sequence[RatePair]) -> str:
    names = list(dict.fromkeys(name for each in found for name in each.unconverged))
    searches = "the search" if len(names) == 1 else "the searches"
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"inconclusive: {searches} of {listed} did not converge"


def no_winner_text(found: Sequence[RatePair]) -> str:
    reasons = dict.fromkeys(reason for each in found for reason in each.no_winner)
    return f"no winner: {'; '.join(reasons)}"


def _many(count: int | None, unit: Unit) -> str:
    return f"an unknown number of {unit}s" if count is None else counted(count, unit)


def rate_pairs(rows: Sequence[Row]) -> list[RatePair]:
    """Return each pair of rows with an answer, by input length."""
    found = []
    known = [row for row in rows if row.outcome in ("found", "at_least", "none")]
    known.sort(key=lengths)
    for _, group in groupby(known, key=lengths):
        ranked = sorted(group, key=lambda row: -(row.answer.max_request_rate or 0.0))
        found += [_compared(one, other) for one, other in combinations(ranked, 2)]
    return found


def by_lengths(found: Iterable[RatePair]) -> dict[tuple[int, int], list[RatePair]]:
    groups: dict[tuple[int, int], list[RatePair]] = {}
    for each in found:
        groups.setdefault((each.input_len, each.output_len), []).append(each)
    return groups


class Parted(NamedTuple):
    """Pairs of connectors, grouped by their conclusion."""

    ordered: list[RatePair]
    alike: list[RatePair]
    """Equal size, no significant difference."""
    unequal: list[RatePair]
    unconverged: list[RatePair]
    no_winner: list[RatePair]


def parted(found: Iterable[RatePair]) -> Parted:
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


def withheld_texts(parts: Parted) -> Iterator[str]:
    """Say why pairs are not ordered, other than for their rates."""
    if parts.unequal:
        yield unequal_text(parts.unequal)
    if parts.unconverged:
        yield unconverged_text(parts.unconverged)
    if parts.no_winner:
        yield no_winner_text(parts.no_winner)


def _compared(one: Row, other: Row) -> RatePair:
    unit = unequal(one.size, other.size)
    if unit is not None:
        # The higher rate per engine comes first.
        one, other = sorted((one, other), key=lambda row: -(row.rate_per(unit) or 0.0))
    pair = RatePair(*lengths(one), one.name, other.name, per=unit)
    if no_winner := tuple(f"{row.name}: {row.no_winner}" for row in (one, other) if row.no_winner):
        return replace(pair, no_winner=no_winner)
    counts = (1, 1) if unit is None else (one.size.count(unit), other.size.count(unit))
    pair = pair if unit is None else replace(pair, counts=counts)
    unconverged = tuple(row.name for row in (one, other) if not row.answer.sure)
    if one.answer.comparable and other.answer.comparable:
        found = _with_ratio(pair, one, other, counts[0] or 0, counts[1] or 0)
        if found.ratio is not None or not unconverged:
            return found
    return replace(pair, unconverged=unconverged)


def _with_ratio(pair: RatePair, one: Row, other: Row, count: int, other_count: int) -> RatePair:
    """Return the pair with the ratio of the rates per unit. A count of 0: number of units unknown."""
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


FOUND: Final = ("found", "at_least")
LENGTHS_MOST: Final = 4
"""Most lengths listed one by one; with more only the first and the last are."""
_TOLD: Final = ("ahead", "untold", "measured", "suspicious")


def answer_text(rows: Sequence[Row], statements: Sequence[Statement] = ()) -> str:
    """Return the run's answer from its result rows, or the first statement if no row has a rate."""
    found = [row for row in rows if row.outcome in FOUND]
    if found:
        names = dict.fromkeys(row.name for row in found)
        who = _of_one(found) if len(names) == 1 else _of_several(found)
        return " ".join(filter(None, (f"{who}.", besides_text(rows))))
    offered = [row for row in rows if row.outcome == "one_rate"]
    if len({row.name for row in offered}) == 1 or (offered and not statements):
        return f"{'; '.join(map(_offered, offered))}."
    if none := _none(rows):
        return none
    first = [each for kind in _TOLD for each in statements if each.kind == kind]
    return f"{first[0].text}." if first else ""


def lead_text(rows: Sequence[Row]) -> str:
    """Return the winner with its margin and confidence. Empty without a rate or a comparison."""
    found = [row for row in rows if row.outcome in FOUND]
    if not found:
        return _none(rows)
    if len({row.name for row in found}) == 1:
        return f"{_of_one(found)}."
    return f"{_of_several(found, certainty=True)}."


def _of_one(found: Sequence[Row]) -> str:
    ordered = sorted(found, key=lengths)
    told = ordered if len(ordered) <= LENGTHS_MOST else [ordered[0], ordered[-1]]
    first, *more = (f"{row.answer.text()}{{}} at {row.cell.input_len:,}" for row in told)
    join = ", down to " if len(told) < len(ordered) else ", "
    return join.join(
        [f"{found[0].name} sustains {first.format(' req/s')} tokens in", *(each.format("") for each in more)]
    )


def _of_several(found: Sequence[Row], *, certainty: bool = False) -> str:
    """List the winner at each length, and the lengths without one together.

    ``certainty``: give the confidence instead of the rates, which the table shows."""
    groups = by_lengths(rate_pairs(found))
    told: list[str] = []
    untold: dict[str, list[tuple[tuple[int, int], list[Row]]]] = {}
    for place, pairs in groups.items():
        mine = sorted(
            (row for row in found if lengths(row) == place),
            key=lambda row: -(row.answer.max_request_rate or 0),
        )
        ahead = [each for each in pairs if each.ratio is not None and each.per is None]
        if ahead:
            best = max(ahead, key=lambda each: sum(each.ahead == other.ahead for other in ahead))
            beaten = [each for each in ahead if each.ahead == best.ahead]
            rate = next(row.answer.text() for row in mine if row.name == best.ahead)
            whole = len(beaten) == len(mine) - 1
            by = ", ".join(each.relation().removeprefix(f"{best.ahead} ") for each in beaten)
            if certainty:  # in whole per cent, and never 100
                by += f", confidence {min(99, *(math.floor(100 * (each.sure or 0.0)) for each in beaten))} %"
            lead = "ahead of all others" if whole and len(beaten) > 1 else "ahead"
            holds = ":" if certainty else f" with {rate} req/s,"
            told.append(f"at {place[0]:,} tokens in, {best.ahead} is {lead}{holds} {by}")
            rest = parted(
                each for each in pairs if best.ahead in (each.ahead, each.behind) and each not in beaten
            )
            alike = [each.behind if each.ahead == best.ahead else each.ahead for each in rest.alike]
            more = [f"no significant difference to {_listed(alike)}"] if alike else []
            if more := [*more, *withheld_texts(rest)]:
                told[-1] += f" ({'; '.join(more)})"
        elif withheld := [each for each in pairs if each.no_winner]:
            told.append(f"at {place[0]:,} tokens in, {no_winner_text(withheld)}")
        elif uneven := [each for each in pairs if each.per is not None]:
            told.append(f"at {place[0]:,} tokens in, the rates {unequal_text(uneven)}")
        else:
            unsure = [each for each in pairs if each.unconverged]
            untold.setdefault(unconverged_text(unsure) if unsure else "", []).append((place, mine))
    for why, them in untold.items():
        where = _listed(f"{place[0]:,}" for place, _ in them)
        who = _listed(dict.fromkeys(row.name for _, mine in them for row in mine))
        spans = "; ".join(_span(mine) for _, mine in them)
        why = why or f"no significant difference between {who}"
        told.append(f"at {where} tokens in, {why} ({spans} req/s)")
    if len(groups) < len({lengths(row) for row in found}) and not told:
        return f"{_listed(dict.fromkeys(row.name for row in found))} have no result at a common length"
    return _capital("; ".join(told))


def _span(rows: Sequence[Row]) -> str:
    rates = [row.answer.max_request_rate or 0.0 for row in rows]
    return f"{number(min(rates))} to {number(max(rates))}"


def besides_text(rows: Sequence[Row]) -> str:
    """Return where no tested rate met the SLO, and what limits the rates that did. Input lengths are named
    only for a connector whose limit depends on them."""
    by_limit: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.outcome in FOUND and row.limit and row.limit not in ("none", "undetermined"):
            names = by_limit.setdefault(LIMIT_WORDS[row.limit], {})
            names.setdefault(row.name, []).append(row.cell.input_len)
    counts = Counter(name for names in by_limit.values() for name in names)
    each = [
        f"{limit} for {_listed(_at(name, at) if counts[name] > 1 else name for name, at in names.items())}"
        for limit, names in by_limit.items()
    ]
    return " ".join(filter(None, (_none(rows), f"Limited by: {', '.join(each)}." if each else "")))


def _at(name: str, input_lens: Iterable[int]) -> str:
    return f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(input_lens))}"


def _none(rows: Sequence[Row]) -> str:
    none = [row for row in rows if row.outcome == "none"]
    where = "; ".join(f"{row.name} at {row.cell.input_len:,}" for row in none)
    return f"No tested rate met the SLO: {where}." if none else ""


def _offered(row: Row) -> str:
    met = row.values.get("slo_attainment")
    share = "" if met is None else f"{percent(met)} % of the requests within the SLO"
    verdict = row.verdict if row.verdict in ("met", "missed") else ""
    if row.verdict == "invalid":
        share, verdict = "", "refused, no result"
    told = ", ".join(filter(None, (share, verdict))) or "offered"
    return (
        f"{row.name} at {row.cell.input_len:,} tokens in, {number(row.answer.max_request_rate)} req/s: {told}"
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
