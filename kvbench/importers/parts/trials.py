"""Imported rows as trials, named as in kvbench's summary, and the plausibility check of every row.

Unreported values are None. An imported trial has no steady window, so ``ttft_ms`` and ``whole_run.ttft_ms``
both cover all answered requests; the window's rates stay None, and the tool's are in ``run_*`` and
``whole_run``. TTFT counts from the tool's send, like ``ttft_sent_ms``.

Two kinds of values are left out, with the reason in the row and in the manifest: 1. unmeasured values written
as 0 (a TTFT of 0 without streaming, all latencies without completed requests); 2. impossible values (a
negative latency, a first token after the end). A transfer row has one value, so the whole row is left out.
The rest keeps its qualifiers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from kvbench.core.records import Cell, TrialRecord
from kvbench.core.transfers.records import TransferRecord
from kvbench.importers.base import LATENCIES, Imported, ServingRow, TransferRow, whole

IMPORTED: Final = "imported"
"""The method of an imported trial, and the label of its run."""
UNKNOWN: Final = "unknown"
"""Connector of a trial whose file names none."""
_STATISTIC: Final = re.compile(r"(?P<statistic>mean|median|std|max|p\d+(?:\.\d+)?)_(?P<latency>\w+)_ms")


def trial_of(row: ServingRow, number: int) -> TrialRecord:
    """Return a row's trial; ``number`` (from 1) makes its id unique. ``engine["source"]`` has its source and
    missing values, ``engine["settings"]`` the run's settings."""
    cell = Cell(row.connector or UNKNOWN, row.input_len or 0, row.output_len or 0)
    finite = row.request_rate is not None and math.isfinite(row.request_rate)
    return TrialRecord(
        trial_id=trial_id(row, cell, number),
        cell=cell,
        request_rate=float(row.request_rate) if finite and row.request_rate is not None else 0.0,
        seed=0,
        verdict="measured",
        reason=row.incomplete,
        purpose=IMPORTED,
        duration_s=float(row.figures.get("duration_s", 0.0)),
        summary=summary_of(row),
        engine={"source": source_of(row), "settings": dict(row.settings)},
        labels=[IMPORTED],
        method="imported",
    )


def trial_id(row: ServingRow, cell: Cell, number: int) -> str:
    """Return an id such as ``mooncake-in1024-out6-tp4-2nics-qps2-04``, valid as a file name."""
    words = [cell.connector, f"in{cell.input_len}", f"out{cell.output_len}"]
    if (tp := row.settings.get("tp")) is not None:
        words.append(f"tp{tp}")
    nics, protocol = row.settings.get("nics"), row.settings.get("protocol")
    words += [f"{nics}nics"] if isinstance(nics, int) else [str(protocol)] if protocol else []
    if row.request_rate is not None:
        words.append(f"rate{row.request_rate:g}")
    text = "-".join([*words, f"{number:02d}"])
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip("._-")[:150] or f"row-{number:02d}"


def source_of(row: ServingRow) -> dict[str, Any]:
    """Return a row's source, missing values and computed values."""
    origin = row.origin
    return {
        "file": origin.file,
        "line": origin.line,
        "last_line": origin.last_line,
        "tool": origin.tool,
        "version": origin.version,
        "date": row.date,
        "command": row.command,
        "request_rate": "inf" if row.request_rate == math.inf else row.request_rate,
        "missing": row.missing,
        "derived": dict(row.derived),
        "unknown": dict(row.unknown),
        "refused": dict(row.refused),
        "qualifiers": list(row.qualifiers),
    }


