"""How far predictions are from what others measured: ``make perf-predict``. It judges nothing.

Give a folder with InferenceX's rows (``*.csv``, as aiconfigurator's silicon_sample.csv) and LLMServingSim's
recorded runs (folders with a ``requests.jsonl``), at whatever depth.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvbench.errors import InputError

from . import inferencex, llmservingsim


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each kind of data that is there; 1 if there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--half", type=int, choices=(0, 1), default=1, help="of InferenceX's configurations")
    parser.add_argument("--share", type=float, default=1 / 3, help="of a recorded run's requests, to fit to")
    options = parser.parse_args(arguments)
    console = Console()
    tables, runs = sorted(options.folder.rglob("*.csv")), sorted(options.folder.rglob("requests.jsonl"))
    seen = 0
    for path in tables:
        if path.with_name("requests.jsonl") not in runs:  # a run's own series are no rows
            seen += _rows(path, options.half, console)
    if runs:
        seen += _runs([path.parent for path in runs], options.share, console)
    if not seen:
        console.print(f"{options.folder} has neither rows of InferenceX nor runs of LLMServingSim")
    return 0 if seen else 1


def _rows(path: Path, half: int, console: Console) -> int:
    try:
        configurations, notes = inferencex.read_rows(path)
    except InputError as error:
        console.print(str(error), style="yellow", markup=False)
        return 0
    head = ("configurations", "loads", "TPOT", "TPOT, straight line", "TTFT")
    table = _table(f"{path.name}, half {half}: |error| P50 / P90 (%) between lowest and highest load", head)
    for row in inferencex.table_rows(inferencex.errors_of(configurations), half):
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)
    return 1


def _runs(folders: Sequence[Path], share: float, console: Console) -> int:
    head = ("run", "fitted to", "", *llmservingsim.STATISTICS)
    table, seen = _table("predicted / measured − 1 (%)", head), 0
    for folder in folders:
        try:
            found = llmservingsim.predicted(folder, share)
        except InputError as error:
            console.print(str(error), style="yellow", markup=False)
            continue
        seen += 1
        kinds = {"the rest": found.rest, "the whole run": found.whole, "LLMServingSim": found.theirs}
        for kind, errors in kinds.items():
            first = (found.name, str(found.fitted)) if kind == "the rest" else ("", "")
            values = (f"{100 * errors[name]:+.1f}" if name in errors else "–" for name in head[3:])
            table.add_row(*first, kind, *values)
    if seen:
        console.print(table)
    return int(seen > 0)


def _table(title: str, head: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name)
    return table


if __name__ == "__main__":
    sys.exit(main())
