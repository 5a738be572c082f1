"""Plots of rates: highest rate by input length, goodput over arrivals, throughput against interactivity.

Goodput and arrivals describe the steady part, so a point can be slightly above the diagonal. Interactivity is
1 / median TPOT; throughput is output tokens per second of the steady window per GPU (per engine if GPUs are
unknown). The line of a connector is its Pareto front."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.plan.engine_count import Unit, first_unequal, unequal
from kvbench.core.records import TrialRecord
from kvbench.report.plots.panels import (
    Lengths,
    Words,
    at_bottom,
    axis_spans,
    lengths_of,
    mark_rates,
    new_sheet,
    nice_log_ticks,
    panel_title,
    plain_ticks,
    rated_trials,
    supporting,
)
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style, tag
from kvbench.report.tables.result import Row, shared_unit, summary_table
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import mark_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.markers import MarkerStyle


LABEL_PT: Final = 20  # width of a rate's label; closer points get none
APART_PT: Final = 36  # largest distance between connectors
WIDTH_PT: Final = 510  # approximate width of the axes


def max_rate_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw max_request_rate with its interval over input length, one line per connector; None without
    data."""
    rows = [row for row in summary_table(run) if row.outcome in ("found", "at_least", "none", "refused")]
    if not rows:
        return None
    palette = PALETTES[theme]
    names = list(dict.fromkeys(row.cell.connector for row in rows))
    look = looks(names, palette)
    with style(palette):
        sheet = new_sheet((8.2, 3.3), Words.of(run, "Highest request rate that meets the SLO"), palette, ax)
        axes = sheet.panel()
        _rate_axes(axes, rows)
        gap_pt = WIDTH_PT / len({row.cell.input_len for row in rows})
        step = min(0.22, 0.66 / len(names), APART_PT / gap_pt)
        room_pt = gap_pt * step
        for name in names:
            connector_rows = [row for row in rows if row.cell.connector == name]
            x = _shifted_lengths(connector_rows, rows, names.index(name) - (len(names) - 1) / 2, step)
            _draw_rates(axes, connector_rows, x, look[name], labelled=room_pt >= LABEL_PT)
        sheet.legend([_rate_legend(rows, look, palette)])
    return sheet.figure


def _shifted_lengths(shown: Sequence[Row], rows: Sequence[Row], shift: float, step: float) -> list[float]:
    """Shift connectors at one length so that their intervals do not overlap. ``step``: distance as a share of
    the smallest distance between lengths."""
    lengths = sorted({row.cell.input_len for row in rows})
    gap = min((math.log2(b / a) for a, b in itertools.pairwise(lengths)), default=1.0)
    return [row.cell.input_len * 2 ** (shift * step * gap) for row in shown]


def _rate_axes(axes: Axes, rows: Sequence[Row]) -> None:
    lengths = sorted({row.cell.input_len for row in rows})
    axes.set_xscale("log", base=2)
    plain_ticks(axes, "x", lengths)
    gaps = [math.log2(b / a) for a, b in itertools.pairwise(lengths)]
    margin = 2 ** (0.5 * min(gaps, default=1.0))
    axes.set_xlim(lengths[0] / margin, lengths[-1] * margin)
    axes.grid(False, axis="x")
    axes.set_xlabel("input length (tokens)")
    unit = _unequal_unit(rows)
    axes.set_ylabel("max request rate (req/s)" + (f"\nby unequal numbers of {unit}s (n)" if unit else ""))
    rated = [row.answer for row in rows if row.answer.max_request_rate]
    values = [
        value for answer in rated for value in (answer.lower, answer.max_request_rate, answer.upper) if value
    ]
    if not values:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
    elif max(values) / min(values) > 6:
        low, high = min(values) / 1.9, max(values) * 1.8
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        plain_ticks(axes, "y", nice_log_ticks(low, high))
    else:
        axes.set_ylim(0, max(values) * 1.22)


