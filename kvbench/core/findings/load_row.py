"""One load that was offered once, as a row of figures: ours, or one that was read from somebody's results.

Figures have the names of ``vllm bench serve``: ``mean_ttft_ms``, ``p99_tpot_ms``, ``request_throughput``
(requests per second over the whole duration), ``duration_s``, ``completed``, ``peak_concurrent_requests``,
and are of the whole run. What is not known is not there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvbench.core.physics import Hardware, PrefillWork, hardware_of, peak_flops_16bit, prefill_work
from kvbench.core.plan.engine_count import Size
from kvbench.core.records import Cell
from kvbench.core.slo import Limit

Axis = str | float | None

_EIGHT_BIT: Final = ("fp8", "fp4", "int8", "w8a8", "w4a8", "nvfp4", "mxfp4")
_SIXTEEN_BIT: Final = ("qwen2.5", "qwen3", "llama-3")
"""Families that are published in 16 bits, so that a name without a word for less means 16."""


@dataclass(frozen=True)
class RowConditions:
    """Under which conditions a row was measured, as far as that is reported.

    ``slots``: requests that one engine decodes at once (max_num_seqs), times the engines that decode.
    ``limits``: the SLO. ``judged``: kvbench judged single requests by it, so nothing has to be read from
    means. ``prefill_flops``: the dense peak of all GPUs that prefill, at the lowest precision that they
    have; ``prefill_flops_16bit``: the same in 16 bits, known only where the weights have 16.
    """

    model: str = ""
    hardware: str = ""
    engine: str = ""
    slots: int | None = None
    limits: tuple[Limit, ...] = ()
    judged: bool = False
    work: PrefillWork | None = None
    prefill_flops: float | None = None
    prefill_flops_16bit: float | None = None

    def differing(self, other: RowConditions) -> list[str]:
        """What of model, hardware and engine is reported for both and differs."""
        return [
            f"{name}: {mine} / {theirs}"
            for name in ("model", "hardware", "engine")
            if (mine := getattr(self, name)) and (theirs := getattr(other, name)) and mine != theirs
        ]


@dataclass(frozen=True)
class LoadRow:
    """One row. ``errors``: standard errors of figures, where single requests are known; within this row only.

    ``axes``: what the row may be sorted, grouped and compared by (connector, protocol, nics, tp, input_len,
    rate). ``requests``: how many were offered. ``request_rate``: per second; None where not reported.
    """

    key: str
    run: str
    cell: Cell
    request_rate: float | None
    requests: int | None
    figures: Mapping[str, float]
    """Of the whole run, ramp and drain included."""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    setting: RowConditions = field(default_factory=RowConditions)
    method: str = ""
    origin: str = ""
    name: str = ""
    asked_rate: float | None = None
    """The rate that a script beside a read-in result asks for."""
    answer: str = ""
    """The search's answer in words, where this row is the load that supports it."""
    answer_rate: float | None = None
    """The rate of that answer, in requests per second."""
    answer_bounds: str = ""
    """What the brackets in ``answer`` hold, such as ``[90 %]``; empty where it has none."""
    size: Size = field(default_factory=Size)
    """Engines and GPUs that served it."""
    steady: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the steady part, by the names of tables/summary.csv; empty for a read-in result."""
    client_late: bool = False
    """The load generator was late, as a gate has found: what is slow need not be the server."""
    arrived: int | None = None
    arrived_in_s: float | None = None
    """Requests that arrived, and the time until the last of them, where single requests are known."""
    sessions: bool = False
    """Its requests are turns of sessions, which wait for answers: fewer arrive where the server is slow."""
    no_winner: str = ""
    """Why this row must not be named a winner; empty if it may be."""

    def get(self, figure: str) -> float | None:
        """A figure's value; the median and P50 stand for each other."""
        value = self.figures.get(figure)
        if value is None and figure.startswith(("p50_", "median_")):
            head, _, rest = figure.partition("_")
            value = self.figures.get(("median_" if head == "p50" else "p50_") + rest)
        return value

    @property
    def arrivals_s(self) -> float | None:
        """For how long requests arrived: as measured, otherwise n / rate."""
        if self.arrived_in_s:
            return self.arrived_in_s
        rate = self.request_rate
        return self.requests / rate if self.requests and rate and math.isfinite(rate) else None

    @property
    def arrival_rate(self) -> float | None:
        """Requests that arrived per second: as measured, otherwise the nominal rate."""
        if self.arrived and self.arrived_in_s:
            return self.arrived / self.arrived_in_s
        return self.request_rate

    @property
    def e2el_s(self) -> float | None:
        """Mean end-to-end latency: as reported, or else mean TTFT and TPOT put together."""
        e2el, ttft, tpot = (self.get(f"mean_{latency}_ms") for latency in ("e2el", "ttft", "tpot"))
        if e2el is not None:
            return e2el / 1e3
        return None if ttft is None or tpot is None else (ttft + tpot * (self.cell.output_len - 1)) / 1e3

    def place(self) -> str:
        """``mooncake at 32,768, 45 req/s``."""
        rate = "" if self.request_rate is None else f", {figure_text(self.request_rate)} req/s"
        return f"{self.name or self.cell.connector} at {self.cell.input_len:,}{rate}"


def known_model(name: str) -> str:
    """The short name that ``core.physics`` uses, of a full one; as it is if none fits.

    ``…/Qwen/Qwen3-30B-A3B-Instruct-2507/`` is ``qwen3-30b-a3b``.
    """
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    parts = short.split("-")
    for length in range(len(parts), 0, -1):
        candidate = "-".join(parts[:length])
        if prefill_work(candidate) is not None:
            return candidate
    return short


def has_16bit_weights(model: str) -> bool:
    """Whether a model's name says that it computes in 16 bits; False where it does not say."""
    low = model.lower()
    return any(family in low for family in _SIXTEEN_BIT) and not any(word in low for word in _EIGHT_BIT)


def prefill_peaks(hardware: str, model: str, instances: int = 1) -> tuple[float | None, float | None]:
    """(FLOP/s at any precision, FLOP/s in 16 bits) of the GPUs that prefill; None where not known.

    ``hardware``: of one instance, such as ``8xH200``. In 16 bits only if the model's weights have them.
    """
    try:
        found: Hardware = hardware_of(hardware)
    except ValueError:
        return None, None
    peak, peak_16 = found.peak_flops, peak_flops_16bit(found.gpu)
    return (
        None if peak is None else peak * instances,
        peak_16 * found.count * instances if peak_16 is not None and has_16bit_weights(model) else None,
    )


def figure_text(value: float | None) -> str:
    """About three significant digits, whole above a thousand: ``0.0123``, ``12.3``, ``30,755``."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return f"{value}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) < 1e-6:
        return f"{value:.3g}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return re.sub(r"\.0+$", "", text)
