"""One table per method besides the main column:
- listed rates (``fixed``), by rate, input length and connector;
- one load, as ``vllm bench serve`` shows it;
- closed loop: results at fixed concurrency, not a rate;
- ``burst``: the rate by means over five seconds, with the sustained rate and their ratio;
- equal rate: all connectors at the lowest resulting rate;
- SLO tiers: each tier's answer from the same trials;
- imported results;
- a trace: requested load, and expected and measured prefix hits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.core.records import TrialRecord
from kvbench.report.tables.columns import OF_WHOLE_RUN
from kvbench.report.tables.result import highest_met, interval_word, stored_answer
from kvbench.report.tables.table import STEADY, WHOLE_RUN, Table, number, of_method, percent
from kvbench.report.tables.vllm_bench import (
    FIGURES,
    about,
    bench_tables,
    closed_loop_table,
    fixed_tables,
    imported_table,
    refused_by,
    serve_values,
    trace_table,
)
from kvbench.results.run import CellResult, RunFolder


def method_tables(run: RunFolder) -> list[Table]:
    """Return the run's non-empty tables in reading order."""
    tables = (
        _tiers(run),
        _burst(run),
        _equal_rate(run),
        *bench_tables([("", run)]),
        *fixed_tables(run),
        closed_loop_table(run),
        trace_table(run),
        imported_table(run),
    )
    return [table for table in tables if table.rows]


# --- burst and sustained --------------------------------------------------------------------------


def _burst(run: RunFolder) -> Table:
    sustained = {result.cell: result for result in run.cells if result.method == "sustained"}
    shown, rows, answers = [], [], []
    for result in run.other_cells:
        burst, paired = stored_answer(run, result), sustained.get(result.cell)
        if result.method != "burst" or result.status != "done" or burst is None:
            continue
        rate = stored_answer(run, paired) if paired else None
        answers += [] if rate is None else [rate]
        trial = _trial_at(run, result, burst.max_request_rate)
        known = rate.max_request_rate if rate else None
        ratio = burst.max_request_rate / known if burst.max_request_rate and known else None
        summary = trial.summary if trial else {}
        whole = summary.get("whole_run") or {}
        shown.append(
            [
                result.cell.connector,
                f"{result.cell.input_len}",
                rate.text() if rate else "not measured",
                f"{burst.text()} (burst)",
                "–" if ratio is None else f"{number(ratio)} ×",
                f"{summary['planned']} requests" if summary else "–",
                number(whole.get("request_throughput")),
                f"{summary.get('peak_in_flight', '–')}",
            ]
        )
        rows.append(
            {
                "connector": result.cell.connector,
                "input_len": result.cell.input_len,
                "output_len": result.cell.output_len,
                "sustained_request_rate": known,
                "burst_request_rate": burst.max_request_rate,
                "burst_lower": burst.lower,
                "burst_upper": burst.upper,
                "ratio": ratio,
                "status": (result.answer or {}).get("status"),
                "trial_id": trial.trial_id if trial else None,
                "requests": summary.get("planned"),
                "completed_per_s": whole.get("request_throughput"),
                "peak_in_flight": summary.get("peak_in_flight"),
            }
        )
    header = [
        "connector", "input", f"sustained (req/s) {interval_word(answers)}",
        "burst (req/s) [met, missed], no sustained rate", "burst / sustained", "burst size",
        f"req/s{OF_WHOLE_RUN}", "peak in flight",
    ]  # fmt: skip
    brief = (*header[:5], header[6])
    words = (
        "The burst rule offers n = 5 × rate requests within five seconds, checks only the means of TTFT and "
        "TPOT, and bisects the rate. Its result is a batch size, not a sustained rate: "
        "compare it with the requests completed per second over the same trial."
    )
    return of_method("burst", "Burst and sustained", words, header, shown, rows, brief, WHOLE_RUN)


def _trial_at(run: RunFolder, result: CellResult, rate: float | None) -> TrialRecord | None:
    """Return the trial that supports an answer of another method or tier."""
    method = [trial for trial in run.all_trials if (trial.cell, trial.method) == (result.cell, result.method)]
    return highest_met(method, rate, result.tier)


# --- one equal rate --------------------------------------------------------------------------------


def _equal_rate(run: RunFolder) -> Table:
    trials = sorted(run.equal_rate_trials, key=lambda trial: (trial.cell.input_len, trial.cell.output_len))
    header = [
        "connector", "input", "rate (req/s)", "met (%)", "TTFT mean / P50 / P99 (ms)",
        "TPOT mean / P50 / P99 (ms)", "E2EL P50 / P99 (ms)", "output tok/s", "KV (ms/req)", "verdict",
    ]  # fmt: skip
    shown = []
    for trial in trials:
        summary = trial.summary

        def figures(latency: str, names: Sequence[str], of: Mapping[str, Any] = summary) -> str:
            return " / ".join(number((of.get(f"{latency}_ms") or {}).get(name)) for name in names)

        shown.append(
            [
                trial.cell.connector,
                f"{trial.cell.input_len}",
                number(trial.request_rate),
                percent(summary.get("slo_attainment")),
                figures("ttft", FIGURES),
                figures("tpot", FIGURES),
                figures("e2el", ("p50", "p99")),
                number(summary.get("output_tok_per_s")),
                number(trial.engine.get("kv_transfer_ms_per_request")),
                refused_by(trial) or trial.verdict,
            ]
        )
    rows = [
        {
            **about(trial),
            "slo_attainment": trial.summary.get("slo_attainment"),
            **serve_values(trial),
            "kv_transfer_ms_per_request": trial.engine.get("kv_transfer_ms_per_request"),
            "verdict": trial.verdict,
            "reason": trial.reason,
        }
        for trial in trials
    ]
    words = (
        "All connectors at the lowest rate that any connector reached for the input length, with the "
        "same prompts at the same times, in a second deployment; one trial each, latencies of the "
        "steady window."
    )
    brief = (*header[:6], "KV (ms/req)", "verdict")
    return of_method("equal_rate", "At one equal rate", words, header, shown, rows, brief, STEADY)


# --- tiers -----------------------------------------------------------------------------------------


def _tiers(run: RunFolder) -> Table:
    results = [result for result in (*run.cells, *run.other_cells) if result.tier]
    results.sort(key=lambda result: (result.cell.input_len, result.cell.connector))
    shown, rows, answers = [], [], []
    for result in results:
        answer = stored_answer(run, result)
        trial = _trial_at(run, result, answer.max_request_rate if answer else None)
        answers += [] if answer is None else [answer]
        shown.append(
            [
                result.cell.connector,
                f"{result.cell.input_len}",
                result.tier,
                answer.text() if answer else result.status,
                str((result.answer or {}).get("status") or ""),
                trial.trial_id if trial else "–",
            ]
        )
        rows.append(
            {
                "connector": result.cell.connector,
                "input_len": result.cell.input_len,
                "output_len": result.cell.output_len,
                "tier": result.tier,
                "max_request_rate": answer.max_request_rate if answer else None,
                "lower": answer.lower if answer else None,
                "upper": answer.upper if answer else None,
                "status": (result.answer or {}).get("status"),
                "trial_id": trial.trial_id if trial else None,
            }
        )
    words = (
        "Every trial was judged for every tier. The main table shows the strictest tier; the rate of another "
        "tier uses the trials of all tiers."
    )
    rate = f"max rate (req/s) {interval_word(answers)}"
    header = ["connector", "input", "tier", rate, "search", "trial"]
    return of_method("tiers", "By tier of the SLO", words, header, shown, rows)
