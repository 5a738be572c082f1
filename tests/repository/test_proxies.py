"""No client of kvbench's takes a proxy from the environment, nor a login from ``.netrc``."""

import ast
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from commands import EASY, Finished, Running, kvbench, the_run, wait_until
from emulated import running, spec

from kvbench.core.access import ServerAccess
from kvbench.core.plan.processes import NO_PROXIES, PROXIES, ProcessSpec, unproxied
from kvbench.errors import ServerError
from kvbench.hosts import web
from kvbench.hosts.telemetry import SAMPLE_INTERVAL_S, Sampler
from kvbench.launchers.local import LocalLauncher
from kvbench.planning.overrides import served_model
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import process_specs
from kvbench.planning.scenario_files import load_scenario
from kvbench.sweep.selftest_server import exact_server
from tests.processes.loadgen.test_loadgen import made_certificate
from tests.repository.test_security_source import SOURCES, tree_of

ROOT = Path(__file__).parents[2]
OUR_CLIENT = "kvbench/hosts/web.py"
FOREIGN = ("tools/perf_peers/httpx_client.py", "tools/perf_peers/fastapi_proxy.py")
"""Run in environments without kvbench; theirs have trust_env=False."""
HTTPX_CALLS = {
    *("Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport"),
    *("get", "post", "put", "patch", "delete", "head", "options", "request", "stream"),
}
OTHER_CLIENTS = {"requests", "aiohttp", "urllib3", "pycurl"}


class Trap:
    """A listening socket where a proxy would be: it notes who comes, answers nothing and hangs up."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                try:
                    self.heard.append(connection.recv(200))
                except OSError:
                    self.heard.append(b"")

    @property
    def variables(self) -> dict[str, str]:
        """All of them at it, and nothing excepted."""
        found = {cased: self.url for name in PROXIES for cased in (name, name.upper())}
        return found | dict.fromkeys(NO_PROXIES, "")

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=5)


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trap]:
    """A trap that every process started from here inherits as its proxy."""
    found = Trap()
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    try:
        yield found
    finally:
        found.close()


def test_the_trap_catches_a_client_that_trusts_its_environment(trap: Trap) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get("http://127.0.0.1:9/metrics", timeout=5)
    assert trap.heard[0].startswith(b"GET http://127.0.0.1:9/metrics")


def well(done: Finished) -> None:
    assert done.status in (0, 3), done.text


def test_a_sweep_makes_no_connection_to_a_proxy(trap: Trap, tmp_path: Path) -> None:
    """A P/D pair with its router: readiness, checks of the outputs, caches, load, telemetry, metrics."""
    words = ("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path / "out"))
    well(kvbench(*words, sets=EASY))
    assert trap.heard == []
    trials = the_run(tmp_path / "out").trials
    assert trials
    assert not {finding.gate for trial in trials for finding in trial.findings} & {"work_unproven"}


def test_a_launched_server_is_found_ready_and_measured_by_its_url(trap: Trap, tmp_path: Path) -> None:
    free = ("deployment.base_port=0",)
    server = Running("launch", "quickstart", "--connector", "aggregated", sets=free)
    try:
        found = re.search(r"http://[^/\s]+", server.wait_for("  requests"))
        words = ["bench", "--base-url", found.group(), "--rate", "15", "--output", str(tmp_path / "out")]
        words += ["--input-len", "64", "--output-len", "4", "--ttft-ms", "20000", "--tpot-ms", "5000"]
        few = ("search.trial_s=2", "search.max_trial_s=2", "search.min_requests=30")
        well(kvbench(*words, sets=few))
        server.signal(signal.SIGINT)
        server.finish()
    finally:
        server.kill()
    assert trap.heard == []


@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_what_only_looks_asks_no_proxy(trap: Trap, command: str) -> None:
    assert kvbench(command, "quickstart").status in (0, 1)
    assert trap.heard == []


def test_a_yardstick_s_log_is_read_from_itself(trap: Trap, tmp_path: Path) -> None:
    launcher = LocalLauncher("test-proxies", tmp_path / "logs", tmp_path / "specs")
    with exact_server(launcher, {"host": "127.0.0.1", "port": 0}) as server:
        assert server.log()["requests"] == []
    assert trap.heard == []


def test_telemetry_has_no_gap_behind_a_proxy(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with running(tmp_path, spec()) as engine:
        trap: Trap = request.getfixturevalue("trap")
        with Sampler("t", {}, {"aggregated-0": f"{engine.url}/metrics"}) as sampler:
            time.sleep(4 * SAMPLE_INTERVAL_S)
        assert "aggregated-0" in {row["source"] for row in sampler.rows}
    assert trap.heard == []


def test_who_needs_a_proxy_is_told_that_there_is_none(trap: Trap, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with pytest.raises(ServerError) as met:
        served_model(nobody, ServerAccess())
    assert "ignores the configured proxy" in met.value.hint
    for name in trap.variables:
        monkeypatch.delenv(name)
    with pytest.raises(ServerError) as met:
        served_model(nobody, ServerAccess())
    assert "proxy" not in met.value.hint
    assert trap.heard == []


# Whom our client believes
class _LoginEcho(BaseHTTPRequestHandler):
    """Answers what login it was sent."""

    def do_GET(self) -> None:
        body = self.headers.get("authorization", "none").encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Nothing."""


