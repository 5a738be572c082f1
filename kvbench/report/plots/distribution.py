"""Plots of the TTFT breakdown, and of the TTFT and TPOT distributions at the resulting rate.

Each bar or curve is the trial that supports the connector's result."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvbench.core.metrics.ttft_breakdown import PART_WORDS, PARTS
from kvbench.core.records import TrialRecord
from kvbench.report.plots.panels import (
    Lengths,
    Words,
    lengths_of,
    new_sheet,
    nice_log_ticks,
    panel_title,
    plain_ticks,
    rated_trials,
    request_times,
    supporting,
)
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style, tag
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import number
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch


if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    Values = npt.NDArray[np.float64]

NAMES: Final = ("ttft", "tpot")
COLUMNS_MOST: Final = 4
STEPS_MOST: Final = 200
MIN_VALUES: Final = 5


@dataclass(frozen=True)
class _Curve:
    """Sorted latencies (ms) of the answered requests in one trial's steady window, by metric."""

    connector: str
    rate: float
    values: Mapping[str, Values]


def distribution_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw TTFT above TPOT, a column per input length; None without stored requests."""
    found = _curves(run)
    panels = sorted(found)[:COLUMNS_MOST]
    if not panels:
        return None
    palette, limits = PALETTES[theme], slo_of(run)
    shown = [curve for panel in panels for curve in found[panel]]
    connectors = list(dict.fromkeys(curve.connector for curve in shown))
    names = [name for name in NAMES if any(name in curve.values for curve in shown)]
    look = looks(connectors, palette)
    with style(palette):
        words = Words.of(run, "Latency distribution")
        size = (1.2 + 2.75 * len(panels), 2.5 * len(names))
        sheet = new_sheet(size, words, palette, ax, legend_lines=2, titled=True)
        grid = sheet.panels(len(names), len(panels), sharey="all", wspace=0.1, hspace=0.34)
        for line, name in enumerate(names):
            lines = [limit for _, _, limit in limits.lines(f"{name}_ms")]
            for axes, panel in zip(grid[line], panels, strict=True):
                _draw(axes, name, found[panel], look)
                for limit in lines:
                    axes.axvline(limit, color=palette.limit, linewidth=1.2, linestyle=(0, (5, 2)), zorder=1.5)
                _scale(axes, name, found[panel], lines)
                axes.set_xlabel(f"{name.upper()} (ms)")
            grid[line][0].set_ylabel("share of requests (%)")
        for axes, panel in zip(grid[0], panels, strict=True):
            axes.set_title(panel_title(panel, panels))
        share = None if limits.attainment is None else limits.attainment * 100
        if share is not None:
            for axes in grid.flat:
                axes.axhline(share, color=palette.limit, linewidth=0.8, linestyle=":", zorder=1.4)
        sheet.legend(_legend(connectors, look, palette, share))
    return sheet.figure


def _curves(run: RunFolder) -> dict[Lengths, list[_Curve]]:
    """Return curves by input length: the supporting trials, or for listed rates each connector's highest
    rate."""
    trials = [trial for _, trial in supporting(run)]
    if not trials:
        highest: dict[tuple[str, Lengths], TrialRecord] = {}
        for trial in rated_trials(run):
            key = (trial.cell.connector, lengths_of(trial))
            if trial.verdict != "invalid" and (
                key not in highest or trial.request_rate > highest[key].request_rate
            ):
                highest[key] = trial
        trials = list(highest.values())
    found: dict[Lengths, list[_Curve]] = {}
    for trial in trials:
        values = _values(run, trial)
        if values:
            curve = _Curve(trial.cell.connector, trial.request_rate, values)
            found.setdefault(lengths_of(trial), []).append(curve)
    return found


def _values(run: RunFolder, trial: TrialRecord) -> dict[str, Values]:
    requests = request_times(run, trial.trial_id)
    if requests is None:
        return {}
    found = requests.answered(trial).latencies_s()
    values = {name: np.sort(column) * 1e3 for name, column in found.items()}
    return {name: value for name, value in values.items() if len(value) >= MIN_VALUES and value[-1] > 0}


def _draw(axes: Axes, name: str, curves: Sequence[_Curve], look: Mapping[str, PlotStyle]) -> None:
    """Draw step curves with marks at P50 and P99 if there are enough values."""
    for curve in curves:
        values = curve.values.get(name)
        if values is None:
            continue
        item = look[curve.connector]
        shares = np.arange(1, len(values) + 1) / len(values) * 100
        (line,) = axes.step(*_thinned(values, shares), where="post", color=item.colour, linewidth=1.5)
        tag(line, curve.connector)
        marks = [50, 99] if len(values) >= 50 else [50]
        quantiles = [float(np.percentile(values, mark)) for mark in marks]
        edge: dict[str, Any] = {"markeredgecolor": axes.get_facecolor(), "markeredgewidth": 0.6}
        (drawn,) = axes.plot(quantiles, marks, item.marker, color=item.colour, markersize=6, zorder=3, **edge)
        texts = [
            f"{curve.connector}, {number(curve.rate)} req/s: {name.upper()} P{mark} {number(value)} ms"
            for mark, value in zip(marks, quantiles, strict=True)
        ]
        tag(drawn, curve.connector, *texts)


def _thinned(x: Values, y: Values) -> tuple[Values, Values]:
    """Thin a curve to its ends and about one step per pixel."""
    if len(x) <= STEPS_MOST:
        return x, y
    kept = np.unique(np.linspace(0, len(x) - 1, STEPS_MOST).round().astype(int))
    return x[kept], y[kept]


def _scale(axes: Axes, name: str, curves: Sequence[_Curve], limits: Sequence[float]) -> None:
    known = [curve.values[name] for curve in curves if name in curve.values]
    low = min([*(float(np.percentile(values[values > 0], 1)) for values in known), *limits]) / 1.15
    high = max([*(float(values[-1]) for values in known), *limits]) * 1.15
    if high / low > 6:
        axes.set_xscale("log")
        plain_ticks(axes, "x", nice_log_ticks(low, high, most=4))
    axes.set_xlim(low, high)
    axes.set_ylim(0, 103)


def _legend(
    connectors: Sequence[str], look: Mapping[str, PlotStyle], palette: Palette, share: float | None
) -> list[list[Line2D]]:
    entries = [
        handle(name, marker=look[name].marker, color=look[name].colour, linestyle="-") for name in connectors
    ]
    keys = [
        handle("marks: P50 and P99", color=palette.faint, marker="o"),
        handle("SLO", color=palette.limit, linestyle=(0, (5, 2))),
    ]
    if share is not None:
        keys.append(handle(f"required share: {share:g} %", color=palette.limit, linestyle=":"))
    return [entries, keys]


PANELS_PER_LINE: Final = 4
HATCH: Final = "////"
"""Hatch of a hand-off that includes D's queue."""

