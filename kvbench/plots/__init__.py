"""Pictures of a run: the highest request rate by input length, latency against rate, TTFT's parts, and
what a burst leaves on its way.

Each is drawn from a run folder alone and carries scenario, version, hardware, date, and the word
*emulated* where the engine was. A picture for which there is no data is not drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvbench.plots.breakdown import breakdown_figure
from kvbench.plots.burst import burst_figure
from kvbench.plots.latency import latency_figure
from kvbench.plots.rates import max_rate_figure
from kvbench.plots.style import PALETTES, Theme, save, style
from kvbench.runs import Run

__all__ = [
    "NO_DATA",
    "Theme",
    "breakdown_figure",
    "burst_figure",
    "latency_figure",
    "max_rate_figure",
    "write_plots",
]

NO_DATA: Final = "there is no picture, because no trial has given a result yet"


def write_plots(
    run: Run, folder: Path, formats: Sequence[str] = ("png", "svg"), theme: Theme = "light"
) -> list[Path]:
    """Writes each picture that has data, in each format; returns what was written.

    A picture left from before for which there is no data any more is removed.
    """
    written = []
    suffix = "" if theme == "light" else f"-{theme}"
    pictures = {
        "max_request_rate": max_rate_figure,
        "latency": latency_figure,
        "ttft_breakdown": breakdown_figure,
        "burst": burst_figure,
    }
    for name, draw in pictures.items():
        figure = draw(run, theme)
        for kind in formats:
            path = folder / f"{name}{suffix}.{kind}"
            if figure is None:
                path.unlink(missing_ok=True)
                continue
            with style(PALETTES[theme]):
                save(figure, path)
            written.append(path)
    return written
