"""Terminal output: sections of a report, the live progress line, changed files of runs."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from kvbench.core.fitted_table import FittedColumn, Grid
from kvbench.core.foreign_text import visible
from kvbench.report.tables.table import Table
from kvbench.report.tables.trial_values import finite
from kvbench.report.value import Block, Note, ReportSection, advised_once
from kvbench.results.checksums import CHECKSUMS, damages
from kvbench.results.run import LIVE, RunFolder

WIDTH: Final = 100
"""Width of printed text in columns."""
_SUPERSCRIPT: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LINE_STYLES: Final = {"head": "bold", "rule": "", "group": "cyan", "row": ""}
_COLOURS: Final = {"FAILED": "red", "WRONG": "bold red"}


def print_sections(sections: Iterable[ReportSection], console: Console) -> None:
    for section in sections:
        if section.apart:
            _line(console, "")
        if section.title and any(map(_shows, section.blocks)):
            _line(console, section.title, "bold")
        for block in filter(_shows, section.blocks):
            _block(console, block)


def _shows(block: Block) -> bool:
    """Return whether a terminal shows the block: some tables have no column for it."""
    return block.table is None or any(column.brief for column in block.table.columns)


def _block(console: Console, block: Block) -> None:
    if block.title:
        _line(console, block.title, "bold")
    if block.words:
        _line(console, block.words, block.style)
    if block.table is not None:
        print_table(console, block.table, bare=block.bare)
    _list(console, block.notes, "• " if block.bullets else "")


# --- tables ----------------------------------------------------------------------------------------


def print_table(console: Console, table: Table, *, bare: bool = False) -> None:
    """Print the brief columns, as many as fit; a row's footnotes follow it. ``bare``: without the text on the
    figures' window and on left-out columns."""
    indices = [index for index, column in enumerate(table.columns) if column.brief]
    grid = Grid(
        [_column(table, index, first=index == indices[0]) for index in indices],
        [[cells[index] for index in indices] for cells in table.cells],
        table.groups,
        table.ruled,
        "" if table.ruled else "  ",
    )
    # A file or a pipe has no width, so output to it is never shortened.
    fitted = grid.fitted(console.width if console.is_terminal else None)
    if not table.ruled and table.groups:
        _line(console, "")
    for line in fitted.lines:
        text = Text(line.text, style=_LINE_STYLES[line.kind])
        if line.row >= 0 and not table.ruled:
            text.stylize(_COLOURS.get(table.cells[line.row][-1], "") if table.groups else "")
        marks = table.marks[line.row] if table.marks and line.row >= 0 else ()
        noted = " ".join(str(mark).translate(_SUPERSCRIPT) for mark in marks)
        text.append(f" {noted}" if noted else "", style="yellow")
        console.print(text, soft_wrap=True)
    if table.window and not bare:
        _line(console, table.of_window, "dim")
    if fitted.note and not bare:
        _line(console, fitted.note, "dim")


def _column(table: Table, index: int, *, first: bool) -> FittedColumn:
    column = table.columns[index]
    align: Literal["left", "right"] = column.align or ("left" if first else "right")
    if not table.ruled:
        align = "left" if column.align == "left" else "right"
    return FittedColumn(column.title, align, column.rank, column.width)


# --- words -----------------------------------------------------------------------------------------


def _list(console: Console, notes: Iterable[Note], bullet: str) -> None:
    width, indent = min(console.width, WIDTH), " " * (2 + len(bullet))
    for note in advised_once(notes):
        lines = f"\n{indent}".join(_wrapped(note.text, width - 4))
        _line(console, f"  {bullet}{lines}", note.style)
        if note.advice:
            _line(console, f"    → {note.advice}", "cyan")


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield a text's lines, wrapped but never joined, because errors may quote log lines."""
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        yield from textwrap.wrap(
            line,
            width,
            subsequent_indent=f"{indent}  " if indent else "",
            break_on_hyphens=False,
            break_long_words=False,
        )


def _line(console: Console, text: str, style: str = "") -> None:
    print_text(console, Text(text, style=style))


def print_text(console: Console, text: Text | str, indent: int = 0) -> None:
    """Print a text without reading markup into it. On a terminal, lines break between words; a word (a path,
    a number) is never split. ``indent``: of all lines but the first. A pipe gets each line as it is."""
    lines = (Text(text) if isinstance(text, str) else text).split("\n") or [Text()]
    if console.is_terminal:
        lines = [part for line in lines for part in broken(line, console.width, indent)]
    # One print: a live line below would swallow anything printed without its line's end.
    console.print(Text("\n").join(lines), soft_wrap=True)


