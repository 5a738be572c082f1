"""JSON reports of guidellm: one row per benchmark (a rate, or a concurrency), over its successful requests.
Names differ from vLLM's: guidellm's *inter token latency* is one mean gap per request, which is TPOT here;
its *time per output token* includes the first token's wait and becomes a setting. It has no single gaps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.errors import InputError
from kvbench.importers.base import (
    Imported,
    LoggedRequest,
    Origin,
    ServingRow,
    listed,
    mapping,
    number,
    parse_json,
    peek,
    plain,
    rate,
    read_lines,
    records_of,
    whole,
)

FORMAT: Final = "guidellm's JSON report"
RANK: Final = 20
TOOL: Final = "guidellm"
DEFINITIONS: Final = {
    "ttft_ms": "first token − start of the request in the client (not its planned time)",
    "tpot_ms": "guidellm's inter token latency: (last − first token) / (output tokens − 1), each request",
    "rates": "guidellm's mean over time, of successful requests",
    "percentiles": "values that occurred, not interpolated",
    "input_len": "mean of the counted prompt tokens",
}

# Metric → (latency, factor to ms).
_LATENCIES: Final = {
    "time_to_first_token_ms": ("ttft", 1.0),
    "inter_token_latency_ms": ("tpot", 1.0),
    "request_latency": ("e2el", 1e3),
}
_RATES: Final = {
    "requests_per_second": "request_throughput",
    "output_tokens_per_second": "output_throughput",
    "tokens_per_second": "total_token_throughput",
}
_PERCENTILES: Final = {"p001": "p0.1", "p01": "p1", "p05": "p5", "p999": "p99.9"}
_STATISTICS: Final = {"mean": "mean", "median": "median", "std_dev": "std", "max": "max"}


def recognise(path: Path) -> bool:
    text = peek(path)
    return text.lstrip().startswith("{") and '"benchmarks"' in text and '"time_to_first_token_ms"' in text


def read(path: Path) -> Imported:
    """Return a row for each benchmark. Raises InputError for an incomplete file."""
    data = parse_json(path)
    benchmarks = data.get("benchmarks") if isinstance(data, Mapping) else None
    if not isinstance(benchmarks, list):
        raise InputError(f"{path.name}:1: has no list of benchmarks, so it is not a report of guidellm")
    version = str(mapping(data.get("metadata")).get("guidellm_version") or "")
    origin = Origin(path.name, 1, len(read_lines(path)), TOOL, version)
    reading = Imported(definitions=dict(DEFINITIONS))
    for place, benchmark in enumerate(benchmarks, start=1):
        metrics = benchmark.get("metrics") if isinstance(benchmark, Mapping) else None
        if not isinstance(metrics, Mapping):
            reading.leave_out(1, f"benchmark {place} has no metrics; left out", path.name)
            continue
        reading.rows.append(_row(benchmark, metrics, origin, place))
    return reading


def _row(benchmark: Mapping[str, Any], metrics: Mapping[str, Any], origin: Origin, place: int) -> ServingRow:
    row = ServingRow(origin, {}, settings={"benchmark": place})
    for name, (latency, scale) in _LATENCIES.items():
        for statistic, value in _statistics(metrics.get(name)).items():
            row.figures[f"{statistic}_{latency}_ms"] = value * scale if scale != 1.0 else value
    for name, figure in _RATES.items():
        if (mean := _statistics(metrics.get(name)).get("mean")) is not None:
            row.figures[figure] = mean
    for statistic, value in _statistics(metrics.get("time_per_output_token_ms")).items():
        row.settings[f"{statistic}_time_per_output_token_with_ttft_ms"] = value
    _counts(row, benchmark, metrics)
    row.requests = _requests(mapping(benchmark.get("requests")))
    _read_load(row, mapping(benchmark.get("config") or benchmark.get("args")))
    return row


def _successful(metric: Any) -> Mapping[str, Any]:
    found = metric.get("successful") if isinstance(metric, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _statistics(metric: Any) -> dict[str, float]:
    """Return a metric's statistics over successful requests; empty without any."""
    values = _successful(metric)
    if not values.get("count"):
        return {}
    found = {_STATISTICS[key]: value for key, value in values.items() if key in _STATISTICS}
    for key, value in mapping(values.get("percentiles")).items():
        found[_PERCENTILES.get(key, key)] = value
    return {key: figure for key, value in found.items() if (figure := number(value)) is not None}


def _counts(row: ServingRow, benchmark: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
    totals = mapping(metrics.get("request_totals") or benchmark.get("request_totals"))
    for name, key in (("completed", "successful"), ("failed", "errored")):
        if (count := whole(totals.get(key))) is not None:
            row.figures[name] = count
    if incomplete := whole(totals.get("incomplete")):
        row.settings["incomplete_requests"] = incomplete
    row.num_prompts = whole(totals.get("total"))
    if (duration := number(benchmark.get("duration"))) is not None:
        row.figures["duration_s"] = duration
    for name, key, total in (
        ("input_len", "prompt_token_count", "total_input_tokens"),
        ("output_len", "output_token_count", "total_output_tokens"),
    ):
        values = _successful(metrics.get(key))
        mean, summed = number(values.get("mean")), whole(values.get("total_sum"))
        if values.get("count") and mean is not None:
            row.take_mean_length(name, mean, key)
        if values.get("count") and summed is not None:
            row.figures[total] = summed


def _requests(groups: Mapping[str, Any]) -> list[RequestRecord]:
    """Return the single requests, if reported: with their planned times, without gaps between tokens."""
    seen: list[LoggedRequest] = []
    for group in ("successful", "errored", "incomplete"):
        for request in map(mapping, listed(groups.get(group))):
            times = mapping(mapping(request.get("info")).get("timings"))
            planned = number(times.get("targeted_start"))
            if planned is None:
                return []
            error = mapping(request.get("info")).get("error")
            seen.append(
                LoggedRequest(
                    str(request.get("request_id") or len(seen)),
                    planned,
                    number(times.get("request_start")),
                    number(times.get("first_token_iteration", times.get("first_iteration"))),
                    number(times.get("last_token_iteration", times.get("last_iteration"))),
                    whole(request.get("prompt_tokens")) or 0,
                    whole(request.get("output_tokens")) or 0,
                    error="" if group == "successful" else str(error or group),
                )
            )
    return records_of(seen)


def _read_load(row: ServingRow, config: Mapping[str, Any]) -> None:
    strategy = mapping(config.get("strategy"))
    row.request_rate = rate(strategy.get("rate"))
    row.settings |= {f"load.{key}": value for key, value in plain(strategy).items() if key != "rate"}
    backend = mapping(config.get("backend"))
    if backend.get("model"):
        row.settings["model"] = str(backend["model"])
