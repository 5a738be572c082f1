"""A trial begins on an idle system: what dropped requests have left is waited for, or the trial is void."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from kvbench.core.load.workers import LoadResult
from kvbench.core.records import Cell, Finding
from kvbench.core.search.load_plan import TrialPlan
from kvbench.deployment.deployment import RunningDeployment
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.sweep.bench import create_store
from kvbench.sweep.display import Silent
from kvbench.sweep.selftest_server import RunningExactServer, exact_server
from kvbench.sweep.trial.idle import BACKLOG, Idleness
from kvbench.sweep.trial.trial import TrialRunner

pytestmark = pytest.mark.timeout(90)
CELL = Cell("aggregated", 16, 1)
SERVICE_S = 0.05


@contextmanager
def queue_server(tmp_path: Path, *, metrics: bool) -> Iterator[tuple[LocalLauncher, RunningExactServer]]:
    """An M/D/1 queue, which works on what clients have dropped."""
    launcher = LocalLauncher("test-idle", tmp_path / "logs", tmp_path / "specs")
    spec = {"queue": "md1", "service_s": SERVICE_S, "output_len": 1, "metrics": metrics}
    with exact_server(launcher, spec) as server:
        yield launcher, server


@contextmanager
def deployed(
    tmp_path: Path, *, metrics: bool
) -> Iterator[tuple[RunningExactServer, RunningDeployment, Idleness]]:
    with queue_server(tmp_path, metrics=metrics) as (launcher, server):
        scenario, _ = resolve(CliOptions(base_url=server.url, input_len="16", output_len=1, ttft_ms=300))
        (planned,) = plan_of(scenario).deployments
        with RunningDeployment(scenario, planned, launcher) as deployment:
            yield server, deployment, Idleness(scenario, deployment, (0.2, 30.0))


def drop(server: RunningExactServer, requests: int) -> float:
    """Sends so many requests and closes their connections; returns when the queue will have done them."""
    url = urlsplit(server.url)
    body = b'{"model": "exact", "prompt": [1, 2, 3], "max_tokens": 1, "stream": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    before = len(server.log()["requests"])
    for _ in range(requests):
        with socket.create_connection((url.hostname or "", url.port or 0), 5) as connection:
            connection.sendall(head + body)
            deadline = time.monotonic() + 10
            while len(server.log("?tokens=0")["requests"]) == before:  # read before it is closed
                assert time.monotonic() < deadline
        before += 1
    return float(max(row["first_due_s"] for row in server.log()["requests"]))


@pytest.mark.parametrize("metrics", [True, False])
def test_what_was_dropped_is_waited_for(tmp_path: Path, metrics: bool) -> None:
    with deployed(tmp_path, metrics=metrics) as (server, deployment, idle):
        assert (deployment.under_way() is None) is not metrics
        assert idle.wait(CELL) is None
        free_s = drop(server, 30)
        idle.left_behind(30, 10.0)
        assert idle.deadline_s == pytest.approx(6.0)
        assert idle.wait(CELL) is None
        assert time.monotonic() >= free_s - 1.5 * SERVICE_S


@pytest.mark.parametrize("metrics", [True, False])
def test_what_does_not_become_idle_is_said(tmp_path: Path, metrics: bool) -> None:
    with deployed(tmp_path, metrics=metrics) as (server, _, idle):
        assert idle.wait(CELL) is None
        drop(server, 60)
        found = idle.wait(CELL)
        assert isinstance(found, Finding)
        assert (found.gate, found.level) == (BACKLOG, "invalid")
        assert "did not become idle" in found.message
        assert ("under_way" in found.evidence) is metrics


def test_another_length_is_first_asked_of_an_idle_system(tmp_path: Path) -> None:
    """Without gauges; else the backlog would be taken for what a request of that length takes."""
    with deployed(tmp_path, metrics=False) as (server, _, idle):
        assert idle.wait(CELL) is None
        free_s = drop(server, 20)
        idle.left_behind(20, 10.0)
        assert idle.wait(Cell("aggregated", 32, 1)) is None
        assert time.monotonic() >= free_s - 1.5 * SERVICE_S


def test_a_system_that_others_use_is_refused_by_name(tmp_path: Path) -> None:
    """Somebody else keeps it busy for longer than a trial waits; nothing more is offered to it."""
    with queue_server(tmp_path, metrics=True) as (launcher, server):
        scenario, source = resolve(CliOptions(base_url=server.url, input_len="16", output_len=1, ttft_ms=300))
        plan = plan_of(scenario)
        with (
            RunningDeployment(scenario, plan.deployments[0], launcher) as deployment,
            create_store(tmp_path / "results", scenario, source, plan, "bench") as store,
        ):
            idle = Idleness(scenario, deployment, (0.3, 0.3))
            trials = TrialRunner(scenario, deployment, store, launcher, Silent().trial_progress, idle=idle)
            drop(server, 60)
            before = len(server.log("?tokens=0")["requests"])
            record = trials.run(TrialPlan(CELL, 1, 2.0, "fixed"))
            assert len(server.log("?tokens=0")["requests"]) == before
            path = store.path
    assert (record.verdict, [finding.gate for finding in record.findings]) == ("invalid", [BACKLOG])
    assert "did not become idle" in record.reason
    assert [trial.verdict for trial in load_run(path).trials] == ["invalid"]


@contextmanager
def metrics_server(page: str) -> Iterator[str]:
    """A server that offers a model, and reports that page of metrics."""

    class Answering(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.encode() if self.path == "/metrics" else b'{"data": [{"id": "tiny"}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(("values", "known"), [
    (("NaN", "NaN"), None), (("NaN", "2"), 2.0), (("+Inf", "0"), 0.0), (("1e999", "-Inf"), None),
    (("1.2.3", "e", "+", "3"), 3.0), (("0", "0.0"), 0.0), (("1e1",), 10.0),
])  # fmt: skip
def test_a_gauge_without_number_is_mute(tmp_path: Path, values: tuple[str, ...], known: float | None) -> None:
    page = "".join(f'vllm:num_requests_running{{engine="{n}"}} {value}\n' for n, value in enumerate(values))
    with metrics_server(page) as url:
        scenario, _ = resolve(CliOptions(base_url=url, input_len="16", output_len=1, ttft_ms=300))
        (planned,) = plan_of(scenario).deployments
        launcher = LocalLauncher("test-idle", tmp_path / "logs", tmp_path / "specs")
        deployment = RunningDeployment(scenario, planned, launcher)
        try:
            assert deployment.under_way() == known
        finally:
            deployment.stop()


class NeverIdle:
    """A deployment whose gauge never falls."""

    def under_way(self) -> float | None:
        return 3.0

    def complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        return ""

    def check_alive(self) -> None:
        """Always."""


class Hurried:
    """A clock that waits for nothing."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_what_was_not_drained_in_time_is_said() -> None:
    scenario, _ = resolve(CliOptions("quickstart"))
    idle = Idleness(scenario, NeverIdle(), clock=Hurried())
    found = idle.drain(LoadResult([], "", 1.0))
    assert (found.gate, found.level) == ("backlog", "warning")
    assert "3 requests were still running or waiting 30 s after the load" in found.message
