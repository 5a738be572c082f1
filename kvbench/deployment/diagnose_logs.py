"""``kvbench diagnose``: what the log patterns find in logs that are there, of whatever origin."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from rich.console import Console

from kvbench.deployment.diagnose import LogSource, diagnose
from kvbench.deployment.log_patterns import Level
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError
from kvbench.hosts.log_tail import MAX_LINE_BYTES

STDIN: Final = "-"
_MARKS: Final[dict[Level, str]] = {
    "fatal": "[red]fatal[/red]",
    "refuse": "[red]no measurement[/red]",
    "warning": "[yellow]warning[/yellow]",
}


def command(names: Sequence[str], protocol: str, console: Console, *, as_json: bool = False) -> int:
    """Print each cause with its first line, how often, and a hint. 1 if one of them spoils a measurement.

    ``names``: files, folders (all ``*.log`` below them), or ``-`` for stdin; none is stdin. ``protocol``:
    what was asked for, since some lines mean trouble only then. Raises InputError for what cannot be read.
    """
    spoiled = 0
    found: list[dict[str, object]] = []
    for name, source in _logs(list(names) or [STDIN]):
        with source as file:
            for each in diagnose(_lines(file), LogSource(transport_asked=protocol)):
                found.append({"log": name, **vars(each)})
                spoiled += each.level != "warning"
                if as_json:
                    continue
                times = f", {each.count} times" if each.count > 1 else ""
                console.print(f"{_MARKS[each.level]} ", end="")
                console.print(f"{name}:{each.number}{times}: {each.cause}", markup=False, soft_wrap=True)
                console.print(f"    log   {each.line}", markup=False, soft_wrap=True)
                console.print(f"    hint  {each.hint}", markup=False, soft_wrap=True)
    if as_json:
        console.file.write(json.dumps({"causes": found}, indent=2) + "\n")
    elif not found:
        console.print("no log pattern matches: nothing that is known to go wrong is in there", markup=False)
    return EXIT_FAILED if spoiled else EXIT_OK


def _logs(names: Sequence[str]) -> Iterator[tuple[str, contextlib.AbstractContextManager[IO[bytes]]]]:
    for name in names:
        if name == STDIN:
            yield "stdin", contextlib.nullcontext(sys.stdin.buffer)
            continue
        path = Path(name)
        paths = sorted(path.rglob("*.log")) if path.is_dir() else [path]
        if not paths:
            raise InputError(f"{path} holds no *.log", hint="name the files")
        for each in paths:
            try:
                yield str(each), each.open("rb")
            except OSError as error:
                raise InputError(f"{each} cannot be read: {error.strerror or error}") from error


def _lines(file: IO[bytes]) -> Iterator[str]:
    """Lines, the first part of each: one library writes hundreds of megabytes into one."""
    begun = True
    for piece in iter(lambda: file.readline(MAX_LINE_BYTES), b""):
        if begun:
            yield piece.decode("utf-8", "replace").rstrip()
        begun = piece.endswith(b"\n")
