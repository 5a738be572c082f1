"""Conclusions drawn from a table's rows by rules, and a check of conclusions that people wrote.

The rules report suspicious rows, false written conclusions, who is ahead and by how much, and inconclusive
comparisons. A written conclusion is a ``Claim``, stored by an import under ``claims``: its ``text`` and
``line``, the figure (``metric``), and the relation or the values::

    {"text": "…", "line": 1020, "metric": "mean_ttft_ms", "input_len": [32768],
     "ahead": "mooncake", "behind": "nixl", "values": {"mooncake": 461, "nixl": 2779}}
    {"text": "…", "metric": "output_throughput", "input_len": [1024, 4096],
     "ahead": "nixl", "behind": "mooncake", "by_percent": [2, 5]}
    {"text": "…", "metric": "mean_tpot_ms", "equal": true}

``by_percent`` is the advantage: larger / smaller figure − 1. Without ``input_len`` a claim applies to all
lengths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.findings.load_row import LoadRow, figure_text
from kvbench.core.findings.suspicions import RULES, same_twice, suspicions
from kvbench.core.records import Finding

VALUE_TOLERANCE: Final = 0.02
"""Relative rounding of a written value."""
SHARE_TOLERANCE: Final = 0.005
"""Absolute rounding of a written advantage, as a share."""
EQUAL: Final = 0.05
"""Largest relative difference that counts as equal in a claim."""


@dataclass(frozen=True)
class Claim:
    text: str
    figure: str
    input_len: tuple[int, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    ahead: str = ""
    behind: str = ""
    by: tuple[float, float] | None = None
    equal: bool = False
    line: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Claim:
        """Parse a claim. Raises ValueError if it has nothing to check."""
        try:
            span = data.get("by_percent")
            claim = cls(
                text=str(data.get("text") or ""),
                figure=str(data["metric"]),
                input_len=tuple(int(length) for length in data.get("input_len") or ()),
                values={str(name): float(value) for name, value in (data.get("values") or {}).items()},
                ahead=str(data.get("ahead") or ""),
                behind=str(data.get("behind") or ""),
                by=None if span is None else (float(span[0]) / 100, float(span[-1]) / 100),
                equal=bool(data.get("equal")),
                line=None if data.get("line") is None else int(data["line"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{data!r} is not a claim: {error}") from None
        if not (claim.values or (claim.ahead and claim.behind) or claim.equal):
            raise ValueError(f"{data!r} is not a claim: it has neither values nor `ahead` nor `equal`")
        return claim


def read_claims(given: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """Return the claims that rows can confirm or contradict."""
    claims = []
    for data in given:
        try:
            claims.append(Claim.from_json(data))
        except ValueError:
            continue
    return claims


def check_claim(claim: Claim, rows: Sequence[LoadRow]) -> Finding | None:
    """Return the contradictions of a claim, a note if it is confirmed, or None if the rows show neither."""
    relevant = [row for row in rows if not claim.input_len or row.cell.input_len in claim.input_len]
    checked = [*_values(claim, relevant), *_relations(claim, relevant)]
    wrong = [text for good, text in checked if not good]
    if not checked:
        return None
    where = f" (line {claim.line}, on {claim.figure})" if claim.line else f" (on {claim.figure})"
    evidence = {"claim": claim.text, "line": claim.line, "figure": claim.figure, "wrong": wrong}
    if not wrong:
        return Finding("claim", "note", f"“{claim.text}”{where}: confirmed by the rows", "", evidence)
    return Finding(
        "claim",
        "invalid",
        f"“{claim.text}”{where} contradicts the rows: {'; '.join(wrong)}",
        "trust the rows; the claim may describe another run",
        evidence,
    )


def _values(claim: Claim, rows: Sequence[LoadRow]) -> Iterable[tuple[bool, str]]:
    for connector, stated in claim.values.items():
        for row in rows:
            value = row.get(claim.figure)
            if row.cell.connector == connector and value is not None:
                good = abs(value - stated) <= VALUE_TOLERANCE * abs(value)
                yield (
                    good,
                    f"{claim.figure} of {connector} at {row.cell.input_len:,} is {figure_text(value)}, "
                    f"not {figure_text(stated)}",
                )


def _relations(claim: Claim, rows: Sequence[LoadRow]) -> Iterable[tuple[bool, str]]:
    """Check order or equality at each common length."""
    for length in dict.fromkeys(row.cell.input_len for row in rows):
        by_connector = {
            row.cell.connector: value
            for row in rows
            if row.cell.input_len == length and (value := row.get(claim.figure))
        }
        if claim.equal and len(by_connector) > 1:
            share = max(by_connector.values()) / min(by_connector.values()) - 1
            yield share <= EQUAL, f"at {length:,} they differ by {share:.1%}"
        if not claim.ahead or claim.ahead not in by_connector or claim.behind not in by_connector:
            continue
        share = by_connector[claim.ahead] / by_connector[claim.behind] - 1
        if claim.figure.endswith("_ms"):  # the lower latency is ahead
            share = by_connector[claim.behind] / by_connector[claim.ahead] - 1
        if claim.by is None:
            yield share > 0, f"at {length:,} {claim.ahead} is not ahead ({share:+.1%})"
        else:
            low, high = claim.by
            good = low - SHARE_TOLERANCE <= share <= high + SHARE_TOLERANCE
            yield good, f"at {length:,} {claim.ahead} is ahead by {share:+.1%}, not {_by(claim.by)}"


def _by(span: tuple[float, float]) -> str:
    low, high = span
    return f"{low:.0%}" if low == high else f"{low * 100:g} to {high:.0%}"


Kind = Literal["suspicious", "claim", "ahead", "untold", "measured"]
KIND_WORDS: Final[dict[Kind, str]] = {
    "suspicious": "Warnings",
    "claim": "Written claims checked against the rows",
    "ahead": "Who is ahead",
    "untold": "Inconclusive",
    "measured": "Further results",
}


@dataclass(frozen=True)
class Statement:
    """One conclusion. ``rule``: its rule; ``places``: its rows; ``evidence``: figures. ``level``: "invalid"
    (wrong number or claim), "warning" or "note"."""

    kind: Kind
    rule: str
    text: str
    advice: str = ""
    level: Literal["invalid", "warning", "note"] = "note"
    places: tuple[str, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "places": list(self.places)}


def conclude(rows: Sequence[LoadRow], claims: Sequence[Claim] = (), by: str = "connector") -> list[Statement]:
    """Return all conclusions: warnings, claims, comparisons, inconclusive pairs."""
    compared = pairs(rows, by)
    return [
        *suspicious(rows),
        *claimed(claims, rows),
        *(_ahead(pair) for pair in compared if pair.significant),
        *_inconclusive(compared),
    ]


def suspicious(rows: Sequence[LoadRow]) -> list[Statement]:
    """Return one warning per rule, with all its rows and the text of the worst."""
    found = [(row, finding) for row in rows for finding in suspicions(row)]
    statements = []
    for rule in RULES:
        warned = [(row, finding) for row, finding in found if finding.gate == rule.__name__]
        if not warned:
            continue
        row, worst = max(warned, key=lambda pair: float(pair[1].evidence.get("excess", 0.0)))
        of = f"{_rows_text([row for row, _ in warned])}: "
        example = f"for example, {row.place()}: " if len(warned) > 1 else ""
        evidence = {load.key: finding.evidence for load, finding in warned}
        level = "invalid" if any(finding.level == "invalid" for _, finding in warned) else worst.level
        places = tuple(load.place() for load, _ in warned)
        text = of + example + worst.message
        statements.append(Statement("suspicious", worst.gate, text, worst.advice, level, places, evidence))
    return [*statements, *_other_rates(rows), *_twice(rows)]


def _other_rates(rows: Sequence[LoadRow]) -> Iterable[Statement]:
    """Report scripts whose rates differ from the measured ones."""
    rows = [
        row for row in rows if row.script_rate and row.request_rate and row.script_rate != row.request_rate
    ]
    if not rows:
        return
    places = "; ".join(f"{row.place()}, script: {figure_text(row.script_rate)}" for row in rows)
    yield Statement(
        "suspicious",
        "other_rates",
        f"the scripts next to the results offer other rates than the measured ones: {places}",
        "another script produced the results; store the command with each result",
        "warning",
        tuple(row.place() for row in rows),
    )


def _twice(rows: Sequence[LoadRow]) -> Iterable[Statement]:
    for group in same_twice(rows):
        places = tuple(row.origin or row.key for row in group)
        yield Statement(
            "suspicious",
            "same_twice",
            f"{group[0].place()}: {len(group)} rows agree in every digit, so they are one measurement",
            "count it once",
            "note",
            places,
        )


def _rows_text(rows: Sequence[LoadRow]) -> str:
    """Return ``mooncake at 1,024, 4,096; nixl at 1,024``, or the number of rows if there are many."""
    if len(rows) == 1:
        return rows[0].place()
    lengths: dict[str, list[int]] = {}
    for row in rows:
        lengths.setdefault(row.name or row.cell.connector, []).append(row.cell.input_len)
    return "; ".join(
        f"{name} at {', '.join(f'{length:,}' for length in dict.fromkeys(input_lens))}"
        for name, input_lens in lengths.items()
    )


def claimed(claims: Sequence[Claim], rows: Sequence[LoadRow]) -> list[Statement]:
    """Check each claim; contradicted ones come first."""
    found = [finding for claim in claims if (finding := check_claim(claim, rows)) is not None]
    found.sort(key=lambda finding: finding.level != "invalid")
    return [
        Statement("claim", "claim", finding.message, finding.advice, finding.level, (), finding.evidence)
        for finding in found
    ]


def _ahead(pair: Pair) -> Statement:
    rows = tuple(row.origin or row.key for row in pair.rows)
    return Statement("ahead", f"{pair.by}_ahead", pair.text(), pair.about(), "note", rows, _evidence([pair]))


def _inconclusive(compared: Sequence[Pair]) -> Iterable[Statement]:
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
    "give both the same number of engines (deployment.aggregated; default: P plus D), and measure again"
)
_UNTOLD_ADVICE: Final = "run each setting several times, alternating, at a rate that both keep up with"


def _evidence(pairs_: Sequence[Pair]) -> dict[str, Any]:
    return {
        "by": pairs_[0].by,
        "one": pairs_[0].one,
        "other": pairs_[0].other,
        "scope": pairs_[0].scope,
        "why_not": list(pairs_[0].why_not),
        "places": {pair.place: [vars(ratio) for ratio in pair.ratios] for pair in pairs_},
    }