# P's parts are lime, D's are pink and the way between them is cyan, from pale (waiting) to strong (work).
# No connector has such a colour.
COLOURS: Final[Mapping[Theme, Mapping[str, str]]] = MappingProxyType(
    {
        "light": dict(
            zip(
                PARTS,
                ("#c4c9d0", "#d5e6a3", "#88b022", "#b5ecf2", "#12b5c8", "#fbc3d0", "#f5427a"),
                strict=True,
            )
        ),
        "dark": dict(
            zip(
                PARTS,
                ("#5b6571", "#4b6d00", "#a9d64a", "#0f5f68", "#7df5f8", "#8a1c4e", "#ff4f8b"),
                strict=True,
            )
        ),
    }
)


_LEAST_BARS: Final = 4
"""Fewest bars that a full-width panel is sized for, so that none is too wide."""


def breakdown_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw stacked bars of TTFT's parts, or None if no trial has them."""
    rows = [row for row in summary_table(run) if any(_parts(row).values())]
    if not rows:
        return None
    palette = PALETTES[theme]
    panels = sorted({(row.cell.input_len, row.cell.output_len) for row in rows})
    columns = min(len(panels), PANELS_PER_LINE)
    lines = math.ceil(len(panels) / columns)
    bars = max(sum(_panel(row) == panel for row in rows) for panel in panels)
    with style(palette):
        words = Words.of(run, "TTFT breakdown (means)")
        size = (1.1 + columns * (0.7 + 0.62 * bars), lines * 2.9)
        keys = _breakdown_legend(rows, COLOURS[theme], palette)
        sheet = new_sheet(size, words, palette, ax, legend_lines=len(keys), titled=True)
        axes = sheet.panels(lines, columns, wspace=0.3, hspace=0.5)
        for index, axis in enumerate(axes.flat):
            if index >= len(panels):
                axis.set_axis_off()
                continue
            panel_rows = [row for row in rows if _panel(row) == panels[index]]
            _breakdown_draw(axis, panel_rows, COLOURS[theme], palette)
            axis.set_title(f"{panels[index][0]:,} tokens in" + _out(panels[index], panels))
            axis.set_ylabel("TTFT (ms), whole trial" if index % columns == 0 else "")
        if len(panels) == 1:
            spare = max(0.0, (_LEAST_BARS - bars) / 2)
            axes[0, 0].set_xlim(-0.6 - spare, bars - 0.4 + spare)
        sheet.legend(keys)
    return sheet.figure


