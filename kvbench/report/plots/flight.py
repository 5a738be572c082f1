"""Plots of requests in flight and waiting over time, at the supporting trials.

At a sustained rate both fluctuate around a level; a curve that rises until the last arrival is a growing
queue. A burst drains as one batch after its last arrival."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.metrics.metrics import in_flight_series, waiting_series
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.stats import StepSeries
from kvbench.report.plots.panels import (
    Lengths,
    Words,
    lengths_of,
    light_records,
    new_sheet,
    panel_title,
    supporting,
)
from kvbench.report.plots.style import PALETTES, Palette, Theme, handle, style, tag
from kvbench.report.tables.result import highest_met, read_answer
from kvbench.report.tables.table import number
from kvbench.results.run import CellResult, RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS_MOST: Final = 4
LINES_MOST: Final = 6
STEPS_MOST: Final = 300

Shown = dict[tuple[str, Lengths], tuple[TrialRecord, list[RequestRecord]]]


def in_flight_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw a row of panels per connector, a column per input length; None without stored requests."""
    found = _trials_by_panel(run)
    if not found:
        return None
    palette = PALETTES[theme]
    panels = sorted({panel for _, panel in found})[:COLUMNS_MOST]
    connectors = list(dict.fromkeys(name for name, _ in found))[:LINES_MOST]
    with style(palette):
        words = Words.of(run, "Requests in flight over time")
        size = (1.2 + 2.75 * len(panels), 1.75 * len(connectors))
        sheet = new_sheet(size, words, palette, ax, titled=True)
        grid = sheet.panels(len(connectors), len(panels), wspace=0.18, hspace=0.34)
        for axes, name in zip(grid, connectors, strict=True):
            for axis, panel in zip(axes, panels, strict=True):
                if (name, panel) not in found:
                    axis.set_axis_off()
                    continue
                trial, records = found[name, panel]
                _draw(axis, trial, records, palette)
                _say(axis, f"measured at {number(trial.request_rate)} req/s", palette)
            axes[0].set_axis_on()
            axes[0].set_ylabel(name)
        for axis, panel in zip(grid[0], panels, strict=True):
            axis.set_title(panel_title(panel, panels))
        for axis in grid[-1]:
            axis.set_xlabel("seconds since trial start")
        sheet.legend([_legend(palette, "steady window, judged")])
    return sheet.figure


def _trials_by_panel(run: RunFolder) -> Shown:
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
    for series, colour, what in (
        (in_flight_series(records, trial.duration_s), palette.ink, "in flight"),
        (waiting_series(records, trial.duration_s), palette.waiting, "waiting for the first token"),
    ):
        times, values = outline(series, trial.duration_s)
        (line,) = axes.step(times, values, where="post", color=colour, linewidth=1.1)
        tag(line, trial.cell.connector, f"{trial.trial_id}: at most {max(values):.0f} {what}")
    axes.set_xlim(0, max(trial.duration_s, 1e-3))
    axes.set_ylim(0, axes.get_ylim()[1] * 1.22)
    axes.locator_params(axis="y", integer=True, nbins=5)
    axes.locator_params(axis="x", nbins=5)


def outline(series: StepSeries, length_s: float) -> tuple[list[float], list[float]]:
    """Return a step series as line points from zero on, merging steps that are too close to see.
    ``length_s``: the axis's span."""
    times, values = [0.0], [0.0]
    slot = 2 * length_s / STEPS_MOST
    steps = list(zip(series.times_s.tolist(), series.values.tolist(), strict=True))
    if len(steps) > STEPS_MOST and slot > 0:
        slots: dict[int, list[tuple[float, float]]] = {}
        for time_s, value in steps:
            slots.setdefault(int(time_s / slot), []).append((time_s, value))
        steps = [
            step
            for slot_steps in slots.values()
            for step in sorted({max(slot_steps, key=lambda step: step[1]), slot_steps[-1]})
        ]
    for time_s, value in steps:
        times.append(time_s)
        values.append(value)
    return times, values


def _say(axes: Axes, text: str, palette: Palette) -> None:
    corner: dict[str, Any] = {"ha": "right", "va": "top", "fontsize": 8, "color": palette.ink}
    axes.text(0.985, 0.965, text, transform=axes.transAxes, **corner)


def _legend(palette: Palette, shaded: str) -> list[Artist]:
    from matplotlib.patches import Patch

    return [
        handle("in flight", linestyle="-", color=palette.ink),
        handle("waiting for the first token", linestyle="-", color=palette.waiting),
        Patch(facecolor=palette.grid, alpha=0.55, label=shaded),
    ]


# --- bursts ----------------------------------------------------------------------------------------

BURSTS_MOST: Final = 4
"""Most rows; further connectors and lengths look alike."""


def burst_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw burst and sustained rate side by side per connector and input length; None without both."""
    pairs = _pairs(run)[:BURSTS_MOST]
    if not pairs:
        return None
    palette = PALETTES[theme]
    with style(palette):
        words = Words.of(run, "Burst and sustained rate")
        sheet = new_sheet((8.2, 2.5 * len(pairs)), words, palette, ax, titled=True)
        grid = sheet.panels(len(pairs), 2, sharey="row", wspace=0.08, hspace=0.6)
        for axes, (burst, sustained) in zip(grid, pairs, strict=True):
            for axis, trial, kind in zip(axes, (burst, sustained), ("burst", "sustained"), strict=True):
                _draw_burst(axis, trial, light_records(run, trial.trial_id), palette)
                axis.set_title(f"{kind}, measured at {number(trial.request_rate)} req/s")
            axes[0].set_ylabel(f"requests ({burst.cell.connector}, {burst.cell.input_len:,} in)")
        for axis in grid[-1]:
            axis.set_xlabel("seconds since the first scheduled arrival")
        sheet.legend([_legend(palette, "requests arrive")])
    return sheet.figure


def _pairs(run: RunFolder) -> list[tuple[TrialRecord, TrialRecord]]:
    """Return the (burst, sustained) trials that support the two results of each cell."""
    sustained_results = {result.cell: result for result in run.cells if result.method == "sustained"}
    pairs = []
    for result in run.other_cells:
        if result.method != "burst" or result.cell not in sustained_results:
            continue
        burst = _supporting(run.other_trials, result)
        sustained = _supporting(run.trials, sustained_results[result.cell])
        if burst is not None and sustained is not None:
            pairs.append((burst, sustained))
    return pairs


def _supporting(trials: Sequence[TrialRecord], result: CellResult) -> TrialRecord | None:
    candidates = [trial for trial in trials if trial.cell == result.cell and trial.method == result.method]
    return highest_met(candidates, read_answer(result.answer).max_request_rate if result.answer else None)


def _draw_burst(axes: Axes, trial: TrialRecord, records: Sequence[RequestRecord], palette: Palette) -> None:
    last_due = max(record.scheduled_s for record in records)
    axes.axvspan(0, last_due, color=palette.grid, alpha=0.55, linewidth=0, zorder=0)
    for series, colour, what in (
        (in_flight_series(records, trial.duration_s), palette.ink, "in flight"),
        (waiting_series(records, trial.duration_s), palette.waiting, "waiting for the first token"),
    ):
        times, values = outline(series, trial.duration_s)
        (line,) = axes.step(times, values, where="post", color=colour, linewidth=1.4)
        tag(line, trial.cell.connector, f"{trial.trial_id}: at most {max(values):.0f} {what}")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
