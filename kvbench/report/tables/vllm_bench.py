"""Tables as ``vllm bench serve`` prints them: one load, listed rates, imported results, trace replays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from kvbench.core.records import TrialRecord
from kvbench.core.search.methods import SATURATED
from kvbench.report.tables.columns import OF_WHOLE_RUN
from kvbench.report.tables.table import (
    MISSING,
    WHOLE_RUN,
    Column,
    Table,
    number,
    of_method,
    percent,
)
from kvbench.results.provenance import slo_of
from kvbench.results.run import RunFolder

FIGURES: Final = ("mean", "p50", "p99")
_LATENCIES: Final = ("ttft", "tpot", "itl")


# --- one load --------------------------------------------------------------------------------------

DIFFERENCE: Final = "Latency counts from the scheduled send; `vllm bench serve` counts from the real one."
BLOCK_COLUMNS: Final = 4
"""Most loads side by side in one block."""
_LATENCY_TITLES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def bench_trials(run: RunFolder) -> list[TrialRecord]:
    """Return the last trial of each load and way of ``kvbench bench``; empty for other runs."""
    if run.manifest.get("kind") != "bench":
        return []
    tried = [trial for trial in run.all_trials if trial.method in ("sustained", "trace", "closed_loop")]
    return list({(trial.cell, trial.engine.get("load_mode")): trial for trial in tried}.values())


def bench_tables(named: Sequence[tuple[str, RunFolder]]) -> list[Table]:
    """Return the block of ``vllm bench serve``, with a column for each load that was not refused.

    ``named``: runs with their names, all empty for a single one."""
    shown = [
        (name, trial, _goodput(run, trial))
        for name, run in named
        for trial in bench_trials(run)
        if trial.verdict != "invalid"
    ]
    ways = len({trial.engine.get("load_mode") for _, trial, _ in shown}) > 1
    blocks = [shown[start : start + BLOCK_COLUMNS] for start in range(0, len(shown), BLOCK_COLUMNS)]
    return [_block(block, ways) for block in blocks]


def refused_text(trial: TrialRecord) -> str:
    """Return the refused load and its reason in one line."""
    cell, at_once = trial.cell, trial.engine.get("concurrency")
    load = f"{at_once} at once" if at_once else f"{number(trial.request_rate)} req/s"
    why = " ".join(trial.reason.split())
    return f"refused: {cell.connector}, {cell.input_len:,} in, {cell.output_len:,} out, {load}: {why}"


def _goodput(run: RunFolder, trial: TrialRecord) -> float | None:
    """Return requests within the SLO per second of the whole run; None without limits on single requests."""
    met, duration_s = trial.summary.get("met"), _whole(trial).get("duration_s")
    return met / duration_s if slo_of(run).main().each and met is not None and duration_s else None


def _arrived(trial: TrialRecord) -> float | None:
    """Return the sent requests per second up to the last arrival; None if no rate was offered. Gaps between
    arrivals are random, so it differs from the offered rate; no rate of the whole run is above it."""
    sent, last_s = trial.summary.get("sent"), (trial.summary.get("window") or {}).get("end_s")
    return sent / last_s if trial.request_rate and sent and last_s else None


def _block(found: Sequence[tuple[str, TrialRecord, float | None]], ways: bool) -> Table:
    shown = [(name, trial) for name, trial, _ in found]
    goodput = [rate for _, _, rate in found]
    cells, groups = _first_lines([trial for _, trial in shown], goodput), {0: ""}
    for latency, title in _LATENCY_TITLES.items():
        groups[len(cells)] = title
        for word, key in (("Mean", "mean"), ("Median", "p50"), ("P90", "p90"), ("P99", "p99")):
            figures = [(_whole(trial).get(f"{latency}_ms") or {}).get(key) for _, trial in shown]
            cells.append([f"{word} {latency.upper()} (ms)", *map(number, figures)])
    moved = [
        [title, *(number(trial.engine.get(key)) for _, trial in shown)]
        for title, key in (
            ("Mean KV transfer (ms)", "kv_transfer_ms_per_request"),
            ("KV bytes per request", "kv_bytes_per_request"),
        )
    ]
    if any(cell != MISSING for row in moved for cell in row[1:]):
        groups[len(cells)] = "KV Transfer"
        cells += moved
    titles = [_column_title(name, trial, ways) for name, trial in shown]
    columns = [Column("", "", align="left"), *(Column("", title, align="right") for title in titles)]
    rows = [
        {
            **about(trial),
            "max_concurrency": trial.engine.get("concurrency"),
            **serve_values(trial),
            "arrived_request_rate": _arrived(trial),
            "run_request_goodput": good,
            "peak_output_tok_per_s": trial.summary.get("peak_output_tok_per_s"),
            "peak_in_flight": trial.summary.get("peak_in_flight"),
            "verdict": trial.verdict,
        }
        for _, trial, good in found
    ]
    return Table("Serving benchmark", columns, cells, rows, "bench", DIFFERENCE, groups, window=WHOLE_RUN)


def _column_title(name: str, trial: TrialRecord, ways: bool) -> str:
    label = f"{trial.cell.connector}@{name}" if name else trial.cell.connector
    lengths = f"{trial.cell.input_len:,} in, {trial.cell.output_len:,} out"
    return "\n".join([label, lengths, *([str(trial.engine.get("load_mode"))] if ways else [])])


def _whole(trial: TrialRecord) -> Mapping[str, Any]:
    return trial.summary.get("whole_run") or {}


def _first_lines(trials: Sequence[TrialRecord], goodput: Sequence[float | None]) -> list[list[str]]:
    """Counts and rates; a line for which no trial has a value is left out, unless vLLM's block has it."""
    values = [serve_values(trial) for trial in trials]
    lines: list[tuple[str, list[str], bool]] = [
        ("Successful requests", [_count(value["completed"]) for value in values], True),
        ("Failed requests", [_count(value["failed"]) for value in values], True),
        ("Requests cancelled at the end", [_count(value["cancelled"] or None) for value in values], False),
        ("Maximum request concurrency", [_count(trial.engine.get("concurrency")) for trial in trials], False),
        ("Request rate offered (req/s)", [number(trial.request_rate or None) for trial in trials], False),
        ("Request rate arrived (req/s)", [number(_arrived(trial)) for trial in trials], False),
        ("Benchmark duration (s)", [number(value["duration_s"]) for value in values], True),
        ("Total input tokens", [_count(value["total_input_tokens"]) for value in values], True),
        ("Total generated tokens", [_count(value["total_output_tokens"]) for value in values], True),
        ("Request throughput (req/s)", [number(value["request_throughput"]) for value in values], True),
        ("Request goodput (req/s)", list(map(number, goodput)), False),
        ("Output token throughput (tok/s)", [number(value["output_throughput"]) for value in values], True),
        (
            "Peak output token throughput (tok/s)",
            [number(trial.summary.get("peak_output_tok_per_s")) for trial in trials],
            True,
        ),
        ("Peak concurrent requests", [_count(trial.summary.get("peak_in_flight")) for trial in trials], True),
        (
            "Total token throughput (tok/s)",
            [number(value["total_token_throughput"]) for value in values],
            True,
        ),
    ]
    return [[title, *cells] for title, cells, always in lines if always or set(cells) != {MISSING}]


