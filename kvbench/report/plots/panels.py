"""Shared parts of plots: sheet, trials and requests, panels, ticks, spans."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.errors import InputError, StoreError
from kvbench.report.plots.style import Palette, PlotStyle, tag
from kvbench.report.tables.result import Row, summary_table
from kvbench.results.provenance import caption, mark_of, slo_of
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecBase
    from matplotlib.transforms import Transform


def plain_ticks(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Set plain-number ticks at exactly these values on a logarithmic axis."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    target = axes.xaxis if which == "x" else axes.yaxis
    target.set_major_locator(FixedLocator(list(values)))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def axis_spans(panels: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Return each panel's axis range: from 0 if a panel has one value, or fills more than half of it. Other
    ranges span at least a fifth of their values."""
    if any(min(values) < 0.5 * max(values) or min(values) == max(values) for values in panels):
        return [(0.0, max(values) * 1.1) for values in panels]
    spans = []
    for values in panels:
        low, high = min(values), max(values)
        room = max(0.15 * (high - low), (0.2 * high - (high - low)) / 2)
        spans.append((low - room, high + room))
    return spans


def at_bottom(axes: Axes) -> Transform:
    """Return the transform with x in data and y from 0 (axis) to 1 (top)."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transData, axes.transAxes)


def nice_log_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most ``most`` round values (1, 2, 5 × 10ⁿ) around ``low`` to ``high``."""
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
"""A panel's key: input and output length in tokens, and TP size (0 if unknown)."""

APART: Final = ("burst", "equal_rate", "closed_loop")
"""Methods with their own plots."""
TIMES: Final = ("scheduled_s", "sent_s", "first_token_s", "last_token_s")


def rated_trials(run: RunFolder) -> list[TrialRecord]:
    """Return the trials at a finite, intended rate: no bursts, no saturation probes."""
    return [
        trial
        for trial in run.all_trials
        if trial.method not in APART and trial.purpose != "ceiling" and math.isfinite(trial.request_rate)
    ]


def supporting(run: RunFolder) -> list[tuple[Row, TrialRecord]]:
    """Return the result rows that have a supporting trial, with that trial."""
    trials = {trial.trial_id: trial for trial in run.trials}
    return [(row, trials[row.trial_id]) for row in summary_table(run) if row.trial_id in trials]


def lengths_of(item: Row | TrialRecord) -> Lengths:
    """Return the panel of a row or trial; TP sizes differ only in imported results."""
    settings = item.engine.get("settings") if isinstance(item, TrialRecord) else None
    ranks = settings.get("tp") if isinstance(settings, Mapping) else None
    return item.cell.input_len, item.cell.output_len, ranks if isinstance(ranks, int) else 0


def panel_title(panel: Lengths, panels: Sequence[Lengths]) -> str:
    """Return a title such as ``1,024 tokens in``, with output length and TP size if they differ."""
    outputs, ranks = {lengths[1] for lengths in panels}, {lengths[2] for lengths in panels}
    title = f"{panel[0]:,} tokens in" + (f", {panel[1]:,} out" if len(outputs) > 1 else "")
    return title + (f", tp {panel[2] or '?'}" if len(ranks) > 1 else "")


def series_of(trials: Sequence[TrialRecord]) -> dict[str, str]:
    """Map trial ids to series: connectors, split by protocol and NICs if a connector has several."""
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
    """Return ``rdma, 2 NICs`` or ``tcp``, as far as the trial states it."""
    settings = trial.engine.get("settings")
    if not isinstance(settings, Mapping):
        return ""
    nics, protocol = settings.get("nics"), settings.get("protocol")
    return ", ".join(
        [*([str(protocol)] if protocol else []), *([f"{nics} NIC{'' if nics == 1 else 's'}"] if nics else [])]
    )


