"""A running deployment: an aggregated server or a P/D pair with its router, from start to stop."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import httpx

from kvbench import engines
from kvbench.connectors.base import Connector
from kvbench.core.plan import DeploymentPlan
from kvbench.core.processes import ProcessSpec
from kvbench.core.scenario import Scenario
from kvbench.diagnose import Diagnosis
from kvbench.engines.external import ExternalOptions
from kvbench.errors import LaunchError, ServerError
from kvbench.launchers.local import GRACE_S, LocalLauncher, LocalProcess
from kvbench.observing import PROFILER_GRACE_S, has_prefix
from kvbench.ports import require_free_port
from kvbench.roster import dispatch_spec, instances, process_specs, profile_of, several_hosts_problem
from kvbench.telemetry import Metrics, scrape
from kvbench.watching import ProcessWatch, beside

POLL_S = 0.02
CONTROL_TIMEOUT_S = 10.0
_UNDER_WAY = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? ([0-9.e+]+)", re.MULTILINE)


@dataclass(frozen=True)
class Endpoints:
    """Where a deployment answers: requests at ``base_url``, metrics per instance."""

    base_url: str
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Instance name → /metrics. Names start with their role."""
    cache_reset_urls: Sequence[str] = ()
    router_metrics_url: str = ""
    direct: Mapping[str, Any] | None = None
    """How to ask P and D without the router (``roster.dispatch_spec``); None where there is none."""

    def of_role(self, *roles: str) -> list[str]:
        """The metrics URLs of the instances of these roles."""
        return [url for name, url in self.metrics_urls.items() if name.split("-")[0] in roles]


