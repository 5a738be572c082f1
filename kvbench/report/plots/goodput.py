"""Goodput over the rate that arrived: how many requests a second were completed within the SLO.

Both are of the steady part. Chance puts more or fewer arrivals into it than the offered rate; a request that
arrived before it may be completed in it, so that a point can lie a little above the diagonal. Where a line
leaves the diagonal, part of the work was done for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.records import TrialRecord
from kvbench.report.plots.panels import found_rates, lengths_of, panel_title, rated_trials
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, says, style
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS_PER_LINE: Final = 4


def goodput_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """``request_goodput`` over the rate of arrivals, a panel a length; None without two such trials."""
    trials = [
        trial
        for trial in rated_trials(run)
        if trial.verdict != "invalid" and trial_value(trial, "request_goodput") is not None
    ]
    if len(trials) < 2:
        return None
    palette, rows = PALETTES[theme], summary_table(run)
    names = list(dict.fromkeys([*(row.cell.connector for row in rows), *(t.cell.connector for t in trials)]))
    look = looks(names, palette)
    panels = sorted({lengths_of(trial) for trial in trials})
    columns = min(len(panels), PANELS_PER_LINE)
    lines = math.ceil(len(panels) / columns)
    with style(palette):
        words = Words.of(run, "Goodput: requests answered within the SLO")
        sheet = new_sheet(
            (1.2 + 2.75 * columns, 2.7 * lines), words, palette, ax, legend_lines=2, titled=True
        )
        grid = sheet.panels(lines, columns, wspace=0.22, hspace=0.5)
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_axis_off()
                continue
            mine = [trial for trial in trials if lengths_of(trial) == panels[index]]
            _draw(axes, mine, look, palette)
            found_rates([axes], [row for row in rows if lengths_of(row) == panels[index]], look)
            axes.set_title(panel_title(panels[index], panels))
            axes.set_ylabel("goodput (req/s)" if index % columns == 0 else "")
            axes.set_xlabel("arrived (req/s)")
        shown = [name for name in names if any(trial.cell.connector == name for trial in trials)]
        sheet.legend([[_entry(name, look[name]) for name in shown], _keys(palette)])
    return sheet.figure


def _entry(name: str, look: PlotStyle) -> Line2D:
    return handle(name, marker=look.marker, color=look.colour, linestyle="-")


def _keys(palette: Palette) -> list[Line2D]:
    return [
        handle("all that arrived", color=palette.faint, linestyle=(0, (4, 2)), marker=""),
        handle("found rate", color=palette.faint, marker="^"),
    ]


def rate_of_arrivals(trial: TrialRecord) -> float:
    """Return the arrivals per second of the steady part; the offered rate where they are unknown."""
    arrived, window = trial.summary.get("arrived"), trial.summary.get("window") or {}
    length_s = (window.get("end_s") or 0.0) - (window.get("start_s") or 0.0)
    return arrived / length_s if arrived and length_s > 0 else trial.request_rate


def _draw(axes: Axes, trials: Sequence[TrialRecord], look: dict[str, PlotStyle], palette: Palette) -> None:
    top = max(map(rate_of_arrivals, trials)) * 1.08
    axes.plot([0, top], [0, top], color=palette.faint, linewidth=1.1, linestyle=(0, (4, 2)), zorder=1.5)
    for name in dict.fromkeys(trial.cell.connector for trial in trials):
        points: dict[float, list[float]] = {}
        for trial in sorted(trials, key=rate_of_arrivals):
            if trial.cell.connector == name:
                arrived = rate_of_arrivals(trial)
                points.setdefault(arrived, []).append(trial_value(trial, "request_goodput") or 0.0)
        colour, marker = look[name].colour, look[name].marker
        means = [sum(values) / len(values) for values in points.values()]
        (line,) = axes.plot(list(points), means, color=colour, linewidth=1.5, zorder=2.5)
        says(line, name)
        x = [rate for rate, values in points.items() for _ in values]
        y = [value for values in points.values() for value in values]
        edge: dict[str, Any] = {"markeredgecolor": palette.paper, "markeredgewidth": 0.6}
        (marks,) = axes.plot(x, y, marker, color=colour, markersize=5.5, zorder=3, **edge)
        says(
            marks,
            name,
            *(
                f"{name}: {number(rate)} req/s arrived, {number(value)} req/s completed within the SLO"
                for rate, value in zip(x, y, strict=True)
            ),
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