@dataclass(frozen=True)
class RequestTimes:
    """A trial's requests as one array per column; times in seconds, NaN if missing."""

    scheduled_s: Floats
    sent_s: Floats
    first_token_s: Floats
    last_token_s: Floats
    output_len: Floats
    untimed_tokens: Floats
    error: NDArray[np.object_]

    def answered(self, trial: TrialRecord) -> RequestTimes:
        window = trial.summary.get("window") or {}
        start, end = window.get("start_s", -math.inf), window.get("end_s", math.inf)
        kept = (self.error == "") & (self.scheduled_s >= start) & (self.scheduled_s <= end)
        return RequestTimes(*(getattr(self, field.name)[kept] for field in fields(self)))

    def latencies_s(self) -> dict[str, Floats]:
        """Return TTFT and TPOT in seconds, as defined by RequestRecord."""
        tokens = self.output_len - self.untimed_tokens
        several = tokens > 0
        tpot = (self.last_token_s - self.first_token_s)[several] / tokens[several]
        ttft = self.first_token_s - self.scheduled_s
        return {"ttft": ttft[~np.isnan(ttft)], "tpot": tpot[~np.isnan(tpot)]}


def request_times(run: RunFolder, trial_id: str) -> RequestTimes | None:
    """Return a trial's requests, or None if they were not stored."""
    return _request_times(_RunKey(run), trial_id)


class _RunKey:
    """Cache key of a run folder: several plots read the same requests."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run

    def __hash__(self) -> int:
        return id(self.run)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RunKey) and other.run is self.run


@lru_cache(maxsize=32)
def _request_times(of: _RunKey, trial_id: str) -> RequestTimes | None:
    run = of.run
    columns = [*TIMES, "output_len", "error"]
    try:
        found = run.columns("requests", trial_id, [*columns, "untimed_tokens"])
    except StoreError:
        try:  # an older kvbench may lack the last column
            found = run.columns("requests", trial_id, columns)
        except StoreError:
            return None
        found["untimed_tokens"] = np.ones(len(found["error"]))
    error = found.pop("error")
    return RequestTimes(**found, error=error)


def light_records(run: RunFolder, trial_id: str) -> list[RequestRecord]:
    """Return a trial's requests without gaps between tokens; [] if not stored."""
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


def mark_rates(axes: Sequence[Axes], rows: Sequence[Row], look: Mapping[str, PlotStyle]) -> None:
    """Mark the resulting rate: a line through the panels and a triangle on the lowest axis."""
    for row in rows:
        if row.outcome not in ("found", "at_least") or row.answer.max_request_rate is None:
            continue
        colour, rate = look[row.cell.connector].colour, row.answer.max_request_rate
        for axis in axes:
            tag(axis.axvline(rate, color=colour, linewidth=0.9, alpha=0.55, zorder=1), row.cell.connector)
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
        tag(mark, row.cell.connector, f"{row.cell.connector}: result {row.answer.text()} req/s")


@dataclass(frozen=True)
class Words:
    heading: str
    subtitle: str
    caption: str
    badge: str = ""

    @classmethod
    def of(cls, run: RunFolder, heading: str) -> Words:
        mark = mark_of(run)
        measured = run.manifest.get("kind") != "imported"
        badge = mark.badge if mark is not None else "LAB" if "lab" in run.labels else ""
        badge = badge or ("" if measured else "IMPORTED: measured by another tool")
        return cls(heading, slo_of(run).text(), " · ".join([caption(run), *libraries_of(run)]), badge)


_MOVERS: Final = ("vllm", "mooncake-transfer-engine", "nixl", "torch")


def libraries_of(run: RunFolder) -> list[str]:
    """Return the machine's engine and transfer libraries with versions, without duplicates."""
    known = run.environment.get("libraries")
    found = known.items() if isinstance(known, Mapping) else ()
    return [
        f"{str(name).split('-')[0]} {version}"
        for name, version in found
        if version and str(name).startswith(_MOVERS)
    ]


# Inches around the axes, for words, legend lines, axis labels and the limits' labels.
HEAD_IN: Final = 0.64
LEGEND_LINE_IN: Final = 0.25
PANEL_TITLE_IN: Final = 0.34
FOOT_IN: Final = 0.76
CAPTION_LINE_IN: Final = 0.14
LEFT_IN: Final = 0.82
MIN_WIDTH_IN: Final = 8.2