def _panel(row: Row) -> tuple[int, int]:
    return row.cell.input_len, row.cell.output_len


def _out(panel: tuple[int, int], panels: Sequence[tuple[int, int]]) -> str:
    return f", {panel[1]:,} out" if len({output_len for _, output_len in panels}) > 1 else ""


def _parts(row: Row) -> dict[str, float]:
    known = {part: row.values[f"ttft_{part}_ms"] for part in PARTS}
    return {part: value for part, value in known.items() if value is not None}


def _mixed(row: Row) -> bool:
    """Return whether the hand-off includes D's queue."""
    parts = _parts(row)
    return "hand_off" in parts and "decode_queue" not in parts


def _breakdown_draw(axes: Axes, rows: Sequence[Row], colours: Mapping[str, str], palette: Palette) -> None:
    tops = []
    for index, row in enumerate(rows):
        bottom = 0.0
        for part, value in _parts(row).items():
            mixed = part == "hand_off" and _mixed(row)
            (bar,) = axes.bar(
                [index],
                [value],
                width=0.68,
                bottom=[bottom],
                color=colours[part],
                edgecolor=palette.paper,
                linewidth=0.6,
                hatch=HATCH if mixed else None,
            )
            tag(bar, row.cell.connector, f"{row.cell.connector}, {PART_WORDS[part]}: {number(value)} ms")
            bottom += value
        tops.append(bottom)
        total = axes.annotate(
            number(bottom),
            (index, bottom),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        tag(total, row.cell.connector)
    axes.set_ylim(0, max(tops) * 1.14)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(False, axis="x")
    names = [f"{_short(row.cell.connector)}\n{number(row.trial_rate)}/s" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7.5)


def _short(name: str, most: int = 11) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _breakdown_legend(rows: Sequence[Row], colours: Mapping[str, str], palette: Palette) -> list[list[Patch]]:
    from matplotlib.patches import Patch

    there = [part for part in PARTS if any(part in _parts(row) for row in rows)]
    handles = [Patch(facecolor=colours[part], label=PART_WORDS[part]) for part in there]
    if any(_mixed(row) for row in rows):
        label = "hand-off including D's queue (concurrent dispatch)"
        handles.append(
            Patch(facecolor=colours["hand_off"], edgecolor=palette.paper, hatch=HATCH, label=label)
        )
    half = math.ceil(len(handles) / 2) + 1
    return [line for line in (handles[:half], handles[half:]) if line]
