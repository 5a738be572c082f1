"""The plausibility check that every imported row passes, whichever tool wrote it.

Two kinds of figures are left out of a row, each with its reason in the row and in the manifest:

1. figures that a tool writes as 0 because it did not measure them (a time to the first token of 0 where
   nothing was streamed, all latencies where no request was completed);
2. figures that cannot be true (a negative latency, a first token after the end of the answer).

A row of raw transfers has one figure, so that the whole row is left out. What remains keeps its qualifiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from kvbench.core.transfers.records import TransferRecord
from kvbench.importers.base import LATENCIES, Imported, ServingRow, TransferRow

MOST_GB_PER_S: Final = 10_000.0
"""Most that one initiator can move, in 10⁹ bytes per second. NVLink 6, the fastest link of a GPU, moves 3,600
in both directions; a call that returns before it moved anything appears to move millions."""
_SAME_LENGTH: Final = 0.05
"""A requested length stands for the measured mean up to this share of it: tokenizers change random text."""
_ROUNDED: Final = 1.001
_ROUNDED_MS: Final = 0.01
"""How far two figures in ms may be off by their rounding, as a factor and in ms."""
_OF_LATENCY: Final = re.compile(r"(?P<statistic>\w[\w.]*?)_(?P<latency>ttft|tpot|itl|e2el)_ms")
_POSITIVE: Final = (
    "duration_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "total_input_tokens",
    "total_output_tokens",
    "peak_output_throughput",
    "peak_concurrent_requests",
)
"""Figures that no run with a completed request has as 0."""


def keep_plausible(reading: Imported) -> None:
    """Leave out of a reading what was not measured or cannot be true, and say so in its problems."""
    kept = []
    for row in reading.rows:
        if isinstance(row, TransferRow):
            if reason := _impossible(row.record):
                reading.leave_out(row.origin.line, f"{reason}; left out", row.origin.file)
                continue
        else:
            _settle_length(row, "input_len", "total_input_tokens")
            _settle_length(row, "output_len", "total_output_tokens")
            for reason, names in _unusable(row).items():
                row.refused |= {name: reason for name in names if row.figures.pop(name, None) is not None}
                reading.leave_out(row.origin.line, f"{reason}; left out", row.origin.file)
        kept.append(row)
    reading.rows = kept


def _impossible(record: TransferRecord) -> str:
    """Why a bandwidth is none; empty for one that may be true."""
    most, speed = MOST_GB_PER_S * max(record.case.initiators, 1), record.gb_per_s or 0.0
    if speed <= 0:
        return f"{speed:g} GB/s is no bandwidth: nothing was moved or measured"
    if speed > most:
        return f"{speed:,.0f} GB/s is impossible: no link moves more than {most:,.0f}"
    return ""


def _unusable(row: ServingRow) -> dict[str, list[str]]:
    """The figures to leave out, by the reason."""
    found: dict[str, list[str]] = {}
    by_latency = {name: dict(_of_latency(row.figures, name)) for name in LATENCIES}
    if row.figures.get("completed") == 0:
        names = [name for name in row.figures if _OF_LATENCY.fullmatch(name)]
        return {"no request was completed, so no latency was measured": names} if names else {}
    for latency, values in by_latency.items():
        if reason := _no_latency(latency, values):
            found[reason] = [f"{statistic}_{latency}_ms" for statistic in values]
            by_latency[latency] = {}
    ttft, e2el = by_latency["ttft"], by_latency["e2el"]
    for statistic in ttft.keys() & e2el.keys() - {"std"}:
        if ttft[statistic] > _ROUNDED * e2el[statistic] + _ROUNDED_MS:
            reason = (
                f"TTFT above E2EL ({statistic} {ttft[statistic]:g} and {e2el[statistic]:g} ms): impossible, "
                "and which of them is wrong is unknown"
            )
            found[reason] = [f"{each}_{name}_ms" for name in ("ttft", "e2el") for each in by_latency[name]]
            break
    zeros = [name for name in _POSITIVE if row.figures.get(name) == 0]
    if zeros:
        found[f"{', '.join(zeros)} of 0 with completed requests: not measured"] = zeros
    negative = [name for name, value in row.figures.items() if value < 0 and not _OF_LATENCY.fullmatch(name)]
    if negative:
        found[f"{', '.join(negative)} below 0: impossible"] = negative
    return found


def _of_latency(figures: Mapping[str, float], latency: str) -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        found = _OF_LATENCY.fullmatch(name)
        if found and found["latency"] == latency:
            yield found["statistic"], value


def _no_latency(latency: str, values: Mapping[str, float]) -> str:
    """Why the figures of a latency are no measurement; empty if they may be one.

    A single percentile of TPOT or ITL may be 0: several tokens arrive in one chunk.
    """
    least = min(values.values(), default=1.0)
    name = latency.upper()
    if least < 0:
        return f"{name} of {least:g} ms is impossible"
    positions = [value for statistic, value in values.items() if statistic not in ("std", "min")]
    whole = ("mean" in values and values["mean"] == 0) or not any(positions)
    if positions and (whole or (latency in ("ttft", "e2el") and min(positions) == 0)):
        return f"{name} of 0 ms was not measured"
    return ""


def _settle_length(row: ServingRow, name: str, total: str) -> None:
    """The measured mean length, unless the requested one stands for it; a difference stays with the row."""
    requested, tokens = getattr(row, name), row.figures.get(total)
    completed = row.figures.get("completed")
    if requested is None or name in row.derived or not tokens or not completed:
        return
    mean = tokens / completed
    if abs(mean - requested) > _SAME_LENGTH * requested:
        row.derive_length(name, total)
    if round(mean) != requested:
        row.qualifiers.append(f"{name} {requested:,} was requested; the mean was {mean:,.0f}")
