"""What the router costs: ``make perf-router``. A benchmark, not a test: it judges nothing.

The same open-loop load goes to the exact server directly, through the router, and through a plain TCP proxy
in C that knows no HTTP (plain_proxy.c), in turn. What is added to TTFT is found by the server's log, request
by request, so the server's lateness does not count; the client's error is the figure of the direct way.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.core.plan.processes import ProcessSpec
from kvbench.errors import ProcessDiedError
from kvbench.hosts import web
from kvbench.hosts.telemetry import Metrics, difference, parse_metrics, quantile
from kvbench.launchers.local import LocalLauncher
from kvbench.sweep.selftest import least_disturbed
from kvbench.sweep.selftest_server import RunningExactServer, errors_of, exact_server
from kvbench.sweep.trial.loadgen_driver import LoadGenerator
from tools.bench import (
    HOST,
    answers,
    arguments,
    compiled,
    free_port,
    load_spec,
    machine_load,
    repeats,
    running,
    table,
    workplace,
)

PROXY = Path(__file__).with_name("plain_proxy.c")
FIRST_TOKEN_S = 0.05
GAP_S = 0.01
OUTPUT_LEN = 128
INPUT_LEN = 256
DURATION_S = FIRST_TOKEN_S + (OUTPUT_LEN - 1) * GAP_S
SERVER = {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}
READY_DEADLINE_S = 30.0

P50_LIMIT_MS = 0.3
P99_LIMIT_MS = 1.0
CHUNKS_LIMIT = 80_000


Repeat = dict[str, float]
"""One pass around the router, one through it, one through a plain proxy: TTFT errors in ms, with what the
client is off by; NaN where there is no plain proxy."""


@dataclass(frozen=True)
class Work:
    """How much is sent, and where logs and specs go."""

    streams: int
    seconds: float
    processes: int
    launcher: LocalLauncher
    folder: Path
    compiled: bool = True
    proxy: Path | None = None
    """The plain proxy's program, if it could be compiled."""


Way = Callable[[Work, str], tuple[dict[str, float], Any]]
"""Sends the load one way: the figures of what stood in it, and the TTFT errors in ms."""


def main() -> None:
    options = arguments(
        __doc__,
        streams=(300, "requests under way on average"),
        seconds=(8.0, "length of each pass, after a ramp"),
        repeats=(5, "of each way"),
        processes=(1, "processes of the router"),
        python=(False, "all streams go through the router's Python"),
    )
    with workplace("perf-router") as (folder, launcher):
        proxy = folder / "plain_proxy"
        if problem := compiled(PROXY, proxy):
            print(f"no plain proxy to compare with, as it could not be compiled: {problem}")
        load = (options.streams, options.seconds, options.processes)
        work = Work(*load, launcher, folder, not options.python, None if problem else proxy)
        found = [repeat(work, number) for number in repeats(options.repeats)]
    rows = [[cell(one[name]) for name in sorted(one)] for one in found]
    title = "what is reported − what the server did: TTFT in ms"
    print(table("", "|".join(sorted(found[0])).replace("_", " "), rows, title))
    for line in summary(found):
        print(line)


def cell(value: float) -> str:
    return "no compiler" if math.isnan(value) else f"{value:,.4g}"


def repeat(work: Work, number: int) -> Repeat:
    """The load around the router, through it and through a plain proxy, beginning with each in turn."""
    load = os.getloadavg()[0]
    figures: dict[str, float] = {}
    ways = [("direct", around), ("router", through), ("plain", plainly)]
    for name, way in ways[number % 3 :] + ways[: number % 3]:
        found, errors_ms = least_disturbed(
            partial(way, work), f"{name}-{number}", partial(print, flush=True)
        ).found
        p50, p99 = (float(error) for error in np.percentile(errors_ms, (50, 99)))
        figures |= {**found, f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}
    return {**figures, "load": load}


def around(work: Work, name: str) -> tuple[dict[str, float], Any]:
    """No figures, and the TTFT errors in ms of what goes to the server itself."""
    with exact_server(work.launcher, SERVER, f"exact-{name}") as server:
        return {}, send(work, server, server.url, name)[0]


