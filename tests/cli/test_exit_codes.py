"""One table of exit codes: in errors.py, in docs/commands.md and in ``kvbench --help``."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from kvbench import errors
from kvbench.cli.app import app

COMMANDS = Path(__file__).parents[2] / "docs" / "commands.md"


def test_docs_and_help_have_every_exit_code() -> None:
    named = {value for name, value in vars(errors).items() if re.fullmatch(r"EXIT_(?!CODES)\w+", name)}
    assert set(errors.EXIT_CODES) == named
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", COMMANDS.read_text().partition("## Exit codes")[2], re.M)
    assert {int(code): meaning for code, meaning in rows} == errors.EXIT_CODES
    done = CliRunner().invoke(app, ["--help"])
    shown = " ".join(done.output.split())
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code} {meaning}" in shown
