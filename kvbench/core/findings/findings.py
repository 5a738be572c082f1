"""The conclusions of a table, made from its rows by rule: what is suspicious, what of written conclusions
does not hold, who is ahead and by how much, and what cannot be concluded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.findings.claims import Claim, check_claim
from kvbench.core.findings.load_row import LoadRow, figure_text
from kvbench.core.findings.suspicions import RULES, same_twice, suspicions

Kind = Literal["suspicious", "claim", "ahead", "untold", "measured"]
KIND_WORDS: Final[dict[Kind, str]] = {
    "suspicious": "What is suspicious",
    "claim": "Written conclusions against the rows",
    "ahead": "Who is ahead",
    "untold": "What cannot be told from this data",
    "measured": "What the rows show besides",
}


@dataclass(frozen=True)
class Statement:
    """One conclusion. ``rule``: which rule made it; ``places``: the rows it is of; ``evidence``: its figures.

    ``level``: "invalid" (a number is not what it is called, a claim is wrong), "warning" or "note".
    """

    kind: Kind
    rule: str
    text: str
    advice: str = ""
    level: Literal["invalid", "warning", "note"] = "note"
    places: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values, without the evidence's objects."""
        return {**vars(self), "places": list(self.places)}


def conclude(rows: Sequence[LoadRow], claims: Sequence[Claim] = (), by: str = "connector") -> list[Statement]:
    """Everything that the rules say of rows: suspicious first, then claims, who is ahead, what cannot be
    concluded.
    """
    compared = pairs(rows, by)
    return [
        *suspicious(rows),
        *claimed(claims, rows),
        *(_ahead(pair) for pair in compared if pair.significant),
        *_undecided(compared),
    ]


def suspicious(rows: Sequence[LoadRow]) -> list[Statement]:
    """One statement a rule, with all rows that it is of and the words for the one that is worst off."""
    found = [(row, finding) for row in rows for finding in suspicions(row)]
    statements = []
    for rule in RULES:
        mine = [(row, finding) for row, finding in found if finding.gate == rule.__name__]
        if not mine:
            continue
        row, worst = max(mine, key=lambda each: float(each[1].evidence.get("excess", 0.0)))
        of = f"{_listed([row for row, _ in mine])}: "
        example = f"for example, {row.place()}: " if len(mine) > 1 else ""
        evidence = {each.key: finding.evidence for each, finding in mine}
        level = "invalid" if any(finding.level == "invalid" for _, finding in mine) else worst.level
        places = tuple(each.place() for each, _ in mine)
        text = of + example + worst.message
        statements.append(Statement("suspicious", worst.gate, text, worst.advice, level, places, evidence))
    return [*statements, *_other_rates(rows), *_twice(rows)]


def _other_rates(rows: Sequence[LoadRow]) -> Iterable[Statement]:
    """Scripts beside the results that ask for other rates than the results were measured at."""
    mine = [row for row in rows if row.asked_rate and row.request_rate and row.asked_rate != row.request_rate]
    if not mine:
        return
    places = "; ".join(f"{row.place()}, the script says {figure_text(row.asked_rate)}" for row in mine)
    yield Statement(
        "suspicious",
        "other_rates",
        f"the scripts beside the results offer other rates than these were measured at: {places}",
        "the script is not the one that made the results; keep the command beside each result",
        "warning",
        tuple(row.place() for row in mine),
    )


def _twice(rows: Sequence[LoadRow]) -> Iterable[Statement]:
    for group in same_twice(rows):
        places = tuple(row.origin or row.key for row in group)
        yield Statement(
            "suspicious",
            "same_twice",
            f"{group[0].place()}: {len(group)} rows are alike to the last digit, so they are one measurement",
            "count them once",
            "note",
            places,
        )


def _listed(rows: Sequence[LoadRow]) -> str:
    """``mooncake at 1,024, 4,096; nixl at 1,024``; of many rows their number."""
    if len(rows) == 1:
        return rows[0].place()
    lengths: dict[str, list[int]] = {}
    for row in rows:
        lengths.setdefault(row.name or row.cell.connector, []).append(row.cell.input_len)
    return "; ".join(
        f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(mine))}"
        for name, mine in lengths.items()
    )


def claimed(claims: Sequence[Claim], rows: Sequence[LoadRow]) -> list[Statement]:
    """Each claim that the rows say anything about; contradicted ones first."""
    found = [finding for claim in claims if (finding := check_claim(claim, rows)) is not None]
    found.sort(key=lambda finding: finding.level != "invalid")
    return [
        Statement("claim", "claim", each.message, each.advice, each.level, (), each.evidence)
        for each in found
    ]


def _ahead(pair: Pair) -> Statement:
    rows = tuple(row.origin or row.key for row in pair.rows)
    return Statement("ahead", f"{pair.by}_ahead", pair.text(), "", "note", rows, _evidence([pair]))


def _undecided(compared: Sequence[Pair]) -> Iterable[Statement]:
    """One statement for all places where the same two cannot be told apart for the same reason."""
    groups: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in compared:
        if not pair.significant:
            groups.setdefault((pair.one, pair.other, pair.reason()), []).append(pair)
    for pairs_ in groups.values():
        text = pairs_[0].undecided([pair.place for pair in pairs_], pairs_)
        rows = tuple(dict.fromkeys(row.origin or row.key for pair in pairs_ for row in pair.rows))
        advice = UNEQUAL_ADVICE if pairs_[0].unequal else _UNTOLD_ADVICE
        yield Statement("untold", f"{pairs_[0].by}_ahead", text, advice, "note", rows, _evidence(pairs_))


UNEQUAL_ADVICE: Final = (
    "give both as many engines (deployment.aggregated, by default as many as P and D together), and measure "
    "again"
)
_UNTOLD_ADVICE: Final = "run each setting several times, in turns, at a rate that both keep up with"


def _evidence(pairs_: Sequence[Pair]) -> dict[str, Any]:
    return {
        "by": pairs_[0].by,
        "one": pairs_[0].one,
        "other": pairs_[0].other,
        "scope": pairs_[0].scope,
        "why_not": list(pairs_[0].why_not),
        "places": {pair.place: [vars(ratio) for ratio in pair.ratios] for pair in pairs_},
    }
