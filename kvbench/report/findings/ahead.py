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
        low = number(self.low)
        if self.low is not None and float(low) == 1.0 < self.low:
            low = f">{low}"
        return f"{self.ahead} {number(self.ratio)}× {self.behind} [{low}, {number(self.high)}]"


def unequal_text(pairs: Sequence[RatePair]) -> str:
    """Describe all pairs of one length and unequal size, for example ``not directly comparable: 2 engines
    (nixl) against 1 engine (aggregated); per engine: aggregated 1.16× nixl [1.03, 1.29]``."""
    clauses = []
    for unit in dict.fromkeys(pair.per for pair in pairs if pair.per is not None):
        unit_pairs = [pair for pair in pairs if pair.per == unit]
        names_by_count: dict[int | None, dict[str, None]] = {}
        for pair in unit_pairs:
            for name, count in zip((pair.ahead, pair.behind), pair.counts, strict=True):
                names_by_count.setdefault(count, {})[name] = None
        ordered = sorted(names_by_count, key=lambda count: -(count or 0))
        sides = [f"{_count_text(count, unit)} ({', '.join(names_by_count[count])})" for count in ordered]
        ratios = [pair.relation() for pair in unit_pairs if None not in pair.counts]
        per_unit = f"; per {unit}: {'; '.join(ratios)}" if ratios else ""
        clauses.append(f"not directly comparable: {' against '.join(sides)}{per_unit}")
    return "; ".join(clauses)


def unconverged_text(pairs: Sequence[RatePair]) -> str:
    names = list(dict.fromkeys(name for pair in pairs for name in pair.unconverged))
    searches = "the search" if len(names) == 1 else "the searches"
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f"inconclusive: {searches} of {listed} did not converge"


def no_winner_text(pairs: Sequence[RatePair]) -> str:
    reasons = dict.fromkeys(reason for pair in pairs for reason in pair.no_winner)
    return f"no winner: {'; '.join(reasons)}"


def _count_text(count: int | None, unit: Unit) -> str:
    return f"an unknown number of {unit}s" if count is None else counted(count, unit)


def rate_pairs(rows: Sequence[Row]) -> list[RatePair]:
    """Return each pair of rows with an answer, by input length."""
    pairs = []
    comparable = [row for row in rows if row.outcome in ("found", "at_least", "none")]
    comparable.sort(key=lengths)
    for _, group in groupby(comparable, key=lengths):
        ranked = sorted(group, key=lambda row: -(row.answer.max_request_rate or 0.0))
        pairs += [_compare_rows(one, other) for one, other in combinations(ranked, 2)]
    return pairs


def by_lengths(pairs: Iterable[RatePair]) -> dict[tuple[int, int], list[RatePair]]:
    groups: dict[tuple[int, int], list[RatePair]] = {}
    for pair in pairs:
        groups.setdefault((pair.input_len, pair.output_len), []).append(pair)
    return groups


class PairGroups(NamedTuple):
    """Pairs of connectors, grouped by their conclusion."""

    ordered: list[RatePair]
    alike: list[RatePair]
    """Equal size, no significant difference."""
    unequal: list[RatePair]
    unconverged: list[RatePair]
    no_winner: list[RatePair]


def group_pairs(pairs: Iterable[RatePair]) -> PairGroups:
    groups = PairGroups([], [], [], [], [])
    for pair in pairs:
        if pair.no_winner:
            groups.no_winner.append(pair)
        elif pair.unconverged:
            groups.unconverged.append(pair)
        elif pair.per is not None:
            groups.unequal.append(pair)
        else:
            (groups.alike if pair.ratio is None else groups.ordered).append(pair)
    return groups


def withheld_texts(groups: PairGroups) -> Iterator[str]:
    """Yield the reasons, other than the rates, why pairs have no order."""
    if groups.unequal:
        yield unequal_text(groups.unequal)
    if groups.unconverged:
        yield unconverged_text(groups.unconverged)
    if groups.no_winner:
        yield no_winner_text(groups.no_winner)


