"""Convert /metrics readings around a trial to evidence and record columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

from kvbench.core.gates.evidence import EXTERNAL, LOCAL_CACHE_HIT, LOCAL_COMPUTE, EngineFigures, RouterFigures
from kvbench.core.load.workers import LoadResult
from kvbench.core.metrics.ttft_breakdown import Phases, RouterTimes, hand_off_parts, ttft_breakdown
from kvbench.core.records import RequestRecord
from kvbench.hosts.telemetry import Metrics, Sampler, difference, quantile
from kvbench.sweep.trial.kv_counters import Pages, RoleKv, grown, kv_columns, role_kv, served_requests

_LAG: Final = "kvbench:emulator_step_lag_seconds"
_TRANSFER_LAG: Final = "kvbench:emulator_transfer_lag_seconds"
_SOURCES: Final = (LOCAL_COMPUTE, LOCAL_CACHE_HIT, EXTERNAL)
_GAPS: Final = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
"""Gap between two tokens: current name, and vLLM's before 0.11."""
_STARTED: Final = "process_start_time_seconds"
_COUNTERS: Final = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
"""Counters that every instance has, and that fall only if it restarts."""
_ROUTER_CPU: Final = "kvbench:router_cpu_seconds_total"
_ROUTER_LAG: Final = "kvbench:router_loop_lag_seconds"
RUNNING, WAITING = Sampler.GAUGES[:2]

Reading = Mapping[str, Metrics | None]


def pages_by_role(before: Reading, after: Reading) -> dict[str, list[tuple[Metrics, Metrics]]]:
    """Return role → (before, after) of each instance, without roles that lack a page."""
    roles: dict[str, list[tuple[Metrics, Metrics]]] = {}
    incomplete = set()
    for name, page in after.items():
        role, start = name.split("-")[0], before.get(name)
        if page is None or start is None:
            incomplete.add(role)
        else:
            roles.setdefault(role, []).append((start, page))
    return {role: pages for role, pages in roles.items() if role != "router" and role not in incomplete}


def engine_figures(
    before: Reading, after: Reading, logged: Mapping[str, RoleKv] | None = None
) -> dict[str, EngineFigures]:
    """Counter growth per role, summed over instances. ``logged``: KV counts from logs, by role."""
    figures = {}
    for role, pages in pages_by_role(before, after).items():
        figures[role] = _with_kv(_figures_of(pages), role_kv(pages), (logged or {}).get(role))
    return figures


def _with_kv(figures: EngineFigures, kv: RoleKv, logged: RoleKv | None) -> EngineFigures:
    if not kv.source and logged is not None:
        # The assignment of log lines to trials is too uncertain to prove losses by counting.
        return replace(figures, kv_failures=logged.failures, kv_expired=logged.expired)
    return replace(
        figures,
        kv_transfers=kv.transfers,
        kv_bytes=kv.nbytes,
        kv_seconds=kv.seconds,
        kv_failures=kv.failures,
        kv_expired=kv.expired,
    )


def _figures_of(pages: Pages) -> EngineFigures:
    lags, transfer_lags = (
        [lag for start, end in pages if (lag := quantile(start, end, name, 0.99)) is not None]
        for name in (_LAG, _TRANSFER_LAG)
    )
    prompt_tokens = grown(pages, "vllm:prompt_tokens_total")
    prefix_hits = grown(pages, "vllm:prefix_cache_hits_total")
    blocks = {label for _, page in pages if (label := page.label("vllm:cache_config_info", "block_size"))}
    restarted = [known for start, end in pages if (known := _restarted(start, end)) is not None]
    return EngineFigures(
        prompt_tokens=prompt_tokens,
        prefix_queries=grown(pages, "vllm:prefix_cache_queries_total"),
        prefix_hits=prefix_hits,
        prompt_tokens_by_source=_by_source(pages, prompt_tokens, prefix_hits),
        requests=grown(pages, "vllm:request_success_total"),
        preemptions=grown(pages, "vllm:num_preemptions_total"),
        step_lag_s=grown(pages, f"{_LAG}_sum"),
        steps=grown(pages, f"{_LAG}_count"),
        step_lag_p99_s=max(lags, default=None),
        busy_s=grown(pages, "kvbench:emulator_busy_seconds_total"),
        transfer_lag_s=grown(pages, f"{_TRANSFER_LAG}_sum"),
        transfer_lag_p99_s=max(transfer_lags, default=None),
        paced_s=grown(pages, "kvbench:emulator_paced_transfer_seconds_total"),
        block_tokens=int(blocks.pop()) if len(blocks) == 1 and min(blocks).isdigit() else None,
        generation_tokens=grown(pages, "vllm:generation_tokens_total"),
        restarts=float(sum(restarted)) if restarted else None,
        instances=len(pages),
        served=_work_done(pages),
        cache_tokens=_cache_tokens(pages),
    )


