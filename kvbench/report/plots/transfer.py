"""Plots of a microbenchmark: bandwidth by block size and NIC count, time per call, NIC shares.

NIC shares use the operating system's counters, so they include other traffic."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvbench.core.transfers.records import Case, TransferRecord
from kvbench.core.transfers.stats import call_times
from kvbench.core.units import size_text
from kvbench.errors import StoreError
from kvbench.report.plots.panels import (
    Sheet,
    Words,
    libraries_of,
    new_sheet,
    nice_log_ticks,
    plain_ticks,
    supporting,
)
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style, tag
from kvbench.report.tables.table import number
from kvbench.results.provenance import caption
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch


_LIMITS: Final = frozenset({"memcpy", "shm"})
_LEGEND_WORDS: Final = 6
"""Most legend entries in one line."""

Rows = Sequence[TransferRecord]


@dataclass(frozen=True)
class _Series:
    name: str
    limit: bool
    points: tuple[TransferRecord, ...]

    @property
    def backend(self) -> str:
        return self.points[0].case.backend


def _series(rows: Rows) -> list[_Series]:
    """Return the rows by configuration; the protocol is named if a backend has several."""
    protocols: dict[str, set[str]] = {}
    for row in rows:
        protocols.setdefault(row.case.backend, set()).add(row.case.protocol)

    def name(case: Case) -> str:
        return case.backend if len(protocols[case.backend]) == 1 else f"{case.backend} {case.protocol}"

    found: dict[str, list[TransferRecord]] = {}
    for row in rows:
        found.setdefault(name(row.case), []).append(row)
    return [
        _Series(key, members[0].case.backend in _LIMITS, tuple(members)) for key, members in found.items()
    ]


def _measured(run: RunFolder) -> list[TransferRecord]:
    return [row for row in run.transfer_records() if row.status == "ok" and row.gb_per_s]


def _words(run: RunFolder, heading: str, rows: Rows, more: str) -> Words:
    labs = sorted({row.lab for row in rows if row.lab})
    badge = f"LAB: {', '.join(labs)}" if labs else ""
    return Words(heading, more, " · ".join([caption(run), *libraries_of(run)]), badge)


def _panels(
    words: Words, rows: Rows, palette: Palette, ax: Axes | None, extra: Sequence[Line2D] = ()
) -> tuple[Sheet, list[tuple[str, Axes]], dict[str, PlotStyle]]:
    """Create a figure with a panel per op, a common legend, and the series' styles."""
    series = _series(rows)
    look = _looks(series, palette)
    handles = [
        handle(
            curve.name,
            color=look[curve.name].colour,
            marker=look[curve.name].marker,
            linestyle="--" if curve.limit else "-",
        )
        for curve in series
    ]
    handles += extra
    lines = [handles[at : at + _LEGEND_WORDS] for at in range(0, len(handles), _LEGEND_WORDS)]
    ops = [op for op in ("write", "read") if any(row.case.op == op for row in rows)]
    sheet = new_sheet((9.4, 3.3), words, palette, ax, legend_lines=len(lines), titled=True)
    grid = sheet.panels(1, max(1, len(ops)), wspace=0.18)
    panels = []
    for index, op in enumerate(ops):
        axes = grid[0, index]
        axes.set_title(op)
        panels.append((op, axes))
    sheet.legend(lines)
    return sheet, panels, look


def _looks(series: Sequence[_Series], palette: Palette) -> dict[str, PlotStyle]:
    """Style backends as in other plots; further protocols take spare styles."""
    first = {curve.points[0].case.backend: curve.name for curve in reversed(series) if not curve.limit}
    keys = {
        curve.name: curve.points[0].case.backend
        for curve in series
        if first.get(curve.points[0].case.backend) == curve.name
    }
    found = looks([keys.get(curve.name, curve.name) for curve in series if not curve.limit], palette)
    marks = {curve.name: "sX"[index % 2] for index, curve in enumerate(e for e in series if e.limit)}
    return {
        curve.name: PlotStyle(palette.faint, marks[curve.name])
        if curve.limit
        else found[keys.get(curve.name, curve.name)]
        for curve in series
    }


def _log_rates(axes: Axes, rates: Sequence[float]) -> None:
    low, high = min(rates) / 1.6, max(rates) * 1.6
    axes.set_yscale("log")
    axes.set_ylim(low, high)
    plain_ticks(axes, "y", nice_log_ticks(low, high))


# --- bandwidth by block size -----------------------------------------------------------------------