def _draw_rates(
    axes: Axes, rows: Sequence[Row], x: Sequence[float], look: PlotStyle, *, labelled: bool
) -> None:
    """Draw points with intervals, an arrow for lower bounds, and marks on the axis for no rate."""
    rates = [row.answer.max_request_rate or math.nan for row in rows]
    (line,) = axes.plot(x, rates, color=look.colour, linewidth=1.3, alpha=0.35, zorder=2)
    tag(line, rows[0].cell.connector)
    for point_x, rate, row in zip(x, rates, rows, strict=True):
        if math.isnan(rate):
            mark = _NONE if row.outcome == "none" else _REFUSED
            (none,) = axes.plot(
                [point_x], [0.04], **mark, color=look.colour, transform=at_bottom(axes), zorder=4
            )
            tag(none, row.cell.connector, f"{_where(row)}: {row.outcome if mark is _REFUSED else 'no rate'}")
            continue
        lower, upper = row.answer.lower or rate, row.answer.upper or rate
        bar = [[max(0.0, rate - lower)], [max(0.0, upper - rate)]]
        bars: dict[str, Any] = {"elinewidth": 1.6, "capsize": 5.5, "capthick": 1.6}
        error = axes.errorbar([point_x], [rate], bar, fmt="none", ecolor=look.colour, zorder=3, **bars)
        for part in error.get_children():
            tag(part, row.cell.connector)
        (point,) = axes.plot([point_x], [rate], look.marker, markersize=5, color=look.colour, zorder=4)
        tag(point, row.cell.connector, f"{_where(row)}: {row.answer.text()} req/s")
        height = 9.0
        if row.outcome == "at_least":
            arrow = {"arrowstyle": "<|-", "color": look.colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 2}
            axes.annotate("", (point_x, rate), (0, 22), textcoords="offset points", arrowprops=arrow)
            height = 25.0
        if labelled:
            label = axes.annotate(
                row.answer.text().split(" [")[0],
                (point_x, upper),
                (0, height),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=look.colour,
                bbox={"boxstyle": "square,pad=0.1", "facecolor": axes.get_facecolor(), "edgecolor": "none"},
                zorder=3.5,
            )
            tag(label, row.cell.connector)


def _where(row: Row) -> str:
    return f"{row.cell.connector}, {row.cell.input_len:,} tokens in"


def _unequal_unit(rows: Sequence[Row]) -> Unit | None:
    """Return the unit in which the connectors' hardware differs, or None. If set, the legend shows each
    connector's count."""
    pair = first_unequal(row.size for row in rows)
    return None if pair is None else unequal(*pair)


_NONE: Final[dict[str, Any]] = {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2.2}
_REFUSED: Final[dict[str, Any]] = {
    "linestyle": "",
    "marker": r"$\oslash$",
    "markersize": 11,
    "markeredgewidth": 0.4,
}


def _question_mark() -> MarkerStyle:
    """Return the marker "$?$" without matplotlib's parser of formulas, which takes 50 ms."""
    from matplotlib.markers import MarkerStyle
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    path = TextPath((0, 0), "?")
    box = path.get_extents()
    return MarkerStyle(path.transformed(Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)))


def _rate_legend(rows: Sequence[Row], look: Mapping[str, PlotStyle], palette: Palette) -> list[Line2D]:
    unit = _unequal_unit(rows)
    counts = {row.cell.connector: row.size.count(unit) for row in rows} if unit else {}
    handles = [
        handle(f"{name} ({counts[name] or '?'})" if unit else name, marker=item.marker, color=item.colour)
        for name, item in look.items()
    ]
    outcomes = {row.outcome for row in rows}
    if "at_least" in outcomes:
        handles.append(
            handle("not reached: at least", marker=r"$\uparrow$", color=palette.faint, markersize=10)
        )
    if any(row.answer.max_request_rate and not row.answer.converged for row in rows):
        handles.append(
            handle("the search did not converge", marker=_question_mark(), color=palette.faint, markersize=8)
        )
    if "none" in outcomes:
        handles.append(handle("no tested rate met the SLO", **_NONE, color=palette.faint))
    if "refused" in outcomes:
        handles.append(handle("refused", **_REFUSED, color=palette.faint))
    return handles


PANELS_PER_LINE: Final = 4


