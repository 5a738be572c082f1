"""Plots of TTFT and TPOT over the offered rate, or side by side for loads with one rate each.

Over the rate there is one panel per input length and one point per trial. The upper line is the quantile of
the SLO (P95 for an attainment of 0.95), computed from the steady window if the summary lacks it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvbench.core.records import TrialRecord
from kvbench.report.plots.panels import (
    Lengths,
    Words,
    axis_spans,
    lengths_of,
    mark_rates,
    new_sheet,
    nice_log_ticks,
    panel_title,
    plain_ticks,
    rated_trials,
    request_times,
    series_of,
)
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style, tag
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.table import number
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


STATISTICS: Final = ("p99", "mean", "p50")
"""Statistics of a load, top to bottom: filled mark, dash, hollow mark."""

Load = tuple[Lengths, float]


def single_rates(run: RunFolder) -> list[Lengths]:
    """Return the lengths where each series has one rate, if there are at least two series."""
    trials = rated_trials(run)
    series = series_of(trials)
    rates: dict[Lengths, dict[str, set[float]]] = {}
    for trial in trials:
        by_series = rates.setdefault(lengths_of(trial), {})
        by_series.setdefault(series[trial.trial_id], set()).add(trial.request_rate)
    single = [lengths for lengths, found in rates.items() if max(map(len, found.values())) == 1]
    searched = any(trial.method == "sustained" for trial in run.all_trials)
    return sorted(single) if len(single) > 1 and not searched else []


def loads_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw latencies by load, or None if loads have several rates."""
    single = single_rates(run)
    trials = [
        trial
        for trial in rated_trials(run)
        if lengths_of(trial) in single and any(_values(trial, name) for name in ("ttft", "tpot"))
    ]
    names = [name for name in ("ttft", "tpot") if any(_values(trial, name) for trial in trials)]
    if not trials or not names:
        return None
    palette, series = PALETTES[theme], series_of(rated_trials(run))
    look = looks(list(dict.fromkeys(series[trial.trial_id] for trial in rated_trials(run))), palette)
    drawn = list(dict.fromkeys(series[trial.trial_id] for trial in trials))
    loads: list[Load] = sorted({(lengths_of(trial), trial.request_rate) for trial in trials})
    with style(palette):
        words = Words.of(run, "Latency by load")
        size = (max(8.2, 1.6 + 1.1 * len(loads)), 2.2 * len(names))
        sheet = new_sheet(size, words, palette, ax, legend_lines=2, right_in=0.8)
        grid = sheet.grid(len(names), 1, hspace=0.12)
        axes = [sheet.figure.add_subplot(grid[line, 0]) for line in range(len(names))]
        for axis, name in zip(axes, names, strict=True):
            for trial in trials:
                index = drawn.index(series[trial.trial_id])
                load_index = loads.index((lengths_of(trial), trial.request_rate))
                x = load_index + (index - (len(drawn) - 1) / 2) * min(0.22, 0.7 / len(drawn))
                text = f"{series[trial.trial_id]}, {number(trial.request_rate)} req/s: {name.upper()}"
                label = (trial.cell.connector, text)
                _draw(axis, x, _values(trial, name), look[drawn[index]], palette.paper, label)
            limits = slo_of(run).lines(f"{name}_ms")
            for tier, statistic, limit in limits:
                axis.axhline(limit, color=palette.limit, linewidth=1.2, linestyle=(0, (5, 2)), zorder=1.5)
                of = f", {statistic.upper()}" if slo_of(run).attainment or statistic == "mean" else ""
                limit_text = f"{tier or 'SLO'}{of}\n{limit:g} ms"
                axis.annotate(
                    limit_text, (1, limit), (5, 0), xycoords=("axes fraction", "data"),
                    textcoords="offset points", color=palette.limit, fontsize=8.5, va="center",
                )  # fmt: skip
            values = [value for trial in trials for value in _values(trial, name).values()]
            _loads_scale(axis, [*values, *(limit for _, _, limit in limits)])
            axis.set_ylabel(f"{name.upper()} (ms)")
            axis.set_xlim(-0.5, len(loads) - 0.5)
            axis.set_xticks(range(len(loads)), [_load_label(load, loads) for load in loads])
            axis.tick_params(labelbottom=axis is axes[-1])
            axis.grid(visible=False, axis="x")
        sheet.figure.align_ylabels(axes)
        connectors = [handle(name, marker=look[name].marker, color=look[name].colour) for name in drawn]
        faint: dict[str, Any] = {"color": palette.faint}
        keys = [
            handle("P99", marker="o", **faint),
            handle("mean", marker="_", markersize=10, markeredgewidth=2, **faint),
            handle("P50", marker="o", markerfacecolor="none", **faint),
        ]
        sheet.legend([connectors, keys])
    return sheet.figure