def _compare_rows(one: Row, other: Row) -> RatePair:
    unit = unequal(one.size, other.size)
    if unit is not None:
        # The higher rate per engine comes first.
        one, other = sorted((one, other), key=lambda row: -(row.rate_per(unit) or 0.0))
    pair = RatePair(*lengths(one), one.name, other.name, per=unit)
    if no_winner := tuple(f"{row.name}: {row.no_winner}" for row in (one, other) if row.no_winner):
        return replace(pair, no_winner=no_winner)
    counts = (1, 1) if unit is None else (one.size.count(unit), other.size.count(unit))
    pair = pair if unit is None else replace(pair, counts=counts)
    unconverged = tuple(row.name for row in (one, other) if not row.answer.converged)
    if one.answer.comparable and other.answer.comparable:
        compared = _with_ratio(pair, one, other, counts[0] or 0, counts[1] or 0)
        if compared.ratio is not None or not unconverged:
            return compared
    return replace(pair, unconverged=unconverged)


def _with_ratio(pair: RatePair, one: Row, other: Row, count: int, other_count: int) -> RatePair:
    """Return the pair with the ratio of the rates per unit. A count of 0: number of units unknown."""
    if not count or not other_count or not one.answer.max_request_rate:
        return pair
    possible, other_possible = one.answer.possible.divided(count), other.answer.possible.divided(other_count)
    probability = possible.above(other_possible)
    if probability < AHEAD:
        return pair
    if not other.answer.max_request_rate:
        return replace(pair, ratio=math.inf, sure=probability)
    ratio = one.answer.max_request_rate / count / (other.answer.max_request_rate / other_count)
    low, high = possible.ratio(other_possible)
    if ratio <= 1:
        return pair
    return replace(pair, ratio=ratio, low=min(low, ratio), high=max(high, ratio), sure=probability)


def lengths(row: Row) -> tuple[int, int]:
    return row.cell.input_len, row.cell.output_len


RATE_OUTCOMES: Final = ("found", "at_least")
MOST_LENGTHS: Final = 4
"""Most input lengths listed one by one; beyond that, only the first and the last are listed."""
_ANSWER_KINDS: Final = ("ahead", "untold", "measured", "suspicious")


def answer_text(rows: Sequence[Row], statements: Sequence[Statement] = ()) -> str:
    """Return the run's answer from its result rows, or the first statement if no row has a rate."""
    found = [row for row in rows if row.outcome in RATE_OUTCOMES]
    if found:
        names = dict.fromkeys(row.name for row in found)
        text = _one_connector(found) if len(names) == 1 else _several_connectors(found)
        return " ".join(filter(None, (f"{text}.", limits_text(rows))))
    offered = [row for row in rows if row.outcome == "one_rate"]
    if len({row.name for row in offered}) == 1 or (offered and not statements):
        return f"{'; '.join(map(_offered_load, offered))}."
    if none := _none_met(rows):
        return none
    ranked = [statement for kind in _ANSWER_KINDS for statement in statements if statement.kind == kind]
    return f"{ranked[0].text}." if ranked else ""


def lead_text(rows: Sequence[Row]) -> str:
    """Return the winner with its margin and confidence. Empty without a rate or a comparison."""
    found = [row for row in rows if row.outcome in RATE_OUTCOMES]
    if not found:
        return _none_met(rows)
    if len({row.name for row in found}) == 1:
        return f"{_one_connector(found)}."
    return f"{_several_connectors(found, certainty=True)}."


def _one_connector(found: Sequence[Row]) -> str:
    ordered = sorted(found, key=lengths)
    shown = ordered if len(ordered) <= MOST_LENGTHS else [ordered[0], ordered[-1]]
    first, *more = (f"{row.answer.text()}{{}} at {row.cell.input_len:,}" for row in shown)
    join = ", down to " if len(shown) < len(ordered) else ", "
    return join.join(
        [f"{found[0].name} sustains {first.format(' req/s')} tokens in", *(text.format("") for text in more)]
    )