def goodput_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw ``request_goodput`` over arrivals, a panel per length; None without two such trials."""
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
            panel_trials = [trial for trial in trials if lengths_of(trial) == panels[index]]
            _draw(axes, panel_trials, look, palette)
            mark_rates([axes], [row for row in rows if lengths_of(row) == panels[index]], look)
            axes.set_title(panel_title(panels[index], panels))
            axes.set_ylabel("goodput (req/s)" if index % columns == 0 else "")
            axes.set_xlabel("arrivals (req/s)")
        shown = [name for name in names if any(trial.cell.connector == name for trial in trials)]
        sheet.legend([[_entry(name, look[name]) for name in shown], _keys(palette)])
    return sheet.figure


def _entry(name: str, look: PlotStyle) -> Line2D:
    return handle(name, marker=look.marker, color=look.colour, linestyle="-")


def _keys(palette: Palette) -> list[Line2D]:
    return [
        handle("all arrivals", color=palette.faint, linestyle=(0, (4, 2)), marker=""),
        handle("resulting rate", color=palette.faint, marker="^"),
    ]


def rate_of_arrivals(trial: TrialRecord) -> float:
    """Return the arrivals per second of the steady part, or the offered rate if unknown."""
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
        tag(line, name)
        x = [rate for rate, values in points.items() for _ in values]
        y = [value for values in points.values() for value in values]
        edge: dict[str, Any] = {"markeredgecolor": palette.paper, "markeredgewidth": 0.6}
        (marks,) = axes.plot(x, y, marker, color=colour, markersize=5.5, zorder=3, **edge)
        tag(
            marks,
            name,
            *(
                f"{name}: {number(rate)} req/s arrived, {number(value)} req/s completed within the SLO"
                for rate, value in zip(x, y, strict=True)
            ),
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)


@dataclass(frozen=True)
class Point:
    """One trial. ``interactivity``: tokens/s per user; ``throughput``: output tokens/s per GPU; ``rate``:
    offered."""

    connector: str
    interactivity: float
    throughput: float
    met: bool
    rate: float = 0.0

    def text(self) -> str:
        return (
            f"{self.connector}, {number(self.rate)} req/s: {number(self.throughput)} tokens/s, "
            f"{number(self.interactivity)} per user"
        )


def pareto_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw a panel per input length; None if the plan lacks instances or fewer than two trials have both
    figures."""
    found = points(run)
    if sum(map(len, found.values())) < 2:
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
            _pareto_draw(axes, found[panels[index]], look, palette)
            axes.set(xlim=across[index], ylim=up[index])
            axes.set_title(panel_title(panels[index], panels))
            axes.set_ylabel(f"output tokens/s per {unit}" if index % columns == 0 else "")
            axes.set_xlabel("tokens/s per user (1 / median TPOT)")
        sheet.legend(_legend(connectors, look, palette))
    return sheet.figure


def points(run: RunFolder) -> dict[Lengths, list[Point]]:
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
    """Map each connector to its GPUs, or its engines if no GPUs are known."""
    rows = summary_table(run)
    unit = shared_unit(rows)
    return {row.cell.connector: count for row in rows if (count := row.size.count(unit))}


def gpu_word(run: RunFolder) -> str:
    """Return the throughput's unit: GPU, modelled GPU or engine."""
    unit = shared_unit(summary_table(run))
    return unit if unit == "engine" or mark_of(run) is None else "modelled GPU"


def front(found: Sequence[Point]) -> list[Point]:
    """Return the Pareto front by rising interactivity."""
    best: list[Point] = []
    for point in sorted(found, key=lambda point: (-point.interactivity, -point.throughput)):
        if not best or point.throughput > best[-1].throughput:
            best.append(point)
    return best[::-1]


def _pareto_draw(axes: Axes, found: Sequence[Point], look: Mapping[str, PlotStyle], palette: Palette) -> None:
    for rank, (name, item) in enumerate(look.items()):
        size = max(4.5, 7.5 - rank)  # a larger mark is seen behind a smaller one
        connector_points = [point for point in found if point.connector == name]
        best = front(connector_points)
        x, y = [point.interactivity for point in best], [point.throughput for point in best]
        (line,) = axes.plot(x, y, color=item.colour, linewidth=1.5, alpha=0.8, zorder=2.5)
        tag(line, name)
        for met in (True, False):
            group = [point for point in connector_points if point.met == met]
            (marks,) = axes.plot(
                [point.interactivity for point in group],
                [point.throughput for point in group],
                item.marker,
                markersize=size,
                markerfacecolor=item.colour if met else "none",
                markeredgecolor=palette.paper if met else item.colour,
                markeredgewidth=0.6 if met else 1.2,
                zorder=3,
            )
            tag(marks, name, *(point.text() for point in group))


def _legend(connectors: Sequence[str], look: Mapping[str, PlotStyle], palette: Palette) -> list[list[Line2D]]:
    entries = [
        handle(name, marker=look[name].marker, color=look[name].colour, linestyle="-") for name in connectors
    ]
    hollow = {"markerfacecolor": palette.paper, "markeredgecolor": palette.faint}
    keys = [
        handle("SLO met, or no SLO", marker="o", color=palette.faint),
        handle("missed or inconclusive", marker="o", **hollow),
        handle("Pareto front", color=palette.faint, linestyle="-"),
    ]
    return [entries, keys]
