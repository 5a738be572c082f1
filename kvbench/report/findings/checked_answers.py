"""How many answers were checked under load, how many were wrong, and the bound: the first thing to know.

The figures are of one run, or of several side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvbench.core.canaries.answer_kinds import found_in_any, percent_text, wrong_share_bound
from kvbench.core.canaries.tally import Tally
from kvbench.core.records import Cell
from kvbench.report.tables.table import MISSING, Column, Table
from kvbench.results.run import CellResult, RunFolder

MOST_CELLS = 6
"""Of more cells, only those with wrong answers are told by name."""


def run_tally(run: RunFolder) -> Tally:
    """Of all trials, and of what was asked for at the ends of cells."""
    total = Tally.of_trials(run.all_trials)
    return sum(map(_at_end, run.cells), total)


def cell_tally(run: RunFolder, cell: Cell) -> Tally:
    """Of all trials of a cell, and of what was asked for at its end."""
    total = Tally.of_trials(trial for trial in run.all_trials if trial.cell == cell)
    return sum((_at_end(result) for result in run.cells if result.cell == cell), total)


def _at_end(result: CellResult) -> Tally:
    cell = Tally.from_json(result.canaries)
    return Tally(cell.at_end, cell.wrong_at_end, own=min(cell.own, cell.at_end))


def noise_power(run: RunFolder) -> float | None:
    """The share of wrong answers that the run's noise tests would have seen, with 95 % in one of its trials;
    None where no server differed from itself, so that nothing was tested.
    """
    told = [trial.engine.get("canaries") or {} for trial in run.all_trials]
    tested = [each for each in told if each.get("noise_test")]
    return (
        found_in_any([(each["checked"], each["noise_test"]["refused_from"]) for each in tested])
        if tested
        else None
    )


def checked_lines(run: RunFolder) -> Iterator[str]:
    """Of the run, and of its cells; nothing where nothing answers with text, as on virtual time."""
    kind = run.manifest.get("kind")
    if kind not in ("sweep", "bench", "chaos", "soak") or not run.all_trials:
        return
    total = run_tally(run)
    if not total.checked:
        yield "answers under load: none were checked"
        return
    power = noise_power(run)
    seen = "" if power is None else f"; the test of their noise would have seen {percent_text(power)} (95 %)"
    yield f"answers under load: {total.text()}{seen}"
    cells = [(result, Tally.from_json(result.canaries)) for result in run.cells]
    if len(cells) > 1:
        told = [(each.cell.key, tally) for each, tally in cells if tally.checked]
        if len(told) > MOST_CELLS:
            told = [(key, tally) for key, tally in told if tally.wrong]
        yield from (f"  {key}: {tally.text()}" for key, tally in told)


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
