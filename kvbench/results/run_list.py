"""The run folders below a folder, by their manifests alone; and a run by its name, or as the latest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvbench.errors import InputError, KvbenchError
from kvbench.files import read_object
from kvbench.results.run import MANIFEST

OUTPUT_ENV: Final = "KVBENCH_OUTPUT"
"""The environment variable with the folder that runs are written to; ``--output`` comes before it."""
LATEST: Final = "latest"
MOST_NAMED: Final = 5


@dataclass(frozen=True)
class ListedRun:
    """A run as its manifest has it; ``problem``: why that cannot be read."""

    path: Path
    kind: str = ""
    scenario: str = ""
    status: str = ""
    started_at: str = ""
    kvbench: str = ""
    labels: tuple[str, ...] = ()
    problem: str = ""

    @classmethod
    def of(cls, manifest: Path) -> ListedRun:
        try:
            known = read_object(manifest, None)
        except KvbenchError as error:
            return cls(manifest.parent, problem=error.message)
        texts = {
            key: _text(known.get(key)) for key in ("kind", "scenario", "status", "started_at", "kvbench")
        }
        return cls(manifest.parent, **texts, labels=tuple(map(str, known.get("labels") or ())))


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def output_folder() -> Path:
    """Where run folders are written if nobody says otherwise."""
    return Path(os.environ.get(OUTPUT_ENV) or "results")


def listed_runs(root: Path) -> list[ListedRun]:
    """The runs below a folder, two levels deep, the latest first. Raises InputError without the folder."""
    if not root.is_dir():
        raise InputError(
            f"there is no folder {root}",
            hint=f"give the folder that runs are written to: --output, or {OUTPUT_ENV}",
        )
    found = [ListedRun.of(manifest) for manifest in sorted(_manifests(root))]
    return sorted(found, key=lambda run: run.started_at, reverse=True)


def _manifests(root: Path) -> Iterator[Path]:
    for pattern in (MANIFEST, f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        yield from (file for file in root.glob(pattern) if not file.parent.name.startswith("."))


def find_run(text: str) -> Path:
    """A run folder by its path, by ``latest``, or by the beginning or the end of its name in the folder that
    runs are written to. Raises InputError.
    """
    path = Path(text)
    if path.is_dir() and text != LATEST:
        return path
    root = output_folder()
    if text == LATEST:
        runs = [run for run in listed_runs(root) if not run.problem]
        if not runs:
            raise InputError(f"there is no run in {root} yet", hint="kvbench sweep makes one")
        return runs[0].path
    if path.exists():
        raise InputError(f"{path} is no folder", hint="give a run folder, or `latest`")
    names = sorted(file.parent.name for file in _manifests(root)) if root.is_dir() and "/" not in text else []
    fitting = [name for name in names if name.startswith(text) or name.endswith(text)]
    if len(fitting) == 1:
        return next(file.parent for file in _manifests(root) if file.parent.name == fitting[0])
    if fitting:
        shown = ", ".join(fitting[-MOST_NAMED:])
        raise InputError(f"{len(fitting)} runs are called {text}…: {shown}", hint="give more of the name")
    raise InputError(f"there is no run {text}", hint=f"`kvbench runs` lists those in {root}; `latest` is one")
