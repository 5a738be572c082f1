"""Two runs of ``kvbench microbench`` side by side, case by case, as a table for files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.core.transfers.stats import Change
from kvbench.errors import KvbenchError
from kvbench.files import write_bytes
from kvbench.report.findings.transfers import changes_text
from kvbench.report.tables.formats import WRITERS, Column, Sheet, as_json
from kvbench.report.tables.transfers import flat_row
from kvbench.results.provenance import differences
from kvbench.results.run import Run, load_run

NAME: Final = "comparison"
_CASE: Final = (
    "backend",
    "protocol",
    "op",
    "block_bytes",
    "batch_size",
    "regions",
    "threads",
    "nics",
    "initiators",
    "targets",
    "memory",
    "scattered",
    "merged",
    "shape",
)
_FIGURES: Final = {
    "before_gb_per_s": "GB/s before",
    "after_gb_per_s": "GB/s after",
    "ratio": "ratio",
    "low": "from",
    "high": "to",
    "before_p50_s": "p50 (s) before",
    "after_p50_s": "p50 (s) after",
    "told": "told",
}


def sheet(before: Run, run: Run) -> Sheet:
    """A row for each case of either run. ``ratio`` with its 99 % interval counts calls a second; empty where
    it cannot be told from 1, and ``told`` says so."""
    columns = [Column(key, key) for key in _CASE] + [Column(key, title) for key, title in _FIGURES.items()]
    rows = [
        _row(change, text) for change, text in changes_text(before.transfer_records(), run.transfer_records())
    ]
    return Sheet(f"{run.run_id} beside {before.run_id}", columns, rows)


def _row(change: Change, text: str) -> dict[str, Any]:
    figures = {key: getattr(change, key) for key in _FIGURES if key != "told"}
    return {**{key: getattr(change.case, key) for key in _CASE}, **figures, "told": text}


def as_text(runs: Sequence[Run], format_: str) -> str:
    """Each run beside the first one, in a format for files; of a single run, its rows."""
    first, *others = runs
    if others:
        sheets = [sheet(first, run) for run in others]
    else:
        records = first.transfer_records()
        rows = [flat_row(record, records) for record in records]
        sheets = [Sheet(first.run_id, [Column(key, key) for key in (rows[0] if rows else ())], rows)]
    if format_ == "json":
        return as_json(sheets, {"runs": [run.run_id for run in runs], "differ_in": differences(runs)})
    return WRITERS[format_](sheets)


def earlier_of(run: Run) -> Run | None:
    """The run that this one was to be compared with, where it is still there."""
    told = run.plan.get("compared_with")
    if not isinstance(told, str) or not Path(told).is_dir():
        return None
    try:
        return load_run(Path(told))
    except KvbenchError:
        return None


def write(run: Run, formats: Sequence[str]) -> list[Path]:
    """Writes ``tables/comparison.*`` where the run was compared with another; returns the files written."""
    before = earlier_of(run)
    if before is None:
        return []
    written = []
    for kind in ("csv", "json", "md"):
        if kind in formats:
            path = run.path / "tables" / f"{NAME}.{kind}"
            write_bytes(path, as_text([before, run], kind).encode("utf-8", "replace"))
            written.append(path)
    return written
