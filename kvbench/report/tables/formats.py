"""A table of values in each format: for a terminal, Markdown, CSV, JSON, LaTeX.

CSV and JSON have every digit and the columns' keys; the others are rounded for people and have the titles.
What is missing is empty in CSV, null in JSON and a dash for people.
"""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich import box
from rich.table import Table
from rich.text import Text

from kvbench.files import spreadsheet_cell
from kvbench.report.tables.cells import table as markdown_table
from kvbench.report.tables.result import MISSING, number

FORMATS: Final = ("terminal", "md", "csv", "json", "latex")
_LATEX: Final = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$",
    "–": "--", "…": r"\ldots{}", "→": r"$\to$", "−": "$-$",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column: its key in CSV and JSON, its title for people. ``brief``: whether a terminal shows it."""

    key: str
    title: str
    brief: bool = True


@dataclass(frozen=True)
class Sheet:
    """One table. ``rows`` are values by key; ``title`` is a heading, empty for none."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]


def shown(value: Any) -> str:
    """A value for people: about three digits; whole numbers as they are."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer() and abs(value) < 1e15):
        return f"{int(value)}"
    return number(value) if isinstance(value, float) else " ".join(str(value).split())


def _cells(sheet: Sheet, columns: Sequence[Column]) -> list[list[str]]:
    return [[shown(row.get(column.key)) for column in columns] for row in sheet.rows]


def as_markdown(sheets: Sequence[Sheet]) -> str:
    """GitHub's tables, a heading before each that has a title."""
    parts = []
    for sheet in sheets:
        parts += [f"## {sheet.title}"] if sheet.title else []
        columns = list(sheet.columns)
        parts.append(markdown_table([column.title for column in columns], _cells(sheet, columns)))
    return "\n\n".join(parts) + "\n"


def as_csv(sheets: Sequence[Sheet]) -> str:
    """All sheets' rows as one table, which a spreadsheet opens as it is."""
    columns = _columns(sheets)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for sheet in sheets:
        writer.writerows([spreadsheet_cell(row.get(key)) for key in columns] for row in sheet.rows)
    return text.getvalue()


def as_json(sheets: Sequence[Sheet], more: Mapping[str, Any]) -> str:
    """``{"rows": […], …}``: all sheets' rows, and what is told besides."""
    columns = _columns(sheets)
    rows = [{key: row.get(key) for key in columns} for sheet in sheets for row in sheet.rows]
    text = json.dumps({**more, "rows": rows}, default=str)
    # What is not finite has no word in JSON.
    plain = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def _columns(sheets: Sequence[Sheet]) -> list[str]:
    return list(dict.fromkeys(column.key for sheet in sheets for column in sheet.columns))


def as_latex(sheets: Sequence[Sheet]) -> str:
    r"""A ``tabular`` with booktabs' rules for each sheet (``\usepackage{booktabs}``); what is special is
    escaped.
    """
    parts = []
    for sheet in sheets:
        columns = list(sheet.columns)
        texts = [
            column.key
            for column in columns
            if any(isinstance(row.get(column.key), str) for row in sheet.rows)
        ]
        kinds = "".join("l" if column.key in texts else "r" for column in columns)
        lines = [f"% {sheet.title}".replace("\n", " ")] if sheet.title else []
        lines += [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
        lines += [_latex_line([column.title for column in columns]), r"\midrule"]
        lines += [_latex_line(cells) for cells in _cells(sheet, columns)]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(cell) for cell in cells) + r" \\"


def latex(text: str) -> str:
    """Text in which nothing is a command."""
    return "".join(_LATEX.get(character, character) for character in text)


def for_terminal(sheet: Sheet) -> Table:
    """The brief columns that have any value."""
    columns = [
        column
        for column in sheet.columns
        if column.brief and any(row.get(column.key) not in (None, "") for row in sheet.rows)
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", padding=(0, 1))
    for column in columns:
        numbers = not any(isinstance(row.get(column.key), str) for row in sheet.rows)
        heading = "\n".join(textwrap.wrap(column.title, 10, break_long_words=False))
        table.add_column(Text(heading), justify="right" if numbers else "left", no_wrap=True, max_width=30)
    for cells in _cells(sheet, columns):
        table.add_row(*(Text(cell) for cell in cells))
    return table


WRITERS: Final[Mapping[str, Callable[[Sequence[Sheet]], str]]] = {
    "md": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
}
