"""How many answers were checked while the load lasted, and how many were wrong: the first thing to know."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.core.canaries.answer_kinds import found_in_any, percent_text
from kvbench.core.canaries.tally import Tally
from kvbench.core.records import Cell
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
