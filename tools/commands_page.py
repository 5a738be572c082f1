"""``python -m tools.commands_page``: write the tables of docs/commands.md anew, from the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import typer.main

from kvbench.cli.app import app
from kvbench.errors import EXIT_CODES

PAGE: Final = Path(__file__).parents[1] / "docs" / "commands.md"


def page() -> str:
    """Return docs/commands.md with each table made anew; the text around them stays."""
    group: Any = typer.main.get_command(app)
    commands = [
        (f"`kvbench {name}`", command.help.splitlines()[0]) for name, command in group.commands.items()
    ]
    codes = [(f"{code}", meaning) for code, meaning in EXIT_CODES.items()]
    text = _with_rows(PAGE.read_text(encoding="utf-8"), "| command | what it does |", commands)
    return _with_rows(text, "| exit code | meaning |", codes)


def _with_rows(text: str, head: str, rows: list[tuple[str, str]]) -> str:
    made = "".join(f"| {name} | {words} |\n" for name, words in rows)
    return re.sub(rf"({re.escape(head)}\n\|[-:|]+\|\n)(?:\|.*\n)*", lambda found: found[1] + made, text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
