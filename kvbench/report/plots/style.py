"""Common style of kvbench's plots, and the data of their marks. No global state is changed.

SVG marks have a ``<title>`` with their value, and ``data-series`` lets a page hide series. matplotlib writes
an artist's gid as its group's id, which carries both until the SVG is written."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import quote, unquote

from kvbench.files import replaced

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


_PREFIX: Final = "values:"
_GROUP: Final = re.compile(rf'<g id="{_PREFIX}([^"]*)">')
_TAG: Final = re.compile(r"<g\b[^>]*?(/?)>|</g>")
_MARK: Final = re.compile(r"<use\b([^>]*?)\s*/>")


def tag(artist: Artist, series: str, *texts: str) -> None:
    """Mark an artist as part of ``series``. ``texts``: one per mark, or one for all, or none."""
    artist.set_gid(_PREFIX + quote(json.dumps([series, *texts])))


def with_values(svg: str) -> str:
    """Replace the ids in the SVG by ``data-series`` and ``<title>``."""
    parts, at = [], 0
    for match in _GROUP.finditer(svg):
        series, *texts = json.loads(unquote(match[1]))
        end = _end(svg, match.end())
        inside = svg[match.end() : end]
        parts += [svg[at : match.start()], f'<g data-series="{escape(series)}">', _titled(inside, texts)]
        at = end
    return "".join([*parts, svg[at:]])


def _end(svg: str, start: int) -> int:
    """Return the end of the group that begins before ``start``."""
    depth = 1
    for match in _TAG.finditer(svg, start):
        depth += -1 if match[0] == "</g>" else not match[1]
        if not depth:
            return match.start()
    raise ValueError("a group of the SVG is not closed")


def _titled(inside: str, texts: Sequence[str]) -> str:
    titles = [f"<title>{escape(text, quote=False)}</title>" for text in texts]
    if len(titles) == inside.count("<use "):
        left = iter(titles)
        return _MARK.sub(lambda mark: f"<use{mark[1]}>{next(left)}</use>", inside)
    return titles[0] + inside if len(titles) == 1 else inside


Theme = Literal["light", "dark"]

PNG_DPI: Final = 150


@dataclass(frozen=True)
class Palette:
    """Colours of one theme. ``series``: by connector; ``spare``: for other connectors; ``waiting``:
    requests without a first token."""

    paper: str
    ink: str
    faint: str
    grid: str
    limit: str
    badge: str
    waiting: str
    series: MappingProxyType[str, str]
    spare: tuple[str, ...]


# Okabe and Ito's colours, which people with any common colour blindness can tell apart; for the dark
# theme they are lightened to a contrast of at least 4.5 : 1 with the paper.
PALETTES: Final = MappingProxyType(
    {
        "light": Palette(
            paper="#ffffff",
            ink="#1f2328",
            faint="#656d76",
            grid="#e4e7eb",
            limit="#b42318",
            badge="#fff3d6",
            waiting="#f5427a",
            series=MappingProxyType(
                {
                    "aggregated": "#57606a",
                    "mooncake": "#0072b2",
                    "nixl": "#d55e00",
                    "tcp": "#009e73",
                    "nccl": "#b0559a",
                }
            ),
            spare=("#8a6d00", "#3a7ca5", "#7a4fbf", "#a0522d"),
        ),
        "dark": Palette(
            paper="#0d1117",
            ink="#e6edf3",
            faint="#9aa4af",
            grid="#262d36",
            limit="#ff7b72",
            badge="#3d3212",
            waiting="#ff4f8b",
            series=MappingProxyType(
                {
                    "aggregated": "#b1bac4",
                    "mooncake": "#56b4e9",
                    "nixl": "#f0883e",
                    "tcp": "#2fc79a",
                    "nccl": "#e39bd0",
                }
            ),
            spare=("#e3c000", "#79b8ff", "#b392f0", "#d9a066"),
        ),
    }
)

_MARKERS: Final = MappingProxyType({"aggregated": "s", "mooncake": "o", "nixl": "D", "tcp": "^", "nccl": "v"})
_SPARE_MARKERS: Final = ("P", "h", "<", ">")


@dataclass(frozen=True)
class PlotStyle:
    colour: str
    marker: str


def looks(connectors: Sequence[str], palette: Palette) -> dict[str, PlotStyle]:
    """Assign a style to each connector; unknown ones take spare styles in order."""
    known: dict[str, PlotStyle] = {}
    spare = 0
    for name in dict.fromkeys(connectors):
        if name in palette.series:
            known[name] = PlotStyle(palette.series[name], _MARKERS[name])
        else:
            known[name] = PlotStyle(
                palette.spare[spare % len(palette.spare)],
                _SPARE_MARKERS[(spare + spare // len(palette.spare)) % len(_SPARE_MARKERS)],
            )
            spare += 1
    return known


_ACTIVE: ContextVar[Palette | None] = ContextVar("_ACTIVE", default=None)
"""Palette whose settings are active: setting them takes milliseconds."""


@contextmanager
def style(palette: Palette) -> Iterator[None]:
    """Apply kvbench's settings on top of matplotlib's defaults, and restore the old ones."""
    import matplotlib
    from matplotlib.rcsetup import cycler

    if _ACTIVE.get() == palette:
        yield
        return
    token = _ACTIVE.set(palette)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "figure.facecolor": palette.paper,
                "savefig.facecolor": palette.paper,
                "axes.facecolor": palette.paper,
                "axes.edgecolor": palette.faint,
                "axes.linewidth": 0.8,
                "axes.labelcolor": palette.ink,
                "axes.labelsize": 9.5,
                "axes.titlesize": 10,
                "axes.titleweight": "bold",
                "axes.titlelocation": "left",
                "axes.titley": 1.0,  # else matplotlib measures every tick label to find a place for it
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.grid": True,
                "axes.axisbelow": True,
                "axes.prop_cycle": cycler(color=list(palette.series.values())),
                "grid.color": palette.grid,
                "grid.linewidth": 0.8,
                "text.color": palette.ink,
                "xtick.color": palette.faint,
                "ytick.color": palette.faint,
                "xtick.labelcolor": palette.ink,
                "ytick.labelcolor": palette.ink,
                "xtick.labelsize": 8.5,
                "ytick.labelsize": 8.5,
                "lines.linewidth": 1.6,
                "lines.markersize": 6,
                "legend.frameon": False,
                "legend.fontsize": 9,
                "font.family": "sans-serif",
                "font.sans-serif": ["DejaVu Sans"],
                "svg.fonttype": "none",
                "svg.hashsalt": "kvbench",
            }
        )
        try:
            yield
        finally:
            _ACTIVE.reset(token)


def save(figure: Figure, path: Path) -> None:
    """Write PNG or SVG by suffix; equal plots give equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        if path.suffix == ".svg":
            temporary.write_text(svg_of(figure), "utf-8")
        else:
            figure.savefig(temporary, format="png", dpi=PNG_DPI, metadata={"Software": "kvbench"})


def svg_of(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return with_values(buffer.getvalue())


def handle(label: str, **look: Any) -> Line2D:
    """Return a legend entry; without a line unless ``look`` has one."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"linestyle": "", "markersize": 7, **look})
