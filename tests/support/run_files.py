"""Copies of run folders, and edits of the JSON files in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

Edit = Callable[[dict[str, Any]], object]


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
    rows = rows_in(path)
    for row in rows[first:last]:
        edit(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
