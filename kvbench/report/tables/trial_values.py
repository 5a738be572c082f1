"""The measured columns of a trial, under the names of all tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from itertools import groupby
from typing import Any, Final

from kvbench.core.metrics.ttft_breakdown import PARTS
from kvbench.core.records import TrialRecord
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import RunFolder

# Column of the table → path of its value in a trial's summary or engine record ("a.b" is b inside a).
# The only place that knows those names.
_LATENCIES: Final = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
_FIGURES: Final = ("mean", "p50", "p90", "p99")
SUMMARY_KEYS: Final[Mapping[str, str]] = {
    "slo_attainment": "slo_attainment",
    "attainment_lower": "attainment_lower",
    "attainment_upper": "attainment_upper",
    "achieved_request_rate": "achieved_rate",
    "request_goodput": "request_goodput",
    **{f"{latency}_{figure}": f"{latency}.{figure}" for latency in _LATENCIES for figure in _FIGURES},
    "output_tok_per_s": "output_tok_per_s",
    "total_tok_per_s": "total_tok_per_s",
}
ENGINE_KEYS: Final[Mapping[str, str]] = {
    "kv_bytes_per_request": "kv_bytes_per_request",
    "kv_transfer_ms_per_request": "kv_transfer_ms_per_request",
    "kv_descriptors_per_request": "kv_descriptors_per_request",
    "prefix_hit_rate_prefill": "prefix_hit_rate_prefill",
    "prefix_hit_rate_decode": "prefix_hit_rate_decode",
    "gpu_watts": "gpu_watts",
    "ttft_ms_mean_of_all": "ttft_ms_mean_of_all",
    **{f"ttft_{part}_ms": f"ttft_breakdown_ms.{part}" for part in PARTS},
    "client_workers": "client.workers",
    "client_send_lag_ms_p50": "client.send_lag_p50_ms",
    "client_send_lag_ms_p99": "client.send_lag_p99_ms",
    "client_chunk_lag_ms_p99": "client.chunk_lag_p99_ms",
    "client_first_error_ms_p99": "client.first_error_p99_ms",
    "client_token_error_ms_p99": "client.token_error_p99_ms",
    "client_loop_lag_ms_p99": "client.loop_lag_p99_ms",
    "client_cpu_share": "client.cpu_share",
}
VALUE_COLUMNS: Final = (*SUMMARY_KEYS, *ENGINE_KEYS)


def trial_values(trial: TrialRecord | None) -> dict[str, float | None]:
    summary = trial.summary if trial else {}
    engine = trial.engine if trial else {}
    values = {column: _at(summary, path) for column, path in SUMMARY_KEYS.items()}
    return values | {column: _at(engine, path) for column, path in ENGINE_KEYS.items()}


def trial_value(trial: TrialRecord, column: str) -> float | None:
    return _at(trial.summary, SUMMARY_KEYS[column]) if column in SUMMARY_KEYS else None


def reason_text(trial: TrialRecord) -> str:
    """Return a verdict's reason without figures that differ from the tables'. Older folders name the live
    rule's interval like the share's, and report queue growth at the decision."""
    live = trial.summary.get("live")
    if not isinstance(live, Mapping) or str(live.get("reason")) not in trial.reason:
        return trial.reason
    text = trial.reason.replace("; interval ", "; stopping interval ")
    return re.sub(r"grows by \S+ requests a second of (\S+) offered", r"grows at \1 req/s offered", text)


def engine_word(trial: TrialRecord | None, path: str) -> str:
    value = _raw_at(trial.engine, path) if trial else None
    return value if isinstance(value, str) else ""


def _at(data: Mapping[str, Any], path: str) -> float | None:
    return finite(_raw_at(data, path))


def _raw_at(data: Mapping[str, Any], path: str) -> Any:
    value: Any = data
    for key in path.split("."):
        if not isinstance(value, (dict, Mapping)):
            return None
        value = value.get(key)
    return value


def finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


# --- how much of the time was measured ------------------------------------------------------------


def measuring_share(trials: Iterable[TrialRecord]) -> float | None:
    """Return the share of time in which load was offered, over each deployment's trials, or None if
    unknown."""
    offered_s = whole_s = 0.0
    timed = [(begun, trial) for trial in trials if (begun := moment(trial.started_at)) is not None]
    timed.sort(key=lambda pair: pair[0])
    # A deployment's trials come one after the other; at the equal rate it is brought up once more.
    for _, group in groupby(timed, lambda pair: (pair[1].cell.connector, pair[1].method == "equal_rate")):
        (begun, first), *more = group
        if more:
            last, ended = more[-1]
            offered_s += first.duration_s + sum(trial.duration_s for _, trial in more)
            whole_s += (last - begun).total_seconds() + ended.duration_s
    return min(1.0, offered_s / whole_s) if whole_s > 0 else None


def moment(text: str) -> datetime | None:
    """Return a UTC time, or None if it is damaged."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def time_line(run: RunFolder) -> str:
    """Return the run's measuring share in words; empty on virtual time."""
    share = None if SIMULATED in run.labels else measuring_share(run.all_trials)
    if share is None:
        return ""
    return f"{len(run.all_trials)} trials; load was offered for {share:.0%} of the deployments' uptime"
