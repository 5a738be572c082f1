"""What the load generator costs and errs: ``make perf-loadgen``. A benchmark, not a test: it judges nothing.

Levels of streams are those of ``kvbench doctor selftest`` (the exact server). Further figures: CPU time until
the generator is ready, send lag with long prompts, memory and file of a million chunks. Limits are those of
an idle machine and the compiled way; ``KVBENCH_PURE_PYTHON=1`` measures the other. Figures are medians of
repeats, each of which goes through all levels: a shared machine has slow minutes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvbench.hosts.procfs import cpu_s
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest import Level, measure
from kvbench.sweep.selftest_server import exact_server
from tools.bench import MB, Row, arguments, limit_table, load_spec, machine_load, repeats, workplace

LEVELS = (10, 100, 300, 1000)
TTFT_P50_MS = {10: 0.1, 100: 0.1, 300: 0.1}
TTFT_P99_MS = {300: 0.5, 1000: 2.0}
ITL_P99_MS = {300: 0.5}
CHUNKS_PER_CORE_S = {1000: 150_000.0}
READY_CPU_S = 0.6
SEND_LAG_P99_MS = 1.0
RECORD_MB = 40.0
READY_DEADLINE_S = 120.0
END_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Ran:
    client: dict[str, Any]
    ready_cpu_s: float
    grown_mb: float
    file_mb: float


def main() -> None:
    chosen = arguments(
        __doc__,
        seconds=(5.0, "measured at each number of streams"),
        repeats=(3, "of each number of streams, and of the sends"),
        chunks=(1_000_000, "chunks of the run for the memory"),
    )
    with workplace("perf-loadgen") as (folder, launcher):
        found = [measure(LEVELS, chosen.seconds, folder / str(n), print) for n in repeats(chosen.repeats)]
        levels = [middle(same) for same in zip(*(one.levels for one in found), strict=True)]
        rows = [row for level in levels for row in level_rows(level)]
        rows += run_rows(folder, launcher, chosen.chunks, chosen.repeats)
    print(limit_table(rows))
    print(f"reads by: {', '.join(sorted({level.reads_by for level in levels}))}")
    print(machine_load())


def middle(levels: Sequence[Level]) -> Level:
    """The median of each figure of one number of streams; what is no figure is the first's."""
    found: dict[str, Any] = {}
    for field in fields(Level):
        values = [getattr(level, field.name) for level in levels]
        if all(isinstance(value, float) for value in values):
            found[field.name] = statistics.median(values)
    return replace(levels[0], **found)


def level_rows(level: Level) -> list[Row]:
    n = level.streams
    what = f"{n} streams: "
    p50, p99, itl = (limits.get(n) for limits in (TTFT_P50_MS, TTFT_P99_MS, ITL_P99_MS))
    rows = [
        Row(what + "TTFT error, p50", level.ttft_error_p50_ms, "ms", p50),
        Row(what + "TTFT error, p99", level.ttft_error_p99_ms, "ms", p99),
        Row(what + "ITL error, p99", level.itl_error_p99_ms, "ms", itl),
        Row(what + "send lag, p99", level.send_lag_p99_ms, "ms"),
    ]
    chunks, limit = level.chunks_per_core_s, CHUNKS_PER_CORE_S.get(n)
    return [*rows, Row(what + "chunks per core-second", chunks, "", limit, at_least=True)]


def run_rows(folder: Path, launcher: LocalLauncher, chunks: int, repeats: int) -> Iterator[Row]:
    """What needs runs of its own. They take at most a few minutes each, or fail."""

    def sent(rate: float, requests: int, input_len: int, output_len: int) -> Ran:
        lengths = {"input_len": input_len, "output_len": output_len}
        return ran(folder, launcher, {"rate": rate, "requests": requests, **lengths})

    few = sent(10.0, 10, 1024, 2)
    yield Row("start-up, CPU time until ready", few.ready_cpu_s, "s", READY_CPU_S)
    for rate, input_len in ((300.0, 1024), (20.0, 32_768)):
        runs = [sent(rate, round(rate * 5), input_len, 4) for _ in range(repeats)]
        what = f"{rate:g} requests/s of {input_len} tokens: send lag, p99"
        lag_ms = statistics.median(one.client["send_lag_p99_ms"] for one in runs)
        yield Row(what, lag_ms, "ms", SEND_LAG_P99_MS)
    many = sent(500.0, max(1, chunks // 128), 32, 128)
    millions = many.client["chunks"] / 1e6
    yield Row("memory for a million chunks", many.grown_mb / millions, "MB", RECORD_MB)
    yield Row("file of a million chunks", many.file_mb / millions, "MB", RECORD_MB)


def ran(folder: Path, launcher: LocalLauncher, changes: dict[str, Any]) -> Ran:
    records = folder / "records"
    with exact_server(launcher, {"first_token_s": 0.05, "gap_s": 0.01}) as server:
        more = {"wait_for_go": True, "slo": {"ttft_ms": 100.0, "tpot_ms": 10.0}, **changes}
        path = folder / "spec.json"
        path.write_text(json.dumps(load_spec(server.url, records, **more)))
        with generator(path) as process:
            return followed(process, records)


@contextlib.contextmanager
def generator(spec: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvbench.processes.loadgen", str(spec)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def followed(process: subprocess.Popen[str], records: Path) -> Ran:
    """From ready to end. Raises RuntimeError if it ends early."""
    assert process.stdin is not None
    assert process.stdout is not None
    deadline = time.monotonic() + READY_DEADLINE_S + END_DEADLINE_S
    ready_cpu_s, before_mb = 0.0, 0.0
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready":
            ready_cpu_s, before_mb = cpu_s([process.pid]), memory_mb(process.pid, "VmRSS")
            process.stdin.write("go\n")
            process.stdin.flush()
        elif event["event"] == "end":
            grown_mb = memory_mb(process.pid, "VmHWM") - before_mb
            return Ran(event["client"], ready_cpu_s, grown_mb, records.stat().st_size / MB)
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the load generator did not come to its end; what it said is above")


def memory_mb(pid: int, name: str) -> float:
    """A line of a process's status, such as VmRSS (now) and VmHWM (at most, so far)."""
    try:
        kib = int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0])
    except (OSError, IndexError):  # it has just ended: what all children ever took is the best known
        kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return kib * 1024 / 1e6


if __name__ == "__main__":
    main()