def bandwidth_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw GB/s over block size, a line per backend at its best batch; None for a single size."""
    rows = [row for row in _measured(run) if not row.case.shape]
    most = max((row.case.nics for row in rows), default=0)
    rows = [row for row in rows if row.case.nics in (0, most)]
    sizes = sorted({row.case.block_bytes for row in rows})
    if len(sizes) < 2:
        return None
    palette = PALETTES[theme]
    batches = {size: {row.case.batch_size for row in rows if row.case.block_bytes == size} for size in sizes}
    single = all(len(found) == 1 for found in batches.values())
    ticks = [f"{size_text(size)}\n× {min(batches[size])}" if single else size_text(size) for size in sizes]
    with style(palette):
        over = f"over {most} NICs, " if most > 1 else ""
        which = "below the axis: block × blocks of a transfer" if single else "each size at its best batch"
        words = _words(run, "KV transfer bandwidth by block size", rows, f"{over}{which}")
        sheet, panels, look = _panels(words, rows, palette, ax)
        lines = {
            (op, curve.name): _best_by_size(curve.points, op) for op, _ in panels for curve in _series(rows)
        }
        best = [rate for points in lines.values() for _, rate in points]
        for index, (op, axes) in enumerate(panels):
            for curve in _series(rows):
                points = lines[op, curve.name]
                texts = [
                    f"{curve.name}, {op} {size_text(int(size))}: {number(rate)} GB/s" for size, rate in points
                ]
                _line(axes, curve, points, look[curve.name], texts)
            axes.set_xscale("log", base=2)
            axes.set_xlim(sizes[0] / 2, sizes[-1] * 2)
            _size_ticks(axes, sizes, ticks)
            axes.set_xlabel("block")
            _log_rates(axes, best)
            if index == 0:
                axes.set_ylabel("GB/s")
    return sheet.figure


def _best_by_size(rows: Rows, op: str) -> list[tuple[float, float]]:
    best: dict[float, float] = {}
    for row in rows:
        if row.case.op == op:
            size = float(row.case.block_bytes)
            best[size] = max(row.gb_per_s or 0.0, best.get(size, 0.0))
    return sorted(best.items())


def _size_ticks(axes: Axes, places: Sequence[float], labels: Sequence[str]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(list(places)))
    steps = math.ceil(len(places) / 6)
    axes.set_xticklabels([label if not index % steps else "" for index, label in enumerate(labels)])


def _line(
    axes: Axes,
    of: _Series,
    points: Sequence[tuple[float, float]],
    look: PlotStyle,
    texts: Sequence[str],
) -> None:
    if points:
        x, y = zip(*points, strict=True)
        line = "--" if of.limit else "-"
        (drawn,) = axes.plot(x, y, color=look.colour, marker=look.marker, linestyle=line, markersize=5)
        tag(drawn, of.backend, *texts)


# --- bandwidth by NICs -----------------------------------------------------------------------------


def scaling_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw GB/s over the number of NICs, with their line rate; None for a single number."""
    rows = [row for row in _measured(run) if row.case.nics]
    counts = sorted({row.case.nics for row in rows})
    if len(counts) < 2:
        return None
    # The largest transfer: there NICs are the limit, not single calls.
    rows = _largest_of_each(rows)
    palette = PALETTES[theme]
    known = [row.line_rate_gb_per_s / row.case.nics for row in rows if row.line_rate_gb_per_s]
    one = max(known, default=0.0) or max((row.gb_per_s or 0) / row.case.nics for row in rows)
    what = "line rate × NICs" if known else "the best of one NIC × NICs"
    with style(palette):
        heading = "KV transfer bandwidth by number of NICs"
        words = _words(run, heading, rows, "the largest transfer of each backend")
        ideal = handle(what, color=palette.limit, linestyle=":")
        sheet, panels, look = _panels(words, rows, palette, ax, [ideal])
        for index, (op, axes) in enumerate(panels):
            axes.plot(counts, [one * count for count in counts], color=palette.limit, linestyle=":", zorder=1)
            for curve in _series(rows):
                points = sorted(
                    (float(r.case.nics), r.gb_per_s or 0.0) for r in curve.points if r.case.op == op
                )
                texts = [f"{curve.name}, {op}, {n:.0f} NICs: {number(rate)} GB/s" for n, rate in points]
                _line(axes, curve, points, look[curve.name], texts)
            axes.set_xlim(0, counts[-1] * 1.06)
            axes.set_ylim(0, max(one * counts[-1], *(row.gb_per_s or 0 for row in rows)) * 1.08)
            axes.set_xticks([float(count) for count in counts], [str(count) for count in counts])
            axes.set_xlabel("NICs")
            if index == 0:
                axes.set_ylabel("GB/s")
    return sheet.figure


