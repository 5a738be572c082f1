"""What several pictures share: their trials and requests, a panel per input length, ticks and spans."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.errors import StoreError
from kvbench.report.plots.style import PlotStyle, says
from kvbench.report.tables.result import Row, summary_table
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Transform


def plain_ticks(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Ticks at just these values, written out in full, on a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_major_locator(FixedLocator(list(values)))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def axis_spans(panels: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The ends of each panel's axis: from 0, unless that leaves more than half of every panel empty.

    A panel that does not begin at 0 spans a fifth of its values at least.
    """
    if any(min(values) < 0.5 * max(values) for values in panels):
        return [(0.0, max(values) * 1.1) for values in panels]
    spans = []
    for values in panels:
        low, high = min(values), max(values)
        room = max(0.15 * (high - low), (0.2 * high - (high - low)) / 2)
        spans.append((low - room, high + room))
    return spans


def at_bottom(axes: Axes) -> Transform:
    """x in data, y from 0 (the axis) to 1 (the top)."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transData, axes.transAxes)


def nice_log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values (1, 2, 5 × 10ⁿ) from just below ``low`` to just above ``high``, at most ``most``."""
    inside: list[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) <= most:
            return inside
    return inside


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]

Lengths = tuple[int, int, int]
"""What one panel stands for: input and output length in tokens; TP size, or 0 if not reported."""

APART: Final = ("burst", "equal_rate", "closed_loop")
"""Methods with a story of their own: a burst's rate is not offered for long, an equal rate was chosen."""
TIMES: Final = ("scheduled_s", "sent_s", "first_token_s", "last_token_s")


def rated_trials(run: RunFolder) -> list[TrialRecord]:
    """Trials at a finite rate that was offered on purpose: no bursts, no saturating probes."""
    return [
        trial
        for trial in run.all_trials
        if trial.method not in APART and trial.purpose != "ceiling" and math.isfinite(trial.request_rate)
    ]


def supporting(run: RunFolder) -> list[tuple[Row, TrialRecord]]:
    """The rows of the result table that have one, with the trial that supports the answer."""
    trials = {trial.trial_id: trial for trial in run.trials}
    return [(row, trials[row.trial_id]) for row in summary_table(run) if row.trial_id in trials]


def lengths_of(item: Row | TrialRecord) -> Lengths:
    """The panel of a row or a trial; only read-in results differ in tensor-parallel size within a run."""
    settings = item.engine.get("settings") if isinstance(item, TrialRecord) else None
    ranks = settings.get("tp") if isinstance(settings, Mapping) else None
    return item.cell.input_len, item.cell.output_len, ranks if isinstance(ranks, int) else 0


def panel_title(panel: Lengths, panels: Sequence[Lengths]) -> str:
    """``1,024 tokens in``; with the output length and tensor-parallel size if the panels differ in them."""
    outputs, ranks = {each[1] for each in panels}, {each[2] for each in panels}
    title = f"{panel[0]:,} tokens in" + (f", {panel[1]:,} out" if len(outputs) > 1 else "")
    return title + (f", tp {panel[2] or '?'}" if len(ranks) > 1 else "")


def series_of(trials: Sequence[TrialRecord]) -> dict[str, str]:
    """Trial id → whose line it is on: its connector's, by protocol and NICs if the connector has several."""
    ways = {trial.trial_id: _way(trial) for trial in trials}
    several: dict[str, set[str]] = {}
    for trial in trials:
        several.setdefault(trial.cell.connector, set()).add(ways[trial.trial_id])
    return {
        trial.trial_id: f"{trial.cell.connector} {ways[trial.trial_id]}".rstrip()
        if len(several[trial.cell.connector]) > 1
        else trial.cell.connector
        for trial in trials
    }


