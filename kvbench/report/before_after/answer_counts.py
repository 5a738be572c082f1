"""Answers that were checked under load, of several runs side by side: how many, wrong ones, and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvbench.core.canaries.answer_kinds import percent_text, wrong_share_bound
from kvbench.core.canaries.tally import Tally
from kvbench.core.records import Cell
from kvbench.report.findings.checked_answers import cell_tally, run_tally
from kvbench.report.tables.numbers import MISSING
from kvbench.report.tables.table import Column, Table
from kvbench.results.run import RunFolder

TITLE: Final = "answers under load: wrong of checked, and what share of wrong ones they leave possible (95 %)"


def answer_counts(sides: Sequence[tuple[str, Sequence[RunFolder]]]) -> Table | None:
    """One row for all answers, and one for each cell; None where no run has checked any.

    ``sides``: a name and its runs, whose counts are added.
    """
    rows = [_row("all", [sum((run_tally(run) for run in runs), Tally()) for _, runs in sides])]
    cells = list(dict.fromkeys(each.cell for _, runs in sides for run in runs for each in run.cells))
    for cell in cells if len(cells) > 1 else ():
        tallies = [sum((cell_tally(run, cell) for run in runs), Tally()) for _, runs in sides]
        rows.append(_row(_place(cell), tallies))
    if not any(tally.checked for tally in rows[0][1]):
        return None
    names = [name for name, _ in sides]
    columns = [Column("cell", "cell", align="left"), *(Column(name, name, align="right") for name in names)]
    shown = [[place, *map(_text, tallies)] for place, tallies in rows]
    flat = [
        {"cell": place, **{name: _flat(tally) for name, tally in zip(names, tallies, strict=True)}}
        for place, tallies in rows
    ]
    return Table(TITLE, columns, shown, flat, "answers")


def _row(place: str, tallies: Sequence[Tally]) -> tuple[str, Sequence[Tally]]:
    return place, tallies


def _place(cell: Cell) -> str:
    return f"{cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out"


def _text(tally: Tally) -> str:
    if not tally.checked:
        return MISSING
    bound = percent_text(wrong_share_bound(tally.wrong, tally.checked))
    weak = " (its own when idle)" if tally.own else ""
    return f"{tally.wrong:,} of {tally.checked:,}, < {bound}{weak}"


def _flat(tally: Tally) -> dict[str, Any]:
    """``wrong_below``: a share of 1; None where none was checked."""
    below = wrong_share_bound(tally.wrong, tally.checked) if tally.checked else None
    return {"checked": tally.checked, "wrong": tally.wrong, "wrong_below": below, "own": tally.own}
