"""report.html: a report in one file that loads nothing, for a screen, a phone, or paper.

Tables sort by a click: a cell's value is that of the CSV of the same name, its text the displayed one. All
text from a run folder is escaped; the page's content security policy forbids any other script. A picture is
one SVG for the light theme, the dark theme and paper: its colours are CSS variables, its styles are
classes of the page, its ids are unique in the page, and unneeded elements are left out."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvbench.report.plots.distribution import COLOURS
from kvbench.report.plots.style import PALETTES, Palette, style, svg_of
from kvbench.report.tables.table import Table
from kvbench.report.value import Drawing, Report
from kvbench.version import __version__

if TYPE_CHECKING:
    from markupsafe import Markup


_COLOUR: Final = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER: Final = re.compile(r"-?\d+\.\d{2,}")
_PATH: Final = re.compile(r'(?<= d=")[^"]*')
_POINT: Final = re.compile(r"[ML] (\S+) (\S+)")
_CURVED: Final = re.compile(r"[CQA]")
_PLACE: Final = re.compile(r'(?<= [xy]=")[^"]*|(?<= transform=")[^"]*')
_STYLE: Final = re.compile(r' style="([^"]*)"')
_LEFT_OUT: Final = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    r'| transform="rotate\(-?0 [^"]*"',
    re.DOTALL,
)
_EMPTY: Final = re.compile(r"<defs>\s*</defs>")
_GROUP: Final = re.compile(r"<g\b([^>]*)>|</g>")
_ID: Final = re.compile(r'\s?\bid="([^"]*)"')
_USE: Final = re.compile(r'(href="#|url\(#)([^")]+)')


def colours() -> dict[str, str]:
    """Return each colour of the light theme with its dark counterpart."""
    light, dark = PALETTES["light"], PALETTES["dark"]
    pairs = list(zip(_all(light), _all(dark), strict=True))
    pairs += [(colour, COLOURS["dark"][part]) for part, colour in COLOURS["light"].items()]
    return dict(reversed(pairs))


def _all(palette: Palette) -> list[str]:
    plain = (palette.paper, palette.ink, palette.faint, palette.grid, palette.limit, palette.badge)
    return [*plain, *palette.series.values(), *palette.spare]


def theme_css() -> str:
    """Return the CSS variables of the pictures' colours; paper uses the light ones."""
    pairs = colours()
    light = "".join(f"{_variable(colour)}:{colour};" for colour in pairs)
    dark = "".join(f"{_variable(colour)}:{other};" for colour, other in pairs.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _variable(colour: str) -> str:
    return f"--k{colour[1:]}"


def page_svg(text: str, name: str, alt: str, classes: dict[str, str]) -> str:
    """Return an SVG document of kvbench as an element of a page. ``name``: prefix of its ids; ``alt`` must be
    safe in an attribute; ``classes``: style → class of the page, extended."""
    text = _LEFT_OUT.sub("", text).strip()
    ids = {key: f"{name}-{index}" for index, key in enumerate(sorted({m[2] for m in _USE.finditer(text)}))}
    text = _ID.sub(lambda match: f' id="{ids[match[1]]}"' if match[1] in ids else "", text)
    text = _USE.sub(lambda match: match[1] + ids[match[2]], text)
    text = _PATH.sub(lambda match: _steps(_NUMBER.sub(_short, match[0]).replace("\n", "")), text)
    text = _PLACE.sub(lambda match: _NUMBER.sub(_short, match[0]), text)
    known = colours()

    def themed(match: re.Match[str]) -> str:
        return f"var({_variable(match[0])})" if match[0] in known else match[0]

    def classed(match: re.Match[str]) -> str:
        return f' class="{classes.setdefault(_COLOUR.sub(themed, match[1]), f"s{len(classes)}")}"'

    head, rest = _STYLE.sub(classed, _without_bare_groups(_EMPTY.sub("", text))).split(">", 1)
    head = re.sub(r'\s(?:width|height|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{alt}">' + re.sub(r"\n\s*", "\n", rest)


def _without_bare_groups(text: str) -> str:
    """Remove the groups without attributes, but keep their content."""
    bare: list[bool] = []

    def kept(match: re.Match[str]) -> str:
        if match[0] != "</g>":
            if match[0].endswith("/>"):
                return match[0]
            bare.append(not match[1].strip())
            return "" if bare[-1] else match[0]
        return "" if bare.pop() else match[0]

    return _GROUP.sub(kept, text)


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.1f}".rstrip("0").rstrip(".")


def _steps(path: str) -> str:
    """Shorten level and upright lines of a path to one coordinate, which halves a step curve."""
    last = ("", "")

    def shorter(match: re.Match[str]) -> str:
        nonlocal last
        (x, y), before = match.groups(), last
        last = (x, y)
        line = match[0].startswith("L")
        return f"V {y}" if line and x == before[0] else f"H {x}" if line and y == before[1] else match[0]

    return path if _CURVED.search(path) else _POINT.sub(shorter, path)


TEMPLATES: Final = Path(__file__).parent / "templates"
SERIES: Final = ("connector", "backend")
_COLOURED: Final = ("met", "missed", "invalid", "warning")
_LONG_TEXT: Final = 28
"""Text length, in characters, above which a column is wrapped."""
_CODE: Final = re.compile(r"`([^`\n]+)`")
_EMPHASIS: Final = re.compile(r"\*(\w+)\*")
_INTERVAL: Final = re.compile(r"\[[^\[\]]*\]")


def report_html(report: Report, drawn: Path | None = None) -> str:
    """Return the whole page. ``drawn``: folder of existing SVG pictures; missing ones are drawn."""
    import jinja2
    from markupsafe import Markup

    pictures, classes = report.pictures("html").values(), dict[str, str]()
    svgs = {picture.name: svg for picture in pictures if (svg := _svg(picture, drawn, classes)) is not None}
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
        marked=marked,
        small=small,
        version=__version__,
        css=Markup((TEMPLATES / "report.css").read_text("utf-8") + _rules(classes)),
        colours=Markup(theme_css()),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _rules(classes: Mapping[str, str]) -> str:
    return "".join(f".plot .{name}{{{style}}}\n" for style, name in classes.items())


def _svg(picture: Drawing, drawn: Path | None, classes: dict[str, str]) -> Markup | None:
    """Return a picture as a part of the page, if the run has data for it."""
    from markupsafe import Markup, escape

    file = drawn / f"{picture.name}.svg" if drawn else None
    if file is not None and file.is_file():
        text = file.read_text("utf-8")
    elif (figure := picture.draw("light")) is not None:
        with style(PALETTES["light"]):
            text = svg_of(figure)
    else:
        return None
    return Markup(page_svg(text, picture.name, str(escape(picture.alt)), classes))


def marked(text: str) -> Markup:
    """Return a sentence with its `code` and *emphasis* as HTML elements."""
    from markupsafe import Markup, escape

    return Markup(_EMPHASIS.sub(r"<em>\1</em>", _CODE.sub(r"<code>\1</code>", str(escape(text)))))


def small(text: str) -> Markup | str:
    """Return a cell with its `code` as an element and its [interval] in small type on one line."""
    from markupsafe import Markup, escape

    if "`" not in text and "[" not in text:
        return text
    return Markup(_INTERVAL.sub(r"<small>\g<0></small>", _CODE.sub(r"<code>\1</code>", str(escape(text)))))


# --- tables ----------------------------------------------------------------------------------------


def numeric_columns(table: Table) -> list[bool]:
    """Return whether each column is numeric; if unspecified, whether all its texts begin with a number."""
    return [
        column.align == "right" or (not column.align and all(_leading(cells[index]) for cells in table.cells))
        for index, column in enumerate(table.columns)
    ]


def series_of(table: Table) -> list[str]:
    """Return each row's connector (or backend), so that a page can hide it; "" without such a column."""
    index = next((at for at, column in enumerate(table.columns) if column.title in SERIES), None)
    return ["" if index is None else cells[index] for cells in table.cells]


def rows_of(table: Table, numeric: Sequence[bool]) -> Iterator[list[tuple[str, str, str]]]:
    """Yield each row's cells as (text, sort value, class)."""
    long = [any(len(text) > _LONG_TEXT for text in column) for column in zip(*table.cells, strict=True)]
    kinds = [
        "number" if number else "long" if wide else "" for number, wide in zip(numeric, long, strict=True)
    ]
    for index, cells in enumerate(table.cells):
        row: list[tuple[str, str, str]] = []
        for column, text, number, kind in zip(table.columns, cells, numeric, kinds, strict=True):
            if column.key:
                value = _plain(table.rows[index].get(column.key))
            else:
                value = _leading(text) if number else text
            row.append((text, value, text if text in _COLOURED else kind))
        yield row


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _leading(text: str) -> str:
    """Return the number at the beginning of a text; empty without one."""
    first = text.replace(",", "").removeprefix("≥ ").split(" ")[0].rstrip("?%×")
    try:
        float(first)
    except ValueError:
        return ""
    return first
