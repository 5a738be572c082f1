"""The columns of files, data frames and tables: heading and, with its unit, meaning.

A request's times count from its trial's start. The order of ``MEANINGS`` is that of the data frames."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvbench.core.metrics.ttft_breakdown import PARTS

OF_WHOLE_RUN: Final = ", whole run"
"""Suffix of a title for a figure over the whole run; without it the figure covers the steady part."""

_LATENCY: Final = {
    "ttft": "time to first token, from the scheduled send",
    "ttft_sent": "time to first token, from the real send",
    "tpot": "time per output token after the first: (e2el − ttft) / (output_len − 1), less if events bundle",
    "itl": "gap between two events that brought text",
    "e2el": "time to the last token, from the scheduled send",
}
_FIGURE: Final = {"mean": "mean", "median": "median", "p50": "median"} | {
    f"p{q}": f"{q}th percentile" for q in (90, 99)
}

TITLES: Final[Mapping[str, str]] = {
    "input_len": "input (tokens)", "output_len": "output (tokens)",
    "max_request_rate": "max rate (req/s)", "max_request_rate_per_engine": "per engine (req/s)",
    "max_request_rate_per_gpu": "per GPU (req/s)", "trial_request_rate": "measured at (req/s)",
    "slo_attainment": "met (%) [95 %]", "achieved_request_rate": "achieved (req/s)",
    "request_goodput": "goodput (req/s)", "request_goodput_per_gpu": "goodput per GPU (req/s)",
    "output_tok_per_s": "output tok/s", "output_tok_per_s_per_gpu": "output tok/s per GPU",
    "total_tok_per_s": "total tok/s", "cost_per_1k_requests": "cost per 1k requests",
    "cost_per_1m_output_tokens": "cost per 1M output tokens", "watts_per_gpu": "W per GPU",
    "joules_per_output_token": "J per output token", "kv_bytes_per_request": "KV (MB/req)",
    "kv_transfer_ms_per_request": "KV (ms/req)", "trial_id": "trial", "request_rate": "rate (req/s)",
    **{f"{latency.lower()}_ms_{figure.lower()}": f"{latency} {figure} (ms)"
       for latency in ("TTFT", "TPOT", "ITL") for figure in ("mean", "P50", "P90", "P99")},
    # As in the tables of vLLM's PR 10884.
    "completed": "Successful Requests", "failed": "Failed Requests", "duration_s": "Duration (s)",
    "total_input_tokens": "Total Input Tokens", "total_output_tokens": "Total Generated Tokens",
    "request_throughput": f"Req Throughput (req/s){OF_WHOLE_RUN}",
    "output_throughput": f"Output Token Throughput (tok/s){OF_WHOLE_RUN}",
    "total_token_throughput": f"Total Token Throughput (tok/s){OF_WHOLE_RUN}",
    **{f"{figure.lower()}_{latency.lower()}_ms": f"{figure} {latency} (ms){OF_WHOLE_RUN}"
       for latency in ("TTFT", "TPOT", "ITL") for figure in ("Mean", "Median", "P90", "P99")},
    "nics": "NICs", "block_bytes": "block (bytes)", "batch_size": "blocks", "gb_per_s": "GB/s",
    "of_line_rate": "of line rate", "of_tcp": "of plain TCP", "of_memcpy": "of a memory copy",
    "call_s_p50": "P50", "call_s_p99": "P99", "cpu_s_per_gb": "CPU s/GB", "verified": "data verified",
}  # fmt: skip
"""Column headings by key; the heading of other columns is their key."""

_ABOUT: Final = {
    "trial_id": "name of the trial; its requests are in requests/<trial_id>.parquet",
    "connector": "how the KV cache travelled from P to D; aggregated: it did not",
    "input_len": "prompt length (tokens)",
    "output_len": "answer's length (tokens)",
    "method": "method of the load: sustained, burst, fixed, trace, equal_rate, imported",
    "request_rate": "offered load (requests/s)",
    "verdict": "met, missed, undecided, measured (without an SLO) or invalid (refused as a measurement)",
    "reason": "why, in words",
}
_STEADY: Final = {
    "slo_attainment": "share of requests that met every limit (0–1), steady window",
    "attainment_lower": "lower end of its 95 % interval (0–1)",
    "attainment_upper": "upper end of its 95 % interval (0–1)",
    "achieved_request_rate": "completed inside the steady window (requests/s)",
    "request_goodput": "completed inside the steady window and met the SLO (requests/s)",
    "output_tok_per_s": "output tokens inside the steady window (tokens/s)",
    "total_tok_per_s": "with the prompts' tokens (tokens/s)",
    **{
        f"{latency}_ms_{figure}": f"{_LATENCY[latency]}; {_FIGURE[figure]} over the steady window (ms)"
        for latency in ("ttft", "tpot", "itl", "e2el")
        for figure in ("mean", "p50", "p90", "p99")
    },
    "kv_bytes_per_request": "KV bytes that one request moved (bytes)",
    "kv_transfer_ms_per_request": "duration of its KV transfer (ms)",
    "kv_descriptors_per_request": "pieces of memory that were handed to the transfer library",
    "prefix_hit_rate_prefill": "share of prompt tokens that P found in its prefix cache (0–1)",
    "prefix_hit_rate_decode": "share of prompt tokens that D found in its prefix cache (0–1)",
    "gpu_watts": "mean power of all of its GPUs during the trial (W), by the driver's energy counters",
    "ttft_ms_mean_of_all": "mean TTFT of all requests of the trial, which the parts below add up to (ms)",
    **{f"ttft_{part}_ms": f"part of the mean TTFT: {part.replace('_', ' ')} (ms)" for part in PARTS},
    "client_workers": "processes of the load generator",
    "client_send_lag_ms_p50": "how late the client sent; median (ms)",
    "client_send_lag_ms_p99": "how late the client sent; 99th percentile (ms)",
    "client_chunk_lag_ms_p99": "how late the client read; 99th percentile (ms)",
    "client_first_error_ms_p99": "largest possible delay of first-token times, because the client read "
    "several chunks at once; 99th percentile (ms)",
    "client_token_error_ms_p99": "the same of all tokens; 99th percentile (ms)",
    "client_loop_lag_ms_p99": "how late the client's event loop was; 99th percentile (ms)",
    "client_cpu_share": "CPU that a client's process used (0–1)",
}
_SERVE: Final = {
    "completed": "answered requests, whole run",
    "failed": "requests without a complete answer, whole run, except those that kvbench cancelled",
    "cancelled": "requests that kvbench cancelled when it stopped the trial",
    "total_input_tokens": "prompt tokens of answered requests",
    "total_output_tokens": "output tokens of answered requests",
    "request_throughput": "answered requests over the whole duration (requests/s)",
    "output_throughput": "output tokens over the whole duration (tokens/s)",
    "total_token_throughput": "prompt and output tokens over the whole duration (tokens/s)",
    **{
        f"{figure}_{latency}_ms": f"{_LATENCY[latency]}; {_FIGURE[figure]} over the whole run, ramp and "
        "drain included, as `vllm bench serve` counts (ms)"
        for latency in ("ttft", "tpot", "itl", "e2el")
        for figure in ("mean", "median", "p90", "p99")
    },
}
_PLACES: Final = {
    "transport": "what really moved the KV",
    "kv_source": "where the KV figures come from",
    "labels": "marks such as emulated or simulated, joined by ;",
    "source": "source of an imported row: file and lines",
    "tp": "tensor-parallel size",
    "nics": "NICs for the KV, if known",
    "protocol": "protocol of the KV transfer, if known",
}
_ANSWER: Final = {
    "outcome": "found, at_least (no rate missed the SLO), none, undecided, one_rate, unfinished, refused, "
    "failed or skipped",
    "max_request_rate": "the highest rate that meets the SLO (requests/s)",
    "lower": "lower end of its interval (requests/s)",
    "upper": "upper end of its interval (requests/s); missing where nothing bounds it",
    "search": "how the search ended: converged, undecided, …",
}
_LIMIT: Final = {
    "limit": "what binds above that rate",
    "limit_evidence": "evidence for the limit, as text",
}
_TRANSFER: Final = {
    "backend": "library that moved the bytes",
    "protocol": "requested protocol",
    "op": "read (the initiator fetches) or write (it pushes)",
    "nics": "requested NICs; 0 if no NIC is used",
    "block_bytes": "size of one block (bytes)",
    "batch_size": "blocks of one transfer in each region",
    "threads": "transfers under way at a time, from each initiator to each target",
}

MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "trials": {
        **_ABOUT,
        "purpose": "why the search chose this rate",
        "started_at": "when it started (UTC)",
        "duration_s": "from its start to its end, drain included (s)",
        "seed": "of its prompts and arrivals",
        "planned": "requests planned",
        "peak_waiting": "most requests that waited for their first token at once",
        "peak_in_flight": "most requests that were open at once",
        **_STEADY,
        **_SERVE,
        **_PLACES,
        "findings": "number of gate findings; see run.findings",
    },
    "summary": {
        "run": "the run's id",
        **_ABOUT,
        **_ANSWER,
        **_LIMIT,
        "interval_level": "probability that the interval contains the rate (0–1); missing if unknown",
        "prediction": "unfit or extrapolated: a simulated rate that its timing profile does not support",
        "censored": "whether the rate is only a lower bound",
        "engines": "engines (instances) that served it; missing where kvbench did not start them",
        "gpus": "GPUs of all engines (planned ones for an emulated engine); missing if unknown",
        "max_request_rate_per_engine": "the highest rate per engine (requests/s)",
        "max_request_rate_per_gpu": "the highest rate per GPU (requests/s)",
        "trial_request_rate": "the rate offered to the supporting trial: the highest that met the SLO, at or "
        "below max_request_rate (requests/s)",
        "request_goodput_per_gpu": "requests within the SLO per GPU, at the supporting trial (requests/s)",
        "output_tok_per_s_per_gpu": "output tokens per GPU, at the supporting trial (tokens/s)",
        "cost_per_1k_requests": "cost of a thousand requests at the highest rate, by price_per_gpu_hour",
        "cost_per_1m_output_tokens": "cost of a million output tokens at the supporting trial, by "
        "price_per_gpu_hour",
        "watts_per_gpu": "mean power of a GPU during the supporting trial (W), by the driver's counters",
        "joules_per_output_token": "energy of all GPUs per output token at the supporting trial (J)",
        **_STEADY,
        **_SERVE,
        **_PLACES,
        "load_mode": "router, or direct to P and D",
        "client_stamps": "where the client's times come from: kernel or read",
        "trials": "trials of this cell",
        "findings": "number of gate findings in them",
        "confirmed": "whether a further trial confirmed the rate",
        "duration_s": "from the trial's start to its end, drain included (s)",
    },
    "cells": {
        **{key: _ABOUT[key] for key in ("connector", "input_len", "output_len", "method")},
        "tier": "SLO tier of the result; empty with a single SLO",
        "status": "done, refused, failed or skipped",
        **_ANSWER,
        "confirmed_by": "the trial that confirmed the rate",
        "trials": "trials of this cell by this method",
        **_LIMIT,
        "outputs_checked": "greedy answers compared with the aggregated server's",
        "outputs_equal": "those that were equal",
        "canaries_checked": "answers under load whose right text was known beforehand",
        "canaries_wrong": "those that were wrong",
        "canaries_wrong_below": "the share of wrong answers is below this, with 95 % (exact binomial)",
        "reason": _ABOUT["reason"],
        "hint": "what to do about the reason",
    },
    "requests": {
        **_ABOUT,
        "request_id": "name of the request",
        "requested_output_len": "requested tokens",
        "scheduled_s": "planned send (s)",
        "sent_s": "real send (s)",
        "sent_kernel_s": "when the kernel handed the last byte to the network device (s)",
        "first_token_s": "first token (s)",
        "last_token_s": "last token (s)",
        **{f"{key}_ms": f"{_LATENCY[key]} (ms)" for key in ("ttft", "ttft_sent", "tpot", "e2el")},
        "ok": "whether the whole answer came",
        "error": "class of the failure; empty for success",
        "error_detail": "error message of the failure",
        "status": "HTTP status",
        "itl_s": "gaps between the events that brought text, a list (s)",
        "router_received_s": "when the router had the request (s)",
        "prefill_sent_s": "request sent to P (s)",
        "prefill_answered_s": "when P had answered (s)",
        "decode_sent_s": "request sent to D (s)",
        "decode_first_byte_s": "when D's first byte came (s)",
        "stamps": "where the times of what was received come from: kernel or read",
        "prompt_tokens": "the prompt's length as the server's usage reports it (tokens)",
        "text_crc": "CRC-32 of the answer's text, equal for equal answers",
        "text_bytes": "length of the answer's text (bytes)",
        "first_event_s": "when the first event of the stream came, with text or without (s)",
        "untimed_tokens": "tokens that did not come between the first text and the last; TPOT is of the rest",
        "empty_events": "events of the stream without text",
        "first_blank": "whether the first text was nothing but blanks",
        "session": "the number of its session in the trial",
        "turn": "which request of its conversation it is, from 0",
        "session_s": "of a session's last request: from the session's begin to its answer's end (s)",
        "cached_tokens": "tokens of its prompt that the cache of the engine that computed it had",
    },
    "telemetry": {
        "trial_id": _ABOUT["trial_id"],
        "t_s": "when (s)",
        "source": "host, instance or device",
        "metric": "what was sampled",
        "value": "its value, in the unit of the metric's name",
        "host": "host of the scenario; empty for the machine that kvbench ran on",
    },
    "transfers": {
        **_TRANSFER,
        "regions": "regions of memory of one transfer: it moves regions × batch_size blocks",
        "initiators": "processes that start transfers",
        "targets": "processes that they transfer with",
        "memory": "host or cuda",
        "scattered": "whether no two blocks touch each other",
        "merged": "whether adjacent blocks were merged",
        "shape": "the KV cache that the blocks stand for",
        "initiator_host": "the scenario's host of the initiators; empty where none was named",
        "target_host": "the scenario's host of the targets; empty where none was named",
        "status": "ok, error or skipped",
        "error": "why it failed or was skipped",
        "gb_per_s": "bandwidth over all initiators (10⁹ bytes/s)",
        "of_line_rate": "share of the NICs' line rate (1 is all)",
        "of_tcp": "share of plain TCP's bandwidth, same transfer, same run",
        "of_memcpy": "share of a copy in memory, same transfer, same run",
        "line_rate_gb_per_s": "what the NICs can carry together (10⁹ bytes/s)",
        **{
            f"call_s_{figure}": f"time of one transfer: {words} (s)"
            for figure, words in {
                "mean": "mean", "min": "least", "p50": "median", "p90": "90th percentile",
                "p99": "99th percentile", "p999": "99.9th percentile", "max": "most",
            }.items()
        },
        "calls": "transfers measured",
        "window_s": "from the first start to the last end (s)",
        "nbytes": "bytes of one transfer",
        "logical_bytes": "bytes of one transfer that a model's KV has, each counted once",
        "descriptors": "descriptors of one transfer, as handed to the library",
        "open_s": "time to open the library (s)",
        "register_s": "time to register the memory (s)",
        "connect_s": "time to connect (s)",
        "prepare_s": "time to make one transfer's descriptors ready (s)",
        "initiator_cpu_s": "CPU time of all initiators in the window (s)",
        "target_cpu_s": "CPU time of all targets in the window (s)",
        "cpu_s_per_gb": "CPU time of both sides by volume (s per 10⁹ bytes)",
        "transport": "the transport that really ran",
        "library": "name and version of the library",
        "verified": "whether all bytes were compared and equal; missing: this backend moves none",
        "lab": "the lab it ran in; empty on real hosts",
        "load_average": "of the machine",
        "nic_bytes": "bytes through each NIC in the window",
        "warnings": "kinds of warnings of the row; see run.findings",
        "started_at": "when it started (UTC)",
    },
    "models": {
        "way": "the next four in words",
        **{key: _TRANSFER[key] for key in ("backend", "protocol", "op", "nics")},
        "start_s": "what a transfer costs before its first byte (s)",
        "per_descriptor_s": "what each descriptor adds (s)",
        "gb_per_s": "bandwidth (10⁹ bytes/s); missing: no measurable cost of bytes",
        "points": "cases that it was fitted to",
        "median_error": "median of |model − measured| / measured",
        "worst_error": "the worst of them",
        "memory": "host or cuda",
        "descriptors_varied": "whether the cases determine the cost per descriptor",
    },
    "calls": {
        **_TRANSFER,
        "case": "names the case within its run",
        "call": "position of the transfer by its end, from 0",
        "call_s": "its time from start to completion (s)",
    },
    "findings": {
        "kind": "subject (trial, transfer, run) or rule (suspicious, claim, ahead, untold)",
        "level": "invalid (the trial is refused), warning or note",
        "gate": "what was checked",
        **{key: _ABOUT[key] for key in ("trial_id", "connector", "input_len", "request_rate")},
        "message": "what was found",
        "advice": "what to do about it",
    },
}  # fmt: skip
