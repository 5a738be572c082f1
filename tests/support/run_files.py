"""Run folders: imported, copied and edited ones, and what a terminal shows of them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.importers.parts import importing
from kvbench.report.report import render_terminal
from kvbench.results.run import RunFolder, load_run

RUNS = Path(__file__).parents[1] / "recorded" / "runs"
QUICKSTART = RUNS / "quickstart"
"""A run of the quickstart by an earlier search, with other limits."""
VLLM_CPU = RUNS / "vllm-cpu-tiny"
"""Pairs of real vLLM against one aggregated engine, before as many as P and D together were started."""
Edit = Callable[[dict[str, Any]], object]


def imported(results: Path, *files: Path, **options: Any) -> RunFolder:
    """Import what other tools wrote into a results folder without any run."""
    console = Console(file=io.StringIO(), width=200)
    assert importing.command(importing.ImportOptions(files, **options), results, console) == 0
    (folder,) = (path for path in results.iterdir() if path.is_dir())
    return load_run(folder)


def printed(*runs: RunFolder, width: int = 100, **shown: Any) -> str:
    """Print the report of runs as on a terminal."""
    out = io.StringIO()
    what = runs[0] if len(runs) == 1 else runs
    render_terminal(what, Console(file=out, width=width, highlight=False), **shown)
    return out.getvalue()


def copied(folder: Path, target: Path) -> Path:
    """Copy a run folder into another folder, under its own name."""
    return Path(shutil.copytree(folder, target / folder.name))


def edit_json(path: Path, edit: Edit | None = None, **values: Any) -> None:
    """Change a JSON file in place, and set these values in it."""
    data = json.loads(path.read_text())
    if edit is not None:
        edit(data)
    path.write_text(json.dumps(data | values))


def rows_in(path: Path) -> list[Any]:
    """Read a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def edit_rows(path: Path, edit: Edit, first: int = 0, last: int | None = None) -> None:
    """Change lines of a file of JSON lines in place: all by default."""
    lines = path.read_text().splitlines()
    for place in range(len(lines))[first:last]:
        row = json.loads(lines[place])
        edit(row)
        lines[place] = json.dumps(row)
    path.write_text("".join(line + "\n" for line in lines))
