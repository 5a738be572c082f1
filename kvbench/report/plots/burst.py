"""Why a burst's rate does not hold: what is on its way over time, in a burst and at the sustained rate.

One line of two panels per connector and input length for which a run has both. They share their axes, so
that the eye can compare: a burst is one batch that is worked off after its last arrival; a sustained rate
has as much on its way at the end as in the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvbench.core.metrics.steady_window import in_flight_series, waiting_series
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.report.plots.flight import IN_FLIGHT, WAITING, outline
from kvbench.report.plots.panels import light_records
from kvbench.report.plots.style import PALETTES, Palette, Theme, Words, add_legend, handle, new_figure, style
from kvbench.report.tables.numbers import number
from kvbench.report.tables.result import read_answer
from kvbench.results.run import CellResult, RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES_MOST: Final = 4
"""Further connectors and lengths look the same."""


def burst_figure(run: RunFolder, theme: Theme = "light") -> Figure | None:
    """Requests on their way and waiting for their first token; None without a burst beside a search."""
    pairs = _pairs(run)[:LINES_MOST]
    if not pairs:
        return None
    palette = PALETTES[theme]
    with style(palette):
        words = Words.of(run, "A burst beside the rate that holds")
        figure = new_figure((8.2, 2.5 * len(pairs)), words, palette, titled=True)
        grid = figure.subplots(
            len(pairs), 2, squeeze=False, sharey="row", gridspec_kw={"wspace": 0.08, "hspace": 0.6}
        )
        for axes, (burst, sustained) in zip(grid, pairs, strict=True):
            for axis, trial, kind in zip(axes, (burst, sustained), ("burst", "sustained"), strict=True):
                _draw(axis, trial, light_records(run, trial.trial_id), palette)
                cell = trial.cell
                axis.set_title(
                    f"{cell.connector}, {cell.input_len:,} in: {kind} {number(trial.request_rate)} req/s",
                    fontsize=9,
                )
            axes[0].set_ylabel("requests")
        for axis in grid[-1]:
            axis.set_xlabel("seconds since the first arrival was due")
        add_legend(figure, [_legend(palette)])
    return figure


def _pairs(run: RunFolder) -> list[tuple[TrialRecord, TrialRecord]]:
    """(burst, sustained) trials that support the two answers of a cell."""
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
    """The trial that confirmed the answer, else the last one at its rate."""
    mine = [trial for trial in trials if trial.cell == result.cell and trial.method == result.method]
    named = [trial for trial in mine if trial.trial_id == result.confirmed_by]
    rate = read_answer(result.answer).max_request_rate if result.answer else None
    at_rate = [trial for trial in mine if rate is not None and trial.request_rate == rate]
    return next(iter([*named, *reversed(at_rate)]), None)


def _draw(axes: Axes, trial: TrialRecord, records: Sequence[RequestRecord], palette: Palette) -> None:
    last_due = max(record.scheduled_s for record in records)
    axes.axvspan(0, last_due, color=palette.grid, alpha=0.55, linewidth=0, zorder=0)
    for series, colour in (
        (in_flight_series(records, trial.duration_s), palette.series[IN_FLIGHT]),
        (waiting_series(records, trial.duration_s), palette.series[WAITING]),
    ):
        times, values = outline(series)
        axes.step(times, values, where="post", color=colour, linewidth=1.4)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _legend(palette: Palette) -> list[Artist]:
    from matplotlib.patches import Patch

    return [
        handle("on their way", linestyle="-", color=palette.series[IN_FLIGHT]),
        handle("waiting for the first token", linestyle="-", color=palette.series[WAITING]),
        Patch(facecolor=palette.grid, alpha=0.55, label="requests arrive"),
    ]