# --- listed rates ----------------------------------------------------------------------------------

_SERVE_HEADER: Final = (
    "successful", "failed", "cancelled", "duration (s)", "input tokens", "output tokens",
    *(f"{title}{OF_WHOLE_RUN}" for title in (
        "req/s", "output tok/s", "total tok/s", "TTFT mean / P50 / P99 (ms)", "TPOT mean / P50 / P99 (ms)",
        "ITL mean / P50 / P99 (ms)",
    )),
)  # fmt: skip
_RATES_SHOWN: Final = _SERVE_HEADER[6:8]
_FIXED_WORDS: Final = (
    "All answered requests over the whole duration, ramp and drain included, as in `vllm bench serve`; "
    "but TTFT counts from the scheduled send, and requests that kvbench cancelled when it stopped a trial "
    "are not "
    "failed. *saturated*: the system did not keep up with the offered rate, so latencies depend on the "
    "trial's length."
)


_FIXED_BRIEF: Final = (
    "connector", "input", "offered req/s", *_RATES_SHOWN, _SERVE_HEADER[9], _SERVE_HEADER[10], "state",
)  # fmt: skip


def serve_values(trial: TrialRecord) -> dict[str, Any]:
    """Return the columns of ``vllm bench serve``."""
    whole = trial.summary.get("whole_run") or {}
    values: dict[str, Any] = {
        "completed": whole.get("successful"),
        "failed": _failed(trial),
        "cancelled": trial.summary.get("cancelled"),
        "duration_s": whole.get("duration_s"),
        "total_input_tokens": whole.get("input_tokens"),
        "total_output_tokens": whole.get("output_tokens"),
        "request_throughput": whole.get("request_throughput"),
        "output_throughput": whole.get("output_throughput"),
        "total_token_throughput": whole.get("total_throughput"),
    }
    for latency in (*_LATENCIES, "e2el"):
        for figure in ("mean", "p50", "p90", "p99"):
            name = {"mean": "mean", "p50": "median"}.get(figure, figure)
            values[f"{name}_{latency}_ms"] = (whole.get(f"{latency}_ms") or {}).get(figure)
    return values


