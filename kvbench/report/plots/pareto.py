"""Throughput against interactivity: what a GPU puts out, and how fast each user's tokens come.

Interactivity is 1 / median TPOT (as in NVIDIA's and SemiAnalysis' charts of serving); throughput is the
output tokens per second of the steady window, over all GPUs (engines, where no GPUs are known).
A point on the line is beaten by no other trial of its connector in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvbench.report.plots.panels import Lengths, axis_spans, lengths_of, panel_title, rated_trials, supporting
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, says, style
from kvbench.report.tables.result import shared_unit, summary_table
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import mark_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS_PER_LINE: Final = 4


@dataclass(frozen=True)
class Point:
    """One trial. ``interactivity``: tokens/s for one user; ``throughput``: output tokens/s of one GPU;
    ``rate``: that was offered.
    """

    connector: str
    interactivity: float
    throughput: float
    met: bool
    rate: float = 0.0

    def text(self) -> str:
        return (
            f"{self.connector}, {number(self.rate)} req/s: {number(self.throughput)} tokens/s, "
            f"{number(self.interactivity)} for each user"
        )


def pareto_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """A panel per input length; None where the plan does not name the instances, or no trial has both."""
    found = points(run)
    if not found:
        return None
    palette = PALETTES[theme]
    panels = sorted(found)
    connectors = list(dict.fromkeys(point.connector for panel in panels for point in found[panel]))
    look = looks(connectors, palette)
    columns = min(len(panels), PANELS_PER_LINE)
    lines = math.ceil(len(panels) / columns)
    with style(palette):
        unit = gpu_word(run)
        words = Words.of(run, "Throughput against interactivity")
        sheet = new_sheet(
            (1.2 + 2.75 * columns, 2.7 * lines), words, palette, ax, legend_lines=2, titled=True
        )
        grid = sheet.panels(lines, columns, wspace=0.28, hspace=0.5)
        across = axis_spans([[point.interactivity for point in found[panel]] for panel in panels])
        up = axis_spans([[point.throughput for point in found[panel]] for panel in panels])
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_axis_off()
                continue
            _draw(axes, found[panels[index]], look, palette)
            axes.set(xlim=across[index], ylim=up[index])
            axes.set_title(panel_title(panels[index], panels))
            axes.set_ylabel(f"output tokens/s per {unit}" if index % columns == 0 else "")
            axes.set_xlabel("tokens/s per user (1 / median TPOT)")
        sheet.legend(_legend(connectors, look, palette))
    return sheet.figure


def points(run: RunFolder) -> dict[Lengths, list[Point]]:
    """The valid trials that have both figures, by input and output length."""
    counts = gpus_by_connector(run)
    supporting_ids = {trial.trial_id for _, trial in supporting(run)}
    found: dict[Lengths, list[Point]] = {}
    for trial in rated_trials(run):
        gpus, tpot_ms = counts.get(trial.cell.connector), trial_value(trial, "tpot_ms_p50")
        output = trial_value(trial, "output_tok_per_s")
        if gpus and tpot_ms and output and trial.verdict != "invalid":
            met = trial.verdict in ("met", "measured") or trial.trial_id in supporting_ids
            point = Point(trial.cell.connector, 1e3 / tpot_ms, output / gpus, met, trial.request_rate)
            found.setdefault(lengths_of(trial), []).append(point)
    return found


def gpus_by_connector(run: RunFolder) -> dict[str, int]:
    """Connector → GPUs, or engines where no GPUs are known; without those of which neither is."""
    rows = summary_table(run)
    unit = shared_unit(rows)
    return {row.cell.connector: count for row in rows if (count := row.size.count(unit))}


def gpu_word(run: RunFolder) -> str:
    """What the throughput is divided by: a real GPU, a modelled one, or an engine that has none."""
    unit = shared_unit(summary_table(run))
    return unit if unit == "engine" or mark_of(run) is None else "modelled GPU"


def front(found: Sequence[Point]) -> list[Point]:
    """The points that no other one beats in both, by rising interactivity."""
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (-point.interactivity, -point.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best[::-1]


def _draw(axes: Axes, found: Sequence[Point], look: Mapping[str, PlotStyle], palette: Palette) -> None:
    for place, (name, item) in enumerate(look.items()):
        size = max(4.5, 7.5 - place)  # a larger mark is seen behind a smaller one
        mine = [point for point in found if point.connector == name]
        best = front(mine)
        x, y = [point.interactivity for point in best], [point.throughput for point in best]
        (line,) = axes.plot(x, y, color=item.colour, linewidth=1.5, alpha=0.8, zorder=2.5)
        says(line, name)
        for met in (True, False):
            those = [point for point in mine if point.met == met]
            (marks,) = axes.plot(
                [point.interactivity for point in those],
                [point.throughput for point in those],
                item.marker,
                markersize=size,
                markerfacecolor=item.colour if met else "none",
                markeredgecolor=palette.paper if met else item.colour,
                markeredgewidth=0.6 if met else 1.2,
                zorder=3,
            )
            says(marks, name, *(point.text() for point in those))


def _legend(connectors: Sequence[str], look: Mapping[str, PlotStyle], palette: Palette) -> list[list[Line2D]]:
    entries = [
        handle(name, marker=look[name].marker, color=look[name].colour, linestyle="-") for name in connectors
    ]
    hollow = {"markerfacecolor": palette.paper, "markeredgecolor": palette.faint}
    keys = [
        handle("SLO met, or not asked", marker="o", color=palette.faint),
        handle("not met, or undecided", marker="o", **hollow),
        handle("not beaten in both", color=palette.faint, linestyle="-"),
    ]
    return [entries, keys]