def plainly(work: Work, name: str) -> tuple[dict[str, float], Any]:
    """The plain proxy's figure, and the TTFT errors of what goes through it; NaN without one."""
    if work.proxy is None:
        return {"plain_chunks_per_core_s": float("nan")}, [float("nan")]
    with exact_server(work.launcher, SERVER, f"exact-{name}") as server:
        port = free_port()
        spec = ProcessSpec(name=name, argv=(str(work.proxy), str(port), server.url.rpartition(":")[2]))
        with running(work.launcher, spec, lambda: accepts(port), READY_DEADLINE_S) as process:
            cpu_ns = Path(f"/proc/{process.pid}/schedstat")
            before_ns = int(cpu_ns.read_text().split()[0])
            errors_ms, _ = send(work, server, f"http://{HOST}:{port}", f"load-{name}")
            took_s = (int(cpu_ns.read_text().split()[0]) - before_ns) / 1e9
            return {"plain_chunks_per_core_s": server.log("?summary")["chunks"] / took_s}, errors_ms


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def through(work: Work, name: str) -> tuple[dict[str, float], Any]:
    """The router's own figures, and the TTFT errors of what goes through it."""
    with (
        exact_server(work.launcher, SERVER, f"exact-{name}") as server,
        router_before(work, server.url, name) as url,
    ):
        before = page(url)
        errors, took_s = send(work, server, url, f"load-{name}")
        after, chunks = page(url), server.log("?summary")["chunks"]
    cpu_s = difference(before, after, "kvbench:router_cpu_seconds_total") or float("nan")
    lag_s = quantile(before, after, "kvbench:router_loop_lag_seconds", 0.99)
    return {
        "failed": difference(before, after, "kvbench:router_errors_total") or 0.0,
        "chunks_per_core_s": chunks / cpu_s,
        "reads_per_chunk": (difference(before, after, "kvbench:router_stream_reads_total") or 0.0) / chunks,
        "cpu_share": cpu_s / took_s,
        "loop_lag_p99_ms": float("nan") if lag_s is None else 1e3 * lag_s,
    }, errors


@contextlib.contextmanager
def router_before(work: Work, url: str, name: str) -> Iterator[str]:
    port = free_port()
    spec = {
        "port": port,
        "connector": "aggregated",
        "decode": [{"url": url}],
        "processes": work.processes,
        "compiled": work.compiled,
    }
    address = f"http://127.0.0.1:{port}"
    process = ProcessSpec(name=name, argv=(sys.executable, "-m", "kvbench.processes.router"), spec=spec)
    with running(work.launcher, process, lambda: answers(f"{address}/health"), READY_DEADLINE_S):
        yield address


def send(work: Work, server: RunningExactServer, url: str, name: str) -> tuple[Any, float]:
    """TTFT errors in ms of the requests sent after the ramp, and how long the pass took."""
    rate = work.streams / DURATION_S
    requests = max(1, round(rate * (work.seconds + DURATION_S)))
    more = {
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "slo": {"ttft_ms": 2e3 * FIRST_TOKEN_S, "tpot_ms": 1e3 * GAP_S},
        "headers": {"x-kvbench-timing": "1"},
    }
    spec = load_spec(url, work.folder / name, rate, requests, **more)

    def alive() -> None:
        if server.process.poll() is not None:
            raise ProcessDiedError("the exact server died", hint=f"see {server.process.log_path}")

    generator = LoadGenerator(work.launcher, spec, name)
    result = generator.run(lambda progress: False, alive, 4 * (work.seconds + 2 * DURATION_S) + 60.0)
    return errors_of(
        result.records, server.log()["requests"], (DURATION_S, np.inf)
    ).ttft_ms, result.duration_s


def page(url: str) -> Metrics:
    with web.client(timeout_s=10) as client:
        return parse_metrics(client.get(f"{url}/metrics").raise_for_status().text)


def summary(found: list[Repeat]) -> Iterator[str]:

    def middle(name: str, less: str = "") -> float:
        return statistics.median(one[name] - (one[less] if less else 0.0) for one in found)

    for at, limit in (("p50", P50_LIMIT_MS), ("p99", P99_LIMIT_MS)):
        added = middle(f"router_{at}_ms", f"direct_{at}_ms")
        yield f"added to TTFT, {at}: {added:.2f} ms (at most {limit:g})"
    chunks, plain = middle("chunks_per_core_s"), middle("plain_chunks_per_core_s")
    yield f"chunks per core-second of the router: {chunks:,.0f} (at least {CHUNKS_LIMIT:,})"
    if not math.isnan(plain):
        p50, p99 = (middle(f"plain_{at}_ms", f"direct_{at}_ms") for at in ("p50", "p99"))
        yield (
            f"a plain TCP proxy adds {p50:.2f} ms (p50) and {p99:.2f} ms (p99) here,"
            f" and passes on {plain:,.0f} chunks per core-second"
        )
    yield f"medians of {len(found)}; {machine_load()}"


if __name__ == "__main__":
    main()
