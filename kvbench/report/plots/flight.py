"""Requests on their way and waiting over time, at the trial that supports each answer.

Under a rate that holds, both go up and down around a level; a curve that climbs to the last arrival is a
queue that grows, and a rate that does not hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvbench.core.metrics.steady_window import in_flight_series, waiting_series
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.stats import StepSeries
from kvbench.report.plots.panels import Lengths, lengths_of, light_records, panel_title, supporting
from kvbench.report.plots.style import PALETTES, Palette, Theme, Words, add_legend, handle, new_figure, style
from kvbench.report.tables.numbers import number
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS_MOST: Final = 4
LINES_MOST: Final = 6
IN_FLIGHT, WAITING = "aggregated", "nixl"
"""Colours of the two curves, by whose they are in the palette."""

Shown = dict[tuple[str, Lengths], tuple[TrialRecord, list[RequestRecord]]]


def in_flight_figure(run: RunFolder, theme: Theme = "light") -> Figure | None:
    """A line of panels per connector, a column per input length; None where no requests were kept."""
    found = _found(run)
    if not found:
        return None
    palette = PALETTES[theme]
    panels = sorted({panel for _, panel in found})[:COLUMNS_MOST]
    connectors = list(dict.fromkeys(name for name, _ in found))[:LINES_MOST]
    with style(palette):
        words = Words.of(run, "Requests on their way over time")
        size = (1.2 + 2.75 * len(panels), 1.75 * len(connectors))
        figure = new_figure(size, words, palette, titled=True)
        grid = figure.subplots(
            len(connectors), len(panels), squeeze=False, gridspec_kw={"wspace": 0.18, "hspace": 0.34}
        )
        for axes, name in zip(grid, connectors, strict=True):
            for axis, panel in zip(axes, panels, strict=True):
                if (name, panel) not in found:
                    axis.set_axis_off()
                    continue
                trial, records = found[name, panel]
                _draw(axis, trial, records, palette)
                _say(axis, f"{number(trial.request_rate)} req/s", palette)
            axes[0].set_axis_on()
            axes[0].set_ylabel(name)
        for axis, panel in zip(grid[0], panels, strict=True):
            axis.set_title(panel_title(panel, panels))
        for axis in grid[-1]:
            axis.set_xlabel("seconds since the trial's start")
        add_legend(figure, [_legend(palette)])
    return figure


def _found(run: RunFolder) -> Shown:
    found: Shown = {}
    for _, trial in supporting(run):
        records = light_records(run, trial.trial_id)
        if records:
            found[trial.cell.connector, lengths_of(trial)] = (trial, records)
    return found


def _draw(axes: Axes, trial: TrialRecord, records: list[RequestRecord], palette: Palette) -> None:
    window = trial.summary.get("window") or {}
    if window:
        span = float(window["start_s"]), float(window["end_s"])
        axes.axvspan(*span, color=palette.grid, alpha=0.55, linewidth=0, zorder=0)
    for series, colour in (
        (in_flight_series(records, trial.duration_s), palette.series[IN_FLIGHT]),
        (waiting_series(records, trial.duration_s), palette.series[WAITING]),
    ):
        times, values = outline(series)
        axes.step(times, values, where="post", color=colour, linewidth=1.1)
    axes.set_xlim(0, max(trial.duration_s, 1e-3))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.locator_params(axis="x", nbins=5)


def outline(series: StepSeries) -> tuple[list[float], list[float]]:
    """A step series as places of a line, from zero on."""
    return [0.0, *series.times_s.tolist()], [0.0, *series.values.tolist()]


def _say(axes: Axes, text: str, palette: Palette) -> None:
    place: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "color": palette.ink}
    axes.text(0.985, 0.965, text, transform=axes.transAxes, **place)


def _legend(palette: Palette) -> list[Artist]:
    from matplotlib.patches import Patch

    return [
        handle("on their way", linestyle="-", color=palette.series[IN_FLIGHT]),
        handle("waiting for the first token", linestyle="-", color=palette.series[WAITING]),
        Patch(facecolor=palette.grid, alpha=0.55, label="steady window, judged"),
    ]