def _failed(trial: TrialRecord) -> int | None:
    """Return the failed requests; older folders include those that kvbench cancelled."""
    whole = trial.summary.get("whole_run") or {}
    failed, cancelled = whole.get("failed"), trial.summary.get("cancelled") or 0
    return failed - cancelled if failed is not None and "cancelled" not in whole else failed


def _serve_cells(trial: TrialRecord) -> list[str]:
    whole = trial.summary.get("whole_run") or {}
    counted = [whole.get("successful"), _failed(trial), trial.summary.get("cancelled")]
    counts = [f"{count or 0:,}" for count in counted]
    tokens = [f"{whole.get(key, 0):,}" for key in ("input_tokens", "output_tokens")]
    rates = [number(whole.get(f"{key}_throughput")) for key in ("request", "output", "total")]
    latencies = [
        " / ".join(number((whole.get(f"{latency}_ms") or {}).get(figure)) for figure in FIGURES)
        for latency in _LATENCIES
    ]
    return [*counts, number(whole.get("duration_s")), *tokens, *rates, *latencies]


def _state(trial: TrialRecord) -> str:
    return refused_by(trial) or (SATURATED if SATURATED in trial.labels else "kept up")


def refused_by(trial: TrialRecord) -> str:
    """Return which gates refused a trial; empty if none did. The trial's reason says why."""
    gates = dict.fromkeys(finding.gate for finding in trial.findings if finding.level == "invalid")
    return ": ".join(filter(None, ("refused", ", ".join(gates)))) if trial.verdict == "invalid" else ""


