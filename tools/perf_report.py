"""What a report costs: ``make perf-report``. A benchmark, not a test: it judges nothing.

Two made-up runs. The first is a sweep of 60 trials of 500 requests: ``kvbench report`` as a process, every
format, its time and its largest memory. The second is 10 million requests in 20 trials: the means with
their errors and the P99 of each trial, from the Parquet columns that they need, beside what the whole files
hold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import Cell, RequestRecord, TrialRecord
from kvbench.core.slo import Slo
from kvbench.results.store import CellResult, RunInfo, RunStore
from tools.bench import MB, arguments, table, workplace

CONNECTORS = ("mooncake", "nixl", "tcp")
INPUT_LENS = (1024, 4096, 8192, 16384)
OUTPUT_LEN = 32
SLO = {"ttft_ms": 500.0, "tpot_ms": 15.0, "attainment": 0.95}
PLAN: dict[str, Any] = {"scenario": {"name": "perf-report", "model": "tiny", "slo": SLO}}
REPORT_S, REPORT_MB = 5.0, 400.0
DEADLINE_S = 300
MANY_TRIALS = 20


def requests_of(cell: Cell, rate: float, count: int, seed: int) -> list[RequestRecord]:
    rng = np.random.default_rng(seed)
    sends = np.cumsum(rng.exponential(1 / rate, count))
    firsts = sends + 0.05 + cell.input_len * 1e-5 + rng.exponential(0.02 * rate, count)
    gaps = rng.normal(0.01, 0.001, (count, OUTPUT_LEN - 1)).clip(0.001)
    return [
        RequestRecord(
            f"r{place}", sends[place], cell.input_len, OUTPUT_LEN, sends[place] + 1e-4, firsts[place],
            firsts[place] + float(gaps[place].sum()), OUTPUT_LEN, gaps[place], 200,
        )
        for place in range(count)
    ]  # fmt: skip


def a_sweep(folder: Path, trials: int, count: int) -> Path:
    store = RunStore.create(
        folder, "perf-report", b"name: perf-report\n", PLAN, {}, RunInfo(labels=["emulated"])
    )
    cells = [Cell(connector, length, OUTPUT_LEN) for length in INPUT_LENS for connector in CONNECTORS]
    with store:
        for place in range(trials):
            cell, rate = cells[place % len(cells)], 2.0 * (1 + place // len(cells))
            records = requests_of(cell, rate, count, place)
            duration = max(record.last_token_s or 0.0 for record in records)
            summary = summarise(records, Slo(500.0, 15.0, 0.95), rate, duration).to_json()
            verdict = "met" if summary["slo_attainment"] >= SLO["attainment"] else "missed"
            store.add_trial(
                TrialRecord(
                    f"{cell.key}-{place:03d}", cell, rate, place, verdict, "", "expand",  # type: ignore[arg-type]
                    "2026-11-21T13:30:00.000Z", duration, summary, {}, [], ["emulated"],
                ),
                records,
            )  # fmt: skip
        for cell in cells:
            answer = {"max_request_rate": 6.0, "lower": 5.0, "upper": 7.0, "status": "converged"}
            store.put_cell(CellResult(cell, "done", answer))
    return store.path


def many_requests(folder: Path, total: int) -> Path:
    """A run of listed rates with ``total`` requests, written column by column."""
    info = RunInfo(kind="fixed", labels=["emulated"])
    store = RunStore.create(folder, "perf-many", b"name: perf-many\n", PLAN, {}, info)
    count = total // MANY_TRIALS
    with store:
        for place in range(MANY_TRIALS):
            cell = Cell(CONNECTORS[place % 2], 1024, OUTPUT_LEN)
            trial_id = f"{cell.key}-{place:03d}"
            _write_columns(store.path / "requests" / f"{trial_id}.parquet", cell, count, place)
            summary = {"planned": count, "whole_run": {"successful": count, "ttft_ms": {"mean": 100.0}}}
            store.add_trial(
                TrialRecord(trial_id, cell, 100.0, place, "measured", "", summary=summary, method="fixed")
            )
    return store.path


def _write_columns(path: Path, cell: Cell, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sends = np.cumsum(rng.exponential(0.01, count))
    firsts = sends + rng.exponential(0.1, count)
    gaps = rng.normal(0.01, 0.001, count * 4).astype(np.float32)
    columns: dict[str, Any] = {
        "request_id": [f"{cell.key}-{place}" for place in range(count)],
        "scheduled_s": sends,
        "input_len": np.full(count, cell.input_len, np.int32),
        "requested_output_len": np.full(count, OUTPUT_LEN, np.int32),
        "sent_s": sends + 1e-4,
        "first_token_s": firsts,
        "last_token_s": firsts + rng.normal(0.31, 0.01, count),
        "output_len": np.full(count, OUTPUT_LEN, np.int32),
        "itl_s": pa.ListArray.from_arrays(np.arange(0, 4 * count + 1, 4, dtype=np.int32), gaps),
        "status": np.full(count, 200, np.int32),
        "error": pa.array([""] * count),
        "error_detail": pa.array([""] * count),
    }
    pq.write_table(pa.table(columns), path, compression="zstd")


def measured(argv: Sequence[str]) -> tuple[float, float, float]:
    """(wall seconds, CPU seconds, largest memory in MB) of a command; its output is dropped.

    Raises SystemExit where it fails.
    """
    begun = time.monotonic()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as process:
        # wait4 gives this child's own memory; a child that hangs is killed by its alarm.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {process.returncode}")
    return time.monotonic() - begun, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / MB


_SUMMARY = """
from kvbench.report.findings.load_rows import load_rows
from kvbench.results.run import load_run
rows = load_rows(load_run(sys.argv[1]))
assert len(rows) == {trials} and all(row.errors["mean_ttft_ms"] > 0 for row in rows)
"""
_COLUMNS = """
from kvbench.results.run import load_run
run = load_run(sys.argv[1])
for trial in run.all_trials:
    frame = run.requests(trial.trial_id{columns})
    (frame["first_token_s"] - frame["scheduled_s"]).quantile(0.99)
