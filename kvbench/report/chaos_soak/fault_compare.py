"""Two chaos runs, or two soaks, beside each other: what each fault costs before and after, what drifts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvbench.core.chaos_soak.fault_cost import ALPHA, FaultChange, fault_change
from kvbench.core.records import HELD_METHODS
from kvbench.errors import InputError
from kvbench.report.chaos_soak.fault_rows import FaultGroup, fault_groups
from kvbench.report.chaos_soak.soak_rows import drift_rows
from kvbench.report.tables.table import MISSING, Column, Table, number
from kvbench.results.run import RunFolder

FAULT_WORDS: Final = (
    "Goodput lost: the median of the repeats, in requests; told apart by ranks (Mann and Whitney), where the "
    f"chance is below {ALPHA:.0%}, which four repeats a side can show at the earliest."
)
_FAULTS: Final = (
    Column("connector", "pair", align="left"),
    Column("fault", "fault", align="left"),
    Column("repeats", "n", align="right", rank=2),
    Column("lost_before", "goodput lost\nbefore", align="right"),
    Column("lost_after", "after", align="right"),
    Column("word", "told apart", align="left"),
    Column("back_before", "back (s)\nbefore", align="right"),
    Column("back_after", "after", align="right"),
    Column("stranded_before", "stranded blocks\nbefore", align="right", rank=1),
    Column("stranded_after", "after", align="right", rank=1),
    Column("taken_before", "taken up\nbefore", align="left", rank=1),
    Column("taken_after", "after", align="left", rank=1),
)
_DRIFT: Final = (
    Column("connector", "pair", align="left"),
    Column("process", "process", align="left"),
    Column("what", "what", align="left"),
    Column("median_before", "median\nbefore", align="right"),
    Column("median_after", "after", align="right"),
    Column("per_hour_before", "per hour\nbefore", align="right"),
    Column("per_hour_after", "after", align="right"),
    Column("verdict_before", "verdict\nbefore", align="left"),
    Column("verdict_after", "after", align="left"),
)


def held_comparison(runs: Sequence[RunFolder]) -> Table | None:
    """The table of two runs at a held rate; None where none is one. Raises InputError for one beside another
    kind, for more than two, or at other rates.
    """
    kinds = {str(run.manifest.get("kind")) for run in runs}
    if not kinds & set(HELD_METHODS):
        return None
    if len(kinds) > 1 or len(runs) != 2:
        found = ", ".join(sorted(kinds))
        raise InputError(
            f"runs at a held rate are compared in pairs of one kind: these are {len(runs)} of {found}",
            hint="kvbench compare BEFORE AFTER, two chaos runs or two soaks",
        )
    make: Callable[[RunFolder, RunFolder], Table] = _faults if kinds == {"chaos"} else _drifts
    return make(*runs)


def _faults(before: RunFolder, after: RunFolder) -> Table:
    sides = [{(each.cell.key, each.name): each for each in fault_groups(run)} for run in (before, after)]
    both = [key for key in sides[0] if key in sides[1]]
    if not both:
        raise InputError("these chaos runs have no fault of the same pair and length in common")
    rates = [f"{key[0]}: {sides[0][key].rate:g} and {sides[1][key].rate:g}" for key in both if
             sides[0][key].rate != sides[1][key].rate]  # fmt: skip
    if rates:
        raise InputError(
            f"these runs held other rates ({rates[0]} req/s), so that what a fault cost cannot be compared",
            hint="hold the same one: --rate",
        )
    rows = [_fault_row(sides[0][key], sides[1][key]) for key in both]
    return Table("What each fault costs, before and after", _FAULTS, _cells(rows, _FAULTS), rows, "faults",
                 FAULT_WORDS)  # fmt: skip


def _fault_row(before: FaultGroup, after: FaultGroup) -> dict[str, Any]:
    change = _change(before, after)
    return {
        "connector": before.cell.connector,
        "input_len": before.cell.input_len,
        "fault": before.name,
        "repeats": f"{before.row.held}, {after.row.held}",
        "lost_before": change.before,
        "lost_after": change.after,
        "word": change.word,
        "chance": change.chance,
        "back_before": _back(before),
        "back_after": _back(after),
        "stranded_before": before.stranded_blocks,
        "stranded_after": after.stranded_blocks,
        "taken_before": before.taken_up,
        "taken_after": after.taken_up,
    }


def _change(before: FaultGroup, after: FaultGroup) -> FaultChange:
    lost = [
        [each.cost.goodput_lost for each in side.trials if each.cost.was_held] for side in (before, after)
    ]
    return fault_change(lost[0], lost[1])


def _back(group: FaultGroup) -> float | str | None:
    row = group.row
    return "never" if row.held and 2 * row.never >= row.held else row.back_s


def _drifts(before: RunFolder, after: RunFolder) -> Table:
    keys = ("connector", "input_len", "process", "what")
    sides = [{tuple(row[key] for key in keys): row for row in drift_rows(run)} for run in (before, after)]
    rows = []
    for key in (each for each in sides[0] if each in sides[1]):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        for name in ("median", "per_hour", "verdict"):
            row |= {f"{name}_before": sides[0][key][name], f"{name}_after": sides[1][key][name]}
        rows.append(row)
    if not rows:
        raise InputError("these soaks have no pair and length in common")
    return Table("What drifts, before and after", _DRIFT, _cells(rows, _DRIFT), rows, "drift")


def _cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[list[str]]:
    return [[_text(row.get(column.key)) for column in columns] for row in rows]


def _text(value: Any) -> str:
    if value in (None, ""):
        return MISSING
    return number(value) if isinstance(value, float) else str(value)