def _way(trial: TrialRecord) -> str:
    """``rdma, 2 NICs`` or ``tcp``, as far as the trial itself says."""
    settings = trial.engine.get("settings")
    if not isinstance(settings, Mapping):
        return ""
    nics, protocol = settings.get("nics"), settings.get("protocol")
    return ", ".join(
        [*([str(protocol)] if protocol else []), *([f"{nics} NIC{'' if nics == 1 else 's'}"] if nics else [])]
    )


@dataclass(frozen=True)
class RequestTimes:
    """A trial's requests, an array of each column over them; times in seconds, NaN where there was none."""

    scheduled_s: Floats
    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_len: Floats
    untimed_tokens: Floats
    error: NDArray[np.object_]

    def answered(self, trial: TrialRecord) -> RequestTimes:
        """Those of the trial's steady window that were answered."""
        window = trial.summary.get("window") or {}
        start, end = window.get("start_s", -math.inf), window.get("end_s", math.inf)
        kept = (self.error == "") & (self.scheduled_s >= start) & (self.scheduled_s <= end)
        return RequestTimes(*(getattr(self, each.name)[kept] for each in fields(self)))

    def latencies_s(self) -> dict[str, Floats]:
        """TTFT and TPOT as RequestRecord has them, each of the requests that have it."""
        tokens = self.output_len - self.untimed_tokens
        several = tokens > 0
        tpot = (self.last_token_s - self.first_token_s)[several] / tokens[several]
        ttft = self.first_token_s - self.scheduled_s
        return {"ttft": ttft[~np.isnan(ttft)], "tpot": tpot[~np.isnan(tpot)]}


def request_times(run: RunFolder, trial_id: str) -> RequestTimes | None:
    """Times, tokens and error of a trial's requests; None where they were not kept."""
    return _request_times(_Of(run), trial_id)


class _Of:
    """A run as it was read, for a cache: several pictures ask for the same requests."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def __hash__(self) -> int:
        return id(self.run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Of) and other.run is self.run


@lru_cache(maxsize=32)
def _request_times(of: _Of, trial_id: str) -> RequestTimes | None:
    run = of.run
    columns = [*TIMES, "output_len", "error"]
    try:
        found = run.columns("requests", trial_id, [*columns, "untimed_tokens"])
    except StoreError:
        try:  # kept by an older kvbench, perhaps
            found = run.columns("requests", trial_id, columns)
        except StoreError:
            return None
        found["untimed_tokens"] = np.ones(len(found["error"]))
    error = found.pop("error")
    return RequestTimes(**found, error=error)


def light_records(run: RunFolder, trial_id: str) -> list[RequestRecord]:
    """A trial's requests, with their times and errors but without the gaps between tokens; [] if not kept."""
    found = request_times(run, trial_id)
    if found is None:
        return []
    columns = [getattr(found, name).tolist() for name in (*TIMES, "output_len", "error")]
    return [
        RequestRecord(
            "", scheduled, 0, 0, _known(sent), _known(first), _known(last), int(output_len), error=error
        )
        for scheduled, sent, first, last, output_len, error in zip(*columns, strict=True)
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def found_rates(axes: Sequence[Axes], rows: Sequence[Row], look: Mapping[str, PlotStyle]) -> None:
    """The rate that the search found: a line through the panels and a triangle on the lowest one's axis."""
    for row in rows:
        if row.outcome not in ("found", "at_least") or row.answer.max_request_rate is None:
            continue
        colour, rate = look[row.cell.connector].colour, row.answer.max_request_rate
        for axis in axes:
            says(axis.axvline(rate, color=colour, linewidth=0.9, alpha=0.55, zorder=1), row.cell.connector)
        (mark,) = axes[-1].plot(
            [rate],
            [0.0],
            marker="^",
            markersize=7,
            color=colour,
            markeredgecolor=axes[-1].get_facecolor(),
            markeredgewidth=0.6,
            transform=at_bottom(axes[-1]),
            clip_on=False,
            zorder=5,
        )
        says(mark, row.cell.connector, f"{row.cell.connector}: found {row.answer.text()} req/s")
