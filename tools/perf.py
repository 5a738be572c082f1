"""kvbench's own figures beside their limits: ``make perf``. A benchmark, not a test: it judges nothing.

Start time of the command, time until an emulated pair is ready, and the memory of its processes
after they have served requests. Each figure is taken on the machine as it is, so its load is shown.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from kvbench import connectors
from kvbench.hosts import web
from kvbench.planning.doctor.doctor import connector_checks
from tools.bench import MB, Row, limit_table, machine_load

KVBENCH = str(Path(sys.executable).with_name("kvbench"))
SCENARIO = "quickstart"

HELP_REPEATS = 11
HELP_LIMIT_S = 0.4
READY_REPEATS = 3
READY_LIMIT_S = 3.0
MEMORY_LIMIT_MB = 150.0

READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
REQUESTS = 20
PROMPT_TOKENS = 1024


@dataclass
class Pair:
    """A launched pair: seconds from the command's start, and each process by its name."""

    started_s: float
    base_url: str = ""
    metrics_urls: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)


def main() -> None:
    rows = [help_row()]
    works = [check.name.removeprefix("connector ") for check in connector_checks() if check.status == "ok"]
    for name in (work for work in works if connectors.get(work).transfer_backend):
        print(f"measuring a pair with {name} …", flush=True)
        try:
            rows += pair_rows(name)
        except RuntimeError as error:
            print(f"{name}: {error}")
    print(limit_table(rows))
    print(machine_load())


def help_row() -> Row:
    times = []
    for _ in range(HELP_REPEATS + 1):
        started = time.perf_counter()
        subprocess.run([KVBENCH, "--help"], stdout=subprocess.DEVNULL, check=True, timeout=60)
        times.append(time.perf_counter() - started)
    times = times[1:]  # the first one fills the caches
    note = f"median of {len(times)}, {min(times):.2f} to {max(times):.2f}"
    return Row("kvbench --help", statistics.median(times), "s", HELP_LIMIT_S, note)


def pair_rows(connector: str) -> list[Row]:
    times = []
    rows: list[Row] = []
    for repeat in range(READY_REPEATS):
        with launched(connector) as pair:
            times.append(pair.started_s)
            if repeat == READY_REPEATS - 1:
                serve(pair)
                rows = memory_rows(connector, pair)
    note = f"median of {len(times)}, {min(times):.2f} to {max(times):.2f}, from the start of kvbench launch"
    return [Row(f"{connector}: pair ready", statistics.median(times), "s", READY_LIMIT_S, note), *rows]


@contextlib.contextmanager
def launched(connector: str) -> Iterator[Pair]:
    """A pair brought up by ``kvbench launch`` and stopped by Ctrl-C. Raises RuntimeError if not."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [KVBENCH, "launch", SCENARIO, "--connector", connector, "--set", "deployment.base_port=0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "300", "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield read_pair(process, started)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def read_pair(process: subprocess.Popen[bytes], started: float) -> Pair:
    assert process.stdout is not None
    text = b""
    pair = Pair(0.0)
    deadline = started + READY_DEADLINE_S
    while b"Ctrl-C" not in text:
        left = deadline - time.perf_counter()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            raise RuntimeError(f"not ready within {READY_DEADLINE_S:g} s: {text.decode()[-500:]}")
        chunk = os.read(process.stdout.fileno(), 65_536)
        if not chunk:
            raise RuntimeError(f"kvbench launch ended: {text.decode()[-500:]}")
        text += chunk
        if not pair.started_s and re.search(rb"^ready", text, re.MULTILINE):
            pair.started_s = time.perf_counter() - started
    for name, url, pid in re.findall(r"^\s+(\S+)\s+(http\S+) \(pid (\d+)", text.decode(), re.MULTILINE):
        pair.metrics_urls[name], pair.pids[name] = url, int(pid)
    found = re.search(r"(http://\S+)/v1/completions", text.decode())
    pair.base_url = found.group(1) if found else ""
    return pair


def serve(pair: Pair) -> None:
    """Some requests one after the other, so that the memory is that of engines which have worked."""
    engine_url = next(iter(pair.metrics_urls.values())).rsplit("/", 1)[0]
    with web.client(timeout_s=30) as client:
        model = client.get(f"{engine_url}/v1/models").raise_for_status().json()["data"][0]["id"]
        for number in range(REQUESTS):
            prompt = [(number * 31 + index * 7) % 4096 + 16 for index in range(PROMPT_TOKENS)]
            body = {"model": model, "prompt": prompt, "max_tokens": 8, "min_tokens": 8, "ignore_eos": True}
            headers = {"X-Request-Id": f"perf-{number}"}
            client.post(f"{pair.base_url}/v1/completions", json=body, headers=headers).raise_for_status()


def memory_rows(connector: str, pair: Pair) -> list[Row]:
    """The engine processes beside their KV pool, and the transfer library's own process without limit."""
    engines = {name: pid for name, pid in pair.pids.items() if not name.startswith("router")}
    if not engines:
        raise RuntimeError("kvbench launch named no engine process")
    largest = max(engines, key=lambda name: private_mb(engines[name])[0])
    own, pool = private_mb(engines[largest])
    note = f"the larger of {', '.join(engines)} ({largest}); its shared KV pool adds {pool:.0f} MB"
    rows = [Row(f"{connector}: engine process beside its KV pool", own, "MB", MEMORY_LIMIT_MB, note)]
    beside = [
        private_mb(child.pid)[0] for pid in engines.values() for child in psutil.Process(pid).children(True)
    ]
    if beside:
        note = "the transfer library's process of an engine"
        rows.append(Row(f"{connector}: transfer process beside the pool", max(beside), "MB", None, note))
    return rows


def private_mb(pid: int) -> tuple[float, float]:
    """Resident memory without shared memory, and the shared memory, in MB: the KV pool is a memfd."""
    status = Path(f"/proc/{pid}/status").read_text()
    kib = {name: int(amount) for name, amount in re.findall(r"^(Rss\w+):\s+(\d+) kB", status, re.MULTILINE)}
    return (kib["RssAnon"] + kib["RssFile"]) * 1024 / MB, kib["RssShmem"] * 1024 / MB


if __name__ == "__main__":
    main()
