"""What a picture is drawn on: a figure of its own with words around the panels, or somebody's Axes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.errors import InputError
from kvbench.report.plots.style import Palette
from kvbench.results.provenance import caption, mark_of, slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecBase


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


@dataclass(frozen=True)
class Sheet:
    """Where a picture's panels and legends go. ``place``: the Axes that were given, None for a figure of its
    own.
    """

    figure: Figure
    place: Axes | None = None

    def grid(self, lines: int, columns: int, **space: Any) -> GridSpecBase:
        """Places for panels. ``space``: wspace, hspace. Raises InputError for Axes that are no subplot."""
        if self.place is None:
            return self.figure.add_gridspec(lines, columns, **space)
        place = self.place.get_subplotspec()
        if place is None:
            raise InputError(
                "this picture has several panels, and the Axes given are no subplot that can be divided",
                hint="take Axes from plt.subplots() or figure.add_subplot()",
            )
        self.place.set_axis_off()
        return place.subgridspec(lines, columns, **space)

    def panels(
        self, lines: int, columns: int, sharey: Literal["none", "row", "all"] = "none", **space: Any
    ) -> Any:
        """The panels, as an array of Axes of so many lines and columns."""
        return self.grid(lines, columns, **space).subplots(squeeze=False, sharey=sharey)

    def panel(self) -> Axes:
        """The one panel of a picture that has no more."""
        return self.figure.add_subplot() if self.place is None else self.place

    def legend(self, lines: Sequence[Sequence[Artist]]) -> None:
        """Legends for the whole picture, one line each, above the panels."""
        if self.place is not None:
            every = [each for line in lines for each in line]
            look: dict[str, Any] = {"fontsize": "small", "columnspacing": 1.2, "handletextpad": 0.5}
            self.place.legend(
                handles=every,
                loc="lower left",
                bbox_to_anchor=(0, 1.06),
                ncols=min(4, len(every)),
                **look,
            )
            return
        width, height = self.figure.get_size_inches()
        for index, handles in enumerate(lines):
            self.figure.legend(
                handles=list(handles),
                loc="upper left",
                bbox_to_anchor=(0.1 / width, 1 - (HEAD_IN + 0.03 + index * LEGEND_LINE_IN) / height),
                ncols=max(1, len(handles)),
                borderaxespad=0,
                columnspacing=1.5,
                handletextpad=0.5,
            )


def new_sheet(
    size: tuple[float, float],
    words: Words,
    palette: Palette,
    ax: Axes | None = None,
    *,
    legend_lines: int = 1,
    right_in: float = 0.25,
    left_in: float = LEFT_IN,
    titled: bool = False,
) -> Sheet:
    """A figure with its words. ``size``: its width, and the height that is left to the axes, in inches.

    ``left_in`` and ``right_in`` inches are kept free beside the axes; ``titled`` axes have room for a title.
    With ``ax`` the picture takes the place of those Axes, and what stands around is up to who gave them.
    """
    if ax is not None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        return Sheet(figure, ax)
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
    return Sheet(figure)


def _wrapped(text: str, most: int) -> list[str]:
    """Lines of at most ``most`` characters that end between two entries, where one entry is no longer."""
    whole = [entry.replace(" ", "\xa0") if len(entry) <= most else entry for entry in text.split(" · ")]
    return [line.replace("\xa0", " ") for line in textwrap.wrap(" · ".join(whole), most)]


def _plain(text: str) -> str:
    """Words of others are no formulas: matplotlib would take what stands between two dollar signs for one."""
    return text.replace("$", r"\$")
