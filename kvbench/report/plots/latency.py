"""TTFT and TPOT over the offered rate: one panel per input length, every trial of the search a point.

The upper line is the quantile that the SLO speaks of (P95 for an attainment of 0.95): where it crosses
the limit, the SLO is lost to that latency alone. It is taken from the requests of the steady window
where the trial's summary does not have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvbench.core.records import TrialRecord
from kvbench.report.plots.axes import axis_spans, nice_log_ticks, plain_ticks
from kvbench.report.plots.loads import single_rates
from kvbench.report.plots.panels import (
    Lengths,
    found_rates,
    lengths_of,
    panel_title,
    rated_trials,
    request_times,
    series_of,
)
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style
from kvbench.report.plots.values import says
from kvbench.report.tables.numbers import number
from kvbench.report.tables.result import summary_table
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

PANELS_PER_LINE: Final = 4
# As many values as a quantile needs on average to have one above it, at P95.
MIN_VALUES: Final = 20
NAMES: Final = ("ttft", "tpot")

Latencies = dict[str, float | None]


@dataclass(frozen=True)
class _Metric:
    """One line of panels. ``high`` (its ``quantile``) and ``middle`` (P50): milliseconds by trial id."""

    name: str
    limits_ms: Sequence[tuple[str, float]]
    """(name, limit) of each line of the SLO."""
    quantile: str
    high: Mapping[str, float]
    middle: Mapping[str, float]

    def of(self, trials: Sequence[TrialRecord]) -> _Metric:
        """Of these trials alone."""
        known = {trial.trial_id for trial in trials}
        high = {name: value for name, value in self.high.items() if name in known}
        middle = {name: value for name, value in self.middle.items() if name in known}
        return replace(self, high=high, middle=middle)

    def texts(self, trials: Sequence[TrialRecord]) -> list[str]:
        """What each trial's mark stands for."""
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
    """Latency against rate; None where no trial has a latency."""
    metrics = _metrics(run)
    elsewhere = set(single_rates(run))  # one rate makes no line: these are drawn by load
    trials = [
        trial
        for trial in rated_trials(run)
        if any(trial.trial_id in metric.high for metric in metrics) and lengths_of(trial) not in elsewhere
    ]
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
            mine = [trial for trial in trials if lengths_of(trial) == panel]
            for axis, metric in zip(axes, metrics, strict=True):
                for place, (name, item) in enumerate(look.items()):
                    own = [trial for trial in mine if series[trial.trial_id] == name]
                    _draw_trials(axis, metric, own, item, palette, max(4.5, 7.5 - place))
                _scale(axis, metric)
                _draw_limit(axis, metric, palette, labelled=_ends_line(index, columns, panels))
                axis.set_xlim(*spans[index])
                axis.tick_params(labelleft=index % columns == 0, labelbottom=axis is axes[-1])
                axis.set_ylabel(f"{metric.name.upper()} (ms)" if index % columns == 0 else "")
            found_rates(axes, [row for row in rows if lengths_of(row) == panel], look)
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
    """TTFT and TPOT as far as measured, each with the highest quantile that can be had."""
    slo = slo_of(run)
    share = slo.attainment or 0.99
    read: dict[tuple[str, float], Latencies] = {}
    found = []
    for name in NAMES:
        lines = slo.lines(f"{name}_ms")
        asked = lines[0][1] if lines else f"p{share * 100:g}"
        share_of_name = float(asked[1:]) / 100 if asked.startswith("p") else share
        limits = [(_line_name(tier, statistic, asked), limit) for tier, statistic, limit in lines]
        middle = _column(run, f"{name}_ms_p50")
        for quantile in (asked, "p99", "p90", "mean"):
            high = _column(run, f"{name}_ms_{quantile}")
            if quantile == asked:
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
    """The quantile of the trials whose summary does not have it. ``read``: what was computed already."""
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
    """What stands at an SLO's line: the tier, and the statistic where it is not that of the upper curve."""
    return " ".join(word for word in (tier or "SLO", "" if statistic == drawn else statistic.upper()) if word)


def _column(run: RunFolder, column: str) -> dict[str, float]:
    values = {trial.trial_id: trial_value(trial, column) for trial in rated_trials(run)}
    return {trial_id: value for trial_id, value in values.items() if value}


def _from_requests(run: RunFolder, trial: TrialRecord, share: float) -> Latencies:
    """A quantile of both latencies, in milliseconds, over the successful requests of the steady window."""
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
    """One connector's trials. Those that were refused stand apart, hollow, and no line goes through them.

    ``size``: of its points; a larger one is seen behind a smaller one of equal value.
    """
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
        says(line, ordered[0].cell.connector)
    for mine, marks in (
        (used, axes.plot(*high, color=look.colour, linestyle="", zorder=3, **point, **edge)),
        (refused, axes.plot(*_points(refused, metric.high), linestyle="", zorder=2, **point, **hollow)),
    ):
        if mine:
            says(marks[0], mine[0].cell.connector, *metric.texts(mine))


def _points(trials: Sequence[TrialRecord], values: Mapping[str, float]) -> tuple[list[float], list[float]]:
    known = [trial for trial in trials if trial.trial_id in values]
    return [trial.request_rate for trial in known], [values[trial.trial_id] for trial in known]


def _means(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """One point per rate, so that a line does not run up and down where a rate was tried more than once."""
    places = list(dict.fromkeys(x))
    pairs = list(zip(x, y, strict=True))
    return places, [fmean(value for place, value in pairs if place == each) for each in places]


def _scale(axes: Axes, metric: _Metric) -> None:
    """The vertical scale is the same in all panels of one latency: logarithmic if it spans much."""
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
        keys.append(handle("found rate", color=palette.faint, marker="^"))
    if any(trial.verdict == "invalid" for trial in trials):
        hollow = {"markerfacecolor": "none", "markeredgecolor": palette.faint}
        keys.append(handle("refused trial, not used", marker="o", **hollow))
    return [connectors, keys]
