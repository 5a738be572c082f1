"""The gates that every trial passes, for people: what each proves, by which evidence, with which limits.

The words are the gates' own docstrings, so that this table cannot fall behind the code.
"""

from __future__ import annotations

import json

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvbench.core.gates.gates import gate_table
from kvbench.core.gates.lies import LIES
from kvbench.errors import EXIT_OK


def command(console: Console, *, as_json: bool = False) -> int:
    """Prints the table, as Markdown where it does not go to a terminal; returns the exit code."""
    if as_json:
        console.file.write(json.dumps({"gates": [vars(each) for each in gate_table()]}, indent=2) + "\n")
        return EXIT_OK
    if not console.is_terminal:
        console.print(as_markdown(), markup=False, soft_wrap=True, end="")
        return EXIT_OK
    console.print("What an honest trial shows, gate by gate.", markup=False)
    for each in gate_table():
        console.print()
        console.print(Text(each.name, "bold"))
        for title, words in (("", each.proves), ("evidence: ", each.evidence), ("limits: ", each.limits)):
            console.print(Padding(Text.assemble((title, "dim"), words), (0, 0, 0, 2)))
    return EXIT_OK


def as_markdown() -> str:
    """The gates, and below them the lies of the liars' bench with the gate that catches each."""
    rows = [f"| `{each.name}` | {each.proves} | {each.evidence} | {each.limits} |" for each in gate_table()]
    lies = [
        f"| `{name}` | {deceit.what} | {deceit.where} | `{deceit.gate}` |" for name, deceit in LIES.items()
    ]
    parts = [
        "| gate | an honest trial shows that | evidence | limits |",
        "|---|---|---|---|",
        *rows,
        "",
        "| lie (`deployment.engine_options.lie`) | what it does | where | caught by |",
        "|---|---|---|---|",
        *lies,
    ]
    return "\n".join(parts) + "\n"
