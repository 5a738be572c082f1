"""What the exact server did, and how late it was with it. Times are seconds of CLOCK_MONOTONIC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from kvbench.processes.exact_server.served import ServedStream

HISTOGRAM_MS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, math.inf)


def lateness(streams: Sequence[ServedStream], gap_s: float) -> dict[str, Any]:
    """How late first and further writes were: percentiles in ms, and a histogram with the upper bounds."""
    first, further = [], []
    for stream in streams:
        late = [value * 1e3 for value in stream.lateness(gap_s)]
        first += late[:1]
        further += late[1:]
    return {"first": _figures(first), "further": _figures(further)}


def _figures(late_ms: list[float]) -> dict[str, Any]:
    late_ms.sort()
    counts, before = [], 0
    for bound in HISTOGRAM_MS:
        count = _up_to(late_ms, bound)
        counts.append([bound if math.isfinite(bound) else None, count - before])
        before = count
    return {
        "n": len(late_ms),
        "p50_ms": _at(late_ms, 50),
        "p99_ms": _at(late_ms, 99),
        "max_ms": _at(late_ms, 100),
        "histogram_ms": counts,
    }


def _up_to(ordered: Sequence[float], bound: float) -> int:
    from bisect import bisect_right

    return bisect_right(ordered, bound)


def _at(ordered: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many per cent do not exceed."""
    if not ordered:
        return None
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 4)


def metrics_text(model: str, counts: dict[str, float]) -> bytes:
    """Counters and gauges as Prometheus reads them, under vLLM's names where vLLM has one."""
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:prompt_tokens_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:num_preemptions_total": "counter",
        "exact_requests_total": "counter",
        "exact_connections_total": "counter",
    }
    lines = []
    for name, kind in kinds.items():
        label = ',finished_reason="length"' if name == "vllm:request_success_total" else ""
        lines += [
            f"# TYPE {name} {kind}",
            f'{name}{{model_name="{model}"{label}}} {float(counts.get(name, 0))}',
        ]
    return ("\n".join(lines) + "\n").encode()
