"""Throughput against interactivity: what a GPU puts out, and how fast each user's tokens come.

Interactivity is 1 / median TPOT (as in NVIDIA's and SemiAnalysis' charts of serving); throughput is the
output tokens per second of the steady window, over all engine instances and their tensor-parallel ranks.
A point on the line is beaten by no other trial of its connector in both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvbench.report.plots.axes import axis_spans
from kvbench.report.plots.panels import Lengths, lengths_of, panel_title, rated_trials, supporting
from kvbench.report.plots.style import (
    PALETTES,
    Palette,
    PlotStyle,
    Theme,
    Words,
    add_legend,
    handle,
    looks,
    new_figure,
    style,
)
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import mark_of, resolved
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS_PER_LINE: Final = 4


@dataclass(frozen=True)
class Point:
    """One trial. ``interactivity``: tokens/s for one user; ``throughput``: output tokens/s of one GPU."""

    connector: str
    interactivity: float
    throughput: float
    met: bool


def pareto_figure(run: RunFolder, theme: Theme = "light") -> Figure | None:
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
        figure = new_figure((1.2 + 2.75 * columns, 2.7 * lines), words, palette, legend_lines=2, titled=True)
        grid = figure.subplots(lines, columns, squeeze=False, gridspec_kw={"wspace": 0.28, "hspace": 0.5})
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
        add_legend(figure, _legend(connectors, look, palette))
    return figure


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
            point = Point(trial.cell.connector, 1e3 / tpot_ms, output / gpus, met)
            found.setdefault(lengths_of(trial), []).append(point)
    return found


def gpus_by_connector(run: RunFolder) -> dict[str, int]:
    """Connector → engine instances times tensor-parallel size; empty where the plan names none."""
    deployment = resolved(run, "deployment")
    settings: Mapping[str, Any] = deployment if isinstance(deployment, Mapping) else {}
    ranks = settings.get("tensor_parallel_size")
    counts = {}
    for planned in run.plan.get("deployments") or ():
        instances = planned.get("instances") if isinstance(planned, Mapping) else None
        if instances and isinstance(ranks, int):
            counts[str(planned.get("label"))] = len(instances) * ranks
    return counts


def gpu_word(run: RunFolder) -> str:
    """What the throughput is divided by: a real GPU, a modelled one, or an engine that has none."""
    if mark_of(run) is not None:
        return "modelled GPU"
    return "GPU" if run.environment.get("gpus") else "engine"


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
        axes.plot(x, y, color=item.colour, linewidth=1.5, alpha=0.8, zorder=2.5)
        for point in mine:
            face = item.colour if point.met else "none"
            axes.plot(
                [point.interactivity],
                [point.throughput],
                item.marker,
                markersize=size,
                markerfacecolor=face,
                markeredgecolor=palette.paper if point.met else item.colour,
                markeredgewidth=0.6 if point.met else 1.2,
                zorder=3,
            )


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