def _largest_of_each(rows: Rows) -> list[TransferRecord]:
    """Return, per configuration and op, the rows of the largest transfer made with the most NIC counts."""
    kept: list[TransferRecord] = []
    for curve in _series(rows):
        for op in ("write", "read"):
            sizes: dict[tuple[int, int, int], dict[int, TransferRecord]] = {}
            for row in curve.points:
                if row.case.op == op:
                    case = row.case
                    sizes.setdefault((case.nbytes, case.block_bytes, case.threads), {})[case.nics] = row
            if sizes:
                kept += sizes[max(sizes, key=lambda size: (len(sizes[size]), size))].values()
    return kept


# --- time of a call --------------------------------------------------------------------------------


def call_time_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw median and P99 time of a call by batch, or by transfer if each block size has one batch."""
    rows = [row for row in _measured(run) if call_times(row.call_s).p50 is not None and row.case.threads == 1]
    most = max((row.case.nics for row in rows), default=0)
    rows = [row for row in rows if row.case.nics in (0, most) and not row.case.shape]
    blocks: dict[int, set[int]] = {}
    for row in rows:
        blocks.setdefault(row.case.block_bytes, set()).add(row.case.batch_size)
    if not rows:
        return None
    several = [block for block, batches in blocks.items() if len(batches) > 2]
    if several:
        rows = [row for row in rows if row.case.block_bytes == min(several)]
    transfers = sorted({(row.case.nbytes, row.case.block_bytes, row.case.batch_size) for row in rows})
    if len(transfers) < 2:
        return None
    palette = PALETTES[theme]
    heading = "Time of one transfer by batch" if several else "Time of one transfer"
    with style(palette):
        words = _words(run, heading, rows, "median, with a line up to P99 where there were enough calls")
        sheet, panels, look = _panels(words, rows, palette, ax)
        names = list(look)
        for index, (op, axes) in enumerate(panels):
            for curve in _series(rows):
                shift = 0.6 * ((names.index(curve.name) + 0.5) / len(names) - 0.5)
                op_rows = [row for row in curve.points if row.case.op == op]
                _times(axes, curve, op_rows, transfers, look[curve.name], shift)
            labels = [f"{size_text(block)}\n× {batch}" for _, block, batch in transfers]
            _size_ticks(axes, range(len(transfers)), labels)
            axes.set_xlim(-0.5, len(transfers) - 0.5)
            axes.grid(False, axis="x")
            axes.set_xlabel("block × blocks of a transfer")
            _log_rates(axes, [ms for row in rows for ms in _middle_and_tail(row) if ms])
            if index == 0:
                axes.set_ylabel("ms")
    return sheet.figure


def _middle_and_tail(row: TransferRecord) -> tuple[float, float]:
    """Return (P50, P99) in ms; P99 equals P50 if there were too few calls."""
    times = call_times(row.call_s)
    middle = (times.p50 or 0.0) * 1e3
    return middle, middle if times.p99 is None else times.p99 * 1e3


def _times(
    axes: Axes,
    of: _Series,
    rows: Rows,
    transfers: Sequence[tuple[int, int, int]],
    look: PlotStyle,
    shift: float,
) -> None:
    for row in rows:
        x = transfers.index((row.case.nbytes, row.case.block_bytes, row.case.batch_size)) + shift
        middle, tail = _middle_and_tail(row)
        (span,) = axes.plot([x, x], [middle, tail], color=look.colour, linewidth=1.4, alpha=0.55, zorder=2)
        (mark,) = axes.plot([x], [middle], look.marker, color=look.colour, markersize=5, zorder=3)
        case = row.case
        what = f"{case.op} {size_text(case.block_bytes)} × {case.batch_size}"
        tag(span, of.backend)
        tag(mark, of.backend, f"{of.name}, {what}: P50 {number(middle)} ms, P99 {number(tail)} ms")


BARS_MOST: Final = 24
NICS_MOST: Final = 9
"""Distinguishable colours; the NICs with the fewest bytes are merged beyond that."""
COUNTED_SHARE: Final = 0.01
"""A NIC with a smaller share of a bar's bytes is noise."""
REST: Final = "others"
LOOPBACK: Final = "lo"

Shares = dict[str, dict[str, float]]
"""Bar → NIC → bytes."""


