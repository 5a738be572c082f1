"""One table for every format.

CSV and JSON have full precision and the columns' keys; other formats have titles and three digits. Missing
values are empty in CSV, null in JSON and a dash elsewhere."""

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
from kvbench.report.tables.columns import TITLES

MISSING: Final = "–"


def number(value: float | None) -> str:
    """Format with three significant digits: ``0.0123``, ``12.3``, ``1235``; exponents below 10⁻⁶ only."""
    if value is None:
        return MISSING
    if not math.isfinite(value) or abs(value) < 1e-6:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 6)}f}"


def percent(value: float | None) -> str:
    """Format a share in per cent with one digit; 100 only for all."""
    if value is None:
        return MISSING
    return "100" if value >= 1 else f"{min(value * 100, 99.9):.1f}"


Rows = Sequence[Mapping[str, Any]]
Align = Literal["", "left", "right"]

STEADY: Final = "steady part of the trial"
WHOLE_RUN: Final = "whole run, ramp and drain included"
"""Windows of a trial that figures can describe; each table with latencies or rates names its window."""
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
    """A column: key in files (or empty) and title. ``brief``: shown in a terminal; ``width``: characters from
    which a cell is folded there, 0 for never; ``align``: empty for automatic; ``rank``: higher ranks are
    dropped first in a narrow terminal, 0 never."""

    key: str
    title: str
    brief: bool = True
    align: Align = ""
    width: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Table:
    """``cells``: displayed texts. ``rows``: values by key, for files. ``name``: its CSV; ``words``:
    explanation; ``groups``: first row → heading; ``marks``: footnotes by row; ``every_column``: for look-up.
    ``ruled``: a line below the header in a terminal. ``window``: the part of the trial described; ``trials``:
    trial id of each row."""

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
        """Return the sentence on the window; empty if the table has none."""
        return f"Latencies and rates: {self.window}." if self.window else ""

    @property
    def header(self) -> list[str]:
        return [column.title for column in self.columns]

    def parts(self) -> Iterable[tuple[str, Sequence[Sequence[str]], Sequence[Sequence[int]]]]:
        """Return (heading, cells, marks) of each group."""
        starts = list(self.groups) or [0]
        for start, end in zip(starts, [*starts[1:], len(self.cells)], strict=True):
            yield self.groups.get(start, ""), self.cells[start:end], self.marks[start:end]


# --- constructors ----------------------------------------------------------------------------------


def of_texts(
    title: str,
    header: Sequence[str],
    cells: Iterable[Sequence[object]],
    align: Align = "",
    words: str = "",
    window: str = "",
    trials: Sequence[str] = (),
) -> Table:
    columns = [Column("", heading, align=align) for heading in header]
    shown = [[str(cell) for cell in row] for row in cells]
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
    """Build a table whose file has other columns than the display. ``brief``: terminal columns, default all.
    ``rows`` of trials have a ``trial_id``."""
    columns = [Column("", heading, brief is None or heading in brief, width=34) for heading in header]
    trials = [str(row.get("trial_id") or "") for row in rows]
    return Table(title, columns, cells, rows, name, words, window=window, trials=trials)


def of_values(title: str, columns: Sequence[Column], rows: Rows, window: str = "") -> Table:
    """Build a table of values, rounded for display; texts are left-aligned."""
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
    shown: Collection[str] | None = None,
    texts: Mapping[str, Sequence[str]] | None = None,
    window: str = "",
    interval: str = "",
) -> Table | None:
    """Build the table of tables/<name>.csv, or None without rows. ``shown``: keys of the columns to show;
    ``texts``: displayed cells of a column; ``interval``: what the rates' brackets mean."""
    if not rows:
        return None
    texts = texts or {}
    keys = list(rows[0]) if shown is None else [key for key in shown if key in rows[0]]
    titles = {} if shown is None else {**TITLES, "max_request_rate": f"max rate (req/s) {interval}"}
    columns = [
        Column(key, titles.get(key, key), align="right" if _numeric(key, rows) else "left") for key in keys
    ]
    cells = [
        [texts[key][index] if key in texts else _rounded(key, row.get(key)) for key in keys]
        for index, row in enumerate(rows)
    ]
    trials = [str(row.get("trial_id") or "") for row in rows]
    return Table(title, columns, cells, rows, name, every_column=shown is None, window=window, trials=trials)


def _numeric(key: str, rows: Rows) -> bool:
    known = [row.get(key) for row in rows if row.get(key) not in (None, "")]
    return bool(known) and all(
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in known
    )


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else number(value)
    return " ".join(_rounded("", value).split())


def _rounded(key: str, value: Any) -> str:
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and key not in _UNROUNDED:
        return f"{value:,.0f}" if abs(value) >= 1e5 and value.is_integer() else number(value)
    return str(value)


# --- as text ---------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: Sequence[str] = ()) -> str:
    """Return a GitHub table with escaped cells. ``rule``: its second line, default ``---``."""
    lines = [_line(header), _line(rule or ["---"] * len(header)), *(_line(row) for row in rows)]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return (
        "| " + " | ".join(" ".join(markdown_words(cell).replace("|", "\\|").split()) for cell in cells) + " |"
    )


def as_markdown(tables: Sequence[Table]) -> str:
    parts = []
    for table in tables:
        parts += [f"## {markdown_words(table.title)}"] if table.title else []
        parts.append(markdown_table(table.header, table.cells))
    return "\n\n".join(parts) + "\n"


def as_csv(tables: Sequence[Table]) -> str:
    keys = _keys(tables)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for table in tables:
        writer.writerows([spreadsheet_cell(row.get(key)) for key in keys] for row in table.rows)
    return text.getvalue()


def write_csv(path: Path, rows: Rows) -> None:
    """Write plain rows with spreadsheet-safe cells; the first row names the columns."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: spreadsheet_cell(value) for key, value in row.items()} for row in rows)
    write_bytes(path, text.getvalue().encode("utf-8", "replace"))


def rows_of(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Return all tables' rows, for JSON."""
    keys = _keys(tables)
    return [{key: row.get(key) for key in keys} for table in tables for row in table.rows]


def json_text(data: Mapping[str, Any]) -> str:
    """Return JSON with null for non-finite numbers."""
    plain = json.loads(json.dumps(data, default=str), parse_constant=lambda _: None)
    return json.dumps(plain, indent=2, ensure_ascii=False) + "\n"


def _keys(tables: Sequence[Table]) -> list[str]:
    return list(dict.fromkeys(column.key for table in tables for column in table.columns))


def as_latex(tables: Sequence[Table]) -> str:
    r"""Return a ``tabular`` with booktabs rules per table (``\usepackage{booktabs}``), escaped."""
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
    """Escape LaTeX commands."""
    return "".join(_LATEX.get(character, character) for character in text)


WRITERS: Final[Mapping[str, Callable[[Sequence[Table]], str]]] = {
    "md": as_markdown,
    "csv": as_csv,
    "latex": as_latex,
}
