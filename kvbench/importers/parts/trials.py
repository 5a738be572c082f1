"""From an imported row to a trial, in the names of kvbench's own summary: what is not reported is None.

An imported trial has no steady window, so its latencies are those of all answered requests, in ``ttft_ms``
and in ``whole_run.ttft_ms`` alike; the rates of the window stay None, and the tool's are in ``run_*`` and
``whole_run``. TTFT counts from the tool's own send, which is why ``ttft_sent_ms`` says the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from kvbench.core.records import Cell, TrialRecord
from kvbench.importers.base import LATENCIES, ServingRow, whole

IMPORTED: Final = "imported"
"""The method of an imported trial, and the label of a run of them."""
UNKNOWN: Final = "unknown"
"""The connector of a trial whose file does not name one."""
_STATISTIC: Final = re.compile(r"(?P<statistic>mean|median|std|max|p\d+(?:\.\d+)?)_(?P<latency>\w+)_ms")


def trial_of(row: ServingRow, number: int) -> TrialRecord:
    """The trial of a row; ``number`` (from 1) makes its id one of its own within a run.

    ``engine["source"]`` says where it stands and what is missing, ``engine["settings"]`` how it was run.
    """
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
    """``mooncake-in1024-out6-tp4-2nics-qps2-04``: only what a file name may have."""
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
    """Where a row stands, what was not reported, and what was worked out."""
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
    """A summary with the keys of ``core.metrics.Summary``, None for all that is not reported."""
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
            "cancelled": None,  # by kvbench, which was not there
            "input_tokens": figures.get("total_input_tokens"),
            "output_tokens": figures.get("total_output_tokens"),
            "request_throughput": figures.get("request_throughput"),
            "output_throughput": figures.get("output_throughput"),
            "total_throughput": figures.get("total_token_throughput"),
            **{name: dict(values) for name, values in latencies.items()},
        },
    }


def distribution(row: ServingRow, latency: str) -> dict[str, float | None]:
    """A latency's figures in ms as they are reported; further percentiles and ``std`` stand behind the usual
    ones.

    ``n`` is known for TTFT and E2EL alone, which every answered request has.
    """
    found: dict[str, float | None] = {
        "n": None,
        "mean": None,
        "p50": None,
        "p90": None,
        "p99": None,
        "max": None,
    }
    if not _has(row.figures, latency):
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


def _has(figures: Mapping[str, float], latency: str) -> bool:
    return any(
        (reported := _STATISTIC.fullmatch(name)) and reported["latency"] == latency for name in figures
    )
