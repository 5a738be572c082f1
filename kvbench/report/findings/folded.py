"""The findings on a page: a part for each kind, statements that are alike in one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from kvbench.core.findings.findings import KIND_WORDS, Statement
from kvbench.core.findings.rate_change import AHEAD
from kvbench.report.findings.ahead import RatePair, no_winner_text, unconverged_text, unequal_text
from kvbench.report.findings.findings import as_notes, by_kind
from kvbench.report.tables.table import Table, of_texts
from kvbench.report.value import Block

OPEN: Final = (KIND_WORDS["ahead"],)
"""Kinds that a page shows unfolded; and whatever holds a number that is not what it is called."""
_UNTOLD: Final = "cannot be told from this data: "


def folded(found: Sequence[Statement], rule: str = "") -> Iterator[Block]:
    """A block for each kind. ``rule``: by which rates are ordered, said where any are."""
    for words, mine in by_kind(found).items():
        tabled = [each for each in mine if _rows(each)]
        rows = [row for each in tabled for row in _rows(each)]
        table = _table(words, rows) if len(rows) > 1 else None
        notes = as_notes(mine if table is None else (each for each in mine if each not in tabled))
        advice = dict.fromkeys(each.advice for each in tabled if each.advice and table is not None)
        said = [rule if words in OPEN else "", "; or ".join(advice)]
        count = len(table.cells if table else ()) + len(notes)
        void = any(each.level == "invalid" for each in mine)
        yield Block(
            f"{words} ({count})",
            " ".join(filter(None, said)),
            notes,
            table,
            folded=words not in OPEN and not void,
        )


def _table(words: str, rows: Iterable[tuple[str, str, str]]) -> Table:
    """Places of the same two and the same words are joined."""
    joined: dict[tuple[str, str], dict[str, None]] = {}
    for which, where, what in rows:
        joined.setdefault((which, what), {})[where] = None
    cells = [[which, "; ".join(where), what] for (which, what), where in joined.items()]
    header = ("of", "where", "by how much" if words in OPEN else "why")
    return of_texts(words, header, cells, "left")


def _rows(of: Statement) -> list[tuple[str, str, str]]:
    """(of which two, where, what) of a statement that compares; empty for another one."""
    if "pairs" in of.evidence:
        return [_of_pair(of, RatePair(**each)) for each in of.evidence["pairs"]]
    if "places" in of.evidence and of.kind == "untold":
        evidence: dict[str, Any] = of.evidence
        why = of.text.partition(_UNTOLD)[2]
        return (
            [(f"{evidence['one']} or {evidence['other']}", "; ".join(evidence["places"]), why)] if why else []
        )
    return []


def _of_pair(of: Statement, pair: RatePair) -> tuple[str, str, str]:
    where = f"{pair.input_len:,} in, {pair.output_len:,} out"
    if of.kind == "ahead":
        return f"{pair.ahead} over {pair.behind}", where, pair.relation().removeprefix(f"{pair.ahead} ")
    if pair.no_winner:
        why = no_winner_text([pair])
    elif pair.unconverged:
        why = unconverged_text([pair]).removeprefix("cannot be told: ")
    elif pair.per is not None:
        why = unequal_text([pair]).removeprefix("cannot be compared directly: ")
    else:
        why = f"neither is the higher one with a probability of {AHEAD:.0%}"
    return " or ".join(sorted((pair.ahead, pair.behind))), where, why
