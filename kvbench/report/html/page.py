"""report.html: a report in one file that loads nothing, for a screen, a phone, or paper.

Tables sort by a click: a cell's value is what stands in the CSV of the same name, its text what people read.
Every word of a run folder is escaped; the page's policy forbids any script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbench.report.html.svg import inline_svg, page_svg, theme_css
from kvbench.report.tables.table import Table
from kvbench.report.value import Drawing, Report
from kvbench.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATES: Final = Path(__file__).parents[1] / "templates"
SERIES: Final = ("connector", "backend")
_LONG_TEXT: Final = 60
"""Characters from which on a cell's text is broken into lines."""


def report_html(report: Report, drawn: Path | None = None) -> str:
    """The whole page. ``drawn``: a folder in which the pictures lie as SVG; those that don't are drawn."""
    import jinja2
    from markupsafe import Markup

    pictures = report.pictures("html").values()
    svgs = {each.name: svg for each in pictures if (svg := _svg(each, drawn)) is not None}
    sections = [section for section in report.shown("html", svgs) if section.blocks]
    tables = [block.table for section in sections for block in section.blocks if block.table]
    script = (TEMPLATES / "report.js").read_text("utf-8").rstrip("\n")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    return environment.get_template("report.html").render(
        report=report,
        title=report.titles["html"],
        sections=sections,
        svgs=svgs,
        series=list(dict.fromkeys(name for table in tables for name in series_of(table) if name)),
        series_of=series_of,
        numeric_columns=numeric_columns,
        rows_of=rows_of,
        version=__version__,
        css=Markup((TEMPLATES / "report.css").read_text("utf-8")),
        colours=Markup(theme_css()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _svg(picture: Drawing, drawn: Path | None) -> Markup | None:
    """A picture as a part of the page; None if the run has no data for it."""
    from markupsafe import Markup, escape

    alt, file = str(escape(picture.alt)), drawn / f"{picture.name}.svg" if drawn else None
    if file is not None and file.is_file():
        return Markup(page_svg(file.read_text("utf-8"), picture.name, alt))
    figure = picture.draw("light")
    return None if figure is None else Markup(inline_svg(figure, picture.name, alt))


# --- tables ----------------------------------------------------------------------------------------


def numeric_columns(table: Table) -> list[bool]:
    """Whether each column has numbers; where nothing says so, whether all its texts begin with one."""
    return [
        column.align == "right" or (not column.align and all(_leading(cells[place]) for cells in table.cells))
        for place, column in enumerate(table.columns)
    ]


def series_of(table: Table) -> list[str]:
    """Whose each row is, for a page that hides connectors (or backends); "" without a column of these."""
    place = next((at for at, column in enumerate(table.columns) if column.title in SERIES), None)
    return ["" if place is None else cells[place] for cells in table.cells]


def rows_of(table: Table, numeric: Sequence[bool]) -> Iterator[list[tuple[str, str, str]]]:
    """(text, value that it is sorted by, class) of each cell."""
    for place, cells in enumerate(table.cells):
        row: list[tuple[str, str, str]] = []
        for column, text, number in zip(table.columns, cells, numeric, strict=True):
            if column.key:
                value = _plain(table.rows[place].get(column.key))
            else:
                value = _leading(text) if number else text
            row.append((text, value, _class(text) or ("number" if number else "")))
        yield row


def _plain(value: Any) -> str:
    """A value as a CSV has it."""
    return "" if value is None else str(value)


def _leading(text: str) -> str:
    """The number that a text begins with; empty if it begins with none."""
    first = text.replace(",", "").removeprefix("≥ ").split(" ")[0].rstrip("?%×")
    try:
        float(first)
    except ValueError:
        return ""
    return first


def _class(text: str) -> str:
    if text in ("met", "missed", "invalid", "warning"):
        return text
    return "long" if len(text) > _LONG_TEXT else ""