_WORD: Final = re.compile(r"\s*(?:\[[^][]{0,30}\]|\d (?=%)|\S)+\s*")


def broken(line: Text, width: int, indent: int = 0) -> list[Text]:
    """Break a line at blanks into lines of at most ``width`` columns, but not within an interval."""
    indices, column = [], 0
    for word in _WORD.finditer(line.plain):
        if column and column + cell_len(word.group().rstrip()) > width:
            indices.append(word.start())
            column = indent
        column += cell_len(word.group())
    first, *more = line.divide(indices) if indices else [line]
    for part in (first, *more):
        part.rstrip()
    return [first, *(Text(" " * indent).append_text(part) for part in more)]


# --- the live line ---------------------------------------------------------------------------------

BAR_CELLS: Final = 8, 24
"""Fewest and most characters of the live line's bar."""
WRITE_S: Final = 0.5
"""Shortest interval, in seconds, of writing the live line for ``kvbench watch``."""
_GAP: Final = "  "


@dataclass(frozen=True)
class LiveLine:
    """Current activity as text. ``share``: finished share of the whole; None is unknown."""

    what: str = ""
    count: str = ""
    trial: str = ""
    rate: str = ""
    left: str = ""
    share: float | None = None

    @classmethod
    def of_folder(cls, path: Path) -> LiveLine | None:
        """Return the current line of the process that measures into a run folder, if one does."""
        with suppress(OSError, ValueError):
            data = json.loads((path / LIVE).read_bytes())
            if isinstance(data, dict):
                texts = {key: str(data.get(key) or "") for key in ("what", "count", "trial", "rate", "left")}
                return cls(**texts, share=finite(data.get("share")))
        return None

    def text(self, width: int, elapsed: str = "") -> Text:
        """Return one line within ``width``. If room is short, whole parts are left out."""
        before = _GAP.join(filter(None, (elapsed, self.what)))
        for left_out in range(4):
            after = _GAP.join(filter(None, (*(self.count, self.trial, self.rate)[left_out:], self.left)))
            room = width - cell_len(before) - cell_len(after) - 2 * len(_GAP)
            if room >= BAR_CELLS[0]:
                break
        cells = min(room, BAR_CELLS[1]) if room >= BAR_CELLS[0] else 0
        done = round(cells * min(max(self.share or 0.0, 0.0), 1.0))
        bar = Text.assemble(("━" * done, "green"), ("━" * (cells - done), "bright_black"))
        return Text(_GAP).join(part for part in (Text(before), bar, Text(after)) if part)


class LiveBar:
    """The live line below the output of a terminal; elsewhere nothing is shown. ``shown``: whether there is
    one. ``path``: a run folder into which the line is also written while it exists."""

    def __init__(self, console: Console, path: Path | None = None) -> None:
        self._console = console
        self._path = path
        self._line = LiveLine("starting")
        self._started = time.monotonic()
        self._written = -WRITE_S
        self._live: Live | None = None

    def __enter__(self) -> LiveBar:
        self._started = time.monotonic()
        if self._console.is_terminal:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._path is not None:
            with suppress(OSError):
                (self._path / LIVE).unlink(missing_ok=True)

    @property
    def shown(self) -> bool:
        return self._live is not None

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._line.text(options.max_width, minutes(self.elapsed_s))

    def say(self, **parts: Any) -> None:
        """Change parts of the line: fields of ``LiveLine``."""
        self._line = replace(self._line, **parts)
        now = time.monotonic()
        if self._path is not None and now - self._written >= WRITE_S:
            self._written = now
            temporary = self._path / f"{LIVE}.tmp"
            with suppress(OSError):  # optional: the measurement continues without it
                temporary.write_text(json.dumps(asdict(self._line)))
                os.replace(temporary, self._path / LIVE)


def minutes(seconds: float) -> str:
    """Return minutes and seconds: ``3:07``."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


MOST_NAMED: Final = 3


def print_changed_files(runs: Sequence[RunFolder], console: Console | None = None) -> None:
    """Print one line for each changed run, on stderr without a console: stdout may be a document."""
    for line in changed_files(runs):
        if console is None:
            sys.stderr.write(f"{visible(line)}\n")
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")


def changed_files(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Yield one line per run with the files that do not match its checksums; none without checksums. Raises
    StoreError for an unreadable file."""
    for run in runs:
        if not (run.manifest.get("checksums") or (run.path / CHECKSUMS).exists()):
            continue
        names = list(dict.fromkeys(damage.file for damage in damages(run.path)))
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            named = ", ".join(names[:MOST_NAMED]) + more
            yield f"CHANGED: {run.path}: {named} no longer match their checksums; see `kvbench verify`"
