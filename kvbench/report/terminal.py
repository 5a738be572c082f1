"""Prints sections of a report in a terminal, progress lines with the time left, and changed files of runs."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvbench.core.fitted_table import FittedColumn, Grid
from kvbench.core.foreign_text import visible
from kvbench.report.tables.table import Table
from kvbench.report.value import Block, Note, ReportSection
from kvbench.results.checksums import CHECKSUMS, damages
from kvbench.results.run import RunFolder

WIDTH: Final = 100
"""Words are broken into lines of so many columns."""
_SUPERSCRIPT: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LINE_STYLES: Final = {"head": "bold", "rule": "", "group": "cyan", "row": ""}
_COLOURS: Final = {"FAILED": "red", "WRONG": "bold red"}


def print_sections(sections: Iterable[ReportSection], console: Console) -> None:
    """What a terminal shows, in the order given."""
    for section in sections:
        if section.apart:
            _line(console, "")
        if section.title and any(map(_shows, section.blocks)):
            _line(console, section.title, "bold")
        for block in filter(_shows, section.blocks):
            _block(console, block)


def _shows(block: Block) -> bool:
    """Whether a terminal has anything of it: some tables have no column for it."""
    return block.table is None or any(column.brief for column in block.table.columns)


def _block(console: Console, block: Block) -> None:
    if block.title:
        _line(console, block.title, "bold")
    if block.words:
        _line(console, block.words, block.style)
    if block.table is not None:
        print_table(console, block.table)
    _list(console, block.notes, "• " if block.bullets else "")


# --- tables ----------------------------------------------------------------------------------------


def print_table(console: Console, table: Table) -> None:
    """Only the brief columns, of these as many as fit; a row's footnotes stand behind it."""
    places = [place for place, column in enumerate(table.columns) if column.brief]
    grid = Grid(
        [_column(table, place, first=place == places[0]) for place in places],
        [[cells[place] for place in places] for cells in table.cells],
        table.groups,
        table.ruled,
        "" if table.ruled else "  ",
    )
    # A file or a pipe has no width: what is told does not depend on it.
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
    if table.window:
        _line(console, table.of_window, "dim")
    if fitted.note:
        _line(console, fitted.note, "dim")


def _column(table: Table, place: int, *, first: bool) -> FittedColumn:
    column = table.columns[place]
    align: Literal["left", "right"] = column.align or ("left" if first else "right")
    if not table.ruled:
        align = "left" if column.align == "left" else "right"
    return FittedColumn(column.title, align, column.rank, column.width)


# --- words -----------------------------------------------------------------------------------------


def _list(console: Console, notes: Iterable[Note], bullet: str) -> None:
    width, indent = min(console.width, WIDTH), " " * (2 + len(bullet))
    for note in notes:
        lines = f"\n{indent}".join(_wrapped(note.text, width - 4))
        _line(console, f"  {bullet}{lines}", note.style)
        if note.advice:
            _line(console, f"    → {note.advice}", "cyan")


def _wrapped(text: str, width: int) -> Iterator[str]:
    """The lines of a text, none of them joined: an error may quote lines of a log."""
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
    """Words of others (paths, errors) are printed as they are: no markup is read into them."""
    console.print(Text(text, style=style), soft_wrap=True)


class LiveBar:
    """A bar on a terminal; elsewhere nothing is shown, and ``shown`` stays False."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        self._console = console
        self._what = what
        self._total = total
        self._progress: Progress | None = None
        self._task = TaskID(0)

    @property
    def shown(self) -> bool:
        return self._progress is not None

    def start(self) -> None:
        if not self._console.is_terminal:
            return
        self._progress = Progress(
            TextColumn(f"[bold]{self._what}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=22),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=self._total, left="")
        self._progress.start()

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str, left: str) -> None:
        """What is being done, and the time left, as texts."""
        if self._progress is not None:
            self._progress.update(self._task, description=text, left=left)

    def count(self, done: int, left: str) -> None:
        """So many of all are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, left=left)


MOST_NAMED: Final = 3


def print_changed_files(runs: Sequence[RunFolder], console: Console | None = None) -> None:
    """Print one line for each changed run, on stderr where no console is given: stdout may be a document."""
    for line in changed_files(runs):
        if console is None:
            sys.stderr.write(f"{visible(line)}\n")
        else:
            console.print(line, markup=False, highlight=False, soft_wrap=True, style="bold red")


def changed_files(runs: Sequence[RunFolder]) -> Iterator[str]:
    """Name what no longer matches the checksums of each run; nothing of a run without checksums.

    Raises StoreError where a file cannot be read.
    """
    for run in runs:
        if not (run.manifest.get("checksums") or (run.path / CHECKSUMS).exists()):
            continue
        names = list(dict.fromkeys(each.file for each in damages(run.path)))
        if names:
            more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            named = ", ".join(names[:MOST_NAMED]) + more
            yield f"CHANGED: {run.path}: {named} no longer match their checksums; see `kvbench verify`"
