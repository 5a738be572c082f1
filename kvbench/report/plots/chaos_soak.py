"""Plots of goodput around each fault, and of a soak's windows.

Goodput is drawn by outcome of the requests due, one panel per pair and fault. Time counts from the fault;
repeats are averaged over those observed for that long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.chaos_soak.fault_cost import FATES, RequestOutcome, goodput_bins, outcomes_of
from kvbench.core.chaos_soak.window_drift import settled
from kvbench.core.records import Cell
from kvbench.core.slo import Slo
from kvbench.errors import StoreError
from kvbench.report.plots.panels import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, Theme, handle, style, tag
from kvbench.report.tables.fault_rows import FaultGroup, InjectedFault, fault_groups
from kvbench.report.tables.soak_rows import SoakSeries, soak_series
from kvbench.report.tables.table import number
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BIN_S: Final = 0.5
LINES_MOST, FAULT_COLUMNS_MOST = 16, 3
SHOWN: Final[Mapping[str, str]] = {
    "good": "within the SLO",
    "late": "late",
    "lost": "lost",
    "hung": "hung",
    "wrong": "wrong",
}


def faults_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw a column of panels per pair and a row per fault, or None without faults."""
    groups = fault_groups(run)
    cells = list(dict.fromkeys(fault.cell for fault in groups))[:FAULT_COLUMNS_MOST]
    names = list(dict.fromkeys(fault.name for fault in groups))[:LINES_MOST]
    by_place: dict[tuple[str, Cell], FaultGroup] = {(fault.name, fault.cell): fault for fault in groups}
    if not groups:
        return None
    palette, slo = PALETTES[theme], slo_of(run).main()
    with style(palette):
        words = Words.of(run, "Goodput over time, with the faults")
        size = (max(8.2, 1.2 + 4.2 * len(cells)), 1.45 * len(names))
        sheet = new_sheet(size, words, palette, ax, titled=True)
        grid = sheet.panels(len(names), len(cells), wspace=0.14, hspace=0.55)
        for axes, name in zip(grid, names, strict=True):
            for axis, cell in zip(axes, cells, strict=True):
                group = by_place.get((name, cell))
                if group is None:
                    axis.set_axis_off()
                    continue
                _draw(axis, run, group, slo, palette)
                axis.set_title(_title(group), fontsize=8.5, fontweight="normal")
            axes[0].set_ylabel("req/s")
        for axis in grid[-1]:
            axis.set_xlabel("seconds since the fault")
        sheet.legend([_legend(palette)])
    return sheet.figure


def _title(group: FaultGroup) -> str:
    row = group.row
    back = "rate not sustained before" if not row.held else "never recovered" if row.back_s is None else ""
    back = back or f"recovered after {number(row.back_s)} s" + (f" ({row.never} never)" if row.never else "")
    return f"{group.cell.connector} · {group.name} · {back}"


def _draw(axis: Axes, run: RunFolder, group: FaultGroup, slo: Slo, palette: Palette) -> None:
    series = _mean_rates(run, group.trials, slo)
    if series is None:
        axis.set_axis_off()
        return
    times, rates = series
    colours = _colours(palette)
    below = [0.0] * len(times)
    for fate in FATES:
        top = [low + value for low, value in zip(below, rates[fate], strict=True)]
        if any(rates[fate]):
            area = axis.fill_between(times, below, top, step="post", color=colours[fate], linewidth=0)
            tag(area, group.cell.connector, f"{group.name}: {SHOWN[fate]}")
        below = top
    axis.axhline(group.rate, color=palette.ink, linewidth=0.9, linestyle=(0, (4, 2)))
    axis.axvline(0, color=palette.limit, linewidth=1.3)
    if (undone := _median_since(group.trials, "undone_s")) is not None:
        axis.axvspan(0, undone, color=palette.limit, alpha=0.12, linewidth=0)
    if (ready := _median_again(group.trials)) is not None:
        axis.axvline(ready, color=palette.faint, linewidth=1.0, linestyle=(0, (1, 1)))
    if group.row.held and group.row.back_s is not None:
        axis.plot([group.row.back_s], [group.rate], marker="v", color=palette.ink, markersize=6, linestyle="")
    axis.set_xlim(times[0], times[-1])
    axis.set_ylim(0, max(1.25 * group.rate, 1.06 * max(below)))
    axis.locator_params(axis="y", nbins=3)


def _mean_rates(
    run: RunFolder, trials: Sequence[InjectedFault], slo: Slo
) -> tuple[list[float], dict[str, list[float]]] | None:
    """Return the bins' starts (s since the fault) and the requests per second by outcome."""
    sums: dict[int, list[Mapping[str, int]]] = {}
    for trial in trials:
        struck_s = float(trial.record["struck_s"])
        shift = math.ceil(struck_s / BIN_S)  # whole bins: the fault is between two bins
        outcomes = _outcomes(run, trial, slo, shift * BIN_S - struck_s)
        if not outcomes:
            continue
        last_s = max(outcome.due_s for outcome in outcomes)
        for index, slot in enumerate(goodput_bins(outcomes, BIN_S, last_s)):
            sums.setdefault(index - shift, []).append(slot.fates)
    if not sums:
        return None
    indices = sorted(sums)[1:]  # the first one is cut by the load's start
    times = [index * BIN_S for index in indices]
    return times, {
        fate: [sum(fates[fate] for fates in sums[index]) / len(sums[index]) / BIN_S for index in indices]
        for fate in FATES
    }


