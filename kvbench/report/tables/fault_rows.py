"""Table of a chaos run, one row per fault and pair over its repeats; comparison of two chaos runs or
soaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from kvbench.core.chaos_soak.fault_cost import (
    ALPHA,
    FATES,
    FaultChange,
    FaultCost,
    FaultRow,
    fault_change,
    fault_row,
)
from kvbench.core.chaos_soak.fault_plan import KINDS, TARGETS
from kvbench.core.records import HELD_METHODS, Cell, TrialRecord
from kvbench.core.stats import upper_bound
from kvbench.errors import InputError
from kvbench.report.tables.soak_rows import drift_rows
from kvbench.report.tables.table import MISSING, WHOLE_RUN, Column, Table, number
from kvbench.results.run import RunFolder

CONFIDENCE: Final = 0.95
NEVER: Final = "never"


@dataclass(frozen=True)
class InjectedFault:
    """One trial of a chaos run with its stored fault."""

    trial: TrialRecord
    cost: FaultCost
    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @classmethod
    def of(cls, trial: TrialRecord) -> InjectedFault | None:
        """Return None for another kind of trial, or an edited one."""
        record = trial.summary.get("chaos")
        if trial.method != "chaos" or not isinstance(record, Mapping):
            return None
        try:
            str(record["name"]), float(record["struck_s"])
            return cls(trial, FaultCost.from_json(record["cost"]), record)
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True)
class FaultGroup:
    cell: Cell
    rate: float
    name: str
    trials: Sequence[InjectedFault] = field(default_factory=tuple)

    @property
    def row(self) -> FaultRow:
        return fault_row([trial.cost for trial in self.trials])

    @property
    def answers(self) -> Counter[str]:
        """Return the counts of checked and wrong answers."""
        counts: Counter[str] = Counter()
        for trial in self.trials:
            answers = trial.record.get("answers") or {}
            counts.update({key: int(answers.get(key) or 0) for key in ("checked", "wrong", "unanswered")})
        return counts

    @property
    def stranded_blocks(self) -> float:
        """Return the median over the repeats, summed over all processes."""
        return float(
            median(sum((trial.record.get("stranded_blocks") or {}).values()) for trial in self.trials)
        )

    @property
    def stranded_mb(self) -> float | None:
        stranded = [trial.record.get("stranded_bytes") for trial in self.trials]
        known = [float(value) for value in stranded if isinstance(value, (int, float))]
        return median(known) / 1e6 if known else None

    @property
    def grown_mb(self) -> float | None:
        """Return the memory growth of the surviving processes together (median, MB)."""
        found = [sum((trial.record.get("grown_bytes") or {}).values()) for trial in self.trials]
        return median(found) / 1e6 if found else None

    @property
    def taken_up(self) -> str:
        """Return in how many repeats a restarted process served again; empty for other faults."""
        restarts = [trial.record.get("again") for trial in self.trials]
        known = [bool(restart.get("taken_up")) for restart in restarts if isinstance(restart, Mapping)]
        return f"{sum(known)} of {len(known)}" if known else ""

    @property
    def noticed(self) -> str:
        """Return the most frequent first detector with its median time: ``router 0.1 s``."""
        firsts = [
            (str(notice["who"]), float(notice["after_s"]))
            for trial in self.trials
            for notice in (trial.record.get("noticed") or [])[:1]
        ]
        if not firsts:
            return "not detected"
        detector = Counter(name for name, _ in firsts).most_common(1)[0][0]
        return f"{detector} {median(after for name, after in firsts if name == detector):.1f} s"


def fault_groups(run: RunFolder) -> list[FaultGroup]:
    """Return the faults by pair, then by kind and target in documented order."""
    found: dict[tuple[Cell, str], list[InjectedFault]] = {}
    for trial in run.all_trials:
        if (fault := InjectedFault.of(trial)) is not None:
            found.setdefault((trial.cell, fault.name), []).append(fault)
    cells = list(dict.fromkeys(cell for cell, _ in found))
    groups = [
        FaultGroup(cell, trials[0].trial.request_rate, name, tuple(trials))
        for (cell, name), trials in found.items()
    ]
    return sorted(groups, key=lambda group: (cells.index(group.cell), _fault_order(group.name)))


def _fault_order(name: str) -> tuple[int, int]:
    kind, _, target = name.partition(" ")
    return (
        list(KINDS).index(kind) if kind in KINDS else len(KINDS),
        list(TARGETS).index(target) if target in TARGETS else len(TARGETS),
    )


COLUMNS: Final = (
    Column("connector", "pair", align="left"),
    Column("fault", "fault", align="left"),
    Column("repeats", "n", align="right", rank=3),
    Column("back_s", "recovery (s)", align="right"),
    Column("back_worst_s", "worst", align="right", rank=2),
    Column("goodput_lost", "goodput\nlost (req)", align="right"),
    Column("lost_s", "of rate\n(s)", align="right", rank=1),
    Column("lost", "lost", align="right"),
    Column("hung", "hung", align="right"),
    Column("late", "late", align="right"),
    Column("wrong", "wrong", align="right"),
    Column("stranded_blocks", "stranded\nblocks", align="right", rank=1),
    Column("stranded_mb", "stranded\nMB", align="right", rank=3),
    Column("noticed", "first notice", align="left", rank=1, width=22),
    Column("taken_up", "serves again", align="left", rank=2),
)
WORDS: Final = (
    "Recovery: seconds from the fault until attainment recovered (median and worst of the repeats). "
    "Goodput lost: "
    "requests due in that time that were not answered within the SLO, also in seconds of the offered "
    "rate. Lost, hung, late: requests of all repeats. Wrong: of the checked answers. Stranded: KV "
    "blocks still in use after all requests ended. Serves again: repeats in which a restarted process "
    "served requests."
)


def flat(group: FaultGroup) -> dict[str, Any]:
    row, answers = group.row, group.answers
    return {
        "connector": group.cell.connector,
        "input_len": group.cell.input_len,
        "output_len": group.cell.output_len,
        "request_rate": group.rate,
        "fault": group.name,
        "repeats": row.repeats,
        "held_before": row.held,
        "never_back": row.never,
        "back_s": row.back_s,
        "back_worst_s": row.back_worst_s,
        "goodput_lost": row.goodput_lost,
        "goodput_lost_worst": row.goodput_lost_worst,
        "lost_s": row.lost_s,
        **{fate: row.fates[fate] for fate in FATES if fate not in ("good", "wrong")},
        "wrong": answers["wrong"],
        "answers_checked": answers["checked"],
        "stranded_blocks": group.stranded_blocks,
        "stranded_mb": group.stranded_mb,
        "grown_mb": group.grown_mb,
        "noticed": group.noticed,
        "taken_up": group.taken_up,
    }


def fault_table(groups: Iterable[FaultGroup]) -> Table:
    """Return one row per fault; without a sustained rate before the fault the row says so."""
    groups = list(groups)
    cells = [_cells(group) for group in groups]
    names = [group.trials[0].trial.trial_id for group in groups]
    return Table(
        "Cost of each fault", COLUMNS, cells, [flat(group) for group in groups], "faults", WORDS,
        window=WHOLE_RUN, trials=names,
    )  # fmt: skip


def _cells(group: FaultGroup) -> list[str]:
    row, answers = group.row, group.answers
    head = [group.cell.connector, group.name, str(row.repeats)]
    if not row.held:
        return [*head, "not sustained", *[MISSING] * (len(COLUMNS) - len(head) - 1)]
    # The median is "never" if at least half of the repeats never recovered.
    back = NEVER if 2 * row.never >= row.held else number(row.back_s)
    worst = f"{NEVER} {row.never}×" if row.never else number(row.back_worst_s)
    checked = answers["checked"] + answers["wrong"]
    wrong = f"{answers['wrong']} of {answers['checked']}" if checked else MISSING
    return [
        *head, back, worst, _whole(row.goodput_lost), number(row.lost_s),
        *(str(row.fates[fate]) for fate in ("lost", "hung", "late")), wrong,
        _whole(group.stranded_blocks), number(group.stranded_mb) if group.stranded_mb else "0",
        group.noticed, group.taken_up or MISSING,
    ]  # fmt: skip


def _whole(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def answers_text(groups: Iterable[FaultGroup]) -> str:
    counts: Counter[str] = Counter()
    for group in groups:
        counts.update(group.answers)
    checked, wrong = counts["checked"], counts["wrong"]
    if not checked:
        return "no answer could be checked"
    most = upper_bound(wrong, checked, CONFIDENCE)
    return f"{wrong} of {checked} answers wrong: at most {most:.1%} ({CONFIDENCE:.0%} confidence)"


def recovery_lines(groups: Sequence[FaultGroup]) -> list[str]:
    lines = []
    for cell in dict.fromkeys(group.cell for group in groups):
        cell_groups = [group for group in groups if group.cell == cell]
        judged = [group for group in cell_groups if group.row.held]
        never = [group.name for group in judged if group.row.never]
        backs = [group.row.back_worst_s for group in judged if group.row.back_worst_s is not None]
        text = f"{cell.connector} at {number(cell_groups[0].rate)} req/s: "
        text += f"recovered from {len(judged) - len(never)} of {len(judged)} faults in every repeat"
        text += f", within {max(backs):.1f} s" if backs else ""
        text += f"; not recovered within the observed time: {', '.join(never)}" if never else ""
        if rest := len(cell_groups) - len(judged):
            text += f"; {rest} not judged, because the rate was not sustained before them"
        lines.append(text)
    return lines


def notices_rows(groups: Iterable[FaultGroup]) -> list[list[str]]:
    """Return the log messages of each fault's first repeat."""
    return [
        [group.cell.connector, group.name, str(notice["who"]), f"{notice['after_s']:.2f}", _words(notice)]
        for group in groups
        for notice in (group.trials[0].record.get("noticed") or [])
    ]