def _restarted(start: Metrics, end: Metrics) -> bool | None:
    """Return whether an instance restarted in between: another start time, or a counter that fell; None
    without its start time."""
    counts = [(start.total(name), end.total(name)) for name in _COUNTERS]
    if any(first is not None and last is not None and last < first for first, last in counts):
        return True
    times = start.total(_STARTED), end.total(_STARTED)
    return None if None in times else times[0] != times[1]


def _cache_tokens(pages: Pages) -> float | None:
    """Sum of the cache sizes that instances report."""
    labels = [
        [page.label("vllm:cache_config_info", name) for name in ("num_gpu_blocks", "block_size")]
        for _, page in pages
    ]
    known = [int(blocks) * int(size) for blocks, size in labels if blocks.isdigit() and size.isdigit()]
    return float(sum(known)) if known and len(known) == len(pages) else None


def _work_done(pages: Pages) -> tuple[float, ...]:
    """Requests, output tokens or prompt tokens of each instance; () if one lacks all."""
    for name in ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"):
        counts = [grown([page], name) for page in pages]
        known = [count for count in counts if count is not None]
        if known and len(known) == len(counts):
            return tuple(known)
    return ()


def with_slots(
    figures: Mapping[str, EngineFigures], rows: Iterable[Mapping[str, Any]], slots: int | None = None
) -> dict[str, EngineFigures]:
    """Add running and waiting sequences. ``slots``: ``max_num_seqs``, if known."""
    seen: dict[str, dict[float, dict[str, float]]] = {}
    for row in rows:
        if row["metric"] in (RUNNING, WAITING):
            moment = seen.setdefault(row["source"], {}).setdefault(row["t_s"], {})
            moment[row["metric"]] = row["value"]
    found = {}
    for role, known in figures.items():
        peak = queued = full = 0.0
        for name, moments in seen.items():
            if name.split("-")[0] != role:
                continue
            highest = max((gauges.get(RUNNING, 0.0) for gauges in moments.values()), default=0.0)
            waiting = [gauges for gauges in moments.values() if gauges.get(WAITING, 0.0) >= 1]
            queued += len(waiting)
            full += sum(gauges.get(RUNNING, 0.0) == highest for gauges in waiting)
            peak = max(peak, highest)
        found[role] = replace(
            known, running_peak=peak or None, queued_samples=queued, full_samples=full, slots=slots
        )
    return found


def router_figures(before: Reading, after: Reading) -> RouterFigures:
    """Counts of kvbench's router between two readings; empty for another router."""
    start, end = before.get("router"), after.get("router")
    if start is None or end is None:
        return RouterFigures()
    processes = int(end.total("kvbench:router_processes") or 1)
    used = (difference(start, end, _ROUTER_CPU, process=str(index)) for index in range(processes))
    return RouterFigures(
        cpu_s=max((cpu_s for cpu_s in used if cpu_s is not None), default=None),
        processes=processes,
        loop_lag_p99_s=quantile(start, end, _ROUTER_LAG, 0.99),
        lag_s=difference(start, end, f"{_ROUTER_LAG}_sum"),
        wait_s=difference(start, end, "kvbench:router_run_queue_wait_seconds_total"),
    )


def _by_source(pages: Pages, prompt_tokens: float | None, prefix_hits: float | None) -> dict[str, float]:
    """Prompt tokens by source. Versions without that metric use the external cache's counters, which count a
    queued request repeatedly and are therefore capped at the prompt tokens."""
    counts = {
        source: grown(pages, "vllm:prompt_tokens_by_source_total", source=source) for source in _SOURCES
    }
    by_source = {source: count for source, count in counts.items() if count is not None}
    external = grown(pages, "vllm:external_prefix_cache_hits_total")
    if by_source or external is None or prompt_tokens is None or not external:
        return by_source
    cached = min(prefix_hits or 0.0, prompt_tokens)
    external = min(external, prompt_tokens - cached)
    local = prompt_tokens - cached - external
    return {LOCAL_COMPUTE: local, LOCAL_CACHE_HIT: cached, EXTERNAL: external}


