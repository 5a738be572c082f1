"""The notebooks run, on committed runs alone, and what is committed of them is whole and tidy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["cells"]
    return cells


def test_the_six_notebooks_are_there() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(path: Path) -> None:
    before = path.read_bytes()
    # Whoever runs the tests may have made any warning an error; the kernel is a process of its own.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.notebooks", "--check", str(path)], capture_output=True, text=True,
        timeout=110, cwd=ROOT, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert path.name in done.stdout
    assert path.read_bytes() == before


EMPTY_FRAME = "import pandas as pd\npd.DataFrame({'a': []})"
EMPTY_AXES = """
import io
from matplotlib.figure import Figure
figure = Figure()
figure.add_subplot(title="the roof alone").axhline(3.0)
figure.savefig(io.BytesIO(), format="png")
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [("1 / 0", "ZeroDivisionError"), (EMPTY_FRAME, "a table has no rows"),
     (EMPTY_AXES, "a picture has axes without a mark")],
    ids=["fails", "empty frame", "empty axes"],
)  # fmt: skip
def test_a_notebook_that_fails_or_shows_nothing_is_named(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "broken.ipynb"
    cell = {"cell_type": "code", "id": "a", "metadata": {}, "execution_count": None, "outputs": []}
    notebook = {"cells": [{**cell, "source": source}], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(notebook))
    done = subprocess.run(
        [sys.executable, "-m", "tools.notebooks", str(path)], capture_output=True, text=True, timeout=110,
        cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 1
    assert "broken.ipynb" in done.stderr
    assert message in done.stderr
    assert json.loads(path.read_text()) == notebook


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_whole_and_name_no_place(path: Path) -> None:
    code = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(not output.get("metadata") for output in outputs)
    assert str(ROOT) not in path.read_text("utf-8")
    assert path.stat().st_size < 500_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_written_for_a_reader(path: Path) -> None:
    cells = cells_of(path)
    assert "".join(cells[0]["source"]).startswith("# ")
    words = sum(len("".join(cell["source"]).split()) for cell in cells if cell["cell_type"] == "markdown")
    assert words > 100
    # Never more than two pieces of code without a word between them.
    kinds = "".join("c" if cell["cell_type"] == "code" else "m" for cell in cells)
    assert "ccc" not in kinds
