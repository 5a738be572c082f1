"""The one look of kvbench's pictures: colours, marks, frame. No global state is touched."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.files import replaced
from kvbench.results.provenance import caption, mark_of, slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Theme = Literal["light", "dark"]

PNG_DPI: Final = 150


@dataclass(frozen=True)
class Palette:
    """Colours of one theme. ``series`` is keyed by connector; ``spare`` is for connectors not listed."""

    paper: str
    ink: str
    faint: str
    grid: str
    limit: str
    badge: str
    series: MappingProxyType[str, str]
    spare: tuple[str, ...]


# Okabe and Ito's colours, which people with any common colour blindness can tell apart; for the dark
# theme lightened until each has a contrast of at least 4.5 : 1 with the paper.
PALETTES: Final = MappingProxyType(
    {
        "light": Palette(
            paper="#ffffff",
            ink="#1f2328",
            faint="#656d76",
            grid="#e4e7eb",
            limit="#b42318",
            badge="#fff3d6",
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
    """How one connector is drawn, the same in every picture."""

    colour: str
    marker: str


def looks(connectors: Sequence[str], palette: Palette) -> dict[str, PlotStyle]:
    """A look for each connector. Those not known to the palette take spare ones in their order."""
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


@contextmanager
def style(palette: Palette) -> Iterator[None]:
    """Our settings, on top of matplotlib's defaults and not of the user's; the old ones come back."""
    import matplotlib
    from matplotlib.rcsetup import cycler

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
        yield


@dataclass(frozen=True)
class Words:
    """The text around a picture."""

    heading: str
    subtitle: str
    caption: str
    badge: str = ""

    @classmethod
    def of(cls, run: RunFolder, heading: str) -> Words:
        mark = mark_of(run)
        own = run.manifest.get("kind") != "imported"
        badge = mark.badge if mark is not None else "LAB" if "lab" in run.labels else ""
        badge = badge or ("" if own else "READ IN: measured by another tool")
        return cls(heading, slo_of(run).text(), " · ".join([caption(run), *libraries_of(run)]), badge)


_MOVERS: Final = ("vllm", "mooncake-transfer-engine", "nixl", "torch")


def libraries_of(run: RunFolder) -> list[str]:
    """Engine and transfer libraries of the machine, with their versions; those of one name once."""
    known = run.environment.get("libraries")
    found = known.items() if isinstance(known, Mapping) else ()
    return [
        f"{str(name).split('-')[0]} {version}"
        for name, version in found
        if version and str(name).startswith(_MOVERS)
    ]


# Inches around the axes, for words, legend lines, axis labels and the limits' labels.
HEAD_IN: Final = 0.64
LEGEND_LINE_IN: Final = 0.25
PANEL_TITLE_IN: Final = 0.34
FOOT_IN: Final = 0.76
CAPTION_LINE_IN: Final = 0.14
LEFT_IN: Final = 0.82
MIN_WIDTH_IN: Final = 8.2


def new_figure(
    size: tuple[float, float],
    words: Words,
    palette: Palette,
    *,
    legend_lines: int = 1,
    right_in: float = 0.25,
    left_in: float = LEFT_IN,
    titled: bool = False,
) -> Figure:
    """A figure with its words. ``size``: its width, and the height that is left to the axes, in inches.

    ``left_in`` and ``right_in`` inches are kept free beside the axes; ``titled`` axes have room for a title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(size[0], MIN_WIDTH_IN)
    caption = _wrapped(_plain(words.caption), int(width / 0.066))
    top_in = HEAD_IN + legend_lines * LEGEND_LINE_IN + (PANEL_TITLE_IN if titled else 0.12)
    bottom_in = FOOT_IN + CAPTION_LINE_IN * len(caption)
    height = size[1] + top_in + bottom_in
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=left_in / width,
        right=1 - right_in / width,
        top=1 - top_in / height,
        bottom=bottom_in / height,
    )
    left, top = 0.16 / width, 1 - 0.14 / height
    figure.text(left, top, _plain(words.heading), fontsize=13, fontweight="bold", va="top")
    below: dict[str, Any] = {"fontsize": 9.5, "color": palette.faint, "va": "top"}
    figure.text(left, top - 0.27 / height, _plain(words.subtitle), **below)
    figure.text(
        left,
        0.12 / height,
        "\n".join(caption),
        fontsize=7.5,
        color=palette.faint,
        va="bottom",
        linespacing=1.3,
    )
    if words.badge:
        box = {"boxstyle": "round,pad=0.4", "facecolor": palette.badge, "edgecolor": "none"}
        place: dict[str, Any] = {"fontsize": 8.5, "ha": "right", "va": "top", "bbox": box}
        figure.text(1 - 0.25 / width, top - 0.05 / height, _plain(words.badge), **place)
    return figure


def _wrapped(text: str, most: int) -> list[str]:
    """Lines of at most ``most`` characters that end between two entries, where one entry is no longer."""
    whole = [entry.replace(" ", "\xa0") if len(entry) <= most else entry for entry in text.split(" · ")]
    return [line.replace("\xa0", " ") for line in textwrap.wrap(" · ".join(whole), most)]


def _plain(text: str) -> str:
    """Words of others are no formulas: matplotlib would take what stands between two dollar signs for one."""
    return text.replace("$", r"\$")


def add_legend(figure: Figure, lines: Sequence[Sequence[Artist]]) -> None:
    """Legends for the whole figure, one line each, between the subtitle and the axes."""
    width, height = figure.get_size_inches()
    for index, handles in enumerate(lines):
        figure.legend(
            handles=list(handles),
            loc="upper left",
            bbox_to_anchor=(0.1 / width, 1 - (HEAD_IN + 0.03 + index * LEGEND_LINE_IN) / height),
            ncols=max(1, len(handles)),
            borderaxespad=0,
            columnspacing=1.5,
            handletextpad=0.5,
        )


def save(figure: Figure, path: Path) -> None:
    """Writes PNG or SVG by the path's ending; the same picture gives the same bytes."""
    kind = path.suffix.lstrip(".")
    metadata = {"Date": None} if kind == "svg" else {"Software": "kvbench"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=PNG_DPI, metadata=metadata)


def handle(label: str, **look: Any) -> Line2D:
    """An entry of a legend; without a line unless ``look`` has one."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{"linestyle": "", "markersize": 7, **look})