def _values(trial: TrialRecord, name: str) -> dict[str, float]:
    found = {statistic: trial_value(trial, f"{name}_ms_{statistic}") for statistic in STATISTICS}
    return {statistic: value for statistic, value in found.items() if value}


def _draw(
    axis: Axes, x: float, values: dict[str, float], look: Any, paper: str, label: tuple[str, str]
) -> None:
    """Draw a load's three values on one line. ``label``: connector and text."""
    span = [min(values.values()), max(values.values())]
    (line,) = axis.plot([x, x], span, color=look.colour, linewidth=1, alpha=0.5)
    tag(line, label[0])
    marks: dict[str, dict[str, Any]] = {
        "p99": {"marker": look.marker, "markeredgecolor": paper, "markeredgewidth": 0.6},
        "mean": {"marker": "_", "markersize": 10, "markeredgewidth": 2},
        "p50": {"marker": look.marker, "markerfacecolor": paper, "markersize": 5},
    }
    for statistic, value in values.items():
        (mark,) = axis.plot([x], [value], color=look.colour, linestyle="", zorder=3, **marks[statistic])
        tag(mark, label[0], f"{label[1]} {statistic.upper()} {number(value)} ms")


def _loads_scale(axis: Axes, values: Sequence[float]) -> None:
    low, high = min(values) / 1.25, max(values) * 1.35
    if high / low > 8:
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        plain_ticks(axis, "y", nice_log_ticks(low, high))
    else:
        axis.set_ylim(0, high)


def _load_label(load: Load, loads: Sequence[Load]) -> str:
    """Return the label ``1,024 in`` over ``tp 4`` and ``2 req/s``; output length and tp only if they
    differ."""
    (input_len, output_len, ranks), rate = load
    lines = [f"{input_len:,} in"]
    if len({lengths[1] for lengths, _ in loads}) > 1:
        lines.append(f"{output_len:,} out")
    if len({lengths[2] for lengths, _ in loads}) > 1:
        lines.append(f"tp {ranks or '?'}")
    return "\n".join([*lines, f"{number(rate)} req/s"])


PANELS_PER_LINE: Final = 4
# Fewest values for a quantile: at P95, one of 20 is above it on average.
MIN_VALUES: Final = 20
NAMES: Final = ("ttft", "tpot")

Latencies = dict[str, float | None]


@dataclass(frozen=True)
class _Metric:
    """One row of panels. ``high`` (at ``quantile``) and ``middle`` (P50): milliseconds by trial id."""

    name: str
    limits_ms: Sequence[tuple[str, float]]
    """(name, limit) of each SLO line."""
    quantile: str
    high: Mapping[str, float]
    middle: Mapping[str, float]

    def of(self, trials: Sequence[TrialRecord]) -> _Metric:
        known = {trial.trial_id for trial in trials}
        high = {name: value for name, value in self.high.items() if name in known}
        middle = {name: value for name, value in self.middle.items() if name in known}
        return replace(self, high=high, middle=middle)

    def texts(self, trials: Sequence[TrialRecord]) -> list[str]:
        return [
            f"{trial.cell.connector}, {number(trial.request_rate)} req/s: {self.name.upper()} "
            f"{self.quantile.upper()} {number(self.high[trial.trial_id])} ms, "
            f"P50 {number(self.middle.get(trial.trial_id))}; {trial.verdict}"
            for trial in trials
            if trial.trial_id in self.high
        ]

    def span(self) -> tuple[float, float]:
        values = [*self.high.values(), *self.middle.values(), *(limit for _, limit in self.limits_ms)]
        return min(values), max(values)


