"""Conclusions that somebody wrote beside his tables, checked against the rows.

A claim is data, as an import describes it under ``claims``: what is said (``text``, on which ``line``), of
which figure (``metric``), and the relation or the values::

    {"text": "…", "line": 1020, "metric": "mean_ttft_ms", "input_len": [32768],
     "ahead": "mooncake", "behind": "nixl", "values": {"mooncake": 461, "nixl": 2779}}
    {"text": "…", "metric": "output_throughput", "input_len": [1024, 4096],
     "ahead": "nixl", "behind": "mooncake", "by_percent": [2, 5]}
    {"text": "…", "metric": "mean_tpot_ms", "equal": true}

``by_percent`` is the advantage: of the larger over the smaller figure, less one. Without ``input_len`` a
claim is of all lengths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvbench.core.findings.load_row import LoadRow, figure_text
from kvbench.core.records import Finding

VALUE_TOLERANCE: Final = 0.02
"""A written value may be rounded so far from the table's."""
SHARE_TOLERANCE: Final = 0.005
"""And a written advantage so far, as a share of one."""
EQUAL: Final = 0.05
"""What people call equal."""


@dataclass(frozen=True)
class Claim:
    """One conclusion as data; see the module."""

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
        """From a claim's JSON. Raises ValueError where it says nothing that can be checked against rows."""
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
            raise ValueError(f"{data!r} is no claim: {error}") from None
        if not (claim.values or (claim.ahead and claim.behind) or claim.equal):
            raise ValueError(f"{data!r} is no claim: it names no values, nobody ahead, and nobody equal")
        return claim


def read_claims(given: Iterable[Mapping[str, Any]]) -> list[Claim]:
    """Those of the given claims that rows can bear out or contradict; words alone are left out."""
    claims = []
    for data in given:
        try:
            claims.append(Claim.from_json(data))
        except ValueError:
            continue
    return claims


def check_claim(claim: Claim, rows: Sequence[LoadRow]) -> Finding | None:
    """What of a claim the rows contradict, or a note that they bear it out; None where they show neither."""
    mine = [row for row in rows if not claim.input_len or row.cell.input_len in claim.input_len]
    checked = [*_values(claim, mine), *_relations(claim, mine)]
    wrong = [text for good, text in checked if not good]
    if not checked:
        return None
    where = f" (line {claim.line}, on {claim.figure})" if claim.line else f" (on {claim.figure})"
    evidence = {"claim": claim.text, "line": claim.line, "figure": claim.figure, "wrong": wrong}
    if not wrong:
        return Finding("claim", "note", f"“{claim.text}”{where}: the rows bear it out", "", evidence)
    return Finding(
        "claim",
        "invalid",
        f"“{claim.text}”{where} contradicts the rows: {'; '.join(wrong)}",
        "go by the rows; the words may be of another run",
        evidence,
    )


def _values(claim: Claim, rows: Sequence[LoadRow]) -> Iterable[tuple[bool, str]]:
    for connector, said in claim.values.items():
        for row in rows:
            value = row.get(claim.figure)
            if row.cell.connector == connector and value is not None:
                good = abs(value - said) <= VALUE_TOLERANCE * abs(value)
                yield (
                    good,
                    f"{claim.figure} of {connector} at {row.cell.input_len:,} is {figure_text(value)}, "
                    f"not {figure_text(said)}",
                )


def _relations(claim: Claim, rows: Sequence[LoadRow]) -> Iterable[tuple[bool, str]]:
    """An order, or equality, at each length where both sides have a row."""
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
            yield good, f"at {length:,} the advantage of {claim.ahead} is {share:+.1%}, not {_by(claim.by)}"


def _by(span: tuple[float, float]) -> str:
    low, high = span
    return f"{low:.0%}" if low == high else f"{low * 100:g} to {high:.0%}"
