"""TTFT and TPOT of loads that were offered at one rate each: side by side, one place on the axis per load.

Results that were read in are often of this kind: a table over input lengths or tensor-parallel sizes, each
at one rate. Over the rate they would be a panel with one point each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.records import TrialRecord
from kvbench.report.plots.axes import nice_log_ticks, plain_ticks
from kvbench.report.plots.panels import Lengths, lengths_of, rated_trials, series_of
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Theme, handle, looks, style
from kvbench.report.plots.values import says
from kvbench.report.tables.numbers import number
from kvbench.report.tables.trial_values import trial_value
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STATISTICS: Final = ("p99", "mean", "p50")
"""From the top: a filled mark, a dash, a hollow mark."""

Load = tuple[Lengths, float]


def single_rates(run: RunFolder) -> list[Lengths]:
    """Lengths at which each series was offered one rate only, if there are two or more: drawn here."""
    trials = rated_trials(run)
    series = series_of(trials)
    rates: dict[Lengths, dict[str, set[float]]] = {}
    for trial in trials:
        mine = rates.setdefault(lengths_of(trial), {})
        mine.setdefault(series[trial.trial_id], set()).add(trial.request_rate)
    single = [lengths for lengths, found in rates.items() if max(map(len, found.values())) == 1]
    searched = any(trial.method == "sustained" for trial in run.all_trials)
    return sorted(single) if len(single) > 1 and not searched else []


def loads_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Latencies by load; None where loads were offered at several rates, as in a search."""
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
    places: list[Load] = sorted({(lengths_of(trial), trial.request_rate) for trial in trials})
    with style(palette):
        words = Words.of(run, "Latency by load")
        size = (max(8.2, 1.6 + 1.1 * len(places)), 2.2 * len(names))
        sheet = new_sheet(size, words, palette, ax, legend_lines=2, right_in=0.8)
        grid = sheet.grid(len(names), 1, hspace=0.12)
        axes = [sheet.figure.add_subplot(grid[line, 0]) for line in range(len(names))]
        for axis, name in zip(axes, names, strict=True):
            for trial in trials:
                own = drawn.index(series[trial.trial_id])
                at = places.index((lengths_of(trial), trial.request_rate))
                x = at + (own - (len(drawn) - 1) / 2) * min(0.22, 0.7 / len(drawn))
                who = f"{series[trial.trial_id]}, {number(trial.request_rate)} req/s: {name.upper()}"
                whose = (trial.cell.connector, who)
                _draw(axis, x, _values(trial, name), look[drawn[own]], palette.paper, whose)
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
            _scale(axis, [*values, *(limit for _, _, limit in limits)])
            axis.set_ylabel(f"{name.upper()} (ms)")
            axis.set_xlim(-0.5, len(places) - 0.5)
            axis.set_xticks(range(len(places)), [_place(place, places) for place in places])
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
    axis: Axes, x: float, values: dict[str, float], look: Any, paper: str, whose: tuple[str, str]
) -> None:
    """A load's three values on a line from the least to the most. ``whose``: connector, and words for it."""
    span = [min(values.values()), max(values.values())]
    (line,) = axis.plot([x, x], span, color=look.colour, linewidth=1, alpha=0.5)
    says(line, whose[0])
    marks: dict[str, dict[str, Any]] = {
        "p99": {"marker": look.marker, "markeredgecolor": paper, "markeredgewidth": 0.6},
        "mean": {"marker": "_", "markersize": 10, "markeredgewidth": 2},
        "p50": {"marker": look.marker, "markerfacecolor": paper, "markersize": 5},
    }
    for statistic, value in values.items():
        (mark,) = axis.plot([x], [value], color=look.colour, linestyle="", zorder=3, **marks[statistic])
        says(mark, whose[0], f"{whose[1]} {statistic.upper()} {number(value)} ms")


def _scale(axis: Axes, values: Sequence[float]) -> None:
    low, high = min(values) / 1.25, max(values) * 1.35
    if high / low > 8:
        axis.set_yscale("log")
        axis.set_ylim(low, high)
        plain_ticks(axis, "y", nice_log_ticks(low, high))
    else:
        axis.set_ylim(0, high)


def _place(place: Load, places: Sequence[Load]) -> str:
    """``1,024 in`` over ``tp 4`` and ``2 req/s``; output length and tp only where they differ."""
    (input_len, output_len, ranks), rate = place
    lines = [f"{input_len:,} in"]
    if len({lengths[1] for lengths, _ in places}) > 1:
        lines.append(f"{output_len:,} out")
    if len({lengths[2] for lengths, _ in places}) > 1:
        lines.append(f"tp {ranks or '?'}")
    return "\n".join([*lines, f"{number(rate)} req/s"])