def _several_connectors(found: Sequence[Row], *, certainty: bool = False) -> str:
    """List the winner at each length, and the lengths without one together.

    ``certainty``: give the confidence instead of the rates, which the table shows."""
    groups = by_lengths(rate_pairs(found))
    clauses: list[str] = []
    unordered: dict[str, list[tuple[tuple[int, int], list[Row]]]] = {}
    for key, pairs in groups.items():
        ranked = sorted(
            (row for row in found if lengths(row) == key),
            key=lambda row: -(row.answer.max_request_rate or 0),
        )
        ahead = [pair for pair in pairs if pair.ratio is not None and pair.per is None]
        if ahead:
            best = max(ahead, key=lambda pair: sum(pair.ahead == other.ahead for other in ahead))
            beaten = [pair for pair in ahead if pair.ahead == best.ahead]
            rate = next(row.answer.text() for row in ranked if row.name == best.ahead)
            beats_all = len(beaten) == len(ranked) - 1
            margin = ", ".join(pair.relation().removeprefix(f"{best.ahead} ") for pair in beaten)
            if certainty:  # in whole per cent, and never 100
                confidence = min(99, *(math.floor(100 * (pair.sure or 0.0)) for pair in beaten))
                margin += f", confidence {confidence} %"
            lead = "ahead of all others" if beats_all and len(beaten) > 1 else "ahead"
            rate_text = ":" if certainty else f" with {rate} req/s,"
            clauses.append(f"at {key[0]:,} tokens in, {best.ahead} is {lead}{rate_text} {margin}")
            others = group_pairs(
                pair for pair in pairs if best.ahead in (pair.ahead, pair.behind) and pair not in beaten
            )
            alike = [pair.behind if pair.ahead == best.ahead else pair.ahead for pair in others.alike]
            reasons = [f"no significant difference to {_listed(alike)}"] if alike else []
            if reasons := [*reasons, *withheld_texts(others)]:
                clauses[-1] += f" ({'; '.join(reasons)})"
        elif withheld := [pair for pair in pairs if pair.no_winner]:
            clauses.append(f"at {key[0]:,} tokens in, {no_winner_text(withheld)}")
        elif uneven := [pair for pair in pairs if pair.per is not None]:
            clauses.append(f"at {key[0]:,} tokens in, the rates {unequal_text(uneven)}")
        else:
            unconverged = [pair for pair in pairs if pair.unconverged]
            why = unconverged_text(unconverged) if unconverged else ""
            unordered.setdefault(why, []).append((key, ranked))
    for why, group in unordered.items():
        where = _listed(f"{key[0]:,}" for key, _ in group)
        names = _listed(dict.fromkeys(row.name for _, ranked in group for row in ranked))
        spans = "; ".join(_span(ranked) for _, ranked in group)
        why = why or f"no significant difference between {names}"
        clauses.append(f"at {where} tokens in, {why} ({spans} req/s)")
    if len(groups) < len({lengths(row) for row in found}) and not clauses:
        return f"{_listed(dict.fromkeys(row.name for row in found))} have no result at a common length"
    return _capital("; ".join(clauses))


def _span(rows: Sequence[Row]) -> str:
    rates = [row.answer.max_request_rate or 0.0 for row in rows]
    return f"{number(min(rates))} to {number(max(rates))}"


def limits_text(rows: Sequence[Row]) -> str:
    """Return where no tested rate met the SLO, and what limits the rates that did. Input lengths are named
    only for a connector whose limit depends on them."""
    by_limit: dict[str, dict[str, list[int]]] = {}
    for row in rows:
        if row.outcome in RATE_OUTCOMES and row.limit and row.limit not in ("none", "undetermined"):
            names = by_limit.setdefault(LIMIT_WORDS[row.limit], {})
            names.setdefault(row.name, []).append(row.cell.input_len)
    counts = Counter(name for names in by_limit.values() for name in names)
    limits = [
        f"{limit} for {_listed(_at(name, at) if counts[name] > 1 else name for name, at in names.items())}"
        for limit, names in by_limit.items()
    ]
    return " ".join(filter(None, (_none_met(rows), f"Limited by: {', '.join(limits)}." if limits else "")))


def _at(name: str, input_lens: Iterable[int]) -> str:
    return f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(input_lens))}"


def _none_met(rows: Sequence[Row]) -> str:
    none = [row for row in rows if row.outcome == "none"]
    where = "; ".join(f"{row.name} at {row.cell.input_len:,}" for row in none)
    return f"No tested rate met the SLO: {where}." if none else ""


def _offered_load(row: Row) -> str:
    met = row.values.get("slo_attainment")
    share = "" if met is None else f"{percent(met)} % of the requests within the SLO"
    verdict = row.verdict if row.verdict in ("met", "missed") else ""
    if row.verdict == "invalid":
        share, verdict = "", "refused, no result"
    text = ", ".join(filter(None, (share, verdict))) or "offered"
    return (
        f"{row.name} at {row.cell.input_len:,} tokens in, {number(row.answer.max_request_rate)} req/s: {text}"
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
