"""What ``kvbench verify`` does with each file of a run folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

FileClass = Literal["recomputed", "cross-checked", "only checksummed", "not checksummed"]

CLASSES: Final[tuple[tuple[str, FileClass], ...]] = (
    ("trials.jsonl", "recomputed"),  # from requests/, canaries.jsonl and the scenario
    ("cells.jsonl", "recomputed"),  # from the trials
    ("transfers.parquet", "recomputed"),  # from the times of its calls
    ("report.md", "recomputed"),  # these four from all others
    ("report.html", "recomputed"),
    ("tables/*", "recomputed"),
    ("figures/*", "recomputed"),
    ("requests/*.parquet", "cross-checked"),  # with the arrivals that each trial's seed plans
    ("plan.json", "cross-checked"),  # with the scenario, the digests of the manifest and the cells
    ("scenario.yaml", "cross-checked"),  # with plan.json and the values that options changed
    ("manifest.json", "cross-checked"),  # kind, labels, seed and scenario with plan.json and the trials
    ("outputs.jsonl", "cross-checked"),  # with the searches that begin with them
    ("canaries.jsonl", "cross-checked"),  # with the counts in the trials
    ("environment.json", "only checksummed"),
    ("telemetry/*.parquet", "only checksummed"),
    ("logs/*", "not checksummed"),  # other processes write them
    ("against.md", "not checksummed"),  # derived from this run and another one
    ("splits.*", "not checksummed"),  # derived from this run and its splits
    ("checksums.jsonl", "cross-checked"),  # each line with the one before it
)
"""Pattern of a file's path within the run folder, and its class. The first pattern that fits counts."""


def class_of(name: str) -> FileClass:
    """Return the class of a file, by its path within the run folder."""
    return next((found for pattern, found in CLASSES if fnmatch(name, pattern)), "not checksummed")


def unproven_files(folder: Path, *, checksums: bool) -> Iterator[str]:
    """Name the files that are neither recomputed nor cross-checked, a folder once with its number of files.

    ``checksums``: whether the run has any.
    """
    counts: Counter[tuple[FileClass, str]] = Counter()
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder)
        if any(part.startswith(".") for part in inside.parts) or file.is_dir():
            continue
        found = class_of(inside.as_posix())
        if found == "only checksummed" and not checksums:
            found = "not checksummed"
        counts[found, inside.parts[0] + ("/" if len(inside.parts) > 1 else "")] += 1
    for kind in ("only checksummed", "not checksummed"):
        names = [
            f"{name} ({count})" if name.endswith("/") else name
            for (of, name), count in counts.items()
            if of == kind
        ]
        if names:
            yield f"{kind}: {', '.join(names)}"
