"""Where the time to the first token goes: one panel per input length, one bar per connector.

Each bar is the trial that supports the connector's answer, so its rate stands below its name: a bar at a
higher rate is longer for that, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvbench.core.metrics.ttft_breakdown import PART_WORDS, PARTS
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Palette, Theme, says, style
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import number
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

PANELS_PER_LINE: Final = 4
HATCH: Final = "////"
"""Hand-off that holds D's queue."""

# P's parts are blue, D's are orange and the way between them is green, from light (waiting) to dark (work).
COLOURS: Final[Mapping[Theme, Mapping[str, str]]] = MappingProxyType(
    {
        "light": dict(
            zip(
                PARTS,
                ("#c4c9d0", "#9dcbea", "#0072b2", "#a8dcc5", "#009e73", "#f5c391", "#d55e00"),
                strict=True,
            )
        ),
        "dark": dict(
            zip(
                PARTS,
                ("#5b6571", "#2f6d94", "#56b4e9", "#1f6e54", "#2fc79a", "#8f5420", "#f0883e"),
                strict=True,
            )
        ),
    }
)


_LEAST_BARS: Final = 4
"""A panel has room for so many bars at least where it has a figure's whole width, so none is too wide."""


def breakdown_figure(run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None:
    """Stacked bars of TTFT's parts; None where no trial has them."""
    rows = [row for row in summary_table(run) if any(_parts(row).values())]
    if not rows:
        return None
    palette = PALETTES[theme]
    panels = sorted({(row.cell.input_len, row.cell.output_len) for row in rows})
    columns = min(len(panels), PANELS_PER_LINE)
    lines = math.ceil(len(panels) / columns)
    bars = max(sum(_panel(row) == panel for row in rows) for panel in panels)
    with style(palette):
        words = Words.of(run, "Where the time to the first token goes (means)")
        size = (1.1 + columns * (0.7 + 0.62 * bars), lines * 2.9)
        keys = _legend(rows, COLOURS[theme], palette)
        sheet = new_sheet(size, words, palette, ax, legend_lines=len(keys), titled=True)
        axes = sheet.panels(lines, columns, wspace=0.3, hspace=0.5)
        for index, axis in enumerate(axes.flat):
            if index >= len(panels):
                axis.set_axis_off()
                continue
            mine = [row for row in rows if _panel(row) == panels[index]]
            _draw(axis, mine, COLOURS[theme], palette)
            axis.set_title(f"{panels[index][0]:,} tokens in" + _out(panels[index], panels))
            axis.set_ylabel("TTFT (ms), whole run" if index % columns == 0 else "")
        if len(panels) == 1:
            spare = max(0.0, (_LEAST_BARS - bars) / 2)
            axes[0, 0].set_xlim(-0.6 - spare, bars - 0.4 + spare)
        sheet.legend(keys)
    return sheet.figure


def _panel(row: Row) -> tuple[int, int]:
    return row.cell.input_len, row.cell.output_len


def _out(panel: tuple[int, int], panels: Sequence[tuple[int, int]]) -> str:
    return f", {panel[1]:,} out" if len({output_len for _, output_len in panels}) > 1 else ""


def _parts(row: Row) -> dict[str, float]:
    known = {part: row.values[f"ttft_{part}_ms"] for part in PARTS}
    return {part: value for part, value in known.items() if value is not None}


def _mixed(row: Row) -> bool:
    """Does the hand-off hold D's queue?"""
    parts = _parts(row)
    return "hand_off" in parts and "decode_queue" not in parts


def _draw(axes: Axes, rows: Sequence[Row], colours: Mapping[str, str], palette: Palette) -> None:
    tops = []
    for place, row in enumerate(rows):
        bottom = 0.0
        for part, value in _parts(row).items():
            mixed = part == "hand_off" and _mixed(row)
            (bar,) = axes.bar(
                [place],
                [value],
                width=0.68,
                bottom=[bottom],
                color=colours[part],
                edgecolor=palette.paper,
                linewidth=0.6,
                hatch=HATCH if mixed else None,
            )
            says(bar, row.cell.connector, f"{row.cell.connector}, {PART_WORDS[part]}: {number(value)} ms")
            bottom += value
        tops.append(bottom)
        total = axes.annotate(
            number(bottom),
            (place, bottom),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
        says(total, row.cell.connector)
    axes.set_ylim(0, max(tops) * 1.14)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.grid(False, axis="x")
    names = [f"{_short(row.cell.connector)}\n{number(row.trial_rate)}/s" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7.5)


def _short(name: str, most: int = 11) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _legend(rows: Sequence[Row], colours: Mapping[str, str], palette: Palette) -> list[list[Patch]]:
    from matplotlib.patches import Patch

    there = [part for part in PARTS if any(part in _parts(row) for row in rows)]
    handles = [Patch(facecolor=colours[part], label=PART_WORDS[part]) for part in there]
    if any(_mixed(row) for row in rows):
        label = "hand-off with D's queue (asked at once, not to be told apart)"
        handles.append(
            Patch(facecolor=colours["hand_off"], edgecolor=palette.paper, hatch=HATCH, label=label)
        )
    half = math.ceil(len(handles) / 2) + 1
    return [line for line in (handles[:half], handles[half:]) if line]
