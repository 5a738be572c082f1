"""Results of ``vllm bench serve``: its JSON, and the block that it prints.

JSON: the keys of ``--save-result`` and ``--save-detailed``, 0.5 to 0.32; ``sglang.bench_serving`` writes the
same keys, and prints the same block::

    ============ Serving Benchmark Result ============
    Successful requests:                     400
    …
    ---------------Time to First Token----------------
    Mean TTFT (ms):                          3798.44
    …
    ==================================================

A block ends with the line of equal signs, which may have more text behind it. Anything else where it should
end (another block, the end of the file, a line that is no figure) means that the log was cut off inside the
block."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Keys that every version has written."""


def is_result(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() >= SIGNS


def row_of(result: Mapping[str, Any], origin: Origin) -> ServingRow:
    """Return the row of one result. Unknown keys are settings."""
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
        row.derived["requests.scheduled_s"] = "the send: the file does not report planned times"
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
    """Return the requests of ``--save-detailed``; empty if a list is missing or lengths differ. Times count
    from the first send. Versions without ``start_times`` give no requests: their sends are unknown."""
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


TITLE: Final = re.compile(r"=+\s*Serving Benchmark Result\s*=+")
_END: Final = re.compile(r"^={40,}")
_SECTION: Final = re.compile(r"^(?:---.*---|={3,}[^=]+={3,})$")
_FIGURE: Final = re.compile(r"^(?P<label>[^:]+?(?:\([^)]*\))?):\s+(?P<value>\S.*?)\s*$")
_PREFIX: Final = re.compile(r"^(?:\([^()]*pid=\d+[^()]*\)\s*|\[[^\]]*\]\s*|\S+\s+\|\s+)")

# Label of the block, lower case → name of the figure.
_LABELS: Final = {
    "successful requests": "completed",
    "failed requests": "failed",
    "maximum request concurrency": "max_concurrency",
    "max request concurrency": "max_concurrency",
    "request rate configured (rps)": "request_rate",
    "traffic request rate": "request_rate",
    "benchmark duration (s)": "duration_s",
    "total input tokens": "total_input_tokens",
    "total generated tokens": "total_output_tokens",
    "request throughput (req/s)": "request_throughput",
    "request goodput (req/s)": "request_goodput",
    "output token throughput (tok/s)": "output_throughput",
    "peak output token throughput (tok/s)": "peak_output_throughput",
    "peak concurrent requests": "peak_concurrent_requests",
    "total token throughput (tok/s)": "total_token_throughput",
}
_BLOCKS_STATISTIC: Final = re.compile(
    r"(?P<statistic>mean|median|std|max|p\d+(?:\.\d+)?) (?P<latency>ttft|tpot|itl|e2el|e2e latency) \(ms\)"
)


@dataclass
class ResultBlock:
    """One block. Lines count from 1. ``cut``: why it is incomplete; empty if complete."""

    line: int
    last_line: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    request_rate: float | None = None
    unknown: dict[str, str] = field(default_factory=dict)
    unreadable: list[tuple[int, str]] = field(default_factory=list)
    cut: str = ""


def figure_name(label: str) -> str | None:
    """Return a label's value name; None for an unknown label."""
    low = " ".join(label.lower().split())
    if low in _LABELS:
        return _LABELS[low]
    found = _BLOCKS_STATISTIC.fullmatch(low)
    if not found:
        return None
    latency = {"e2e latency": "e2el"}.get(found["latency"], found["latency"])
    statistic = {"p50": "p50"}.get(found["statistic"], found["statistic"])
    return f"{statistic}_{latency}_ms"


def blocks(lines: Sequence[str]) -> Iterator[ResultBlock]:
    """Yield all blocks of a log in order, complete or cut off."""
    place = 0
    while place < len(lines):
        if TITLE.search(lines[place]):
            block = _block(lines, place)
            yield block
            place = block.last_line
        else:
            place += 1


def _block(lines: Sequence[str], first: int) -> ResultBlock:
    block = ResultBlock(first + 1)
    for place in range(first + 1, len(lines)):
        text = _PREFIX.sub("", lines[place].strip())
        if TITLE.search(lines[place]):
            return _cut(block, place, f"the next block begins at line {place + 1} before this one has ended")
        if _END.match(text):
            block.last_line = place + 1
            if not block.figures:
                block.cut = "it has no values"
            return block
        if not text or _SECTION.match(text):
            continue
        found = _FIGURE.match(text)
        if found is None:
            if block.figures and len(block.unreadable) >= 3:
                return _cut(block, place, f"line {block.unreadable[0][0]} is not a value and no end follows")
            block.unreadable.append((place + 1, text))
            continue
        _take(block, place + 1, found["label"].strip(), found["value"])
    return _cut(block, len(lines), f"the file ends at line {len(lines)} before the block does")


def _take(block: ResultBlock, line: int, label: str, text: str) -> None:
    name = figure_name(label)
    if name == "request_rate":
        block.request_rate = rate(text)
        return
    value = number(text)
    if name is not None and text.lower() in ("none", "not set", "n/a"):
        return
    if name is None:
        block.unknown[label] = text
    elif value is None:
        block.unreadable.append((line, f"{label}: {text}"))
    else:
        block.figures[name] = int(text) if re.fullmatch(r"\d+", text) else value


def _cut(block: ResultBlock, end: int, why: str) -> ResultBlock:
    block.last_line = end
    block.cut = why
    return block
