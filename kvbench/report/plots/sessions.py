"""Plots of sessions at each connector's supporting trial: TTFT by turn, offered and achieved reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvbench.core.physics import ModelShape
from kvbench.core.sessions.corpus import CorpusFigures
from kvbench.errors import InputError
from kvbench.report.plots.panels import Words, new_sheet, nice_log_ticks, plain_ticks
from kvbench.report.plots.style import PALETTES, Palette, PlotStyle, Theme, handle, looks, style, tag
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import number
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LEAST: Final = 5
"""Fewest sessions at a turn for a median."""
_KINDS: Final = (
    ("offered_reuse", "offered", 0.25),
    ("offered_reuse_in_pool", "offered, for the actual cache size", 0.55),
    ("achieved_reuse", "achieved", 1.0),
)
"""Session figures: key, label, opacity of the bar."""


def sessions_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Draw two panels, or None for a load without sessions."""
    trials = {trial.trial_id: trial for trial in run.trials if trial.engine.get("sessions")}
    rows = [row for row in summary_table(run) if row.trial_id in trials]
    if not rows:
        return None
    from matplotlib.ticker import MaxNLocator

    figures = [dict(trials[str(row.trial_id)].engine["sessions"]) for row in rows]
    palette = PALETTES[theme]
    look = looks(list(dict.fromkeys(row.cell.connector for row in rows)), palette)
    with style(palette):
        words = Words.of(run, "Sessions: TTFT by turn, and reuse")
        sheet = new_sheet((8.6, 3.2), words, palette, ax, legend_lines=2)
        by_turn, reuse = sheet.panels(1, 2, wspace=0.24).flat
        for row, found in zip(rows, figures, strict=True):
            _turns(by_turn, row, found, look[row.cell.connector])
        by_turn.set_ylim(bottom=0)
        by_turn.xaxis.set_major_locator(MaxNLocator(integer=True))
        by_turn.set_xlabel("turn of the conversation")
        by_turn.set_ylabel("TTFT, P50 (ms)")
        _bars(reuse, rows, figures, [look[row.cell.connector] for row in rows])
        connectors = [handle(name, marker=mark.marker, color=mark.colour) for name, mark in look.items()]
        sheet.legend([connectors, _kinds(palette)])
    return sheet.figure


def _turns(axis: Axes, row: Row, found: dict[str, Any], look: PlotStyle) -> None:
    known = [(turn + 1, median) for turn, count, median in found["ttft_ms_by_turn"] if count >= LEAST]
    if not known:
        return
    turns, medians = zip(*known, strict=True)
    (line,) = axis.plot(turns, medians, marker=look.marker, color=look.colour)
    name = row.cell.connector
    tag(line, name, *(f"{name}, turn {turn}: TTFT P50 {number(value)} ms" for turn, value in known))


def _bars(
    axis: Axes, rows: Sequence[Row], figures: Sequence[dict[str, Any]], look: Sequence[PlotStyle]
) -> None:
    width = 0.8 / len(_KINDS)
    for index, (row, shares) in enumerate(zip(rows, figures, strict=True)):
        for bar_index, (key, kind, opacity) in enumerate(_KINDS):
            if (share := shares.get(key)) is None:
                continue
            x = index + (bar_index - 1) * width
            (bar,) = axis.bar([x], [100 * share], width=width * 0.92, color=look[index].colour, alpha=opacity)
            tag(bar, row.cell.connector, f"{row.cell.connector}, {kind}: {100 * share:.1f} %")
            axis.annotate(
                f"{100 * share:.0f}", (x, 100 * share), (0, 2), textcoords="offset points",
                ha="center", fontsize=7.5,
            )  # fmt: skip
    axis.set_ylim(0, 112)
    axis.set_yticks(range(0, 101, 25))
    axis.grid(False, axis="x")
    axis.set_xticks(range(len(rows)), [row.cell.connector for row in rows])
    axis.set_ylabel("reuse (% of prompts' blocks)")


def _kinds(palette: Palette) -> list[Any]:
    from matplotlib.patches import Patch

    return [Patch(facecolor=palette.faint, alpha=filled, label=kind) for _, kind, filled in _KINDS]


POINTS: Final = 60


def offered_reuse_figure(
    figures: CorpusFigures,
    source: str,
    model: ModelShape | None = None,
    theme: Theme = "light",
    ax: Axes | None = None,
) -> Figure:
    """Draw the offered reuse of one cache per session and of one shared cache. With a model the axis is GB of
    KV cache. Raises InputError for a corpus without whole blocks."""
    size, together = figures.corpus.block_tokens, figures.together
    if not together.blocks:
        raise InputError(f"{source} has no prompt with a whole block, so there is nothing to draw")
    palette = PALETTES[theme]
    scale = size if model is None else size * model.kv_bytes_per_token() / 1e9
    most = max(2, together.distinct)
    blocks = np.unique(np.geomspace(max(1, most / 2000), most * 1.5, POINTS).astype(int))
    curves = {
        "one cache per session": [figures.share_alone(int(block)) for block in blocks],
        "one cache for all sessions": [together.share(int(block)) for block in blocks],
    }
    unit = "tokens" if model is None else f"GB of {model.name}"
    with style(palette):
        words = Words(
            "Offered reuse by prefix cache size",
            f"{source}: {len(figures.corpus.sessions):,} sessions, {len(figures.turns):,} requests, "
            f"{together.blocks:,} blocks of {size} tokens",
            "counted from the prompts: whole blocks, LRU eviction; dashed: "
            "unlimited cache. Sessions begin at their recorded times",
        )
        sheet = new_sheet((8.2, 3.4), words, palette, ax)
        axes = sheet.panel()
        looks = zip(curves.items(), (palette.series["mooncake"], palette.series["nixl"]), strict=True)
        handles = []
        for (label, shares), colour in looks:
            values = [100 * share for share in shares]
            (line,) = axes.plot(blocks * scale, values, color=colour)
            tag(line, "", label)
            handles.append(handle(label, color=colour, linestyle="-"))
        unlimited = 100 * together.share()
        axes.axhline(unlimited, color=palette.faint, linestyle="--", linewidth=1.0)
        axes.annotate(
            f"unlimited: {unlimited:.1f} %", (0, unlimited), (4, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="left", va="bottom", fontsize=8, color=palette.faint,
        )  # fmt: skip
        axes.set_xscale("log")
        low, high = float(blocks[0] * scale), float(blocks[-1] * scale)
        axes.set_xlim(low, high)
        plain_ticks(axes, "x", [float(number(tick)) for tick in nice_log_ticks(low, high)])
        axes.set_ylim(0, 108)
        axes.set_xlabel(f"cache ({unit})")
        axes.set_ylabel("blocks found (%)")
        sheet.legend([handles])
    return sheet.figure
