"""Plots of a run.

Each plot is drawn from a run folder alone, carries scenario, versions, hardware and date, and is marked
*emulated*, *simulated* or *lab* where that applies. Plots without data are skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from kvbench.report.plots.chaos_soak import faults_figure, soak_figure
from kvbench.report.plots.distribution import breakdown_figure, distribution_figure
from kvbench.report.plots.flight import burst_figure, in_flight_figure
from kvbench.report.plots.latency import latency_figure, loads_figure
from kvbench.report.plots.rates import goodput_figure, max_rate_figure, pareto_figure
from kvbench.report.plots.sessions import sessions_figure
from kvbench.report.plots.style import PALETTES, Theme, save, style
from kvbench.report.plots.transfer import bandwidth_figure, call_time_figure, nic_share_figure, scaling_figure
from kvbench.report.value import NO_DATA, PICTURES_AS
from kvbench.results.run import RunFolder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "NO_DATA",
    "PICTURES",
    "PICTURES_AS",
    "TRANSFER_PICTURES",
    "Picture",
    "Theme",
    "breakdown_figure",
    "burst_figure",
    "distribution_figure",
    "goodput_figure",
    "in_flight_figure",
    "latency_figure",
    "loads_figure",
    "max_rate_figure",
    "nic_share_figure",
    "pareto_figure",
    "pictures_of",
    "sessions_figure",
    "write_plots",
]


class Drawn(Protocol):
    """Draw a plot of a run in a new figure or in ``ax``; None without data. Raises InputError for Axes that
    cannot be divided."""

    def __call__(self, run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None: ...


@dataclass(frozen=True)
class Picture:
    """One plot of a run. ``alt``: text alternative."""

    title: str
    alt: str
    draw: Drawn
    filed: bool = True
    """Whether figures/ contains it; the page contains all."""


PICTURES: Final[Mapping[str, Picture]] = MappingProxyType(
    {
        "max_request_rate": Picture(
            "Highest request rate by input length",
            "The highest request rate that met the SLO over input length, with intervals, by connector.",
            max_rate_figure,
        ),
        "latency": Picture(
            "Latency against request rate",
            "TTFT and TPOT of every trial over the offered rate, with the SLO's limits and the resulting "
            "rates.",
            latency_figure,
        ),
        "sessions": Picture(
            "Sessions: TTFT by turn, and reuse",
            "Median TTFT of each turn of a conversation, and the shares of prompt blocks that prefix "
            "caches could find and did find, by connector.",
            sessions_figure,
        ),
        "loads": Picture(
            "Latency by load",
            "P99, mean and P50 of TTFT and TPOT of loads that were each offered at one rate, side by side.",
            loads_figure,
        ),
        "goodput": Picture(
            "Goodput against request rate",
            "Requests per second completed within the SLO over arrivals per second; on the diagonal both "
            "are equal.",
            goodput_figure,
        ),
        "ttft_breakdown": Picture(
            "TTFT breakdown",
            "Stacked bars of the mean TTFT's parts, from queue and prefill to KV transfer and first step.",
            breakdown_figure,
        ),
        "distribution": Picture(
            "Latency distribution",
            "Cumulative share of requests by TTFT and TPOT, one curve per connector, with the SLO.",
            distribution_figure,
        ),
        "in_flight": Picture(
            "Requests in flight over time",
            "Requests in flight and waiting for their first token over time, for each supporting trial.",
            in_flight_figure,
        ),
        "pareto": Picture(
            "Throughput against interactivity",
            "Output tokens per second of a GPU or engine over tokens per second per user.",
            pareto_figure,
        ),
        "nic_share": Picture(
            "Share of the bytes by NIC",
            "Stacked bars of each network card's share of the bytes.",
            nic_share_figure,
        ),
        "burst": Picture(
            "Burst and sustained rate",
            "Requests in flight over time, in a burst and at the sustained rate, on the same scale.",
            burst_figure,
        ),
    }
)
"""Plots of a run of requests, in reading order."""

TRANSFER_PICTURES: Final[Mapping[str, Picture]] = MappingProxyType(
    {
        "bandwidth": Picture(
            "Bandwidth by block size",
            "GB/s over the block size, one curve per way of moving bytes, "
            "with the line rate where it is known.",
            bandwidth_figure,
        ),
        "nic_scaling": Picture(
            "Bandwidth by number of NICs",
            "GB/s over the number of network cards, with linear scaling from one card.",
            scaling_figure,
        ),
        "nic_share": replace(PICTURES["nic_share"], filed=False),
        "call_time": Picture(
            "Time of one transfer",
            "Duration of one transfer, by its number of blocks.",
            call_time_figure,
        ),
    }
)
"""Plots of a microbenchmark."""

HELD_PICTURES: Final[Mapping[str, Mapping[str, Picture]]] = MappingProxyType(
    {
        "chaos": {
            "faults": Picture(
                "Goodput over time, with the faults",
                "Requests per second by outcome (within the SLO, late, lost, hung) over time, "
                "one panel per pair and fault; the fault's start and end are marked.",
                faults_figure,
            )
        },
        "soak": {
            "soak": Picture(
                "Drift over the windows",
                "Latency, memory, descriptors and KV blocks in use by window, with the fitted trends.",
                soak_figure,
            )
        },
    }
)
"""Plots of chaos and soak runs, by kind."""


def pictures_of(run: RunFolder) -> Mapping[str, Picture]:
    kind = str(run.manifest.get("kind") or "")
    return TRANSFER_PICTURES if kind == "microbench" else HELD_PICTURES.get(kind, PICTURES)


def write_plots(
    run: RunFolder, folder: Path, formats: Sequence[str] = ("svg",), theme: Theme = "light"
) -> list[Path]:
    """Write each plot that has data in each format (svg, png), and return the paths. Other existing files are
    rewritten too, a PNG only if its SVG changed; outdated plots without data are removed. Dark files end in
    ``-dark``."""
    written = []
    suffix = "" if theme == "light" else f"-{theme}"
    with style(PALETTES[theme]):
        for name, picture in pictures_of(run).items():
            if not picture.filed:
                continue
            figure = picture.draw(run, theme)
            png, svg = (folder / f"{name}{suffix}.{kind}" for kind in PICTURES_AS)
            before = svg.read_bytes() if svg.is_file() else None
            for path in (svg, png):
                if figure is None:
                    path.unlink(missing_ok=True)
                elif path.suffix[1:] in formats or (
                    path.exists() and (path == svg or before is None or before != svg.read_bytes())
                ):
                    save(figure, path)
                    written.append(path)
    return written