@contextmanager
def login_echo(context: ssl.SSLContext | None = None) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _LoginEcho)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http{'s' if context else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_login_in_netrc_is_sent_to_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    with login_echo() as url, web.client() as client:
        assert client.get(url).text == "none"
    with login_echo() as url, web.client(headers={"authorization": "Bearer k"}) as client:
        assert client.get(url).text == "Bearer k"


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_a_certificate_authority_of_one_s_own_is_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    key, cert = made_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    folder = tmp_path / "authorities"
    folder.mkdir()
    hashed = subprocess.run(
        ["openssl", "x509", "-hash", "-noout", "-in", cert], capture_output=True, text=True, check=True
    )
    (folder / f"{hashed.stdout.strip()}.0").write_text(Path(cert).read_text())
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with login_echo(context) as url:
        with web.client() as client, pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            client.get(url)
        monkeypatch.setenv(variable, cert if variable == "SSL_CERT_FILE" else str(folder))
        with web.client() as client:
            assert client.get(url).text == "none"
        with httpx.Client(transport=web.transport()) as client:
            assert client.get(url).text == "none"


# What we start
@pytest.mark.parametrize(
    ("environment", "excepted"),
    [
        ({}, None),
        ({"no_proxy": "intern"}, None),
        ({"http_proxy": ""}, None),
        ({"http_proxy": "http://p:1"}, "10.0.0.1,127.0.0.1"),
        ({"ALL_PROXY": "socks5://p:1"}, "10.0.0.1,127.0.0.1"),
        ({"HTTPS_PROXY": "p:1", "NO_PROXY": "intern, 127.0.0.1"}, "intern,127.0.0.1,10.0.0.1"),
        ({"http_proxy": "p:1", "no_proxy": "a", "NO_PROXY": "b"}, "a,b,10.0.0.1,127.0.0.1"),
        ({"http_proxy": "p:1", "no_proxy": "*"}, None),
    ],
)
def test_own_addresses_are_excepted_from_a_proxy(environment: dict[str, str], excepted: str | None) -> None:
    found = unproxied(environment, ["10.0.0.1", "127.0.0.1", "10.0.0.1"])
    assert found == ({} if excepted is None else dict.fromkeys(NO_PROXIES, excepted))


# vLLM's MooncakeConnector asks P's bootstrap server so: httpx.AsyncClient(), nothing else said.
TRUSTING = "import httpx, sys; print(httpx.get(sys.argv[1], timeout=5).text)"


def test_a_started_process_reaches_its_deployment_without_the_proxy(trap: Trap, tmp_path: Path) -> None:
    scenario, _ = load_scenario("quickstart", ["deployment.base_port=0"])
    (planned,) = [deployment for deployment in plan_of(scenario).deployments if deployment.label == "nixl"]
    made = process_specs(scenario, planned)
    assert {spec.beside for spec in made} == {("127.0.0.1", "localhost")}
    launcher = LocalLauncher("test-proxies", tmp_path / "logs", tmp_path / "specs")
    with login_echo() as url:
        asking = ProcessSpec("asking", (sys.executable, "-c", TRUSTING, url), beside=made[0].beside)
        process = launcher.start(asking)
        wait_until(lambda: process.poll() is not None, 20)
    assert process.tail() == ["none"]
    assert trap.heard == []


def test_every_host_of_a_deployment_is_excepted() -> None:
    scenario, _ = load_scenario("qwen3-30b-a3b-h200-mooncake", [])
    (planned,) = [
        deployment for deployment in plan_of(scenario).deployments if deployment.label == "mooncake"
    ]
    made = process_specs(scenario, planned)
    hosts = {spec.host for spec in made if spec.host}
    assert len(hosts) > 1
    assert all(hosts <= set(spec.beside) for spec in made)


# The source
def breaches(tree: ast.AST) -> Iterator[str]:
    """Where a module makes a client of its own."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names}
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            whole = {f"{module}.{name}" if module else name for name in names} | {module}
            tops = {path.split(".")[0] for path in whole}
            for name in whole & {"urllib.request", "http.client"} | tops & OTHER_CLIENTS:
                yield f"line {node.lineno}: imports {name}"
            if module == "httpx" and names & HTTPX_CALLS:
                yield f"line {node.lineno}: takes {', '.join(sorted(names & HTTPX_CALLS))} from httpx"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr if getattr(node.func.value, "id", "") == "httpx" else ""
            untrusting = any(ast.unparse(keyword) == "trust_env=False" for keyword in node.keywords)
            if name in HTTPX_CALLS and not untrusting:
                yield f"line {node.lineno}: httpx.{name} without trust_env=False"
            elif name in HTTPX_CALLS:
                yield f"line {node.lineno}: httpx.{name}"


def test_one_module_alone_makes_clients() -> None:
    assert len(SOURCES) > 300
    found = {path.relative_to(ROOT).as_posix(): list(breaches(tree_of(path))) for path in SOURCES}
    guilty = {name: lines for name, lines in found.items() if lines}
    assert set(guilty) == {OUR_CLIENT, *FOREIGN}
    assert [line for lines in guilty.values() for line in lines if "without" in line] == []


@pytest.mark.parametrize(
    "code",
    [
        "import urllib.request", "import http.client", "from urllib import request",
        "from urllib.request import urlopen", "import requests", "import aiohttp.client",
        "from httpx import Client", "httpx.Client(timeout=3)", "def f():\n  return httpx.get(url)",
        "httpx.AsyncClient(trust_env=False)", "httpx.HTTPTransport()",
    ],
)  # fmt: skip
def test_the_rule_sees_what_it_forbids(code: str) -> None:
    assert list(breaches(ast.parse(code)))


def test_the_rule_lets_exceptions_and_url_parsing_be() -> None:
    code = "import httpx\nfrom urllib.parse import urlsplit\ntry: pass\nexcept httpx.HTTPError: pass"
    assert list(breaches(ast.parse(code))) == []