def latency_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw latency against rate, a panel per length with two rates or more; None without one."""
    metrics = _metrics(run)
    elsewhere = set(single_rates(run))  # one rate makes no line: these are drawn by load
    trials = [
        trial
        for trial in rated_trials(run)
        if any(trial.trial_id in metric.high for metric in metrics) and lengths_of(trial) not in elsewhere
    ]
    rates = {
        panel: {t.request_rate for t in trials if lengths_of(t) == panel} for panel in map(lengths_of, trials)
    }
    trials = [trial for trial in trials if len(rates[lengths_of(trial)]) > 1]
    if not trials:
        return None
    metrics = [metric.of(trials) for metric in metrics]
    palette, rows = PALETTES[theme], summary_table(run)
    series = series_of(trials)
    look = looks(list(dict.fromkeys([*(row.cell.connector for row in rows), *series.values()])), palette)
    panels = sorted({lengths_of(trial) for trial in trials})
    columns = min(len(panels), PANELS_PER_LINE)
    bands = math.ceil(len(panels) / columns)
    with style(palette):
        words = Words.of(run, "Latency against request rate")
        size = (1.2 + 2.75 * columns, bands * (0.6 + 1.75 * len(metrics)))
        sheet = new_sheet(size, words, palette, ax, legend_lines=2, right_in=0.8, titled=True)
        grid = sheet.grid(bands, columns, wspace=0.1, hspace=0.3)
        spans = axis_spans(
            [[trial.request_rate for trial in trials if lengths_of(trial) == panel] for panel in panels]
        )
        every: list[Axes] = []
        for index, panel in enumerate(panels):
            lines = grid[index // columns, index % columns].subgridspec(len(metrics), 1, hspace=0.12)
            axes = [sheet.figure.add_subplot(lines[line]) for line in range(len(metrics))]
            every += axes
            panel_trials = [trial for trial in trials if lengths_of(trial) == panel]
            for axis, metric in zip(axes, metrics, strict=True):
                for rank, (name, item) in enumerate(look.items()):
                    series_trials = [trial for trial in panel_trials if series[trial.trial_id] == name]
                    _draw_trials(axis, metric, series_trials, item, palette, max(4.5, 7.5 - rank))
                _scale(axis, metric)
                _draw_limit(axis, metric, palette, labelled=_ends_line(index, columns, panels))
                axis.set_xlim(*spans[index])
                axis.tick_params(labelleft=index % columns == 0, labelbottom=axis is axes[-1])
                axis.set_ylabel(f"{metric.name.upper()} (ms)" if index % columns == 0 else "")
            mark_rates(axes, [row for row in rows if lengths_of(row) == panel], look)
            axes[0].set_title(panel_title(panel, [*panels, *elsewhere]))
            axes[-1].set_xlabel("offered request rate (req/s)")
        sheet.figure.align_ylabels(every)
        found = any(row.outcome in ("found", "at_least") for row in rows)
        sheet.legend(_legend(trials, metrics, {name: look[name] for name in series.values()}, palette, found))
    return sheet.figure


def _ends_line(index: int, columns: int, panels: Sequence[Lengths]) -> bool:
    return index % columns == columns - 1 or index == len(panels) - 1


# --- values --------------------------------------------------------------------------------------


def _metrics(run: RunFolder) -> list[_Metric]:
    """Return TTFT and TPOT if measured, each with the highest available quantile."""
    slo = slo_of(run)
    share = slo.attainment or 0.99
    read: dict[tuple[str, float], Latencies] = {}
    found = []
    for name in NAMES:
        lines = slo.lines(f"{name}_ms")
        slo_quantile = lines[0][1] if lines else f"p{share * 100:g}"
        share_of_name = float(slo_quantile[1:]) / 100 if slo_quantile.startswith("p") else share
        limits = [(_line_name(tier, statistic, slo_quantile), limit) for tier, statistic, limit in lines]
        middle = _column(run, f"{name}_ms_p50")
        for quantile in (slo_quantile, "p99", "p90", "mean"):
            high = _column(run, f"{name}_ms_{quantile}")
            if quantile == slo_quantile:
                high |= _computed(run, name, share_of_name, read, known=high)
            if high:
                found.append(_Metric(name, limits, quantile, high, middle))
                break
    return found


def _computed(
    run: RunFolder,
    name: str,
    share: float,
    read: dict[tuple[str, float], Latencies],
    known: Mapping[str, float],
) -> dict[str, float]:
    """Return the quantile for the trials whose summary lacks it. ``read``: cache."""
    found = {}
    for trial in rated_trials(run):
        if trial.trial_id not in known:
            key = (trial.trial_id, share)
            if key not in read:
                read[key] = _from_requests(run, trial, share)
            if value := read[key].get(name):
                found[trial.trial_id] = value
    return found


def _line_name(tier: str, statistic: str, drawn: str) -> str:
    """Return an SLO line's label: tier, and the statistic if it differs from the upper curve's."""
    return " ".join(word for word in (tier or "SLO", "" if statistic == drawn else statistic.upper()) if word)


def _column(run: RunFolder, column: str) -> dict[str, float]:
    values = {trial.trial_id: trial_value(trial, column) for trial in rated_trials(run)}
    return {trial_id: value for trial_id, value in values.items() if value}


def _from_requests(run: RunFolder, trial: TrialRecord, share: float) -> Latencies:
    """Return a quantile (ms) of both latencies over the steady window's successful requests."""
    requests = request_times(run, trial.trial_id)
    if requests is None:
        return {}
    return {
        name: float(np.quantile(values, share)) * 1e3 if len(values) >= MIN_VALUES else None
        for name, values in requests.answered(trial).latencies_s().items()
    }


