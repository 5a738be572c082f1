"""Derived files of a run folder made anew: is the report that of the stored trials?"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from filecmp import cmp
from pathlib import Path
from typing import Final

from kvbench.errors import KvbenchError
from kvbench.hosts.scratch import scratch
from kvbench.report.report import FORMATS, write_report
from kvbench.results.run import RunFolder

TEXTS: Final = ("report.html", "report.md")
FOLDERS: Final = ("tables", "figures")
MOST_NAMED: Final = 3


def stale_files(run: RunFolder, checked: Counter[str]) -> Iterator[str]:
    """Name derived files that this kvbench would write otherwise from the raw files. ``checked`` counts.

    Such a file was edited, or another version wrote it; bytes cannot show which.
    """
    stored = {name: run.path / name for name in _derived(run.path)}
    if not stored:
        return
    png = any(name.endswith(".png") for name in stored)
    with scratch("kvbench-verify-") as temporary:
        folder = temporary / run.path.resolve().name
        try:
            shutil.copytree(run.path, folder, ignore=_left_out, symlinks=True)
            write_report(folder, (*FORMATS, "png") if png else FORMATS)
        except (KvbenchError, OSError, ValueError) as error:
            yield f"the report cannot be made from the raw files: {error}"
            return
        made = {name: folder / name for name in _derived(folder)}
        common = [name for name in stored if name in made]
        checked["derived files"] += len(common)
        other = [name for name in common if not cmp(stored[name], made[name], shallow=False)]
    if other:
        named = ", ".join(other[:MOST_NAMED])
        more = f" and {len(other) - MOST_NAMED} more" if len(other) > MOST_NAMED else ""
        yield f"{named}{more}: this kvbench writes another from the raw files; `kvbench report` does so"


def _derived(folder: Path) -> list[str]:
    files = [folder / name for name in TEXTS]
    files += [file for name in FOLDERS for file in sorted((folder / name).glob("*"))]
    return [file.relative_to(folder).as_posix() for file in files if file.is_file() and not file.is_symlink()]


def _left_out(place: str, names: list[str]) -> set[str]:
    """Names of a folder that are not copied: derived files, logs, and what is hidden."""
    return {name for name in names if name in (*TEXTS, *FOLDERS, "logs") or name.startswith(".")}