def fixed_tables(run: RunFolder) -> Iterable[Table]:
    """Return three views of the same trials, each led by the varying axis."""
    trials = [trial for trial in run.other_trials if trial.method == "fixed"]
    if not trials:
        return
    rows = [_fixed_row(trial) for trial in trials]
    views: dict[str, tuple[str, Any]] = {
        "by_rate": ("by rate", lambda t: (t.cell.input_len, t.cell.connector, t.request_rate)),
        "by_input_len": ("by input length", lambda t: (t.request_rate, t.cell.connector, t.cell.input_len)),
        "by_connector": ("by connector", lambda t: (t.cell.input_len, t.request_rate, t.cell.connector)),
    }
    several = {
        "by_rate": len({trial.request_rate for trial in trials}) > 1,
        "by_input_len": len({trial.cell.input_len for trial in trials}) > 1,
        "by_connector": len({trial.cell.connector for trial in trials}) > 1,
    }
    chosen = [view for view, varies in several.items() if varies] or ["by_rate"]
    for view in chosen:
        title, key = views[view]
        keyed = [(key(trial), index) for index, trial in enumerate(trials)]
        ordered = [index for _, index in sorted(keyed)]
        yield of_method(
            f"fixed_{view}",
            f"Listed rates, {title}",
            _FIXED_WORDS if view == chosen[0] else "The same trials.",
            ["connector", "input", "output", "offered req/s", *_SERVE_HEADER, "state"],
            [
                [
                    trials[index].cell.connector,
                    f"{trials[index].cell.input_len}",
                    f"{trials[index].cell.output_len}",
                    number(trials[index].request_rate),
                    *_serve_cells(trials[index]),
                    _state(trials[index]),
                ]
                for index in ordered
            ],
            [rows[index] for index in ordered],
            _FIXED_BRIEF if view == chosen[0] else (),
            WHOLE_RUN,
        )


_CLOSED_WORDS: Final = (
    "Closed loop: a fixed number of requests in flight; each finished request starts the next one. No "
    "rate is offered, so a slow server gets fewer requests: `req/s, whole run` is the completed rate, not a "
    "sustained rate. All answered requests over the whole duration, as in `vllm bench serve "
    "--max-concurrency`."
)


def closed_loop_table(run: RunFolder) -> Table:
    trials = [trial for trial in run.other_trials if trial.method == "closed_loop"]
    shown, rows = [], []
    for trial in trials:
        at_once = trial.engine.get("concurrency")
        shown.append(
            [
                *(trial.cell.connector, f"{trial.cell.input_len}", f"{trial.cell.output_len}", f"{at_once}"),
                *_serve_cells(trial),
                refused_by(trial) or trial.verdict,
            ]
        )
        values = {key: value for key, value in about(trial).items() if key != "request_rate"}
        rows.append({**values, "max_concurrency": at_once, **serve_values(trial), "verdict": trial.verdict})
    header = ["connector", "input", "output", "at once", *_SERVE_HEADER, "state"]
    brief = ["at once" if name == "offered req/s" else name for name in _FIXED_BRIEF]
    return of_method("closed_loop", "Closed loop", _CLOSED_WORDS, header, shown, rows, brief, WHOLE_RUN)


def _fixed_row(trial: TrialRecord) -> dict[str, Any]:
    return {
        **about(trial),
        **serve_values(trial),
        "achieved_request_rate": trial.summary.get("achieved_rate"),
        "saturated": SATURATED in trial.labels,
        "verdict": trial.verdict,
        "reason": trial.reason,
    }


def about(trial: TrialRecord) -> dict[str, Any]:
    return {
        "trial_id": trial.trial_id,
        "method": trial.method,
        "connector": trial.cell.connector,
        "input_len": trial.cell.input_len,
        "output_len": trial.cell.output_len,
        "request_rate": trial.request_rate,
    }


# --- imported results ------------------------------------------------------------------------------

_IMPORTED_WORDS: Final = (
    "Figures as the measuring tool reported them; kvbench judged nothing. Unreported figures are "
    "missing. TTFT counts from the tool's send. `source`: file and lines of the row."
)


