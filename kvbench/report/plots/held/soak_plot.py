"""Latency, memory, descriptors and KV blocks over a soak's windows, one column a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvbench.core.held_rate.window_drift import settled
from kvbench.report.held.soak_rows import SoakSeries, soak_series
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, Theme, style
from kvbench.report.plots.values import says
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS_MOST: Final = 3
PANELS: Final = (
    ("TTFT (ms)", ("TTFT P50 (ms)", "TTFT P99 (ms)")),
    ("TPOT (ms)", ("TPOT P50 (ms)", "TPOT P99 (ms)")),
    ("memory (MB)", ("memory (MB)",)),
    ("descriptors", ("descriptors",)),
    ("KV blocks in use", ("KV blocks in use",)),
)
"""A panel's label, and the series in it."""


def soak_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """A line of panels a thing; None without windows."""
    series = soak_series(run)
    cells = list(dict.fromkeys(each.cell for each in series))[:COLUMNS_MOST]
    if not cells:
        return None
    palette = PALETTES[theme]
    with style(palette):
        words = Words.of(run, "Drift over the windows")
        size = (max(8.2, 1.2 + 4.2 * len(cells)), 1.6 * len(PANELS))
        sheet = new_sheet(size, words, palette, ax, titled=True, legend_lines=0)
        grid = sheet.panels(len(PANELS), len(cells), wspace=0.16, hspace=0.22)
        for line, (axes, (label, names)) in enumerate(zip(grid, PANELS, strict=True)):
            for axis, cell in zip(axes, cells, strict=True):
                _draw(axis, [each for each in series if each.cell == cell and each.name in names], palette)
                if not line:
                    axis.set_title(cell.connector)
                axis.tick_params(labelbottom=line == len(PANELS) - 1)
            axes[0].set_ylabel(label)
        for axis, _cell in zip(grid[-1], cells, strict=True):
            axis.set_xlabel("minutes of load")
        sheet.figure.align_ylabels(list(grid[:, 0]))
    return sheet.figure


def _draw(axis: Axes, series: Sequence[SoakSeries], palette: Palette) -> None:
    colours = [*palette.series.values(), *palette.spare]
    for place, each in enumerate(series):
        known = [(window.at_s / 60, window.value) for window in each.windows if window.value is not None]
        if not known:
            continue
        colour, label = colours[place % len(colours)], each.of or each.name.split(" (")[0]
        (line,) = axis.plot(
            [at for at, _ in known], [value for _, value in known], ".-",
            color=colour, linewidth=1.0, markersize=3.5, label=label,
        )  # fmt: skip
        says(line, each.cell.connector, f"{label}: {each.drift.verdict}")
        if each.drift.per_hour is not None and each.drift.median is not None:
            _trend(axis, each, colour)
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.3)
    if series:
        axis.legend(loc="upper left", fontsize=7, ncols=min(4, len(series)), borderaxespad=0.1)


def _trend(axis: Axes, of: SoakSeries, colour: str) -> None:
    """The fitted line, through the middle of what it was fitted to."""
    at = [window.at_s for window in settled(of.windows) if window.value is not None]
    values = [window.value for window in settled(of.windows) if window.value is not None]
    middle_s, middle = sum(at) / len(at), sum(values) / len(values)
    slope = (of.drift.per_hour or 0.0) / 3600
    ends = [min(at), max(at)]
    axis.plot(
        [each / 60 for each in ends], [middle + slope * (each - middle_s) for each in ends],
        color=colour, linewidth=1.0, linestyle=(0, (4, 2)),
    )  # fmt: skip