"""
_REPORT = """
sys.argv = ["kvbench", "report", sys.argv[1]]
from kvbench.cli import main
main()
"""


def main() -> None:
    chosen = arguments(
        __doc__,
        trials=(60, "of the first run"),
        requests=(500, "of each of its trials"),
        many=(10_000_000, "requests of the second run; 0: without it"),
        repeats=(3, "of which the best counts"),
    )
    rows: list[tuple[str, float, float, float, str]] = []

    def add(what: str, code: str, folder: Path, limits: str = "", **values: Any) -> None:
        text = f"import signal, sys; signal.alarm({DEADLINE_S})\n{code.format(**values)}"
        best = min(measured([sys.executable, "-c", text, str(folder)]) for _ in range(chosen.repeats))
        rows.append((what, *best, limits))

    with workplace("perf-report") as (temporary, _):
        sweep = a_sweep(temporary, chosen.trials, chosen.requests)
        limit = f"≤ {REPORT_S:g} s, ≤ {REPORT_MB:g} MB"
        add(f"report, {chosen.trials} trials × {chosen.requests} requests", _REPORT, sweep, limit)
        if chosen.many:
            many = many_requests(temporary, chosen.many)
            size = sum(file.stat().st_size for file in (many / "requests").iterdir()) / MB
            words = f"{chosen.many:,} requests ({size:.0f} MB): "
            add(f"{words}means and errors of each trial", _SUMMARY, many, trials=MANY_TRIALS)
            two = ', ["scheduled_s", "first_token_s"]'
            add(f"{words}P99 TTFT of each trial, 2 columns", _COLUMNS, many, columns=two)
            add(f"{words}the same with all columns read", _COLUMNS, many, columns="")
    cells = [[what, limit, f"{s:.2f}", f"{cpu:.2f}", f"{mb:.0f}"] for what, s, cpu, mb, limit in rows]
    print(
        table("what|limit", "wall s|CPU s|memory MB", cells, "best of several, this machine as busy as it is")
    )


if __name__ == "__main__":
    main()
