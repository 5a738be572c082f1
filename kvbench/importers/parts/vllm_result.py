"""One result of ``vllm bench serve`` as JSON: the keys of ``--save-result`` and ``--save-detailed``, 0.5
to 0.32, and of ``sglang.bench_serving``, which writes the same keys."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from kvbench.core.records import RequestError, RequestRecord
from kvbench.importers.base import Origin, ServingRow, listed, number, rate, whole

DEFINITIONS: Final = {
    "ttft_ms": "first streamed chunk − start of the request in the client (not its planned time)",
    "tpot_ms": "(latency − TTFT) / (output tokens − 1), each request",
    "itl_ms": "gaps between streamed chunks, all requests together",
    "rates": "totals over the time from the first send to the last answer, ramp and drain included",
    "peak_concurrent_requests": "most requests that were open in one second of the clock",
}
_FIGURES: Final = {
    "duration": "duration_s",
    "completed": "completed",
    "failed": "failed",
    "total_input_tokens": "total_input_tokens",
    "total_output_tokens": "total_output_tokens",
    "request_throughput": "request_throughput",
    "request_goodput": "request_goodput",
    "request_goodput:": "request_goodput",  # as some versions wrote it
    "output_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
    "max_output_tokens_per_s": "peak_output_throughput",
    "max_concurrent_requests": "peak_concurrent_requests",
}
_STATISTIC: Final = re.compile(r"(mean|median|std|p\d+(?:\.\d+)?)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_LISTS: Final = frozenset(
    {"input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors"}
    | {"generated_texts", "rps_change_events"}
)
_NAMED: Final = frozenset({"date", "num_prompts", "request_rate", "tokenizer_id", "endpoint_type"})
SIGNS: Final = frozenset({"completed", "total_input_tokens", "request_throughput", "duration"})
"""What every version has written."""


def is_result(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= SIGNS


def row_of(result: Mapping[str, Any], origin: Origin) -> ServingRow:
    """The row of one result.

    Keys that are not vLLM's own (``--metadata``, a sweep's parameters) are settings.
    """
    row = ServingRow(origin, {}, date=str(result.get("date") or ""))
    for key, value in result.items():
        latency = key.replace("_e2e_latency_", "_e2el_") if _STATISTIC.fullmatch(key) else None
        name = _FIGURES.get(key) or latency
        figure = number(value)
        if name is not None:
            if figure is not None:
                row.figures[name] = figure
        elif key not in _LISTS | _NAMED and isinstance(value, (str, int, float, bool)) and value != "":
            row.settings[key] = value
    row.connector = str(row.settings.get("kv_connector") or row.settings.get("connector") or "")
    if (tp := whole(row.settings.get("tensor_parallel_size"))) is not None:
        row.settings["tp"] = tp
    row.num_prompts = whole(result.get("num_prompts"))
    row.request_rate = rate(result.get("request_rate"))
    row.requests = requests_of(result)
    if row.requests:
        row.derived["requests.scheduled_s"] = "the send: the file does not tell when a request was planned"
    _lengths(row, result)
    return row


def _lengths(row: ServingRow, result: Mapping[str, Any]) -> None:
    for name, total in (("input_len", "total_input_tokens"), ("output_len", "total_output_tokens")):
        reported = whole(result.get(f"random_{name}", result.get(name)))
        if not str(result.get("dataset_name") or "random").startswith("random"):
            reported = None  # SGLang writes the default of random prompts for every dataset
        if reported is not None:
            setattr(row, name, reported)
            continue
        lengths = {
            length for length in listed(result.get(f"{name}s")) if isinstance(length, int) and length > 0
        }
        if len(lengths) == 1:
            setattr(row, name, lengths.pop())
        else:
            row.derive_length(name, total)


def requests_of(result: Mapping[str, Any]) -> list[RequestRecord]:
    """The single requests of ``--save-detailed``; none where a list is absent or they differ in length.

    Times are counted from the first send. Versions without ``start_times`` give no requests: when they were
    sent is not reported.
    """
    columns = [result.get(key) for key in ("start_times", "ttfts", "itls", "input_lens", "output_lens")]
    if not all(isinstance(column, Sequence) and not isinstance(column, str) for column in columns):
        return []
    starts, ttfts, itls, inputs, outputs = (list(column) for column in columns if column is not None)
    if not starts or len({len(starts), len(ttfts), len(itls), len(inputs), len(outputs)}) != 1:
        return []
    errors = list(listed(result.get("errors")) or [""] * len(starts))
    errors += [""] * (len(starts) - len(errors))
    try:
        first = min(float(start) for start in starts)
        return [
            _request(
                place, float(start) - first, ttfts[place], itls[place], inputs[place], outputs[place], error
            )
            for place, (start, error) in enumerate(zip(starts, errors, strict=False))
        ]
    except (TypeError, ValueError):
        return []


def _request(
    place: int, sent_s: float, ttft_s: Any, gaps: Any, input_len: Any, output_len: Any, error: Any
) -> RequestRecord:
    itl_s = [float(gap) for gap in gaps or ()]
    got = float(ttft_s or 0.0) > 0 and not math.isnan(float(ttft_s))
    first_s = sent_s + float(ttft_s) if got else None
    last_s = list(accumulate(itl_s, initial=first_s))[-1] if first_s is not None else None
    kind: RequestError = "" if not error and got else ("early_close" if got else "no_answer")
    return RequestRecord(
        request_id=f"{place}",
        scheduled_s=sent_s,
        input_len=int(input_len or 0),
        requested_output_len=int(output_len or 0),
        sent_s=sent_s,
        first_token_s=first_s,
        last_token_s=last_s,
        output_len=int(output_len or 0),
        itl_s=itl_s,
        error=kind,
        error_detail=str(error or "")[-300:],
    )
