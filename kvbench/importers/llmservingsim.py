"""LLMServingSim's recorded vLLM runs: ``requests.jsonl`` with ``meta.json``, or their folder. Each line has
the engine's times of a request on a monotonic clock, and its arrival on the wall clock. The clocks are
aligned by the smallest difference: no request is queued before it arrives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from kvbench.errors import InputError
from kvbench.importers.base import (
    Imported,
    LoggedRequest,
    Origin,
    ServingRow,
    json_value,
    mapping,
    number,
    parse_json,
    peek,
    read_lines,
    records_of,
    whole,
)

FORMAT: Final = "LLMServingSim's recorded vLLM runs (requests.jsonl and meta.json, or their folder)"
RANK: Final = 20
TOOL: Final = "LLMServingSim bench"
DEFINITIONS: Final = {
    "ttft_ms": "the engine's first token − arrival in the client; its own summary counts from queued_ts",
    "tpot_ms": "(last − first token) / (output tokens − 1), both in the engine",
}
_REQUESTS: Final = "requests.jsonl"
_TIMES: Final = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts")


def recognise(path: Path) -> bool:
    if path.is_dir():
        return (path / _REQUESTS).is_file() and recognise(path / _REQUESTS)
    first = peek(path).lstrip().partition("\n")[0]
    return first.startswith("{") and all(f'"{name}"' in first for name in (*_TIMES, "input_toks"))


def read(path: Path) -> Imported:
    """Return one row with its requests. Raises InputError for a file without a complete one."""
    file = path / _REQUESTS if path.is_dir() else path
    reading = Imported(definitions=dict(DEFINITIONS), files=[file])
    lines = read_lines(file)
    seen = list(filter(None, (_line(at, text, file, reading) for at, text in enumerate(lines, start=1))))
    if not seen:
        raise InputError(f"{file.name}:1: contains no complete request")
    about = file.with_name("meta.json")
    meta = mapping(parse_json(about)) if about.is_file() else {}
    row = ServingRow(Origin(file.name, 1, len(lines), TOOL, ""), {}, num_prompts=len(seen))
    row.requests = records_of(_on_one_clock(seen))
    _summed_up(row)
    _read_load(row, meta)
    if meta:
        reading.files.append(about)
    reading.rows.append(row)
    return reading


def _line(at: int, text: str, file: Path, reading: Imported) -> Mapping[str, Any] | None:
    if not text.strip():
        return None
    try:
        row = mapping(json_value(text))
    except json.JSONDecodeError as error:
        reading.leave_out(at, f"is not complete JSON ({error.msg}); left out", file.name)
        return None
    lacking = [name for name in _TIMES if number(row.get(name)) is None]
    lacking += [name for name in ("input_toks", "output_toks") if not whole(row.get(name))]
    if lacking:
        reading.leave_out(at, f"has no {', '.join(lacking)}; left out", file.name)
        return None
    return row


def _on_one_clock(seen: Sequence[Mapping[str, Any]]) -> list[LoggedRequest]:
    ahead = min(float(row["queued_ts"]) - float(row["arrival_time"]) for row in seen)
    return [
        LoggedRequest(
            str(row.get("request_id") or place),
            float(row["arrival_time"]),
            float(row["arrival_time"]),
            float(row["first_token_ts"]) - ahead,
            float(row["last_token_ts"]) - ahead,
            int(row["input_toks"]),
            int(row["output_toks"]),
        )
        for place, row in enumerate(seen)
    ]


def _summed_up(row: ServingRow) -> None:
    requests = row.requests
    row.figures["completed"] = len(requests)
    ttft = [request.ttft_s for request in requests if request.ttft_s is not None]
    tpot = [request.tpot_s for request in requests if request.tpot_s is not None]
    for name, values in (("mean_ttft_ms", ttft), ("mean_tpot_ms", tpot)):
        if values:
            row.figures[name] = 1e3 * fmean(values)
            row.derived[name] = "mean over the requests"
    row.take_mean_length("input_len", fmean(request.input_len for request in requests), "input_toks")
    row.take_mean_length("output_len", fmean(request.output_len for request in requests), "output_toks")
    row.derived["requests.first_token_s"] = (
        "the engine's clock, aligned with the client's by the smallest difference"
    )


def _read_load(row: ServingRow, meta: Mapping[str, Any]) -> None:
    engine = mapping(meta.get("engine_kwargs"))
    kept = ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel", "max_num_seqs")
    names = (*kept, "max_num_batched_tokens", "max_model_len", "dtype")
    row.settings = {name: engine[name] for name in names if engine.get(name) is not None}
    row.settings |= {name: meta[name] for name in ("model", "vllm_version") if meta.get(name)}
    cache = mapping(meta.get("kv_cache"))
    blocks, size = whole(cache.get("num_gpu_blocks")), whole(cache.get("block_size"))
    tokens = whole(cache.get("num_kv_tokens")) or whole(meta.get("num_kv_tokens"))
    if tokens is None and blocks and size:
        tokens = blocks * size
    if tokens:
        row.settings["num_kv_tokens"] = tokens
    row.date = str(meta.get("started_at") or "")
