"""Runs side by side: one comparison, for ``kvbench compare``, for a notebook, and for microbenchmarks.

Latencies and rates of loads are those of the steady part, as in a run's own tables, if every row has them. An
imported result has only figures of the whole run; rows are then compared by these. Files have both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kvbench.core.findings.ahead import Pair, pairs
from kvbench.core.findings.findings import Statement
from kvbench.core.findings.load_row import LoadRow
from kvbench.core.plan.engine_count import Unit, unit_of
from kvbench.core.transfers.stats import Change
from kvbench.errors import InputError, KvbenchError
from kvbench.report.findings.ahead import RatePair, rate_pairs
from kvbench.report.findings.load_rows import AXES, conclusions, default_axis, load_rows, searched_rows
from kvbench.report.findings.transfers import changes_text
from kvbench.report.tables.columns import TITLES
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.table import (
    STEADY,
    WHOLE_RUN,
    WRITERS,
    Column,
    Table,
    json_text,
    of_values,
    rows_of,
)
from kvbench.report.tables.transfers import CASE_KEYS, flat_row
from kvbench.results.provenance import check_comparable, differences
from kvbench.results.run import RunFolder, load_run

_AXIS_TITLES: Final = {
    "run": "run",
    "connector": "connector",
    "mode": "way",
    "protocol": "protocol",
    "nics": "num_rdma_nic",
    "tp": "tp",
    "input_len": "input length",
    "output_len": "output length",
    "concurrency": "max concurrency",
    "rate": "qps",
}
_OF_STEADY: Final = (
    "achieved_request_rate", "output_tok_per_s", "total_tok_per_s",
    *(f"{name}_ms_{figure}" for name in ("ttft", "tpot", "itl") for figure in ("mean", "p50", "p90", "p99")),
)  # fmt: skip
_SERVE: Final = (
    "completed", "failed", "duration_s", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput",
    *(f"{figure}_{name}_ms" for name in ("ttft", "tpot") for figure in ("mean", "median", "p90", "p99")),
    "mean_itl_ms", "median_itl_ms", "p99_itl_ms",
)  # fmt: skip
_BRIEF: Final = re.compile(
    r"(request|output)_throughput|(mean|p99)_t\w+|achieved\w+|output_tok_per_s|t\w+_(mean|p99)"
)
"""Figures that a terminal shows."""
_CHANGE: Final = {
    "before_gb_per_s": "GB/s before",
    "after_gb_per_s": "GB/s after",
    "ratio": "ratio",
    "low": "from",
    "high": "to",
    "before_p50_s": "p50 (s) before",
    "after_p50_s": "p50 (s) after",
    "told": "told",
}


def load_tables(
    found: Sequence[LoadRow], by: str, sort: Sequence[str], group: str, several: bool
) -> list[Table]:
    """Return the rows as one table, or one per level of ``group``.

    ``by``: compared axis; ``several``: whether they are of several runs."""
    order = [group, *sort] if group else list(sort)
    order += [axis for axis in ("input_len", "output_len", by, "rate") if axis not in order]
    rows = sorted(found, key=lambda row: [_sortable(row.axes.get(axis)) for axis in order])
    unit = unit_of(row.size for row in rows)
    window = STEADY if all(row.steady for row in rows) else WHOLE_RUN
    columns = _columns(rows, by, unit, several, window)
    if not group:
        return [of_values("", columns, [_flat(row, unit) for row in rows], window)] if rows else []
    return [
        of_values(
            f"{_AXIS_TITLES[group]} = {level if level is not None else 'unknown'}",
            columns,
            [_flat(row, unit) for row in level_rows],
            window,
        )
        for level, level_rows in groupby(rows, key=lambda row: row.axes.get(group))
    ]


def _sortable(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _columns(rows: Sequence[LoadRow], by: str, unit: Unit, several: bool, window: str) -> list[Column]:
    """Return the compared axis, then varying columns, constant ones, and the figures."""
    known = [axis for axis in AXES if any(row.axes.get(axis) is not None for row in rows)]
    if not several:
        known = [axis for axis in known if axis != "run"]
    varying = [axis for axis in known if len({row.axes.get(axis) for row in rows}) > 1]
    first = [by] if by in known else []
    order = list(dict.fromkeys([*first, *varying, *known]))
    # An axis that the compared axis determines has no column in a terminal.
    dependent = {axis for axis in varying if _depends_on(rows, axis, by)}
    brief = {*first, *varying, "connector", "input_len"} - (dependent - {"connector"})
    answered = any(row.answer for row in rows)
    # An answer's row has the rate of the supporting trial, as in the run's tables.
    titles = {**_AXIS_TITLES, "rate": "measured at (req/s)"} if answered else _AXIS_TITLES
    brief |= {"rate"} if answered else set()
    columns = [Column(axis, titles[axis], axis in brief) for axis in order]
    if answered:
        bounds = {row.answer_bounds for row in rows if row.answer_bounds}
        word = bounds.pop() if len(bounds) == 1 else "[interval]"
        columns.append(Column("max_request_rate", f"max rate (req/s) {word}"))
        columns += [Column("engines", "engines", False), Column("gpus", "GPUs", False)]
        columns.append(Column(f"max_request_rate_per_{unit.lower()}", f"per {unit} (req/s)"))
    for of, keys in ((STEADY, _OF_STEADY if any(row.steady for row in rows) else ()), (WHOLE_RUN, _SERVE)):
        columns += [Column(key, TITLES[key], window == of and bool(_BRIEF.fullmatch(key))) for key in keys]
    return [*columns, Column("trial_id", "trial", False), Column("source", "source", False)]


def _depends_on(rows: Sequence[LoadRow], axis: str, by: str) -> bool:
    levels = {(row.axes.get(by), row.axes.get(axis)) for row in rows}
    return axis != by and len(levels) == len({level for level, _ in levels})


def _flat(row: LoadRow, unit: Unit) -> dict[str, Any]:
    rate, count = row.answer_rate, row.size.count(unit)
    figures: dict[str, float | None] = {key: row.get(key) for key in _SERVE}
    for key, value in figures.items():
        if value is not None and value == int(value) and not key.endswith(("_ms", "_s", "_throughput")):
            figures[key] = int(value)
    return {
        **row.axes,
        "max_request_rate": row.answer,
        "engines": row.size.engines,
        "gpus": row.size.gpus,
        f"max_request_rate_per_{unit.lower()}": rate / count if rate is not None and count else None,
        **{key: row.steady.get(key) for key in _OF_STEADY},
        **figures,
        "trial_id": row.key,
        "source": row.origin,
    }


def change_table(title: str, cases: Sequence[tuple[Change, str]]) -> Table:
    """Return a row for each case of either run. ``ratio``, with its 99 % interval, compares calls per second;
    without a significant difference it is empty, and ``told`` states that."""
    columns = [Column(key, key) for key in CASE_KEYS] + [Column(key, words) for key, words in _CHANGE.items()]
    rows = [
        {
            **{key: getattr(change.case, key) for key in CASE_KEYS},
            **{key: getattr(change, key) for key in _CHANGE if key != "told"},
            "told": text,
        }
        for change, text in cases
    ]
    return of_values(title, columns, rows)


def short_name(index: int) -> str:
    """Return the short name of the index-th run of a table: A, B, …"""
    return chr(65 + index) if index < 26 else f"R{index + 1}"


def are_microbenchmarks(runs: Sequence[RunFolder], hint: str = "") -> bool:
    """Return whether the runs are microbenchmarks. Raises InputError for a mixture."""
    kinds = {run.manifest.get("kind") == "microbench" for run in runs}
    if kinds == {True, False}:
        raise InputError(
            "a microbenchmark of transfers and a run of requests have no table in common", hint=hint
        )
    return True in kinds


# --- runs of requests ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """Runs of requests: conclusions, rows, and the differences of runs that were compared with ``force``.
    ``names`` distinguish the runs, empty for a single one; ``by``: the axis that is compared."""

    runs: Sequence[RunFolder]
    names: Sequence[str]
    by: str
    rows: Sequence[LoadRow]
    differing: Sequence[str] = ()

    @property
    def named(self) -> list[tuple[RunFolder, str]]:
        return list(zip(self.runs, self.names, strict=True))

    @cached_property
    def statements(self) -> list[Statement]:
        """Conclusions about all runs together."""
        return conclusions(self.runs, self.names, self.by)

    @cached_property
    def searched(self) -> list[RatePair]:
        """Pairs of searched rates."""
        return rate_pairs([row for run, name in self.named for row in summary_table(run, name)])

    @cached_property
    def offered(self) -> list[Pair]:
        """Pairs of offered loads."""
        return pairs([row for run, name in self.named for row in load_rows(run, name)], self.by)


def compared_runs(runs: Sequence[RunFolder], by: str = "", *, force: bool = False) -> Compared:
    """Return the compared runs. ``by``: compared axis, by default the first in which loads differ.

    Raises InputError for runs that are not comparable, unless ``force``."""
    differing = check_comparable(runs, force=force)
    names = [short_name(index) if len(runs) > 1 else "" for index in range(len(runs))]
    rows = [
        row
        for run, name in zip(runs, names, strict=True)
        for row in (*searched_rows(run, name), *load_rows(run, name, errors=False))
    ]
    return Compared(runs, names, by or default_axis(row for row in rows if not row.answer), rows, differing)


# --- microbenchmarks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """Microbenchmarks compared case by case, with each conclusion."""

    before: RunFolder
    after: RunFolder
    cases: Sequence[tuple[Change, str]]

    @classmethod
    def between(cls, before: RunFolder, after: RunFolder) -> Changes:
        return cls(before, after, changes_text(before.transfer_records(), after.transfer_records()))

    @property
    def differing(self) -> list[str]:
        return differences([self.before, self.after])


def earlier_of(run: RunFolder) -> RunFolder | None:
    """Return the run that a microbenchmark is compared with, if it still exists."""
    earlier = run.plan.get("compared_with")
    if not isinstance(earlier, str) or not Path(earlier).is_dir():
        return None
    try:
        return load_run(Path(earlier))
    except KvbenchError:
        return None


def changes_as_text(runs: Sequence[RunFolder], format_: str) -> str:
    """Return each microbenchmark compared with the first one in a file format; of a single run, its rows."""
    first, *others = runs
    if others:
        changes = [Changes.between(first, run) for run in others]
        found = [
            change_table(f"{change.after.run_id} beside {change.before.run_id}", change.cases)
            for change in changes
        ]
    else:
        records = first.transfer_records()
        rows = [flat_row(record, records) for record in records]
        found = [of_values(first.run_id, [Column(key, key) for key in (rows[0] if rows else ())], rows)]
    if format_ == "json":
        more = {"runs": [run.run_id for run in runs], "differ_in": differences(runs)}
        return json_text({**more, "rows": rows_of(found)})
    return WRITERS[format_](found)