def _outcomes(run: RunFolder, trial: InjectedFault, slo: Slo, later_s: float) -> list[RequestOutcome]:
    """Return the trial's requests, shifted by ``later_s``; empty if not stored."""
    try:
        records = run.request_records(trial.trial.trial_id)
    except StoreError:
        return []
    known = outcomes_of(records, slo, trial.record.get("wrong_ids") or ())
    return [replace(outcome, due_s=outcome.due_s + later_s) for outcome in known]


def _median_since(trials: Iterable[InjectedFault], key: str) -> float | None:
    return _median(
        float(trial.record[key]) - float(trial.record["struck_s"])
        for trial in trials
        if trial.record.get(key) is not None
    )


def _median_again(trials: Iterable[InjectedFault]) -> float | None:
    known = [
        (again.get("ready_s"), trial.record["struck_s"])
        for trial in trials
        if (again := trial.record.get("again")) is not None
    ]
    return _median(float(ready) - float(struck) for ready, struck in known if ready is not None)


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _colours(palette: Palette) -> dict[str, str]:
    return {
        "good": palette.series["tcp"],
        "late": palette.spare[0],
        "lost": palette.limit,
        "hung": palette.series["aggregated"],
        "wrong": palette.series["nccl"],
    }


def _legend(palette: Palette) -> list[Artist]:
    from matplotlib.patches import Patch

    colours = _colours(palette)
    dashed: dict[str, Any] = {"linestyle": (0, (4, 2)), "color": palette.ink, "linewidth": 0.9}
    return [
        *(Patch(facecolor=colours[fate], label=words) for fate, words in SHOWN.items() if fate != "wrong"),
        handle("offered rate", marker="", **dashed),
        handle("fault", marker="", linestyle="-", color=palette.limit),
        handle("ready again", marker="", linestyle=(0, (1, 1)), color=palette.faint),
        handle("attainment recovered", marker="v", color=palette.ink),
    ]


SOAK_COLUMNS_MOST: Final = 3
PANELS: Final = (
    ("TTFT (ms)", ("TTFT P50 (ms)", "TTFT P99 (ms)")),
    ("TPOT (ms)", ("TPOT P50 (ms)", "TPOT P99 (ms)")),
    ("memory (MB)", ("memory (MB)",)),
    ("descriptors", ("descriptors",)),
    ("KV blocks in use", ("KV blocks in use",)),
)
"""Panel label and its series."""


def soak_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw a row of panels per metric, or None without windows."""
    series = soak_series(run)
    cells = list(dict.fromkeys(curve.cell for curve in series))[:SOAK_COLUMNS_MOST]
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
                _soak_plot_draw(
                    axis, [curve for curve in series if curve.cell == cell and curve.name in names], palette
                )
                if not line:
                    axis.set_title(cell.connector)
                axis.tick_params(labelbottom=line == len(PANELS) - 1)
            axes[0].set_ylabel(label)
        for axis, _cell in zip(grid[-1], cells, strict=True):
            axis.set_xlabel("minutes of load")
        sheet.figure.align_ylabels(list(grid[:, 0]))
    return sheet.figure


def _soak_plot_draw(axis: Axes, series: Sequence[SoakSeries], palette: Palette) -> None:
    colours = [*palette.series.values(), *palette.spare]
    for index, item in enumerate(series):
        known = [(window.at_s / 60, window.value) for window in item.windows if window.value is not None]
        if not known:
            continue
        colour, label = colours[index % len(colours)], item.of or item.name.split(" (")[0]
        (line,) = axis.plot(
            [at for at, _ in known], [value for _, value in known], ".-",
            color=colour, linewidth=1.0, markersize=3.5, label=label,
        )  # fmt: skip
        tag(line, item.cell.connector, f"{label}: {item.drift.verdict}")
        if item.drift.per_hour is not None and item.drift.median is not None:
            _trend(axis, item, colour)
    axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.3)
    if series:
        axis.legend(loc="upper left", fontsize=7, ncols=min(4, len(series)), borderaxespad=0.1)


def _trend(axis: Axes, of: SoakSeries, colour: str) -> None:
    at = [window.at_s for window in settled(of.windows) if window.value is not None]
    values = [window.value for window in settled(of.windows) if window.value is not None]
    middle_s, middle = sum(at) / len(at), sum(values) / len(values)
    slope = (of.drift.per_hour or 0.0) / 3600
    ends = [min(at), max(at)]
    axis.plot(
        [end / 60 for end in ends], [middle + slope * (end - middle_s) for end in ends],
        color=colour, linewidth=1.0, linestyle=(0, (4, 2)),
    )  # fmt: skip