def _words(notice: Mapping[str, Any]) -> str:
    more = f" (and {notice['more']} more)" if notice.get("more") else ""
    return f"{notice['words']}{more}"


FAULT_WORDS: Final = (
    "Goodput lost: median of the repeats, in requests. Significance: Mann-Whitney rank test, "
    f"p < {ALPHA:.0%}; it needs at least four repeats per side."
)
_FAULTS: Final = (
    Column("connector", "pair", align="left"),
    Column("fault", "fault", align="left"),
    Column("repeats", "n", align="right", rank=2),
    Column("lost_before", "goodput lost\nbefore", align="right"),
    Column("lost_after", "after", align="right"),
    Column("word", "difference", align="left"),
    Column("back_before", "recovery (s)\nbefore", align="right"),
    Column("back_after", "after", align="right"),
    Column("stranded_before", "stranded blocks\nbefore", align="right", rank=1),
    Column("stranded_after", "after", align="right", rank=1),
    Column("taken_before", "serves again\nbefore", align="left", rank=1),
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


def fixed_rate_comparison(runs: Sequence[RunFolder]) -> Table | None:
    """Return the comparison of two chaos or soak runs, or None for other kinds. Raises InputError for mixed
    kinds, more than two runs, or different rates."""
    kinds = {str(run.manifest.get("kind")) for run in runs}
    if not kinds & set(HELD_METHODS):
        return None
    if len(kinds) > 1 or len(runs) != 2:
        found = ", ".join(sorted(kinds))
        raise InputError(
            f"chaos and soak runs are compared in pairs of one kind: given are {len(runs)} runs of {found}",
            hint="kvbench compare BEFORE AFTER, two chaos runs or two soaks",
        )
    make: Callable[[RunFolder, RunFolder], Table] = _faults if kinds == {"chaos"} else _drifts
    return make(*runs)


def _faults(before: RunFolder, after: RunFolder) -> Table:
    sides = [{(group.cell.key, group.name): group for group in fault_groups(run)} for run in (before, after)]
    both = [key for key in sides[0] if key in sides[1]]
    if not both:
        raise InputError("these chaos runs have no fault of the same pair and length in common")
    rates = [f"{key[0]}: {sides[0][key].rate:g} and {sides[1][key].rate:g}" for key in both if
             sides[0][key].rate != sides[1][key].rate]  # fmt: skip
    if rates:
        raise InputError(
            f"these runs offered different rates ({rates[0]} req/s), so fault costs are not comparable",
            hint="use the same rate: --rate",
        )
    rows = [_fault_row(sides[0][key], sides[1][key]) for key in both]
    cells = _fault_compare_cells(rows, _FAULTS)
    return Table("Cost of each fault, before and after", _FAULTS, cells, rows, "faults", FAULT_WORDS)


def _fault_row(before: FaultGroup, after: FaultGroup) -> dict[str, Any]:
    change = _goodput_change(before, after)
    return {
        "connector": before.cell.connector,
        "input_len": before.cell.input_len,
        "fault": before.name,
        "repeats": f"{before.row.held}, {after.row.held}",
        "lost_before": change.before,
        "lost_after": change.after,
        "word": change.word,
        "chance": change.chance,
        "back_before": _recovery_s(before),
        "back_after": _recovery_s(after),
        "stranded_before": before.stranded_blocks,
        "stranded_after": after.stranded_blocks,
        "taken_before": before.taken_up,
        "taken_after": after.taken_up,
    }


def _goodput_change(before: FaultGroup, after: FaultGroup) -> FaultChange:
    lost = [
        [trial.cost.goodput_lost for trial in side.trials if trial.cost.was_held] for side in (before, after)
    ]
    return fault_change(lost[0], lost[1])


def _recovery_s(group: FaultGroup) -> float | str | None:
    row = group.row
    return "never" if row.held and 2 * row.never >= row.held else row.back_s


def _drifts(before: RunFolder, after: RunFolder) -> Table:
    keys = ("connector", "input_len", "process", "what")
    sides = [{tuple(row[key] for key in keys): row for row in drift_rows(run)} for run in (before, after)]
    rows = []
    for key in (side for side in sides[0] if side in sides[1]):
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        for name in ("median", "per_hour", "verdict"):
            row |= {f"{name}_before": sides[0][key][name], f"{name}_after": sides[1][key][name]}
        rows.append(row)
    if not rows:
        raise InputError("these soaks have no pair and length in common")
    return Table("Drift, before and after", _DRIFT, _fault_compare_cells(rows, _DRIFT), rows, "drift")


def _fault_compare_cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[list[str]]:
    return [[_text(row.get(column.key)) for column in columns] for row in rows]


def _text(value: Any) -> str:
    if value in (None, ""):
        return MISSING
    return number(value) if isinstance(value, float) else str(value)
