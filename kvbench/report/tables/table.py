"""One table, for every format: what people read in its cells, and the values that files have.

CSV and JSON have every digit and the columns' keys; the others are rounded to three digits for people and
have the titles. What is missing is empty in CSV, null in JSON and a dash for people.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from kvbench.core.foreign_text import markdown_words, spreadsheet_cell
from kvbench.files import write_bytes

MISSING: Final = "–"


def number(value: float | None) -> str:
    """About three significant digits: ``0.0123``, ``1.23``, ``12.3``, ``1235``; exponents below 10⁻⁶ only."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or abs(value) < 1e-6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def percent(value: float | None) -> str:
    """A share as per cent, with one digit: ``99.2``; 100 only when it is all."""
    if value is None:
        return MISSING
    return "100" if value >= 1 else f"{min(value * 100, 99.9):.1f}"


Rows = Sequence[Mapping[str, Any]]
Align = Literal["", "left", "right"]

STEADY: Final = "steady part of the trial"
WHOLE_RUN: Final = "whole run, ramp and drain included"
"""What latencies and rates are of; every table that has any names it."""
OF_WHOLE_RUN: Final = ", whole run"
"""The end of a title whose figure is of the whole run; without it, it is of the steady part."""
FORMATS: Final = ("terminal", "md", "csv", "json", "latex")
_UNROUNDED: Final = ("seed",)
_LATEX: Final = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "≥": r"$\geq$", "≤": r"$\leq$", "×": r"$\times$",
    "–": "--", "…": r"\ldots{}", "→": r"$\to$", "−": "$-$",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column: its key in files, empty where no file has it, and its title for people.

    ``brief``: whether a terminal shows it; ``width``: from how many characters on a cell takes several lines
    there, 0 for never. ``align``: empty where that goes by what is in it. ``rank``: where a terminal is too
    narrow, columns of a higher one are left out earlier, those of 0 never.
    """

    key: str
    title: str
    brief: bool = True
    align: Align = ""
    width: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """``cells``: what people read, a text for each column. ``rows``: values by key, as files have them.

    ``name``: of the CSV that has the rows; ``words``: what a reader has to know to read it right; ``groups``:
    number of the row that begins a group → the words above it; ``marks``: numbers of footnotes, by row.
    ``every_column``: whether it is for looking something up. In a terminal, ``ruled``: a line below the
    header, or blanks alone. ``window``: the part of a trial that its latencies and rates are of.
    ``trials``: whose figures a row has, trial by trial.
    """

    title: str
    columns: Sequence[Column]
    cells: Sequence[Sequence[str]]
    rows: Rows = ()
    name: str = ""
    words: str = ""
    groups: Mapping[int, str] = field(default_factory=dict)
    marks: Sequence[Sequence[int]] = ()
    every_column: bool = False
    ruled: bool = True
    window: str = ""
    trials: Sequence[str] = ()

    @property
    def of_window(self) -> str:
        """What its latencies and rates are of; empty where it has none."""
        return f"Latencies and rates: {self.window}." if self.window else ""

    @property
    def header(self) -> list[str]:
        return [column.title for column in self.columns]

    def parts(self) -> Iterable[tuple[str, Sequence[Sequence[str]], Sequence[Sequence[int]]]]:
        """(words above it, cells, marks) of each group; of a table without groups the whole."""
        starts = list(self.groups) or [0]
        for start, end in zip(starts, [*starts[1:], len(self.cells)], strict=True):
            yield self.groups.get(start, ""), self.cells[start:end], self.marks[start:end]


# --- ways to make one ------------------------------------------------------------------------------


def of_texts(
    title: str,
    header: Sequence[str],
    cells: Iterable[Sequence[object]],
    align: Align = "",
    words: str = "",
    window: str = "",
    trials: Sequence[str] = (),
) -> Table:
    """A table of what people read."""
    columns = [Column("", heading, align=align) for heading in header]
    shown = [[str(each) for each in row] for row in cells]
    return Table(title, columns, shown, words=words, window=window, trials=trials)


def of_method(
    name: str,
    title: str,
    words: str,
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    rows: Rows,
    brief: Collection[str] | None = None,
    window: str = "",
) -> Table:
    """A table whose file has other columns than people read. ``brief``: those for a terminal; None: all.

    ``rows`` have a ``trial_id`` where the table is of trials.
    """
    columns = [Column("", heading, brief is None or heading in brief, width=34) for heading in header]
    trials = [str(row.get("trial_id") or "") for row in rows]
    return Table(title, columns, cells, rows, name, words, window=window, trials=trials)


def of_values(title: str, columns: Sequence[Column], rows: Rows, window: str = "") -> Table:
    """A table of values, rounded for people; words are on the left."""
    columns = [
        replace(
            column,
            align="left" if any(isinstance(row.get(column.key), str) for row in rows) else "right",
            width=30,
        )
        for column in columns
    ]
    cells = [[_shown(row.get(column.key)) for column in columns] for row in rows]
    trials = [str(row.get("trial_id") or "") for row in rows]
    return Table(title, columns, cells, rows, window=window, trials=trials)


def of_csv(
    name: str,
    title: str,
    rows: Rows,
    headings: Mapping[str, str] | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
    window: str = "",
) -> Table | None:
    """The rows of tables/<name>.csv. None if there are none.

    ``headings``: the columns to show, by key, with their words; all of them if None. ``texts``: for a column,
    what people read in each row instead of its value.
    """
    if not rows:
        return None
    texts = texts or {}
    keys = [key for key in headings if key in rows[0]] if headings is not None else list(rows[0])
    columns = [
        Column(key, (headings or {}).get(key, key), align="right" if _numeric(key, rows) else "left")
        for key in keys
    ]
    cells = [
        [texts[key][place] if key in texts else _rounded(key, row.get(key)) for key in keys]
        for place, row in enumerate(rows)
    ]
    trials = [str(row.get("trial_id") or "") for row in rows]
    return Table(
        title, columns, cells, rows, name, every_column=headings is None, window=window, trials=trials
    )


def _numeric(key: str, rows: Rows) -> bool:
    known = [row.get(key) for row in rows if row.get(key) not in (None, "")]
    return bool(known) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in known
    )


def _shown(value: Any) -> str:
    """A value for people: about three digits; whole numbers as they are."""
    if isinstance(value, float):
        return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else number(value)
    return " ".join(_rounded("", value).split())


def _rounded(key: str, value: Any) -> str:
    """A value for people: numbers rounded as in the other tables, a missing one as missing."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and key not in _UNROUNDED:
        return f"{value:,.0f}" if abs(value) >= 1e5 and value.is_integer() else number(value)
    return str(value)


