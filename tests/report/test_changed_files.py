"""``report``, ``compare`` and ``export`` begin with a line on files that no longer match their checksums."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_run import make_run
from typer.testing import CliRunner

from kvbench.cli.app import app


@pytest.mark.parametrize(
    "words", [("report",), ("report", "--json"), ("compare",), ("export",), ("export", "--format", "csv")]
)
def test_the_first_line_names_changed_files(tmp_path: Path, words: tuple[str, ...]) -> None:
    command, *options = words
    folder = make_run(tmp_path, ("aggregated", "nixl"), (512,))
    runs = [str(folder)] * (2 if command == "compare" else 1)
    before = CliRunner().invoke(app, [command, *runs, *options])
    assert before.exit_code == 0, before.output
    assert "CHANGED" not in before.output
    cells = folder / "cells.jsonl"
    cells.write_text(cells.read_text().replace('"status": "done"', '"status":  "done"', 1))
    after = CliRunner().invoke(app, [command, *runs, *options])
    assert after.exit_code == 0, after.output
    document = command == "export" or "--json" in options  # for programs: stdout has nothing else
    first = (after.stderr if document else after.stdout).splitlines()[0]
    assert first.startswith(f"CHANGED: {folder}: cells.jsonl no longer match their checksums")