# --- drawing -------------------------------------------------------------------------------------


def _draw_trials(
    axes: Axes,
    metric: _Metric,
    trials: Sequence[TrialRecord],
    look: PlotStyle,
    palette: Palette,
    size: float,
) -> None:
    """Draw one connector's trials; refused ones are hollow and not connected. ``size``: marker size."""
    ordered = sorted(trials, key=lambda trial: trial.request_rate)
    used = [trial for trial in ordered if trial.verdict != "invalid"]
    refused = [trial for trial in ordered if trial.verdict == "invalid"]
    edge: dict[str, Any] = {"markeredgecolor": palette.paper, "markeredgewidth": 0.6}
    point: dict[str, Any] = {"marker": look.marker, "markersize": size}
    middle, high = _points(used, metric.middle), _points(used, metric.high)
    hollow: dict[str, Any] = {"markerfacecolor": "none", "markeredgecolor": palette.faint}
    drawn = [
        *axes.plot(*_means(*middle), color=look.colour, linestyle=":", linewidth=1.2, alpha=0.85),
        *axes.plot(*_means(*high), color=look.colour, linewidth=1.5, zorder=2.5),
    ]
    for line in drawn if ordered else ():
        tag(line, ordered[0].cell.connector)
    for group, marks in (
        (used, axes.plot(*high, color=look.colour, linestyle="", zorder=3, **point, **edge)),
        (refused, axes.plot(*_points(refused, metric.high), linestyle="", zorder=2, **point, **hollow)),
    ):
        if group:
            tag(marks[0], group[0].cell.connector, *metric.texts(group))


def _points(trials: Sequence[TrialRecord], values: Mapping[str, float]) -> tuple[list[float], list[float]]:
    known = [trial for trial in trials if trial.trial_id in values]
    return [trial.request_rate for trial in known], [values[trial.trial_id] for trial in known]


def _means(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return one mean point per rate."""
    rates = list(dict.fromkeys(x))
    pairs = list(zip(x, y, strict=True))
    return rates, [fmean(value for x_value, value in pairs if x_value == rate) for rate in rates]


def _scale(axes: Axes, metric: _Metric) -> None:
    """Set one vertical scale per latency: logarithmic for a wide range."""
    low, high = metric.span()
    low, high = low / 1.25, high * 1.35
    if high / low > 8:
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        plain_ticks(axes, "y", nice_log_ticks(low, high))
    else:
        axes.set_ylim(0, high)


def _draw_limit(axes: Axes, metric: _Metric, palette: Palette, *, labelled: bool) -> None:
    dashes = (0, (5, 2))
    for name, limit_ms in metric.limits_ms:
        axes.axhline(limit_ms, color=palette.limit, linewidth=1.2, linestyle=dashes, zorder=1.5)
        if labelled:
            axes.annotate(
                f"{name}\n{limit_ms:g} ms",
                (1, limit_ms),
                (5, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                color=palette.limit,
                fontsize=8.5,
                va="center",
            )


def _legend(
    trials: Sequence[TrialRecord],
    metrics: Sequence[_Metric],
    look: Mapping[str, PlotStyle],
    palette: Palette,
    found: bool,
) -> list[list[Line2D]]:
    connectors = [
        handle(name, marker=item.marker, color=item.colour, linestyle="-") for name, item in look.items()
    ]
    quantiles = " / ".join(dict.fromkeys(metric.quantile.upper() for metric in metrics))
    keys = [
        handle(quantiles, color=palette.faint, linestyle="-", marker="o", markersize=4),
        handle("P50", color=palette.faint, linestyle=":"),
    ]
    if found:
        keys.append(handle("resulting rate", color=palette.faint, marker="^"))
    if any(trial.verdict == "invalid" for trial in trials):
        hollow = {"markerfacecolor": "none", "markeredgecolor": palette.faint}
        keys.append(handle("refused trial, not used", marker="o", **hollow))
    return [connectors, keys]
