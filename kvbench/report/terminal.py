"""Prints sections of a report in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table as RuledTable
from rich.text import Text

from kvbench.report.tables.table import Table
from kvbench.report.value import Block, Note, ReportSection

WIDTH: Final = 100
"""Words are broken into lines of so many columns."""
_SUPERSCRIPT: Final = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
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
    if block.table is not None and block.table.ruled:
        console.print(_ruled(block.table))
    elif block.table is not None:
        _aligned(console, block.table)
    _list(console, block.notes, "• " if block.bullets else "")


# --- tables ----------------------------------------------------------------------------------------


def _ruled(table: Table) -> RuledTable:
    """A line below the header and between groups; only the brief columns."""
    # One blank less between the columns of a table with groups: so a hundred columns hold one figure more.
    padding = (0, 1, 0, 0) if table.groups else (0, 1)
    ruled = RuledTable(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=padding
    )
    places = [place for place, column in enumerate(table.columns) if column.brief]
    for place in places:
        column = table.columns[place]
        align = column.align or ("right" if place else "left")
        width = column.width or None
        ruled.add_column(
            Text(column.title), justify=align, no_wrap=not table.wrap, max_width=width
        )  # fmt: skip
    for number, (_, rows, _marks) in enumerate(table.parts()):
        if number:
            ruled.add_section()
        for cells in rows:
            ruled.add_row(*(Text(cells[place]) for place in places))
    return ruled


def _aligned(console: Console, table: Table) -> None:
    """Columns set apart by blanks; a row's footnotes stand behind it."""
    widths = [max(map(len, texts)) for texts in zip(table.header, *table.cells, strict=True)]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.ljust(width) if column.align == "left" else cell.rjust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        ]
        return "  " + "  ".join(parts).rstrip()

    _line(console, *(("\n" + line(table.header), "bold") if table.groups else (line(table.header),)))
    for title, rows, marks in table.parts():
        if title:
            _line(console, title, "cyan")
        for place, cells in enumerate(rows):
            text = Text(line(cells), style=_COLOURS.get(cells[-1], "") if table.groups else "")
            noted = " ".join(str(mark).translate(_SUPERSCRIPT) for mark in (marks[place] if marks else ()))
            text.append(f" {noted}" if noted else "", style="yellow")
            console.print(text, soft_wrap=True)


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
