"""Which gates could see nothing in a run: that they found nothing proves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kvbench.core.gates.gates import CORRUPT
from kvbench.report.tables.result import Row
from kvbench.report.value import Note
from kvbench.results.run import RunFolder

NO_REFERENCE: Final = "no aggregated server to compare outputs with"

_Lacking = Mapping[str, Sequence[str]]
"""What was lacking, in words → gates."""


def unseen_gates(run: RunFolder, rows: Sequence[Row]) -> Iterable[Note]:
    """One note for all deployments whose trials lacked the same evidence.

    Of the trials behind the table, or where there are none of all: a gate is named if it was blind in each.
    """
    shown = {row.trial_id for row in rows if row.trial_id}
    trials = [trial for trial in run.all_trials if isinstance(trial.summary.get("unseen"), Mapping)]
    behind = [trial for trial in trials if trial.trial_id in shown]
    told: dict[str, list[_Lacking]] = {}
    for trial in behind or trials:
        told.setdefault(trial.cell.connector, []).append(trial.summary["unseen"])
    compared = {cell.cell.connector for cell in run.cells if cell.equal_outputs is not None}
    reference = {str(row.get("label")) for row in run.outputs}
    alike: dict[tuple[tuple[str, tuple[str, ...]], ...], list[str]] = {}
    for name, lacking in told.items():
        mine = _in_each(lacking)
        if name not in compared | reference:
            mine[NO_REFERENCE] = [CORRUPT.name]
        if mine:
            alike.setdefault(tuple((why, tuple(gates)) for why, gates in mine.items()), []).append(name)
    for parts, names in alike.items():
        listed = "; ".join(f"{why}: {', '.join(gates)}" for why, gates in parts)
        yield Note(
            f"gates that saw nothing of {', '.join(names)}, and prove nothing by their silence: {listed}",
            "`kvbench doctor --gates` says what each would prove",
        )


def _in_each(lacking: Sequence[_Lacking]) -> dict[str, list[str]]:
    """The gates that were blind in every trial, under the last trial's words."""
    always = set.intersection(*({gate for gates in each.values() for gate in gates} for each in lacking))
    last = {why: [gate for gate in gates if gate in always] for why, gates in lacking[-1].items()}
    return {why: gates for why, gates in last.items() if gates}
