"""Exports of aiperf (``profile_export_aiperf.json`` and ``.csv``) and of its predecessor genai-perf. The JSON
has more digits and the requested load. Names differ from vLLM's: aiperf's *inter token latency* is one mean
gap per request, which is TPOT here; its *inter chunk latency* is ITL."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.errors import InputError
from kvbench.importers.base import (
    Imported,
    LoggedRequest,
    Origin,
    ServingRow,
    json_value,
    listed,
    mapping,
    number,
    parse_json,
    peek,
    plain,
    rate,
    read_lines,
    read_text,
    records_of,
    whole,
)

FORMAT: Final = "aiperf's profile export (JSON, CSV, or its folder)"
RANK: Final = 20
TOOL: Final = "aiperf"
DEFINITIONS: Final = {
    "ttft_ms": "first chunk − start of the request in the client (not its planned time)",
    "tpot_ms": "aiperf's inter token latency: (latency − TTFT) / (output tokens − 1), each request",
    "itl_ms": "aiperf's inter chunk latency: gaps between streamed chunks, all requests together",
    "input_len": "mean of the counted tokens; the requested length is in the settings",
}

_LATENCIES: Final = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "tpot",
    "inter_chunk_latency": "itl",
    "request_latency": "e2el",
}
_TOTALS: Final = {
    "request_throughput": "request_throughput",
    "output_token_throughput": "output_throughput",
    "total_token_throughput": "total_token_throughput",
    "goodput": "request_goodput",
    "request_count": "completed",
    "error_request_count": "failed",
    "benchmark_duration": "duration_s",
    "total_isl": "total_input_tokens",
    "total_osl": "total_output_tokens",
}
_CSV_NAMES: Final = {
    "time to first token": "time_to_first_token",
    "inter token latency": "inter_token_latency",
    "inter chunk latency": "inter_chunk_latency",
    "request latency": "request_latency",
    "request throughput": "request_throughput",
    "output token throughput": "output_token_throughput",
    "total token throughput": "total_token_throughput",
    "goodput": "goodput",
    "request count": "request_count",
    "error request count": "error_request_count",
    "benchmark duration": "benchmark_duration",
    "total input sequence length": "total_isl",
    "total output sequence length": "total_osl",
    "input sequence length": "input_sequence_length",
    "output sequence length": "output_sequence_length",
}
_MS: Final = {"ms": 1.0, "s": 1e3, "sec": 1e3, "us": 1e-3, "µs": 1e-3, "ns": 1e-6}
_PERCENTILE: Final = re.compile(r"p\d+(?:\.\d+)?")
_CSV_METRIC: Final = re.compile(r"(?P<name>.+?)(?:\s+\((?P<unit>[^()]*)\))?")
_REQUESTS: Final = "profile_export.jsonl"
_FILES: Final = ("profile_export_aiperf.json", "profile_export_genai_perf.json", "profile_export_aiperf.csv")


def recognise(path: Path) -> bool:
    if path.is_dir():
        return _inside(path) is not None
    text = peek(path)
    if text.lstrip().startswith("{"):
        return '"time_to_first_token"' in text and '"input_config"' in text and '"unit"' in text
    return text.startswith("Metric,") and "time to first token" in text.lower()


def read(path: Path) -> Imported:
    """Return one row. Raises InputError for an incomplete file."""
    file = _inside(path) if path.is_dir() else path
    if file is None:
        raise InputError(f"{path} contains no export of aiperf", hint=f"one of {', '.join(_FILES)}")
    reading = Imported(definitions=dict(DEFINITIONS), files=[file])
    lines = read_lines(file)
    origin = Origin(file.name, 1, len(lines), TOOL)
    row = (
        _from_csv(file, lines, origin, reading)
        if file.suffix == ".csv"
        else _from_json(file, origin, reading)
    )
    if not row.figures:
        raise InputError(f"{file.name}:1: contains no metric of aiperf")
    reading.rows.append(row)
    single = file.with_name(_REQUESTS)
    if path.is_dir() and single.is_file():
        row.requests = _requests(single, reading)
        row.derived |= {"requests.scheduled_s": "credit_issued_ns"} if row.requests else {}
        reading.files.append(single)
    return reading


def _requests(file: Path, reading: Imported) -> list[RequestRecord]:
    """Return the single requests of ``profile_export.jsonl``, without the warm-up."""
    seen = []
    for line, text in enumerate(read_lines(file), start=1):
        try:
            row = mapping(json_value(text)) if text.strip() else {}
        except json.JSONDecodeError as error:
            problem = f"is not whole JSON ({error.msg}); left out"
            reading.leave_out(line, problem, file.name)
            continue
        about, metrics = mapping(row.get("metadata")), mapping(row.get("metrics"))
        planned, sent = (number(about.get(key)) for key in ("credit_issued_ns", "request_start_ns"))
        if planned is None or sent is None or about.get("benchmark_phase", "profiling") != "profiling":
            continue

        def value(name: str, of: Mapping[str, Any] = metrics) -> Any:
            return mapping(of.get(name)).get("value")

        ttft_ms, latency_ms = number(value("time_to_first_token")), number(value("request_latency"))
        seen.append(
            LoggedRequest(
                str(about.get("x_request_id") or line),
                planned / 1e9,
                sent / 1e9,
                None if ttft_ms is None else sent / 1e9 + ttft_ms / 1e3,
                None if latency_ms is None else sent / 1e9 + latency_ms / 1e3,
                whole(value("input_sequence_length")) or 0,
                whole(value("output_sequence_length")) or 0,
                [gap / 1e3 for gap in map(number, listed(value("inter_chunk_latency"))) if gap is not None],
                str(mapping(row.get("error")).get("message") or row.get("error") or ""),
            )
        )
    return records_of(seen)


def _inside(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _from_json(file: Path, origin: Origin, reading: Imported) -> ServingRow:
    data = mapping(parse_json(file))
    version = str(data.get("aiperf_version") or "")
    row = ServingRow(Origin(origin.file, origin.line, origin.last_line, TOOL, version), {})
    row.figures = _figures({key: value for key, value in data.items() if isinstance(value, Mapping)})
    _lengths(row, data)
    _read_load(row, data.get("input_config"))
    for sign, what in (
        ("was_cancelled", "the run was cancelled"),
        ("incomplete_reason", "the run is incomplete"),
    ):
        if data.get(sign):
            row.incomplete = f"{what}: {data[sign]}" if sign == "incomplete_reason" else what
            reading.leave_out(1, row.incomplete, origin.file)
    row.date = str(data.get("start_time") or "")
    run_info = data.get("run_info")
    row.command = str(run_info.get("cli_command") or "") if isinstance(run_info, Mapping) else ""
    return row


def _figures(metrics: Mapping[str, Any]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key, latency in _LATENCIES.items():
        metric = mapping(metrics.get(key))
        scale = _MS.get(str(metric.get("unit", "ms")).lower())
        if scale is None:
            continue
        names = {"avg": "mean", "p50": "median", "std": "std", "max": "max"}
        for statistic, value in metric.items():
            name = names.get(statistic) or (statistic if _PERCENTILE.fullmatch(statistic) else None)
            found = number(value)
            if name is not None and found is not None:
                figures[f"{name}_{latency}_ms"] = found * scale if scale != 1.0 else found
    for key, name in _TOTALS.items():
        metric = mapping(metrics.get(key))
        found = number(metric.get("avg"))
        if found is not None:
            scale = _MS.get(str(metric.get("unit", "s")).lower(), 1e3) / 1e3 if name == "duration_s" else 1.0
            figures[name] = found * scale if scale != 1.0 else found
    return figures


def _lengths(row: ServingRow, metrics: Mapping[str, Any]) -> None:
    for name, key in (("input_len", "input_sequence_length"), ("output_len", "output_sequence_length")):
        if (mean := number(mapping(metrics.get(key)).get("avg"))) is not None:
            row.take_mean_length(name, mean, key)


def _read_load(row: ServingRow, config: Any) -> None:
    """Read the requested load from ``input_config``, whose layout differs between versions."""
    if not isinstance(config, Mapping):
        return
    phases = listed(config.get("phases")) or [config.get("loadgen")]
    phase = next((entry for entry in reversed(list(phases)) if isinstance(entry, Mapping)), {})
    row.request_rate = rate(phase.get("rate", phase.get("request_rate")))
    row.num_prompts = whole(phase.get("requests", phase.get("request_count")))
    row.settings |= {
        f"load.{key}": value for key, value in plain(phase).items() if key not in ("rate", "requests")
    }
    models = listed(mapping(config.get("models")).get("items"))
    names = [model.get("name") for model in models if isinstance(model, Mapping)]
    if not names:
        names = list(listed(mapping(config.get("endpoint")).get("model_names")))
    if names:
        row.settings["model"] = ", ".join(str(name) for name in names)
    for dataset in listed(config.get("datasets")):
        prompts = mapping(mapping(dataset).get("prompts"))
        for name, key in (("asked_input_len", "isl"), ("asked_output_len", "osl")):
            if (length := number(mapping(prompts.get(key)).get("mean"))) is not None:
                row.settings[name] = length


def _from_csv(file: Path, lines: Sequence[str], origin: Origin, reading: Imported) -> ServingRow:
    """Return the metrics of complete lines; a file without its totals was cut off."""
    row = ServingRow(origin, {})
    metrics: dict[str, dict[str, Any]] = {}
    headers: list[list[str]] = [[]]
    ended = read_text(file).endswith("\n")
    for line, text in enumerate(lines, start=1):
        cells = next(csv.reader([text]), [])
        if not cells:
            headers.append([])
        elif cells[0] == "Metric":
            headers[-1] = ["avg" if cell == "Value" else cell for cell in cells]
        elif headers[-1] and (len(cells) != len(headers[-1]) or (line == len(lines) and not ended)):
            reading.leave_out(line, "is cut off; left out", origin.file)
        elif headers[-1]:
            _metric(cells, headers[-1], metrics, row)
    if sum(bool(header) for header in headers) < 2:
        reading.leave_out(len(lines), "the file ends before its totals", origin.file)
    row.figures = _figures(metrics)
    _lengths(row, metrics)
    return row


def _metric(
    cells: Sequence[str], header: Sequence[str], metrics: dict[str, dict[str, Any]], row: ServingRow
) -> None:
    found = _CSV_METRIC.fullmatch(cells[0])
    key = _CSV_NAMES.get(found["name"].strip().lower()) if found else None
    if key is not None and found is not None:
        metrics[key] = {**dict(zip(header[1:], cells[1:], strict=True)), "unit": found["unit"] or ""}
    else:
        row.unknown[cells[0]] = ", ".join(cells[1:])