class Deployment:
    """Context manager: starts the processes, waits until all are ready, stops all of them at the end."""

    def __init__(self, scenario: Scenario, plan: DeploymentPlan, launcher: LocalLauncher) -> None:
        self.plan = plan
        self.ready_s = 0.0
        self.processes: list[LocalProcess] = []
        self._scenario = scenario
        self._launcher = launcher
        self._client = httpx.Client(timeout=CONTROL_TIMEOUT_S)
        self._connector: Connector = profile_of(scenario, plan.connector, plan.label)
        self._specs = [] if self.external else process_specs(scenario, plan, launcher.log_dir.absolute())
        options = scenario.connector_options(plan.label)
        asked = self._connector.transport_asked(options) if self._specs else ""
        self._watch = ProcessWatch(scenario.deployment.engine, self._connector, asked)
        self.endpoints = self._endpoints()

    @property
    def connector(self) -> Connector:
        """The connector as this deployment's engine wants it."""
        return self._connector

    @property
    def external(self) -> bool:
        return self._scenario.deployment.engine == "external"

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until each process answers its ready question.

        Raises PortInUseError, ProcessDiedError or LaunchError; the caller stops what was started.
        """
        began = time.monotonic()
        host = self._scenario.deployment.host
        if self._scenario.deployment.several_hosts:
            raise several_hosts_problem()
        for name, port in self._ports():
            require_free_port(host, port, name)
        for spec in self._specs:
            self._watch.follow(spec, self._launcher.log_path(spec))
            self.processes.append(self._launcher.start(spec))
        self._wait_ready(began + self._scenario.deployment.ready_timeout_s)
        self._watch.started()
        self.ready_s = time.monotonic() - began

    def stop(self) -> None:
        """Stop all processes, last started first. Safe to call twice."""
        started, self.processes = self.processes, []
        if started:
            grace_s = PROFILER_GRACE_S if has_prefix(self._scenario.deployment) else GRACE_S
            self._launcher.stop(started, grace_s)
        self._client.close()

    def check_alive(self) -> None:
        """Raises ProcessDiedError if a process has ended, LaunchError if a log tells a fatal cause."""
        self._watch.check(self.processes)

    def diagnoses(self) -> list[Diagnosis]:
        """What the logs have said since the last call, and what they said at start-up; none of it fatal."""
        return self._watch.take()

    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {process.name: process.pid for process in self.processes}

    def metrics(self) -> dict[str, Metrics | None]:
        """Read /metrics of each instance, and of the router as ``router``."""
        pages = {name: scrape(self._client, url) for name, url in self.endpoints.metrics_urls.items()}
        if self.endpoints.router_metrics_url:
            pages["router"] = scrape(self._client, self.endpoints.router_metrics_url)
        return pages

    def reset_caches(self) -> None:
        """Empty the prefix caches of all instances; servers without that endpoint are left as they are."""
        for url in self.endpoints.cache_reset_urls:
            try:
                self._client.post(url)
            except httpx.HTTPError as error:
                raise ServerError(f"POST {url} failed: {error}") from error

    def wait_drained(self, deadline_s: float) -> bool:
        """Wait until no instance has a running or waiting request; False if that took too long."""
        deadline = time.monotonic() + deadline_s
        while True:
            self.check_alive()
            if not any(self._under_way(url) for url in self.endpoints.metrics_urls.values()):
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)

    def _under_way(self, url: str) -> float:
        """Requests that an instance says it has; 0 if it does not tell. Nothing else of the page is read."""
        try:
            response = self._client.get(url)
        except httpx.HTTPError:
            return 0.0
        found = _UNDER_WAY.findall(response.text) if response.status_code == 200 else ()
        return sum(float(value) for value in found)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        """One greedy completion, not streamed; returns the text. Raises ServerError."""
        body = {
            "model": self._scenario.model.served_model_name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "min_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        url = f"{self.endpoints.base_url}/v1/completions"
        try:
            timeout_s = self._scenario.workload.request_timeout_s
            post = partial(self._client.post, url, json=body, timeout=timeout_s)
            response = beside(post, self.check_alive)
        except httpx.HTTPError as error:
            self.check_alive()
            raise ServerError(f"POST {url} failed: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise ServerError(f"POST {url} answered {response.status_code}: {response.text[:300]}")
        try:
            return str(response.json()["choices"][0]["text"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"POST {url} answered no completion: {response.text[:300]}") from error

    def _ports(self) -> list[tuple[str, int]]:
        if self.external:
            return []
        ports = [(each.name, each.port) for each in self.plan.instances]
        ports += [
            (f"{each.name}'s side channel", port)
            for each in self.plan.instances
            for port in each.all_side_ports
        ]
        ports += [(f"{self.plan.label}'s helpers", port) for port in self.plan.service_ports]
        return ports + ([("router", self.plan.router_port)] if self.plan.router_port else [])

    def _wait_ready(self, deadline: float) -> None:
        waiting = [process.spec for process in self.processes]
        last_answer = ""
        while waiting:
            self.check_alive()
            still = []
            for spec in waiting:
                ready, answer = self._is_ready(spec)
                if not ready:
                    still.append(spec)
                    last_answer = f"{spec.name}: {answer}"
            waiting = still
            if waiting and time.monotonic() > deadline:
                self._raise_not_ready([spec.name for spec in waiting], last_answer)
            if waiting:
                time.sleep(POLL_S)

    def _is_ready(self, spec: ProcessSpec) -> tuple[bool, str]:
        if not spec.ready_url:
            return _listens(spec.host, spec.port), f"nothing listens on {spec.host}:{spec.port}"
        try:
            response = self._client.get(spec.ready_url, timeout=2.0)
        except httpx.HTTPError as error:
            return False, f"{type(error).__name__}"
        return response.status_code == 200, f"HTTP {response.status_code} {response.text[:200]}"

    def _raise_not_ready(self, names: Sequence[str], last_answer: str) -> None:
        lines = [
            f"  {process.name}: {line}"
            for process in self.processes
            if process.name in names
            for line in process.tail(5)
        ]
        limit = self._scenario.deployment.ready_timeout_s
        found = self._watch.take()
        message = f"{', '.join(names)} not ready after {limit:g} s; last answer from {last_answer}"
        if lines:
            message += "\nlast lines of the logs:\n" + "\n".join(lines)
        if found:
            message += "\n" + "\n".join(each.text() for each in found)
        advice = [each.mend for each in found[:1]] or ["look into the logs"]
        raise LaunchError(message, hint=f"{advice[0]}, or raise deployment.ready_timeout_s")

    def _endpoints(self) -> Endpoints:
        if self.external:
            return _external_endpoints(self._scenario, self._connector)
        members = instances(self._scenario, self.plan)
        host = self._scenario.deployment.host
        engine = engines.get(self._scenario.deployment.engine)
        port = self.plan.router_port if self.plan.router_port is not None else members[0].port
        router = f"http://{host}:{port}" if self.plan.router_port is not None else ""
        return Endpoints(
            base_url=f"http://{host}:{port}",
            metrics_urls={member.name: f"{member.url}/metrics" for member in members},
            cache_reset_urls=[f"{member.url}{engine.cache_reset_path}" for member in members],
            router_metrics_url=f"{router}/metrics" if router else "",
            direct=dispatch_spec(self._scenario, self.plan),
        )


def _external_endpoints(scenario: Scenario, connector: Connector) -> Endpoints:
    options = scenario.deployment.engine_options
    assert isinstance(options, ExternalOptions)
    urls = {
        "prefill-0": options.prefill_metrics_url,
        "decode-0" if connector.disaggregated else "aggregated-0": options.decode_metrics_url,
    }
    return Endpoints(options.base_url, {name: url for name, url in urls.items() if url})


def _listens(host: str, port: int) -> bool:
    """Whether a connection to ``host:port`` is taken."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False