def imported_table(run: RunFolder) -> Table:
    trials = [trial for trial in run.other_trials if trial.method == "imported"]
    axes = [
        axis
        for axis in ("protocol", "nics", "tp")
        if any((trial.engine.get("settings") or {}).get(axis) is not None for trial in trials)
    ]
    rows, shown = [], []
    for trial in trials:
        settings, source = trial.engine.get("settings") or {}, trial.engine.get("source") or {}
        lines = dict.fromkeys((source.get("line"), source.get("last_line")))
        source_lines = f"{source.get('file')}:{'-'.join(str(line) for line in lines)}"
        values, varied = serve_values(trial), {axis: settings.get(axis) for axis in axes}
        rows.append({**about(trial), **varied, **values, "source": source_lines})
        counts = [_count(values[key]) for key in ("completed", "failed")]
        tokens = [_count(values[key]) for key in ("total_input_tokens", "total_output_tokens")]
        rates = [number(values[f"{key}_throughput"]) for key in ("request", "output", "total_token")]
        shown.append(
            [
                trial.cell.connector,
                f"{trial.cell.input_len}",
                f"{trial.cell.output_len}",
                *("–" if varied[axis] is None else str(varied[axis]) for axis in axes),
                number(trial.request_rate or None),
                *[*counts, number(values["duration_s"]), *tokens, *rates],
                *(_figures(values, latency) for latency in (*_LATENCIES, "e2el")),
                source_lines,
            ]
        )
    header = ["connector", "input", "output", *axes, "offered req/s", *_IMPORTED_HEADER, "source"]
    brief = (*header[: 4 + len(axes)], *_RATES_SHOWN, *_IMPORTED_HEADER[8:10])
    title = "Imported results"
    return of_method("imported", title, _IMPORTED_WORDS, header, shown, rows, brief, WHOLE_RUN)


_IMPORTED_HEADER: Final = (
    *(title for title in _SERVE_HEADER[:9] if title != "cancelled"),
    *(f"{latency} mean / P50 / P90 / P99 (ms){OF_WHOLE_RUN}" for latency in ("TTFT", "TPOT", "ITL", "E2EL")),
)


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else "–"


def _figures(values: Mapping[str, Any], latency: str) -> str:
    shown = [values[f"{figure}_{latency}_ms"] for figure in ("mean", "median", "p90", "p99")]
    return " / ".join(number(value) for value in shown) if any(value is not None for value in shown) else "–"


# --- traces ----------------------------------------------------------------------------------------


def trace_table(run: RunFolder) -> Table:
    trace = run.manifest.get("trace")
    trials = [trial for trial in run.trials if trial.method == "trace"]
    if not isinstance(trace, Mapping) or not trials:
        return of_method("trace", "", "", (), (), ())
    recorded_rate = trace.get("request_rate")
    header = [
        "connector", "rate (req/s)", "speed-up", *_SERVE_HEADER, "prefix hits expected (%)",
        "measured, P (%)", "measured, D (%)", "verdict",
    ]  # fmt: skip
    shown, rows = [], []
    for trial in trials:
        factor = trial.request_rate / recorded_rate if recorded_rate else None
        expected = trial.engine.get("expected_hit_rate")
        hits = [trial.engine.get(f"prefix_hit_rate_{role}") for role in ("prefill", "decode")]
        shown.append(
            [
                trial.cell.connector,
                number(trial.request_rate),
                "–" if factor is None else f"{number(factor)} ×",
                *_serve_cells(trial),
                *(percent(share) for share in (expected, *hits)),
                trial.verdict,
            ]
        )
        rows.append(
            {
                **about(trial),
                "speed_up": factor,
                **serve_values(trial),
                "expected_hit_rate": expected,
                "prefix_hit_rate_prefill": hits[0],
                "prefix_hit_rate_decode": hits[1],
                "verdict": trial.verdict,
            }
        )
    words = (
        f"{trace.get('path')}: {trace.get('requests'):,} requests in {number(trace.get('duration_s'))} s, "
        f"{number(trace.get('mean_input_len'))} tokens in and {number(trace.get('mean_output_len'))} out on "
        f"average, time scaled by {trace.get('time_scale'):g}; the speed-up is relative to that. Expected "
        "hits assume an unlimited cache that holds a prompt from its arrival; real caches hit less."
    )
    brief = (*header[:3], _RATES_SHOWN[0], _SERVE_HEADER[9], _SERVE_HEADER[10], *header[-4:-2], "verdict")
    return of_method("trace", "The trace", words, header, shown, rows, brief, WHOLE_RUN)
