"""List the gates for people: what each proves, its evidence and limits, from the gates' docstrings."""

from __future__ import annotations

import json

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvbench.core.gates.gates import gate_table
from kvbench.core.gates.lies import LIES
from kvbench.errors import EXIT_OK


def command(console: Console, *, as_json: bool = False) -> int:
    """Print the table, as Markdown if not to a terminal; return the exit code."""
    if as_json:
        console.file.write(json.dumps({"gates": [vars(each) for each in gate_table()]}, indent=2) + "\n")
        return EXIT_OK
    if not console.is_terminal:
        console.print(as_markdown(), markup=False, soft_wrap=True, end="")
        return EXIT_OK
    console.print("What each gate proves about a trial.", markup=False)
    for each in gate_table():
        console.print()
        console.print(Text(each.name, "bold"))
        for title, words in (("", each.proves), ("evidence: ", each.evidence), ("limits: ", each.limits)):
            console.print(Padding(Text.assemble((title, "dim"), words), (0, 0, 0, 2)))
    return EXIT_OK


def as_markdown() -> str:
    """Gates as Markdown, then the lies of the liars' bench with the gate that detects each."""
    rows = [f"| `{each.name}` | {each.proves} | {each.evidence} | {each.limits} |" for each in gate_table()]
    lies = [
        f"| `{name}` | {deceit.what} | {deceit.where} | `{deceit.gate}` |" for name, deceit in LIES.items()
    ]
    parts = [
        "| gate | an honest trial shows that | evidence | limits |",
        "|---|---|---|---|",
        *rows,
        "",
        "| lie (`deployment.engine_options.lie`) | effect | where | detected by |",
        "|---|---|---|---|",
        *lies,
    ]
    return "\n".join(parts) + "\n"
