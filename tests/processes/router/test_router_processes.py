"""The router in several processes: one port, one sum, one end."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from emulated import free_port
from processes import still_living

from kvbench.core.load.dispatch import SESSION_HEADER
from kvbench.errors import PortInUseError
from kvbench.hosts.telemetry import parse_metrics
from kvbench.processes.http1 import Pool, ReceivedRequest, Reply, Response, fetch, serve
from kvbench.processes.router.backend_request import Timing
from kvbench.processes.router.dispatch import Dispatch
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.processes import listening_sockets
from kvbench.processes.router.spec import RouterSpec

HOST = "127.0.0.1"
DEADLINE_S = 20.0
PROCESSES = 3


@contextmanager
def router(folder: Path, **spec: Any) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    path = folder / "spec.json"
    path.write_text(json.dumps({"port": port, "processes": PROCESSES, **spec}))
    command = [sys.executable, "-m", "kvbench.processes.router", str(path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process, port
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


async def one(port: int, method: str, path: str, body: bytes = b"") -> Reply:
    """A request on a connection of its own, so that the kernel deals it to any of the processes."""
    pool = Pool(f"http://{HOST}:{port}")
    try:
        return await fetch(pool, pool.request(method, path, {"connection": "close"}, body))
    finally:
        await pool.close()


async def until_healthy(port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            if (await one(port, "GET", "/health")).status == 200:
                return
        await asyncio.sleep(0.05)


def on_loop(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main(), DEADLINE_S))


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


async def test_every_process_tells_the_sum_and_goes_round_the_servers(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    count = 60

    def engine(request: ReceivedRequest, response: Response) -> None:
        if request.method == "POST":
            seen[request.headers["host"]] += 1
        response.start_stream()
        response.write(b"data: 1\n\n")
        response.end()

    engines = [await serve(engine, HOST, 0) for _ in range(2)]
    decode = [{"url": f"http://{HOST}:{engine.port}"} for engine in engines]
    with router(tmp_path, connector="aggregated", decode=decode) as (process, port):
        await until_healthy(port)
        workers = workers_of(process)
        assert len(workers) == PROCESSES
        await asyncio.gather(*(one(port, "POST", "/v1/completions", b"{}") for _ in range(count)))
        for _ in range(2 * PROCESSES):  # whichever answers
            page = parse_metrics((await one(port, "GET", "/metrics")).body.decode())
            assert page.total("kvbench:router_requests_total") == count
            assert page.total("kvbench:router_streams_total") == count
            assert page.total("kvbench:router_request_seconds_count") == count
            assert page.total("kvbench:router_requests_in_flight") == 0
            assert page.total("kvbench:router_processes") == PROCESSES
        used = [sum(worker.cpu_times()[:2]) for worker in workers]
        assert sum(seen.values()) == count
        assert max(seen.values()) - min(seen.values()) <= PROCESSES
        reported = [page.total("kvbench:router_cpu_seconds_total", process=str(k)) for k in range(PROCESSES)]
        assert 0 < sum(cpu_s or 0.0 for cpu_s in reported) <= sum(used) + 0.1
        assert page.total("kvbench:router_loop_lag_seconds_count")
    for server in engines:
        await server.close()


def test_each_process_begins_with_another_server() -> None:
    urls = [f"http://{HOST}:{port}" for port in (1, 2, 3)]
    servers = [{"url": url} for url in urls]
    spec = RouterSpec(connector="nixl", port=0, prefill=servers, decode=servers, processes=4)
    prefills, decodes, metrics = [], [], RouterMetrics(4)
    for process in range(4):
        metrics.write_as(process)
        dispatch = Dispatch(spec, metrics, None)
        prefills.append([urls.index(dispatch.prefill_for(request_of("")).url) for _ in range(4)])
        decodes.append([urls.index(dispatch.decode_for(request_of("")).url) for _ in range(4)])
    assert prefills == decodes == [[0, 1, 2, 0], [1, 2, 0, 1], [2, 0, 1, 2], [0, 1, 2, 0]]


def request_of(session: str) -> ReceivedRequest:
    return ReceivedRequest("POST", "/v1/completions", "", {SESSION_HEADER: session} if session else {}, b"{}")


def chosen_servers(routing: str) -> list[list[tuple[int, int]]]:
    """P and D of 30 sessions, by each of four processes."""
    servers = [{"url": f"http://{HOST}:{port}"} for port in (1, 2, 3)]
    spec = RouterSpec(
        connector="nixl", port=0, prefill=servers, decode=servers[:2], processes=4, routing=routing
    )
    metrics, chosen = RouterMetrics(4), []
    for process in range(4):
        metrics.write_as(process)
        dispatch = Dispatch(spec, metrics, None)
        of_one = []
        for session in range(30):
            request = request_of(f"kvb-{session}")
            p, d = dispatch.prefill_for(request), dispatch.decode_for(request)
            of_one.append((dispatch.prefills.index(p), dispatch.decodes.index(d)))
        chosen.append(of_one)
    return chosen


def test_all_processes_send_a_session_to_the_same_p_and_d() -> None:
    chosen = chosen_servers("session")
    assert chosen[1:] == chosen[:1] * 3
    assert {p for p, _ in chosen[0]} == {0, 1, 2}
    assert {d for _, d in chosen[0]} == {0, 1}


def test_round_robin_does_not_look_at_sessions() -> None:
    in_turn = [(number % 3, number % 2) for number in range(34)]
    assert chosen_servers("round_robin") == [in_turn[first : first + 30] for first in range(4)]


async def test_none_is_healthy_before_all_know_the_engine_ids(tmp_path: Path) -> None:
    statuses: set[int] = set()
    answering = False

    def engine(request: ReceivedRequest, response: Response) -> None:
        known = answering and request.path == "/query"
        response.send(200, b'{"0":{"engine_id":"a"}}' if known else b"{}")

    server = await serve(engine, HOST, 0)
    url = f"http://{HOST}:{server.port}"
    spec = {
        "connector": "mooncake",
        "prefill": [{"url": url, "bootstrap_url": url}],
        "decode": [{"url": url}],
    }
    with router(tmp_path, **spec) as (_, port):
        while True:
            with contextlib.suppress(OSError):
                statuses.add((await one(port, "GET", "/health")).status)
                break
            await asyncio.sleep(0.05)
        assert statuses == {503}
        answering = True
        await until_healthy(port)
        for _ in range(2 * PROCESSES):
            assert (await one(port, "GET", "/health")).status == 200
    await server.close()


NOWHERE = [{"url": f"http://{HOST}:1"}]


def until_listening(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_well_with_all_its_processes(tmp_path: Path, number: int) -> None:
    with router(tmp_path, connector="aggregated", decode=NOWHERE) as (process, port):
        until_listening(port)
        workers = workers_of(process)
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        assert not still_living(workers, DEADLINE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_a_signal_while_its_processes_start_ends_it_well(tmp_path: Path, number: int, after_s: float) -> None:
    with router(tmp_path, connector="aggregated", decode=NOWHERE) as (process, _):
        deadline = time.monotonic() + DEADLINE_S
        while not (workers := workers_of(process)):
            assert time.monotonic() < deadline
        time.sleep(after_s)
        workers = workers_of(process) or workers
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        assert not still_living(workers, DEADLINE_S)


def test_one_that_dies_ends_all_and_is_a_failure(tmp_path: Path) -> None:
    with router(tmp_path, connector="aggregated", decode=NOWHERE) as (process, port):
        until_listening(port)
        workers = workers_of(process)
        os.kill(workers[1].pid, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGKILL
        assert not still_living(workers, DEADLINE_S)


def test_its_processes_end_with_it(tmp_path: Path) -> None:
    with router(tmp_path, connector="aggregated", decode=NOWHERE) as (process, port):
        until_listening(port)
        workers = workers_of(process)
        process.kill()
        process.wait(DEADLINE_S)
        assert not still_living(workers, DEADLINE_S)


def test_a_process_that_cannot_learn_the_engine_ids_ends_all_with_its_message(tmp_path: Path) -> None:
    prefill = [{"url": f"http://{HOST}:1", "bootstrap_url": f"http://{HOST}:1"}]
    spec = {"connector": "mooncake", "prefill": prefill, "decode": NOWHERE, "bootstrap_timeout_s": 0.3}
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"port": free_port(), "processes": 2, **spec}))
    done = subprocess.run(
        [sys.executable, "-m", "kvbench.processes.router", str(path)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "reported no engine id" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("spec", "code", "words"),
    [
        ({"processes": 0, "decode": NOWHERE}, 2, "'processes' must be 1 or more"),
        ({"processes": 2, "decode": []}, 2, "at least one decode"),
        ({"processes": 2, "decode": NOWHERE, "host": "no.such.host.invalid"}, 2, "has no address"),
        ({"processes": 2, "decode": NOWHERE, "trace_path": "/nowhere/at/all"}, 2, "trace_path"),
    ],
)
def test_a_mistake_is_told_once(tmp_path: Path, spec: dict[str, Any], code: int, words: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"port": 0, "connector": "aggregated", **spec}))
    command = [sys.executable, "-m", "kvbench.processes.router", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr.count(words)) == (code, 1)
    assert "Traceback" not in done.stderr


def test_a_port_is_not_shared_with_another_router() -> None:
    first = listening_sockets(HOST, 0, 2)
    port = first[0].getsockname()[1]
    try:
        assert first[1].getsockname()[1] == port
        for sock in first:
            sock.listen()
        with pytest.raises(PortInUseError, match=f"{HOST}:{port} is in use"):
            listening_sockets(HOST, port, 2)
    finally:
        for sock in first:
            sock.close()


def test_the_rows_of_all_processes_are_added_up() -> None:
    metrics = RouterMetrics(processes=2)
    for process, seconds in ((0, 0.003), (1, 0.5), (1, 100.0)):
        metrics.write_as(process)
        metrics.began()
        if process:
            timing = Timing(prefill_sent=1.0, prefill_answered=1.0 + seconds)
            metrics.ended(timing, 0.0, 1.0, "timeout", sequential=True)
        else:
            metrics.observe("prefill_seconds", seconds)
            metrics.error("timeout")
        assert metrics.all_ready == (process == 1 and seconds == 100.0)
        metrics.ready()
    metrics.error("of a kind that nobody knows")
    page = metrics.page().decode()
    for line in (
        "kvbench:router_requests_total 3.0",
        "kvbench:router_requests_in_flight 1.0",
        'kvbench:router_errors_total{error="timeout"} 3.0',
        'kvbench:router_errors_total{error="internal"} 1.0',
        'kvbench:router_prefill_seconds_bucket{le="0.005"} 1.0',
        'kvbench:router_prefill_seconds_bucket{le="0.5"} 2.0',
        'kvbench:router_prefill_seconds_bucket{le="60.0"} 2.0',
        'kvbench:router_prefill_seconds_bucket{le="+Inf"} 3.0',
        "kvbench:router_prefill_seconds_count 3.0",
        "kvbench:router_prefill_seconds_sum 100.503",
    ):
        assert line in page.splitlines(), page
    assert 'kvbench:router_cpu_seconds_total{process="1"}' in page
