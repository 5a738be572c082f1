"""``kvbench --help`` shows every exit code."""

import re

from typer.testing import CliRunner

from kvbench import errors
from kvbench.cli.app import app


def test_help_has_every_exit_code() -> None:
    named = {value for name, value in vars(errors).items() if re.fullmatch(r"EXIT_(?!CODES)\w+", name)}
    assert set(errors.EXIT_CODES) == named
    shown = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    for code, meaning in errors.EXIT_CODES.items():
        assert f"{code} {meaning}" in shown