def summary_of(row: ServingRow) -> dict[str, Any]:
    """Return a summary with the keys of ``core.metrics.Summary``, None for unreported values."""
    figures = row.figures
    completed = figures.get("completed")
    latencies = {f"{name}_ms": distribution(row, name) for name in LATENCIES}
    latencies["ttft_sent_ms"] = dict(latencies["ttft_ms"])
    latencies["first_event_ms"] = distribution(row, "first_event")
    failed = figures.get("failed")
    rate = row.request_rate
    nothing = dict.fromkeys(
        (
            "sent", "cancelled", "met", "missed", "undecided", "window", "judged_met",
            "judged_missed",
            "judged_undecided", "slo_attainment", "attainment_lower", "attainment_upper",
            "attainment_confidence",
            "effective_n", "achieved_rate", "output_tok_per_s", "total_tok_per_s", "peak_waiting",
            "waiting_trend", "arrived", "left",
        )
    )  # fmt: skip
    return {
        **nothing,
        "offered_rate": rate if rate is not None and math.isfinite(rate) else None,
        "duration_s": figures.get("duration_s"),
        "planned": row.num_prompts,
        "completed": completed,
        "failed": None if failed is None else ({"unknown": failed} if failed else {}),
        "missed_by": {},
        "request_goodput": figures.get("request_goodput"),
        "run_request_rate": figures.get("request_throughput"),
        "run_output_tok_per_s": figures.get("output_throughput"),
        "run_total_tok_per_s": figures.get("total_token_throughput"),
        **latencies,
        "peak_in_flight": whole(figures.get("peak_concurrent_requests")),
        "peak_output_tok_per_s": figures.get("peak_output_throughput"),
        "criteria": [],
        "whole_run": {
            "duration_s": figures.get("duration_s"),
            "successful": completed,
            "failed": failed,
            "cancelled": None,  # by kvbench, which did not measure it
            "input_tokens": figures.get("total_input_tokens"),
            "output_tokens": figures.get("total_output_tokens"),
            "request_throughput": figures.get("request_throughput"),
            "output_throughput": figures.get("output_throughput"),
            "total_throughput": figures.get("total_token_throughput"),
            **{name: dict(values) for name, values in latencies.items()},
        },
    }


def distribution(row: ServingRow, latency: str) -> dict[str, float | None]:
    """Return a latency's reported statistics in ms, the usual ones first. ``n`` is known only for TTFT and
    E2EL, which every answered request has."""
    found: dict[str, float | None] = {
        "n": None,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "max": None,
    }
    if not any(match and match["latency"] == latency for match in map(_STATISTIC.fullmatch, row.figures)):
        return found
    if latency in ("ttft", "e2el"):
        found["n"] = row.figures.get("completed")
    for name, value in row.figures.items():
        reported = _STATISTIC.fullmatch(name)
        if reported and reported["latency"] == latency:
            statistic = "p50" if reported["statistic"] == "median" else reported["statistic"]
            if (
                statistic == "p50"
                and reported["statistic"] == "p50"
                and f"median_{latency}_ms" in row.figures
            ):
                continue  # the same figure twice in one block
            found[statistic] = value
    return found


MOST_GB_PER_S: Final = 10_000.0
"""Upper limit of one initiator's bandwidth, in 10⁹ bytes per second. NVLink 6, the fastest GPU link, moves
3,600 in both directions; a call that returns too early appears to move millions."""
_SAME_LENGTH: Final = 0.05
"""Maximum relative difference of a requested length from the measured mean: tokenizers change random text."""
_ROUNDED: Final = 1.001
_ROUNDED_MS: Final = 0.01
"""Maximum rounding error of two values in ms, as a factor and in ms."""
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
"""Values that cannot be 0 with completed requests."""


def keep_plausible(reading: Imported) -> None:
    """Remove unmeasured and impossible values from a reading, and report them as problems."""
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
    """Return why a bandwidth is invalid; empty if plausible."""
    most, speed = MOST_GB_PER_S * max(record.case.initiators, 1), record.gb_per_s or 0.0
    if speed <= 0:
        return f"{speed:g} GB/s is not a bandwidth: nothing was moved or measured"
    if speed > most:
        return f"{speed:,.0f} GB/s is impossible: no link moves more than {most:,.0f}"
    return ""


def _unusable(row: ServingRow) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    by_latency: dict[str, dict[str, float]] = {name: {} for name in LATENCIES}
    for name, value in row.figures.items():
        if (parts := _OF_LATENCY.fullmatch(name)) and parts["latency"] in by_latency:
            by_latency[parts["latency"]][parts["statistic"]] = value
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
            found[reason] = [f"{key}_{name}_ms" for name in ("ttft", "e2el") for key in by_latency[name]]
            break
    if zeros := [name for name in _POSITIVE if row.figures.get(name) == 0]:
        found[f"{', '.join(zeros)} of 0 with completed requests: not measured"] = zeros
    negative = [name for name, value in row.figures.items() if value < 0 and not _OF_LATENCY.fullmatch(name)]
    if negative:
        found[f"{', '.join(negative)} below 0: impossible"] = negative
    return found


def _no_latency(latency: str, values: Mapping[str, float]) -> str:
    """Return why a latency's values are invalid, or ""."""
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
    """Use the measured mean length unless the requested one is close; note a difference in the row."""
    requested, tokens = getattr(row, name), row.figures.get(total)
    completed = row.figures.get("completed")
    if requested is None or name in row.derived or not tokens or not completed:
        return
    mean = tokens / completed
    if abs(mean - requested) > _SAME_LENGTH * requested:
        row.derive_length(name, total)
    if round(mean) != requested:
        row.qualifiers.append(f"{name} {requested:,} was requested; the mean was {mean:,.0f}")
