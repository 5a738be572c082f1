"""What of a corpus's prompts a prefix cache could have found, by the size of the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvbench.core.physics import ModelShape
from kvbench.core.sessions.corpus import CorpusFigures
from kvbench.errors import InputError
from kvbench.report.plots.axes import nice_log_ticks, plain_ticks
from kvbench.report.plots.sheet import Words, new_sheet
from kvbench.report.plots.style import PALETTES, Theme, handle, style
from kvbench.report.plots.values import says
from kvbench.report.tables.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS: Final = 60


def offered_reuse_figure(
    figures: CorpusFigures,
    source: str,
    model: ModelShape | None = None,
    theme: Theme = "light",
    ax: Axes | None = None,
) -> Figure:
    """Two lines: a cache for each session, and one for all. With a model the axis is in GB of its KV cache.

    Raises InputError of a corpus without whole blocks.
    """
    size, together = figures.corpus.block_tokens, figures.together
    if not together.blocks:
        raise InputError(f"{source} has no prompt of a whole block: there is nothing to draw")
    palette = PALETTES[theme]
    scale = size if model is None else size * model.kv_bytes_per_token() / 1e9
    most = max(2, together.distinct)
    blocks = np.unique(np.geomspace(max(1, most / 2000), most * 1.5, POINTS).astype(int))
    curves = {
        "a cache for each session": [figures.share_alone(int(each)) for each in blocks],
        "one cache for all sessions": [together.share(int(each)) for each in blocks],
    }
    unit = "tokens" if model is None else f"GB of {model.name}"
    with style(palette):
        words = Words(
            "Reuse offered, by the size of the prefix cache",
            f"{source}: {len(figures.corpus.sessions):,} sessions, {len(figures.turns):,} requests, "
            f"{together.blocks:,} blocks of {size} tokens",
            "counted from the prompts alone: whole blocks, least recently used ones go first; dashed: an "
            "unlimited cache. All sessions begin at the times that are recorded",
        )
        sheet = new_sheet((8.2, 3.4), words, palette, ax)
        axes = sheet.panel()
        looks = zip(curves.items(), (palette.series["mooncake"], palette.series["nixl"]), strict=True)
        handles = []
        for (label, shares), colour in looks:
            values = [100 * each for each in shares]
            (line,) = axes.plot(blocks * scale, values, color=colour)
            says(line, "", label)
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
        plain_ticks(axes, "x", [float(number(each)) for each in nice_log_ticks(low, high)])
        axes.set_ylim(0, 108)
        axes.set_xlabel(f"cache ({unit})")
        axes.set_ylabel("blocks found (%)")
        sheet.legend([handles])
    return sheet.figure
