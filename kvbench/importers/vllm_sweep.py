"""Folders of ``vllm bench sweep``: one folder per combination with ``run=<n>.json`` for each run. ``serve``,
``serve_sla`` and ``serve_workload`` write the same files. Each run's JSON has the combination's parameters;
``summary.json`` repeats the runs and is read only if they are missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

from kvbench.errors import InputError
from kvbench.importers.base import Imported, LeftOut, Origin, parse_json, read_lines
from kvbench.importers.parts.vllm_result import DEFINITIONS, is_result, row_of

FORMAT: Final = "folders of `vllm bench sweep`"
RANK: Final = 10
TOOL: Final = "vllm bench sweep"
MAX_FILES: Final = 10_000


def recognise(path: Path) -> bool:
    return path.is_dir() and bool(_runs(path) or _summaries(path))


def read(path: Path) -> Imported:
    """Return every run of every combination, in the order of their names."""
    reading = Imported(definitions=dict(DEFINITIONS))
    runs = _runs(path)
    folders = {run.parent for run in runs}
    for file in [*runs, *(summary for summary in _summaries(path) if summary.parent not in folders)]:
        name = file.relative_to(path).as_posix()
        try:
            value = parse_json(file)
        except InputError as error:
            reading.leave_out(0, f"{error.message}; left out", name)
            continue
        reading.files.append(file)
        last = len(read_lines(file))
        for result in value if isinstance(value, list) else [value]:
            if is_result(result):
                row = row_of(result, Origin(name, 1, last, TOOL))
                row.settings["combination"] = file.parent.relative_to(path).as_posix()
                reading.rows.append(row)
            else:
                reading.leave_out(1, "is not a result of a serving benchmark; left out", name)
    reading.problems += [_failure(path, file) for file in sorted(path.rglob("*failure.json"))[:MAX_FILES]]
    return reading


def _runs(path: Path) -> list[Path]:
    found = [*path.rglob("run=*.json")][:MAX_FILES]
    return sorted((run for run in found if not run.stem.endswith(".failure")), key=_order)


def _order(run: Path) -> list[str | int]:
    """Return a sort key that orders numbers in names as numbers."""
    parts = re.split(r"(\d+)", run.as_posix())
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _summaries(path: Path) -> list[Path]:
    return sorted(file for file in [*path.rglob("summary.json")][:MAX_FILES] if _has_runs(file))


def _has_runs(file: Path) -> bool:
    try:
        value = parse_json(file)
    except InputError:
        return False
    return isinstance(value, list) and any(is_result(result) for result in value)


def _failure(path: Path, file: Path) -> LeftOut:
    try:
        reported: Any = parse_json(file)
    except InputError:
        reported = {}
    why = reported.get("error") if isinstance(reported, dict) else ""
    text = f"a run failed and has no figures: {str(why)[:200]}" if why else "a run failed and has no figures"
    return LeftOut(0, text, file.relative_to(path).as_posix())
