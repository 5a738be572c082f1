"""What the load generator costs and errs: ``make perf-loadgen``. A benchmark, not a test: it judges nothing.

The levels of streams are those of ``kvbench selftest``, against the exact server. Beside them stand what
that does not show: CPU time until the generator is ready, how late requests go out whose prompts are long,
and the memory and the file that a million chunks take. Limits are those of an otherwise idle machine, and
of the compiled way; ``KVBENCH_PURE_PYTHON=1`` measures the other. Figures are medians of several repeats,
each of which goes through all levels: a shared machine has slow minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest import Level, measure
from kvbench.sweep.selftest_server import exact_server

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
MB = 1e6


@dataclass(frozen=True)
class Row:
    """A line of the table; ``limit`` in the same unit, None where there is none."""

    what: str
    value: float | None
    unit: str
    limit: float | None = None
    at_least: bool = False

    @property
    def kept(self) -> str:
        """Whether the limit is kept; empty without one."""
        if self.limit is None or self.value is None:
            return ""
        return "ok" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "OVER"


@dataclass(frozen=True)
class Ran:
    """One generator's run: what it reported, and what it took."""

    client: dict[str, Any]
    ready_cpu_s: float
    grown_mb: float
    file_mb: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="measured at each number of streams")
    parser.add_argument("--repeats", type=int, default=3, help="of each number of streams, and of the sends")
    parser.add_argument("--chunks", type=int, default=1_000_000, help="chunks of the run for the memory")
    chosen = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with tempfile.TemporaryDirectory(prefix="kvbench-perf-") as name:
        found = []
        for repeat in range(chosen.repeats):
            console.print(f"repeat {repeat + 1} of {chosen.repeats}", highlight=False)
            folder = Path(name) / str(repeat)
            found.append(
                measure(LEVELS, chosen.seconds, folder, lambda text: console.print(text, markup=False))
            )
        levels = [middle(same) for same in zip(*(one.levels for one in found), strict=True)]
        rows = [row for level in levels for row in level_rows(level)]
        rows += run_rows(Path(name), chosen.chunks, chosen.repeats)
    console.print(table(rows))
    console.print(f"reads by: {', '.join(sorted({level.reads_by for level in levels}))}", markup=False)
    load = os.getloadavg()
    console.print(
        f"load average {load[0]:.2f} {load[1]:.2f} {load[2]:.2f} on {os.cpu_count()} cores, at the end"
    )


def middle(levels: Sequence[Level]) -> Level:
    """The median of each figure of one number of streams; what is no figure is the first's."""
    found: dict[str, Any] = {}
    for each in fields(Level):
        values = [getattr(level, each.name) for level in levels]
        if all(isinstance(value, float) for value in values):
            found[each.name] = statistics.median(values)
    return replace(levels[0], **found)


def level_rows(level: Level) -> list[Row]:
    """What the selftest found with one number of streams."""
    n = level.streams
    what = f"{n} streams: "
    return [
        Row(what + "TTFT error, p50", level.ttft_error_p50_ms, "ms", TTFT_P50_MS.get(n)),
        Row(what + "TTFT error, p99", level.ttft_error_p99_ms, "ms", TTFT_P99_MS.get(n)),
        Row(what + "ITL error, p99", level.itl_error_p99_ms, "ms", ITL_P99_MS.get(n)),
        Row(what + "send lag, p99", level.send_lag_p99_ms, "ms"),
        Row(
            what + "chunks per core-second",
            level.chunks_per_core_s,
            "",
            CHUNKS_PER_CORE_S.get(n),
            at_least=True,
        ),
    ]


def run_rows(folder: Path, chunks: int, repeats: int) -> Iterator[Row]:
    """What needs runs of its own. They take at most a few minutes each, or fail."""
    few = ran(folder, {"request_rate": 10.0, "num_requests": 10, "input_len": 1024, "output_len": 2})
    yield Row("start-up, CPU time until ready", few.ready_cpu_s, "s", READY_CPU_S)
    for rate, input_len in ((300.0, 1024), (20.0, 32_768)):
        spec = {"num_requests": round(rate * 5), "input_len": input_len, "output_len": 4}
        sent = [ran(folder, {"request_rate": rate, **spec}) for _ in range(repeats)]
        what = f"{rate:g} requests/s of {input_len} tokens: send lag, p99"
        lag_ms = statistics.median(one.client["send_lag_p99_ms"] for one in sent)
        yield Row(what, lag_ms, "ms", SEND_LAG_P99_MS)
    requests = max(1, chunks // 128)
    many = ran(folder, {"request_rate": 500.0, "num_requests": requests, "input_len": 32, "output_len": 128})
    millions = many.client["chunks"] / 1e6
    yield Row("memory for a million chunks", many.grown_mb / millions, "MB", RECORD_MB)
    yield Row("file of a million chunks", many.file_mb / millions, "MB", RECORD_MB)


def ran(folder: Path, changes: dict[str, Any]) -> Ran:
    """Runs one generator against an exact server of its own."""
    launcher = LocalLauncher("perf-loadgen", folder / "logs", folder / "specs")
    records = folder / "records"
    with exact_server(launcher, {"first_token_s": 0.05, "gap_s": 0.01}) as server:
        spec = {
            "base_url": server.url,
            "model": "exact",
            "seed": 1,
            "vocab_size": 32_000,
            "records_path": str(records),
            "wait_for_go": True,
            "slo": {"ttft_ms": 100.0, "tpot_ms": 10.0},
            **changes,
        }
        path = folder / "spec.json"
        path.write_text(json.dumps(spec))
        with generator(path) as process:
            return followed(process, records)


@contextlib.contextmanager
def generator(spec: Path) -> Iterator[subprocess.Popen[str]]:
    """The process, which is gone at the end."""
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
            ready_cpu_s, before_mb = cpu_s(process.pid), memory_mb(process.pid, "VmRSS")
            process.stdin.write("go\n")
            process.stdin.flush()
        elif event["event"] == "end":
            grown_mb = memory_mb(process.pid, "VmHWM") - before_mb
            return Ran(event["client"], ready_cpu_s, grown_mb, records.stat().st_size / MB)
        if time.monotonic() > deadline:
            break
    raise RuntimeError("the load generator did not come to its end; what it said is above")


def cpu_s(pid: int) -> float:
    """CPU time that a process has taken so far, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, name: str) -> float:
    """A line of a process's status, such as VmRSS (now) and VmHWM (at most, so far)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return int(status.partition(f"{name}:")[2].split()[0]) * 1024 / MB
    except (OSError, IndexError):  # it has just ended: what all children ever took is the best known
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MB


def table(rows: list[Row]) -> Table:
    found = Table(box=None, pad_edge=False)
    found.add_column("what")
    for name in ("value", "limit"):
        found.add_column(name, justify="right")
    found.add_column("")
    for row in rows:
        value = "not seen" if row.value is None else f"{row.value:,.4g} {row.unit}"
        if row.value is not None and row.value >= 1e4:
            value = f"{row.value:,.0f} {row.unit}"
        limit = "" if row.limit is None else f"{'≥' if row.at_least else '≤'} {row.limit:,.6g} {row.unit}"
        found.add_row(row.what, value, limit, row.kept)
    return found


if __name__ == "__main__":
    main()
