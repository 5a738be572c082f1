"""The routers: each between kvbench's load generator and two exact servers, P and D, with NIXL's dispatch."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from kvbench.core.plan.processes import ProcessSpec
from kvbench.hosts import web
from kvbench.launchers.local import LocalLauncher, LocalProcess
from kvbench.sweep.selftest_server import exact_server
from kvbench.version import __version__

from .clients import kvbench_command, kvbench_outcome
from .environments import python_of, version_of
from .work import FIRST_TOKEN_S, GAP_S, Cost, Outcome, PeerError, Work, run_command

HOST = "127.0.0.1"
READY_DEADLINE_S = 60.0
POLL_S = 0.1
PREFILL_S = DECODE_S = FIRST_TOKEN_S / 2
"""P's answer and D's first token each take half, so that what is true is the same as without a router."""


@dataclass(frozen=True)
class Router:
    """``process``: what to start for a port and the URLs of P and D."""

    name: str
    environment: str
    package: str
    process: Callable[[int, str, str], ProcessSpec]

    def version(self) -> str:
        return version_of(self.environment, self.package) if self.environment else __version__


@dataclass(frozen=True)
class RoutedLoad:
    """What a load through a router showed. ``cpu_s``: of the router with its children, during the load.

    ``late_p99_ms``: how late P and D were with their answers.
    """

    outcome: Outcome
    cpu_s: float | None
    memory_mb: float | None
    late_p99_ms: tuple[float | None, float | None]


def kvbench_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    spec = {"port": port, "connector": "nixl", "prefill": [{"url": prefill}], "decode": [{"url": decode}]}
    return ProcessSpec("router-kvbench", (sys.executable, "-m", "kvbench.processes.router"), spec=spec)


def vllm_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    argv = [str(python_of("vllm-router").with_name("vllm-router")), "--host", HOST, "--port", str(port)]
    argv += ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--kv-connector", "nixl"]
    argv += ["--policy", "round_robin", "--log-level", "warning", "--disable-retries"]
    argv += ["--prometheus-port", str(free_port())]
    return ProcessSpec("router-vllm", tuple(argv), one_thread=False)


def fastapi_process(port: int, prefill: str, decode: str) -> ProcessSpec:
    script = Path(__file__).with_name("fastapi_proxy.py")
    return ProcessSpec(
        "router-fastapi", (str(python_of("httpx")), str(script), str(port), prefill, decode), one_thread=False
    )


ROUTERS = (
    Router("kvbench", "", "", kvbench_process),
    Router("vllm-router", "vllm-router", "vllm-router", vllm_process),
    Router("fastapi+httpx", "httpx", "fastapi", fastapi_process),
)


def through(router: Router, work: Work, folder: Path, deadline_s: float) -> RoutedLoad:
    """Sends the work through a router. Raises PeerError, or LaunchError if an exact server does not start."""
    launcher = LocalLauncher("perf-peers", folder / "logs", folder / "specs")
    port = free_port()
    with (
        exact_server(launcher, {"first_token_s": PREFILL_S, "gap_s": GAP_S}, "exact-prefill") as prefill,
        exact_server(launcher, {"first_token_s": DECODE_S, "gap_s": GAP_S}, "exact-decode") as decode,
        _running(launcher, router.process(port, prefill.url, decode.url), f"http://{HOST}:{port}") as process,
    ):
        # A first request, so that what is opened or loaded once is not part of the load.
        _load(Work(1, 10.0, 2), f"http://{HOST}:{port}", folder / "first", deadline_s)
        before, _ = _used(process.pid)
        _load(work, f"http://{HOST}:{port}", folder / "load", deadline_s)
        after, memory_mb = _used(process.pid)
        outcome = kvbench_outcome(work, folder / "load")
        late = [server.log("?summary=1")["lateness"]["first"]["p99_ms"] for server in (prefill, decode)]
        return RoutedLoad(outcome, after - before, memory_mb, (late[0], late[1]))


def direct(work: Work, folder: Path, deadline_s: float) -> RoutedLoad:
    """The same load with no router in between: what the load generator and the server add themselves."""
    launcher = LocalLauncher("perf-peers", folder / "logs", folder / "specs")
    with exact_server(launcher, {"first_token_s": FIRST_TOKEN_S, "gap_s": GAP_S}) as server:
        _load(work, server.url, folder / "load", deadline_s)
        late = server.log("?summary=1")["lateness"]["first"]["p99_ms"]
        return RoutedLoad(kvbench_outcome(work, folder / "load"), None, None, (None, late))


def _load(work: Work, url: str, folder: Path, deadline_s: float) -> Cost:
    argv, env = kvbench_command(work, url, folder)
    return run_command(argv, folder, deadline_s, env)


@contextlib.contextmanager
def _running(launcher: LocalLauncher, spec: ProcessSpec, url: str) -> Iterator[LocalProcess]:
    process = launcher.start(spec)
    try:
        deadline = time.monotonic() + READY_DEADLINE_S
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                said = "; ".join(process.tail(3)) or "it said nothing"
                raise PeerError(f"the router did not get ready: {said[:200]}")
            time.sleep(POLL_S)
        yield process
    finally:
        launcher.stop([process])


def _healthy(url: str) -> bool:
    try:
        with web.client(timeout_s=2) as client:
            return client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def _used(pid: int) -> tuple[float, float]:
    """CPU seconds so far and resident MB of a process with its children."""
    cpu_s = memory = 0.0
    router = psutil.Process(pid)
    for process in (router, *router.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            times = process.cpu_times()
            cpu_s += times.user + times.system
            memory += process.memory_info().rss / 1e6
    return cpu_s, memory


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])
