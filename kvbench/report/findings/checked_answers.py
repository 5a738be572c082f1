"""How many answers were checked while the load lasted, and how many were wrong: the first thing to know."""

from __future__ import annotations

from collections.abc import Iterator

from kvbench.core.canaries.tally import Tally
from kvbench.results.run import RunFolder

MOST_CELLS = 6
"""Of more cells, only those with wrong answers are told by name."""


def run_tally(run: RunFolder) -> Tally:
    """Of all trials, and of what was asked for at the ends of cells."""
    total = Tally.of_trials(run.all_trials)
    for result in run.cells:
        cell = Tally.from_json(result.canaries)
        total += Tally(cell.at_end, cell.wrong_at_end, own=min(cell.own, cell.at_end))
    return total


def checked_lines(run: RunFolder) -> Iterator[str]:
    """Of the run, and of its cells; nothing where nothing answers with text, as on virtual time."""
    kind = run.manifest.get("kind")
    if kind not in ("sweep", "bench", "chaos", "soak") or not run.all_trials:
        return
    total = run_tally(run)
    if not total.checked:
        yield "answers under load: none were checked"
        return
    yield f"answers under load: {total.text()}"
    cells = [(result, Tally.from_json(result.canaries)) for result in run.cells]
    if len(cells) > 1:
        told = [(each.cell.key, tally) for each, tally in cells if tally.checked]
        if len(told) > MOST_CELLS:
            told = [(key, tally) for key, tally in told if tally.wrong]
        yield from (f"  {key}: {tally.text()}" for key, tally in told)
