"""Tables for a page that sorts: what people read, with the values of a CSV behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvbench.core.metrics.limit import LIMIT_WORDS
from kvbench.report.tables.cells import megabytes, with_interval
from kvbench.report.tables.numbers import MISSING, percent
from kvbench.report.tables.result import Row, interval_word, shared_unit
from kvbench.report.tables.table import STEADY, Rows, Table, of_csv
from kvbench.report.tables.transfers import time_text

_RESULT: Final = {
    "connector": "connector",
    "input_len": "input (tokens)",
    "output_len": "output (tokens)",
    "max_request_rate": "max rate (req/s)",
    "max_request_rate_per_engine": "per engine (req/s)",
    "max_request_rate_per_gpu": "per GPU (req/s)",
    "limit": "limit",
    "trial_request_rate": "measured at (req/s)",
    "slo_attainment": "met (%) [95 %]",
    "ttft_ms_p50": "TTFT P50 (ms)",
    "ttft_ms_p99": "TTFT P99 (ms)",
    "tpot_ms_p50": "TPOT P50 (ms)",
    "tpot_ms_p99": "TPOT P99 (ms)",
    "request_goodput": "goodput (req/s)",
    "request_goodput_per_gpu": "goodput per GPU (req/s)",
    "output_tok_per_s": "output tok/s",
    "output_tok_per_s_per_gpu": "output tok/s per GPU",
    "cost_per_1k_requests": "cost per 1k requests",
    "cost_per_1m_output_tokens": "cost per 1M output tokens",
    "watts_per_gpu": "W per GPU",
    "joules_per_output_token": "J per output token",
    "kv_bytes_per_request": "KV (MB/req)",
    "kv_transfer_ms_per_request": "KV (ms/req)",
    "trials": "trials",
    "findings": "findings",
    "labels": "labels",
}
_COSTS: Final = (
    *("cost_per_1k_requests", "cost_per_1m_output_tokens"),
    *("watts_per_gpu", "joules_per_output_token"),
)
_TRIALS: Final = {
    "trial_id": "trial",
    "method": "method",
    "purpose": "asked as",
    "request_rate": "rate (req/s)",
    "verdict": "verdict",
    "slo_attainment": "met (%)",
    "ttft_ms_p50": "TTFT P50 (ms)",
    "ttft_ms_p99": "TTFT P99 (ms)",
    "tpot_ms_p50": "TPOT P50 (ms)",
    "tpot_ms_p99": "TPOT P99 (ms)",
    "reason": "reason",
}


def sorted_result(rows: Sequence[Row], summary: Rows) -> Table | None:
    """The result with the values of summary.csv behind it, for a page that sorts."""
    texts = {
        "max_request_rate": [row.rate_text() for row in rows],
        "limit": [LIMIT_WORDS.get(row.limit, MISSING) for row in rows],
        "slo_attainment": list(map(with_interval, rows)),
        "kv_bytes_per_request": list(map(megabytes, rows)),
    }
    other = "per_engine" if shared_unit(rows) == "GPU" else "per_gpu"
    empty = {key for key in _COSTS if all(row[key] is None for row in summary)}
    headings = {key: words for key, words in _RESULT.items() if not key.endswith(other) and key not in empty}
    headings["max_request_rate"] += f" {interval_word(row.answer for row in rows)}"
    return of_csv("summary", "One line per connector and input length", summary, headings, texts, STEADY)


def sorted_trials(trials: Rows) -> Table | None:
    """The trials with the values of trials.csv behind them."""
    met = {"slo_attainment": [percent(row["slo_attainment"]) for row in trials]}
    return of_csv("trials", "Every trial, in the order of measuring", trials, _TRIALS, met, STEADY)


_CASES: Final = {
    "backend": "backend",
    "protocol": "protocol",
    "nics": "NICs",
    "op": "op",
    "block_bytes": "block (bytes)",
    "batch_size": "blocks",
    "descriptors": "descriptors",
    "gb_per_s": "GB/s",
    "of_line_rate": "of line rate",
    "of_tcp": "of plain TCP",
    "of_memcpy": "of a memory copy",
    "call_s_p50": "P50",
    "call_s_p99": "P99",
    "cpu_s_per_gb": "CPU s/GB",
    "verified": "data right",
    "status": "status",
    "transport": "transport",
    "error": "error",
}


def sorted_cases(rows: Rows) -> Table | None:
    """The cases with the values of transfers.csv behind them, for a page that sorts."""
    texts = {key: [time_text(row.get(key)) for row in rows] for key in ("call_s_p50", "call_s_p99")}
    return of_csv("transfers", "Every case", rows, _CASES, texts)