@dataclass(frozen=True)
class Sheet:
    """Layout of a plot's panels and legends. ``given``: Axes to draw in, or None for the whole figure."""

    figure: Figure
    given: Axes | None = None

    def grid(self, lines: int, columns: int, **space: Any) -> GridSpecBase:
        """Return a grid for panels. ``space``: wspace, hspace. Raises InputError for Axes that are no
        subplot."""
        if self.given is None:
            return self.figure.add_gridspec(lines, columns, **space)
        spec = self.given.get_subplotspec()
        if spec is None:
            raise InputError(
                "this picture has several panels, and the given Axes cannot be divided",
                hint="use Axes from plt.subplots() or figure.add_subplot()",
            )
        self.given.set_axis_off()
        return spec.subgridspec(lines, columns, **space)

    def panels(
        self, lines: int, columns: int, sharey: Literal["none", "row", "all"] = "none", **space: Any
    ) -> Any:
        """Return the panels as an array of Axes."""
        return self.grid(lines, columns, **space).subplots(squeeze=False, sharey=sharey)

    def panel(self) -> Axes:
        return self.figure.add_subplot() if self.given is None else self.given

    def legend(self, lines: Sequence[Sequence[Artist]]) -> None:
        """Add legends above the panels, one per line."""
        if self.given is not None:
            every = [artist for line in lines for artist in line]
            look: dict[str, Any] = {"fontsize": "small", "columnspacing": 1.2, "handletextpad": 0.5}
            self.given.legend(
                handles=every,
                loc="lower left",
                bbox_to_anchor=(0, 1.06),
                ncols=min(4, len(every)),
                **look,
            )
            return
        width, height = self.figure.get_size_inches()
        for index, handles in enumerate(lines):
            self.figure.legend(
                handles=list(handles),
                loc="upper left",
                bbox_to_anchor=(0.1 / width, 1 - (HEAD_IN + 0.03 + index * LEGEND_LINE_IN) / height),
                ncols=max(1, len(handles)),
                borderaxespad=0,
                columnspacing=1.5,
                handletextpad=0.5,
            )


def new_sheet(
    size: tuple[float, float],
    words: Words,
    palette: Palette,
    ax: Axes | None = None,
    *,
    legend_lines: int = 1,
    right_in: float = 0.25,
    left_in: float = LEFT_IN,
    titled: bool = False,
) -> Sheet:
    """Create a figure with its texts. ``size``: width, and height of the axes, in inches. ``left_in``,
    ``right_in``: free margins in inches. With ``ax`` the plot replaces those Axes, and the caller draws the
    surroundings."""
    if ax is not None:
        figure = ax.get_figure(root=True)
        assert figure is not None
        return Sheet(figure, ax)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(size[0], MIN_WIDTH_IN)
    caption = _wrapped(_plain(words.caption), int(width / 0.066))
    top_in = HEAD_IN + legend_lines * LEGEND_LINE_IN + (PANEL_TITLE_IN if titled else 0.12)
    bottom_in = FOOT_IN + CAPTION_LINE_IN * len(caption)
    height = size[1] + top_in + bottom_in
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.subplots_adjust(
        left=left_in / width,
        right=1 - right_in / width,
        top=1 - top_in / height,
        bottom=bottom_in / height,
    )
    left, top = 0.16 / width, 1 - 0.14 / height
    figure.text(left, top, _plain(words.heading), fontsize=13, fontweight="bold", va="top")
    below: dict[str, Any] = {"fontsize": 9.5, "color": palette.faint, "va": "top"}
    figure.text(left, top - 0.27 / height, _plain(words.subtitle), **below)
    figure.text(
        left,
        0.12 / height,
        "\n".join(caption),
        fontsize=7.5,
        color=palette.faint,
        va="bottom",
        linespacing=1.3,
    )
    if words.badge:
        box = {"boxstyle": "round,pad=0.4", "facecolor": palette.badge, "edgecolor": "none"}
        corner: dict[str, Any] = {"fontsize": 8.5, "ha": "right", "va": "top", "bbox": box}
        figure.text(1 - 0.25 / width, top - 0.05 / height, _plain(words.badge), **corner)
    return Sheet(figure)


def _wrapped(text: str, most: int) -> list[str]:
    """Break text between entries into lines of at most ``most`` characters, if entries permit."""
    whole = [entry.replace(" ", "\xa0") if len(entry) <= most else entry for entry in text.split(" · ")]
    return [line.replace("\xa0", " ") for line in textwrap.wrap(" · ".join(whole), most)]


def _plain(text: str) -> str:
    return text.replace("$", r"\$")