# --- as text ---------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """GitHub's table; what would break it is escaped. ``rule``: its second line, if not ``---`` only."""
    lines = [_line(header), _line(rule or ["---"] * len(header)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return (
        "| " + " | ".join(" ".join(markdown_words(cell).replace("|", "\\|").split()) for cell in cells) + " |"
    )


def as_markdown(tables: Sequence[Table]) -> str:
    """GitHub's tables, a heading before each that has a title."""
    parts = []
    for table in tables:
        parts += [f"## {markdown_words(table.title)}"] if table.title else []
        parts.append(markdown_table(table.header, table.cells))
    return "\n\n".join(parts) + "\n"


def as_csv(tables: Sequence[Table]) -> str:
    """All tables' rows as one, which a spreadsheet opens as it is."""
    keys = _keys(tables)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for table in tables:
        writer.writerows([spreadsheet_cell(row.get(key)) for key in keys] for row in table.rows)
    return text.getvalue()


def write_csv(path: Path, rows: Rows) -> None:
    """Rows of plain values, each cell safe to open in a spreadsheet; the first row names the columns."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: spreadsheet_cell(value) for key, value in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode("utf-8", "replace"))


def as_json(tables: Sequence[Table], more: Mapping[str, Any]) -> str:
    """``{"rows": […], …}``: all tables' rows, and what is reported besides."""
    keys = _keys(tables)
    rows = [{key: row.get(key) for key in keys} for table in tables for row in table.rows]
    return json_text({**more, "rows": rows})


def json_text(data: Mapping[str, Any]) -> str:
    """For people and programs; what is not finite has no word in JSON, and is null."""
    plain = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def _keys(tables: Sequence[Table]) -> list[str]:
    return list(dict.fromkeys(column.key for table in tables for column in table.columns))


def as_latex(tables: Sequence[Table]) -> str:
    r"""A ``tabular`` with booktabs' rules for each table (``\usepackage{booktabs}``); what is special is
    escaped.
    """
    parts = []
    for table in tables:
        kinds = "".join("l" if column.align == "left" else "r" for column in table.columns)
        lines = [f"% {table.title}".replace("\n", " ")] if table.title else []
        lines += [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule"]
        lines += [_latex_line(table.header), r"\midrule"]
        lines += [_latex_line(cells) for cells in table.cells]
        parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n\n".join(parts) + "\n"


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(latex(" ".join(cell.split())) for cell in cells) + r" \\"


def latex(text: str) -> str:
    """Text in which nothing is a command."""
    return "".join(_LATEX.get(character, character) for character in text)


WRITERS: Final[Mapping[str, Callable[[Sequence[Table]], str]]] = {
    "md": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
}
