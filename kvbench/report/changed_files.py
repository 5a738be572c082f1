"""A line for runs whose files no longer match their checksums: the first that a command prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console

from kvbench.core.foreign_text import visible
from kvbench.results.checksums import CHECKSUMS, damages
from kvbench.results.run import RunFolder

MOST_NAMED: Final = 3


def print_changed_files(runs: Sequence[RunFolder], console: Console | None = None) -> None:
    """Print one line for each changed run, on stderr where no console is given: stdout may be a document."""
    for line in changed_files(runs):
        if console is None:
            sys.stderr.write(f"{visible(line)}\n")
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")


def changed_files(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Name what no longer matches the checksums of each run; nothing of a run without checksums.

    Raises StoreError where a file cannot be read.
    """
    for run in runs:
        if not (run.manifest.get("checksums") or (run.path / CHECKSUMS).exists()):
            continue
        names = list(dict.fromkeys(each.file for each in damages(run.path)))
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            named = ", ".join(names[:MOST_NAMED]) + more
            yield f"CHANGED: {run.path}: {named} no longer match their checksums; see `kvbench verify`"