def engine_summary(
    before: Reading,
    after: Reading,
    figures: Mapping[str, EngineFigures],
    load: LoadResult,
    logged: Mapping[str, RoleKv] | None = None,
) -> dict[str, Any]:
    """Engine columns of the result table; None if not reported."""
    roles = pages_by_role(before, after)
    kv = {role: role_kv(pages) for role, pages in roles.items()}
    if not any(entry.source for entry in kv.values()):
        kv = dict(logged or {})
    columns = kv_columns(kv, served_requests(roles.get("decode") or roles.get("prefill") or []))
    lag = [role.step_lag_s / role.steps * 1e3 for role in figures.values() if role.steps and role.step_lag_s]
    whole = figures.get("aggregated")
    times = [record.ttft_s for record in load.records if record.ok and record.ttft_s is not None]
    ttft_s = fmean(times) if times else None
    kv_ms = columns["kv_transfer_ms_per_request"]
    prefill = phases(roles.get("prefill") or roles.get("aggregated"))
    decode = phases(roles["decode"]) if "decode" in roles else None if "aggregated" in roles else Phases()
    routed = router_times(load.records, before.get("router"), after.get("router"))
    return {
        **columns,
        "prefix_hit_rate_prefill": whole.hit_rate if whole is not None else _hit_rate(figures, "prefill"),
        "prefix_hit_rate_decode": _hit_rate(figures, "decode"),
        "ttft_breakdown_ms": ttft_breakdown(
            ttft_s, prefill, decode, routed, None if kv_ms is None else kv_ms / 1e3
        ),
        "hand_off_parts_ms": hand_off_parts(prefill, decode, routed),
        "ttft_ms_mean_of_all": None if ttft_s is None else ttft_s * 1e3,
        "emulator_step_lag_ms_mean": max(lag) if lag else None,
        "client": dict(load.client),
        "roles": {role: known.to_json() for role, known in figures.items()},
    }


def _hit_rate(figures: Mapping[str, EngineFigures], role: str) -> float | None:
    known = figures.get(role)
    return None if known is None else known.hit_rate


def phases(pages: Pages | None) -> Phases | None:
    """Mean phase times of a request in the engines of one role."""
    if not pages:
        return None
    gaps = (mean_of(pages, name) for name in _GAPS)
    return Phases(
        queue=mean_of(pages, "vllm:request_queue_time_seconds"),
        prefill=mean_of(pages, "vllm:request_prefill_time_seconds"),
        token_gap=next((gap for gap in gaps if gap is not None), None),
    )


def mean_of(pages: Pages, histogram: str) -> float | None:
    """Mean of a histogram between two readings, or None if it counted nothing."""
    total, count = grown(pages, f"{histogram}_sum"), grown(pages, f"{histogram}_count")
    return total / count if total is not None and count else None


def router_times(
    records: Sequence[RequestRecord], before: Metrics | None, after: Metrics | None
) -> RouterTimes | None:
    """Mean router times: from the answers that carry them, else from its histograms."""
    timed = [record for record in records if record.ok and record.decode_first_byte_s is not None]
    sent = [record for record in timed if None not in (record.prefill_sent_s, record.decode_sent_s)]
    if sent:
        answered = [record for record in sent if record.prefill_answered_s is not None]
        turns = [_from(record.prefill_answered_s, record.decode_sent_s) for record in answered]
        in_turn = len(answered) == len(sent) and min(turns) >= 0
        known = [_from(record.prefill_sent_s, record.prefill_answered_s) for record in answered]
        return RouterTimes(
            prefill=fmean(known) if 2 * len(known) > len(sent) else None,
            decode=fmean(_from(record.decode_sent_s, record.decode_first_byte_s) for record in sent),
            hand_off=fmean(turns) if in_turn else None,
        )
    if before is None or after is None:
        return None
    pages = [(before, after)]
    prefill = mean_of(pages, "kvbench:router_prefill_seconds")
    decode = mean_of(pages, "kvbench:router_decode_first_byte_seconds")
    if prefill is None or decode is None:
        return None
    return RouterTimes(prefill, decode, mean_of(pages, "kvbench:router_handoff_seconds"))


def _from(begin_s: float | None, end_s: float | None) -> float:
    return (end_s or 0.0) - (begin_s or 0.0)


def transport_of(pages: Reading) -> str:
    """Transport reported by the engines, or "". The active side of a transfer decides; the passive side knows
    only its configuration."""
    named = {page.label("kvbench:transport_info", "transport") for page in pages.values() if page is not None}
    proven = {name for name in named if name and not name.endswith("(configured)")}
    return ",".join(sorted(proven or named - {""}))
