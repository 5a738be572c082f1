"""Pictures of a run: what it holds by input length, latency and goodput against rate, where the time goes.

Each is drawn from a run folder alone and carries scenario, versions, hardware, date, and the word
*emulated*, *simulated* or *lab* where it applies. A picture for which there is no data is not drawn.
"""

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

PICTURES_AS: Final = ("png", "svg")
NO_DATA: Final = "there is no picture, because no trial has given a result yet"


class Drawn(Protocol):
    """Draws a picture of a run, in a figure of its own or in the place of ``ax``; None without data for it.

    Raises InputError for Axes that it cannot divide.
    """

    def __call__(self, run: RunFolder, theme: Theme = "light", ax: Axes | None = None) -> Figure | None: ...


@dataclass(frozen=True)
class Picture:
    """One picture of a run. ``alt``: what it shows, for those who do not see it."""

    title: str
    alt: str
    draw: Drawn
    filed: bool = True
    """Whether figures/ has it; the page has all."""


PICTURES: Final[Mapping[str, Picture]] = MappingProxyType(
    {
        "max_request_rate": Picture(
            "Highest request rate by input length",
            "The highest request rate that met the SLO over input length, with intervals, by connector.",
            max_rate_figure,
        ),
        "latency": Picture(
            "Latency against request rate",
            "TTFT and TPOT of every trial over the offered rate, with the SLO's limits and the found rates.",
            latency_figure,
        ),
        "sessions": Picture(
            "Sessions: TTFT by turn, and reuse",
            "The median TTFT of each turn of a conversation, and the shares of prompts' blocks that prefix "
            "caches could have found and did, by connector.",
            sessions_figure,
        ),
        "loads": Picture(
            "Latency by load",
            "P99, mean and P50 of TTFT and TPOT of loads that were offered at one rate each, side by side.",
            loads_figure,
        ),
        "goodput": Picture(
            "Goodput against request rate",
            "Requests per second completed within the SLO over those that arrived; the diagonal has all.",
            goodput_figure,
        ),
        "ttft_breakdown": Picture(
            "Where the time to the first token goes",
            "Stacked bars of the mean TTFT's parts, from queue and prefill to KV transfer and first step.",
            breakdown_figure,
        ),
        "distribution": Picture(
            "How the latencies are distributed",
            "Share of requests that were faster than a TTFT or TPOT, one curve per connector, with the SLO.",
            distribution_figure,
        ),
        "in_flight": Picture(
            "Requests on their way over time",
            "Requests on their way and waiting for their first token over time, for each supporting trial.",
            in_flight_figure,
        ),
        "pareto": Picture(
            "Throughput against interactivity",
            "Output tokens per second of a GPU or engine over the tokens per second that each user gets.",
            pareto_figure,
        ),
        "nic_share": Picture(
            "Share of the bytes by NIC",
            "Stacked bars of how the bytes were shared out over the network cards.",
            nic_share_figure,
        ),
        "burst": Picture(
            "A burst beside the sustained rate",
            "Requests on their way over time, in a burst and at the sustained rate, on the same scale.",
            burst_figure,
        ),
    }
)
"""Every picture of a run of requests, in the order in which they are read."""

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
            "GB/s over the number of network cards, beside the ideal of as many times one card.",
            scaling_figure,
        ),
        "nic_share": replace(PICTURES["nic_share"], filed=False),
        "call_time": Picture(
            "Time of one transfer",
            "How long one transfer takes, by the number of blocks in it.",
            call_time_figure,
        ),
    }
)
"""The same of a microbenchmark."""

HELD_PICTURES: Final[Mapping[str, Mapping[str, Picture]]] = MappingProxyType(
    {
        "chaos": {
            "faults": Picture(
                "Goodput over time, with the faults",
                "Requests per second that were due and met the SLO, or became late, lost or hung, over time, "
                "one panel a pair and fault; where the fault struck and was undone is marked.",
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
"""The same of runs at a held rate, by kind."""


def pictures_of(run: RunFolder) -> Mapping[str, Picture]:
    """The pictures that a run of its kind may have."""
    kind = str(run.manifest.get("kind") or "")
    return TRANSFER_PICTURES if kind == "microbench" else HELD_PICTURES.get(kind, PICTURES)


def write_plots(
    run: RunFolder, folder: Path, formats: Sequence[str] = ("svg",), theme: Theme = "light"
) -> list[Path]:
    """Writes each picture that has data, in each format (svg, png); returns what was written.

    What lies there in another format is written anew, too, so that no two differ. A picture left from before
    for which there is no data any more is removed. The dark theme's files end in ``-dark``.
    """
    written = []
    suffix = "" if theme == "light" else f"-{theme}"
    with style(PALETTES[theme]):
        for name, picture in pictures_of(run).items():
            if not picture.filed:
                continue
            figure = picture.draw(run, theme)
            for kind in PICTURES_AS:
                path = folder / f"{name}{suffix}.{kind}"
                if figure is None:
                    path.unlink(missing_ok=True)
                if figure is not None and (kind in formats or path.exists()):
                    save(figure, path)
                    written.append(path)
    return written
