"""The parts of report.html: sections of blocks, and tables whose cells know the value they are sorted by.

A cell's value is what stands in the CSV of the same name, its text what people read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.report.findings.notes import Note
from kvbench.report.tables.result import MISSING, number
from kvbench.report.tables.vllm_bench import Table

LONG_TEXT: Final = 60
"""Characters from which on a cell's text is broken into lines."""
UNROUNDED: Final = ("seed",)


@dataclass(frozen=True)
class Column:
    """``key``: its name in the CSV; empty for a column that no CSV has."""

    key: str
    heading: str
    numeric: bool = False


@dataclass(frozen=True)
class Cell:
    text: str
    value: str
    classes: str = ""


@dataclass(frozen=True)
class HtmlTable:
    """``csv``: the file under tables/ that has the same rows, or empty. ``bulk``: whether all its columns are
    here, for those who look something up.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    csv: str = ""
    bulk: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a section: words, sentences, a table, code, or a picture, under a title or none."""

    title: str = ""
    words: str = ""
    told: Sequence[Note] = ()
    table: HtmlTable | None = None
    code: str = ""
    svg: Any = None
    figure: str = ""
    folded: bool = False
    bulk: bool = False


@dataclass(frozen=True)
class Section:
    anchor: str
    title: str
    blocks: Sequence[Block]


def plain(value: Any) -> str:
    """A value as a CSV has it."""
    return "" if value is None else str(value)


def shown(key: str, value: Any) -> str:
    """A value as people read it: numbers rounded as in the other tables, a missing one as missing."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and key not in UNROUNDED:
        return f"{value:,.0f}" if abs(value) >= 1e5 and value == int(value) else number(value)
    return str(value)


def csv_table(
    name: str,
    title: str,
    rows: Sequence[Mapping[str, Any]],
    headings: Mapping[str, str] | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
) -> HtmlTable | None:
    """The rows of tables/<name>.csv. None if there are none.

    ``headings``: the columns to show, by key, with their words; all of them if None. ``texts``: for a column,
    what people read in each row instead of its value.
    """
    if not rows:
        return None
    keys = [key for key in headings if key in rows[0]] if headings is not None else list(rows[0])
    columns = [Column(key, (headings or {}).get(key, key), _numeric(key, rows)) for key in keys]
    body = [
        [
            Cell(
                text := (texts or {}).get(key, {place: shown(key, row.get(key))})[place],
                plain(row.get(key)),
                _classes(key, text),
            )
            for key in keys
        ]
        for place, row in enumerate(rows)
    ]
    return HtmlTable(title, columns, body, f"{name}.csv", bulk=headings is None)


def method_table(table: Table) -> HtmlTable:
    """A method's own table as it is shown; its cells sort by the number that they begin with."""
    numeric = [
        all(_leading(cells[place]) != "" for cells in table.shown) for place in range(len(table.header))
    ]
    columns = [Column("", heading, number_) for heading, number_ in zip(table.header, numeric, strict=True)]
    rows = [
        [
            Cell(text, _leading(text) if number_ else text, _classes("", text))
            for text, number_ in zip(cells, numeric, strict=True)
        ]
        for cells in table.shown
    ]
    return HtmlTable(table.title, columns, rows)


def text_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> HtmlTable:
    """A table of words; numbers among them sort as numbers."""
    columns = [Column("", heading) for heading in header]
    cells = [[Cell(str(each), str(each), _classes("", str(each))) for each in row] for row in rows]
    return HtmlTable(title, columns, cells)


def _numeric(key: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    known = [row.get(key) for row in rows if row.get(key) not in (None, "")]
    return bool(known) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in known
    )


def _leading(text: str) -> str:
    """The number that a text begins with; empty if it begins with none."""
    first = text.replace(",", "").removeprefix("≥ ").split(" ")[0].rstrip("?%×")
    try:
        float(first)
    except ValueError:
        return ""
    return first


def _classes(key: str, text: str) -> str:
    if text in ("met", "missed", "invalid", "warning"):
        return text
    return "long" if len(text) > LONG_TEXT else ""
