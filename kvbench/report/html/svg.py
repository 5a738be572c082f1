"""A picture as part of an HTML page: one SVG for the light and the dark theme, and on paper.

Its colours become CSS variables, its ids unique in the page, and what no page needs is left out.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from kvbench.report.plots.breakdown import COLOURS
from kvbench.report.plots.style import PALETTES, Palette, style, svg_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOUR: Final = re.compile(r"#[0-9a-f]{6}\b")
_NUMBER: Final = re.compile(r"-?\d+\.\d{3,}")
_PATH: Final = re.compile(r'(?<= d=")[^"]*')
_STYLE: Final = re.compile(r'(?<= style=")[^"]*')
_LEFT_OUT: Final = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.DOTALL
)
_ID: Final = re.compile(r'\bid="([^"]*)"')
_USE: Final = re.compile(r'(href="#|url\(#)([^")]+)')


def colours() -> dict[str, str]:
    """Each colour of the light theme with the one that stands for it in the dark theme."""
    light, dark = PALETTES["light"], PALETTES["dark"]
    pairs = list(zip(_all(light), _all(dark), strict=True))
    pairs += [(colour, COLOURS["dark"][part]) for part, colour in COLOURS["light"].items()]
    return dict(reversed(pairs))


def _all(palette: Palette) -> list[str]:
    plain = (palette.paper, palette.ink, palette.faint, palette.grid, palette.limit, palette.badge)
    return [*plain, *palette.series.values(), *palette.spare]


def theme_css() -> str:
    """The variables that the pictures' colours are; paper shows the light ones."""
    pairs = colours()
    light = "".join(f"{_variable(colour)}:{colour};" for colour in pairs)
    dark = "".join(f"{_variable(colour)}:{other};" for colour, other in pairs.items())
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _variable(colour: str) -> str:
    return f"--k{colour[1:]}"


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """A figure of the light theme as an ``<svg>`` element. ``name``: what its ids begin with."""
    with style(PALETTES["light"]):
        return page_svg(svg_of(figure), name, alt)


def page_svg(text: str, name: str, alt: str) -> str:
    """A whole SVG document of ours as an element of a page. ``alt`` must be safe in an attribute."""
    text = _LEFT_OUT.sub("", text).strip()
    used = {match[2] for match in _USE.finditer(text)}
    text = _ID.sub(lambda match: f'id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = _USE.sub(lambda match: f"{match[1]}{name}-{match[2]}", text)
    text = _PATH.sub(lambda match: _NUMBER.sub(_short, match[0]).replace("\n", ""), text)
    known = colours()

    def themed(match: re.Match[str]) -> str:
        return f"var({_variable(match[0])})" if match[0] in known else match[0]

    text = _STYLE.sub(lambda match: _COLOUR.sub(themed, match[0]), text)
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(?:width|height|version)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{alt}">' + re.sub(r"\n\s*", "\n", rest)


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")
