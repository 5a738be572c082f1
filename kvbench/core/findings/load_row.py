"""One offered load as a row of figures, measured or imported.

Figures have the names of ``vllm bench serve`` (``mean_ttft_ms``, ``request_throughput``, ``duration_s``,
``completed``, ``peak_concurrent_requests``, …) and cover the whole run. Unknown ones are absent."""

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
"""Parts of a model name that mean eight bits or fewer."""
_SIXTEEN_BIT: Final = ("qwen2.5", "qwen3", "llama-3")
"""Families published in 16 bits: a name without a precision means 16."""


@dataclass(frozen=True)
class RowConditions:
    """Reported conditions of a row.

    ``slots``: requests that all decoding engines run at once (max_num_seqs). ``limits``: the SLO. ``judged``:
    kvbench judged single requests by it. ``prefill_flops``: dense peak of all prefill GPUs at their lowest
    precision; ``prefill_flops_16bit``: the same in 16 bits, known only for 16-bit weights."""

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
        """Return model, hardware and engine where both rows report them and they differ."""
        return [
            f"{name}: {left} / {right}"
            for name in ("model", "hardware", "engine")
            if (left := getattr(self, name)) and (right := getattr(other, name)) and left != right
        ]


@dataclass(frozen=True)
class LoadRow:
    """One row. ``errors``: standard errors within this row. ``axes``: connector, protocol, nics, tp,
    input_len, rate. ``requests``: offered. ``request_rate``: per second, or None."""

    key: str
    run: str
    cell: Cell
    request_rate: float | None
    requests: int | None
    figures: Mapping[str, float]
    """Figures over the whole run, ramp and drain included."""
    axes: Mapping[str, Axis] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    setting: RowConditions = field(default_factory=RowConditions)
    method: str = ""
    origin: str = ""
    name: str = ""
    script_rate: float | None = None
    """Rate in the script next to an imported result."""
    answer: str = ""
    """Text of the search's answer, if this row supports it."""
    answer_rate: float | None = None
    """Rate of that answer, in requests per second."""
    answer_bounds: str = ""
    """Meaning of the brackets in ``answer``, such as ``[90 %]``."""
    size: Size = field(default_factory=Size)
    """Engines and GPUs."""
    steady: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the steady part, by the names of tables/summary.csv; empty for imports."""
    client_late: bool = False
    """Whether a gate found the load generator late: the server may not be the slow part."""
    arrived: int | None = None
    arrived_in_s: float | None = None
    """Arrived requests, and the time until the last one in seconds."""
    sessions: bool = False
    """Whether requests are session turns: a slow server then gets fewer of them."""
    no_winner: str = ""
    """Reason why this row must not win; empty if it may."""

    def get(self, figure: str) -> float | None:
        """Return a figure; median and P50 are synonyms."""
        value = self.figures.get(figure)
        if value is None and figure.startswith(("p50_", "median_")):
            head, _, rest = figure.partition("_")
            value = self.figures.get(("median_" if head == "p50" else "p50_") + rest)
        return value

    @property
    def arrivals_s(self) -> float | None:
        """Return the duration of arrivals: measured, or n / rate."""
        if self.arrived_in_s:
            return self.arrived_in_s
        rate = self.request_rate
        return self.requests / rate if self.requests and rate and math.isfinite(rate) else None

    @property
    def arrival_rate(self) -> float | None:
        """Return arrivals per second: measured, or the nominal rate."""
        if self.arrived and self.arrived_in_s:
            return self.arrived / self.arrived_in_s
        return self.request_rate

    @property
    def e2el_s(self) -> float | None:
        """Return the mean end-to-end latency: reported, or from mean TTFT and TPOT."""
        e2el, ttft, tpot = (self.get(f"mean_{latency}_ms") for latency in ("e2el", "ttft", "tpot"))
        if e2el is not None:
            return e2el / 1e3
        return None if ttft is None or tpot is None else (ttft + tpot * (self.cell.output_len - 1)) / 1e3

    def place(self) -> str:
        rate = "" if self.request_rate is None else f", {figure_text(self.request_rate)} req/s"
        return f"{self.name or self.cell.connector} at {self.cell.input_len:,}{rate}"


def known_model(name: str) -> str:
    """Return the name used by ``core.physics``, such as ``qwen3-30b-a3b``, or the name itself."""
    short = name.rstrip("/").rsplit("/", 1)[-1].lower()
    parts = short.split("-")
    for length in range(len(parts), 0, -1):
        candidate = "-".join(parts[:length])
        if prefill_work(candidate) is not None:
            return candidate
    return short


def has_16bit_weights(model: str) -> bool:
    """Return whether the name implies 16-bit weights."""
    low = model.lower()
    return any(family in low for family in _SIXTEEN_BIT) and not any(word in low for word in _EIGHT_BIT)


def prefill_peaks(hardware: str, model: str) -> tuple[float | None, float | None]:
    """Return the prefill GPUs' peaks: (FLOP/s at any precision, FLOP/s in 16 bits), None if unknown.
    ``hardware``: of one instance, such as ``8xH200``. The 16-bit peak needs 16-bit weights."""
    try:
        found: Hardware = hardware_of(hardware)
    except ValueError:
        return None, None
    peak, peak_16 = found.peak_flops, peak_flops_16bit(found.gpu)
    return peak, peak_16 * found.count if peak_16 is not None and has_16bit_weights(model) else None


def figure_text(value: float | None) -> str:
    """Format with three significant digits, integers above a thousand: ``0.0123``, ``12.3``, ``30,755``."""
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