def nic_share_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw stacked bars of each NIC's share; None if no bar has bytes on two NICs."""
    bars = nic_bytes(run)
    if not bars:
        return None
    palette = PALETTES[theme]
    bars = dict(list(bars.items())[:BARS_MOST])
    totals: dict[str, float] = {}
    for parts in bars.values():
        for name, amount in parts.items():
            totals[name] = totals.get(name, 0.0) + amount
    named = sorted(sorted(totals, key=lambda name: -totals[name])[:NICS_MOST])
    colours = dict(zip(named, [*palette.series.values(), *palette.spare], strict=False))
    if len(totals) > len(named):
        colours[REST] = palette.grid
    with style(palette):
        micro = run.manifest.get("kind") == "microbench"
        words = Words.of(run, "Share of the bytes by NIC")
        words = replace(words, subtitle="the largest transfer per configuration") if micro else words
        sheet = new_sheet((8.2, 0.45 + 0.34 * len(bars)), words, palette, ax, right_in=1.2, left_in=2.3)
        axes = sheet.panel()
        _draw(axes, bars, colours, palette)
        sheet.legend([_legend(colours)])
    return sheet.figure


def nic_bytes(run: RunFolder) -> Shares:
    """Return the bytes by NIC of each supporting trial (larger direction), or of each transfer
    configuration."""
    if run.manifest.get("kind") == "microbench":
        return _of_cases(run)
    bars: Shares = {}
    for row, trial in supporting(run):
        try:
            parts = _of_telemetry(run, trial.trial_id)
        except StoreError:
            continue
        total = sum(parts.values())
        parts = {name: amount for name, amount in parts.items() if amount >= COUNTED_SHARE * total > 0}
        if len(parts) > 1:
            bars[f"{row.cell.connector}, {row.cell.input_len:,} in"] = parts
    return bars


def _of_cases(run: RunFolder) -> Shares:
    """Return the largest transfer per configuration over several NICs; idle requested NICs have 0 bytes."""
    largest: dict[tuple[str, str, str, int], TransferRecord] = {}
    for record in run.transfer_records():
        case = record.case
        way = (case.backend, case.protocol, case.op, case.nics)
        if record.status == "ok" and case.nics > 1 and sum(record.nic_bytes.values()) > 0:
            known = largest.get(way)
            if known is None or record.nbytes > known.nbytes:
                largest[way] = record
    return {
        f"{backend} {protocol} {op}, {nics} NICs": _one_side(record.nic_bytes)
        for (backend, protocol, op, nics), record in largest.items()
    }


def _one_side(amounts: Mapping[str, int]) -> dict[str, float]:
    """Return the initiator's bytes if both sides counted them."""
    sides = {key.partition(":")[0] for key in amounts}
    side = next((name for name in sorted(sides) if name.startswith("initiator")), min(sides))
    return {
        key.partition(":")[2] or key: float(amount) for key, amount in amounts.items() if key.startswith(side)
    }


def _of_telemetry(run: RunFolder, trial_id: str) -> dict[str, float]:
    """Return the growth of each NIC's counters over the trial."""
    read = run.columns("telemetry", trial_id, ("t_s", "source", "metric", "value"))
    samples = sorted(zip(*(read[name].tolist() for name in read), strict=True))
    counted: dict[tuple[str, str], list[float]] = {}
    for _, source, metric, value in samples:
        if source.startswith("nic:") and metric in ("tx_bytes", "rx_bytes"):
            counted.setdefault((source.removeprefix("nic:"), metric), []).append(value)
    grown: dict[str, float] = {}
    for (name, _), values in counted.items():
        if name != LOOPBACK:
            grown[name] = max(grown.get(name, 0.0), values[-1] - values[0])
    return grown


def _draw(axes: Axes, bars: Shares, colours: Mapping[str, str], palette: Palette) -> None:
    for index, parts in enumerate(bars.values()):
        total, left = sum(parts.values()), 0.0
        amounts = {name: parts.get(name, 0.0) for name in colours if name != REST}
        amounts |= {REST: total - sum(amounts.values())} if REST in colours else {}
        for name, amount in amounts.items():
            share = amount / total * 100
            look: dict[str, Any] = {"color": colours[name], "edgecolor": palette.paper, "linewidth": 0.6}
            (bar,) = axes.barh([index], [share], left=[left], height=0.7, **look)
            tag(bar, "", f"{name}: {number(share)} % of {number(total / 1e6)} MB")
            left += share
        spread = max(parts.values()) / total * len(parts)
        axes.annotate(
            f"max / mean {spread:.2f}",
            (100, index),
            (5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(bars)), list(bars))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")
    axes.set_xlabel("share of the bytes (%)")


def _legend(colours: Mapping[str, str]) -> Sequence[Patch]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
