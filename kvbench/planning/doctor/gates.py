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
    """Print the gates; return the exit code."""
    if as_json:
        console.file.write(json.dumps({"gates": [vars(gate) for gate in gate_table()]}, indent=2) + "\n")
        return EXIT_OK
    console.print("What each gate proves about a trial.", markup=False)
    for gate in gate_table():
        console.print()
        console.print(Text(gate.name, "bold"))
        for title, words in (("", gate.proves), ("evidence: ", gate.evidence), ("limits: ", gate.limits)):
            _indented(console, title, words)
    console.print("\nGate that detects each planted fault of the emulated engine.", markup=False)
    for name, lie in LIES.items():
        _indented(console, f"{name} ({lie.where}): ", f"{lie.what}: {lie.gate}")
    return EXIT_OK


def _indented(console: Console, title: str, words: str) -> None:
    """Print below a name; a pipe gets each text as one line."""
    text = Text.assemble((title, "dim"), words.replace("`", ""))
    console.print(
        Padding(text, (0, 0, 0, 2)) if console.is_terminal else Text("  ") + text,
        soft_wrap=not console.is_terminal,
    )
