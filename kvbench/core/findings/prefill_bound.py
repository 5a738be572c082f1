"""Whether a table's TTFT could be that of prompts that were computed, from its percentiles alone."""

from __future__ import annotations

import math
from typing import Final

from kvbench.core.findings.load_row import LoadRow, figure_text
from kvbench.core.gates.physics import MARGIN
from kvbench.core.records import Finding

PERCENTILES: Final = (50, 90, 99)
ARRIVAL_ERRORS: Final = 3.0
"""Arrivals are random: the k-th comes within so many standard deviations, sqrt(k) / rate. A server at the
very peak would be beyond that once in 700 times; what real ones reach is far from the peak.
"""


def impossible_prefill(row: LoadRow) -> Finding | None:
    """Prompts were computed no faster than the GPUs can.

    Served in their order by all GPUs at their peak, the k-th of requests that come at rate r is ready no
    sooner than k × s after the first, s being the time of one prompt: its TTFT is at least k × s - k / r. A
    table whose percentiles are below that had prompts that were not computed. Random arrivals are allowed
    three standard deviations.
    """
    setting, rate, n = row.setting, row.request_rate, row.requests
    if setting.work is None or rate is None or not n or not math.isfinite(rate) or row.method == "trace":
        return None
    flop = setting.work.flop(row.cell.input_len)
    for peak, how in ((setting.prefill_flops, "any precision"), (setting.prefill_flops_16bit, "16 bits")):
        if not peak:
            continue
        one_s = flop / (peak * MARGIN)
        for percent in PERCENTILES:
            reported, k = row.get(f"p{percent}_ttft_ms"), n * percent / 100
            least_s = k * one_s - (k + ARRIVAL_ERRORS * math.sqrt(k)) / rate
            if reported is not None and reported / 1e3 < least_s:
                return _impossible(row, flop, peak, how, (percent, reported, least_s))
    return None


def _impossible(row: LoadRow, flop: float, peak: float, how: str, bound: tuple[int, float, float]) -> Finding:
    percent, reported, least_s = bound
    rate = row.request_rate or 0.0
    precision = "" if how == "any precision" else f" in {how}, as the weights are"
    return Finding(
        "impossible_prefill",
        "invalid",
        f"prompts that were not computed: {figure_text(rate)} prompts a second of {row.cell.input_len:,} "
        f"tokens are {figure_text(rate * flop / 1e15)} PFLOP/s, {figure_text(rate * flop / peak)} times the "
        f"{figure_text(peak / 1e15)} PFLOP/s peak of {row.setting.hardware or 'the GPUs'}{precision}. "
        f"Served in their order, P{percent} of the TTFT would be {figure_text(least_s * 1e3)} ms at least; "
        f"{figure_text(reported)} ms are told",
        "prompts came from a prefix cache: empty it before each load, use fresh prompts",
        {
            "excess": rate * flop / (row.setting.prefill_flops or peak),
            "flop": flop,
            "peak": peak,
            "precision": how,
            "percentile": percent,
            "told_ms": reported,
            "least_s": least_s,
        },
    )
