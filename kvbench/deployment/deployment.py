"""A running deployment from start to stop: engines or P/D pairs, router, ports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from kvbench import engines
from kvbench.connectors.base import Connector, PlainConnector
from kvbench.core.access import ServerAccess
from kvbench.core.foreign_text import visible
from kvbench.core.gates.evidence import LoggedTransport
from kvbench.core.load.dispatch import COMPLETIONS
from kvbench.core.load.prompts import ChatLength
from kvbench.core.plan.plan import GROUP_PORTS, DeploymentPlan, InstancePlan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.scenario import Deployment, Scenario
from kvbench.deployment.diagnose import Diagnosis
from kvbench.deployment.liveness import ProcessWatch
from kvbench.deployment.single_requests import Completion, SingleRequests, greedy_body
from kvbench.errors import LaunchError, ServerError
from kvbench.hosts import web
from kvbench.hosts.server_access import access_headers
from kvbench.hosts.telemetry import Metrics, finite, scrape
from kvbench.launchers.base import GRACE_S, Launcher, Process
from kvbench.launchers.parts.sockets import free_ports, port_in_use, require_free_port
from kvbench.planning.gpu_dealing import VISIBLE
from kvbench.planning.process_specs import (
    PROFILER_GRACE_S,
    dispatch_spec,
    has_prefix,
    instances,
    process_specs,
    profile_of,
    several_hosts_problem,
)

__all__ = [
    "free_ports",
    "port_in_use",
    "require_free_port",
    "require_free_ports",
    "with_ports",
    "with_ports_at",
]


_HELPERS = "helpers"

Choose = Callable[[str, Sequence[int]], Sequence[int]]
"""(process name, counts) → first of each count's consecutive free ports."""


def with_ports(plan: DeploymentPlan, host: str) -> DeploymentPlan:
    """Replace open ports (0) of the plan by free local ones."""
    return _with_chosen(plan, {_HELPERS: host}, lambda _, counts: free_ports(host, counts))


def with_ports_at(plan: DeploymentPlan, deployment: Deployment, launcher: Launcher) -> DeploymentPlan:
    """Replace open ports by free ones of each process's host."""
    names = [instance.name for instance in plan.instances] + ["router", _HELPERS]
    places = {name: f"{launcher.place_of(name).host} {deployment.address_of(name)}" for name in names}

    def choose(name: str, counts: Sequence[int]) -> Sequence[int]:
        return launcher.place_of(name).free_ports(deployment.address_of(name), counts)

    return _with_chosen(plan, places, choose)


def require_free_ports(plan: DeploymentPlan, deployment: Deployment, launcher: Launcher) -> None:
    """Raise PortInUseError for a port in use on its host."""
    wanted: dict[str, list[tuple[str, int]]] = {"router": []}
    if plan.router_port:
        wanted["router"].append(("router", plan.router_port))
    wanted["router"] += [(f"{plan.label}'s helpers", port) for port in plan.service_ports]
    for instance in plan.instances:
        nodes = deployment.nodes_of(instance.name)
        for node in range(max(1, len(nodes))):
            name = f"{instance.name}{NODE}{node}" if node else instance.name
            wanted[name] = [
                (_port_of(instance, port), port) for port in instance.ports_on(node, len(nodes)) if port
            ]
    for name, needed in wanted.items():
        if needed:
            launcher.place_of(name).require_free(deployment.address_of(name), needed)


def _port_of(instance: InstancePlan, port: int) -> str:
    """Purpose of a port, as text."""
    if port == instance.port:
        return instance.name
    return f"{instance.name}'s {'ranks' if port in instance.group_ports else 'side channel'}"


def _with_chosen(plan: DeploymentPlan, places: dict[str, str], choose: Choose) -> DeploymentPlan:
    """Choose all open ports of one host at once, so that none is used twice."""
    open_: list[tuple[str, str, int]] = []
    if plan.router_port == 0:
        open_.append(("router", "port", 1))
    open_ += [(_HELPERS, str(index), 1) for index, port in enumerate(plan.service_ports) if port == 0]
    for instance in plan.instances:
        if instance.port == 0:
            open_.append((instance.name, "port", 1))
        if instance.side_port == 0:
            open_.append((instance.name, "side_port", instance.side_ports))
        if instance.group_port == 0:
            open_.append((instance.name, "group_port", GROUP_PORTS))
    chosen: dict[tuple[str, str], int] = {}
    by_place: dict[str, list[tuple[str, str, int]]] = {}
    for name, what, count in open_:
        by_place.setdefault(places.get(name, places[_HELPERS]), []).append((name, what, count))
    for wanted in by_place.values():
        ports = choose(wanted[0][0], [count for _, _, count in wanted])
        chosen |= {(name, what): port for (name, what, _), port in zip(wanted, ports, strict=True)}
    return replace(
        plan,
        instances=tuple(
            replace(
                instance,
                port=chosen.get((instance.name, "port"), instance.port),
                side_port=chosen.get((instance.name, "side_port"), instance.side_port),
                group_port=chosen.get((instance.name, "group_port"), instance.group_port),
            )
            for instance in plan.instances
        ),
        router_port=chosen.get(("router", "port"), plan.router_port),
        service_ports=tuple(
            chosen.get((_HELPERS, str(index)), port) for index, port in enumerate(plan.service_ports)
        ),
    )


POLL_S = 0.02
SLOWEST_POLL_S = 0.5
"""Interval of an engine that loads for a minute: asking more often would take CPU time from its start."""
CONTROL_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 1.5
"""Timeout of a repeated request in seconds; processes are checked in between."""
KV_HELD_S = 45.0
"""Longest wait in seconds for held KV, above NIXL's lease of 30 s (kv_lease_duration in vLLM)."""
RESET_POLL_S = 0.5
_UNDER_WAY = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs"
    r"|llamacpp:requests_(?:processing|deferred))(?:\{.*\})? (\S+)",
    re.MULTILINE,
)
"""Gauges of vLLM, SGLang and llama.cpp; a value that is not a number is unknown."""


@dataclass(frozen=True)
class Endpoints:
    """Endpoints of a deployment: requests at ``base_url``, metrics per instance."""

    base_url: str
    metrics_urls: Mapping[str, str] = field(default_factory=dict)
    """Instance name, starting with its role → /metrics."""
    cache_reset_urls: Sequence[str] = ()
    keeping_urls: Sequence[str] = ()
    """P instances that keep fetched KV while idle (``Engine.keeps_fetched_kv``)."""
    router_metrics_url: str = ""
    access: ServerAccess = field(default_factory=ServerAccess)
    """Headers and certificates of the server's requests."""
    direct: Mapping[str, Any] | None = None
    """Direct dispatch to P and D (``process_specs.dispatch_spec``), or None."""


class RunningDeployment:
    """Context manager: starts processes, waits until ready, stops them."""

    def __init__(self, scenario: Scenario, plan: DeploymentPlan, launcher: Launcher) -> None:
        self.plan = plan
        self.ready_s = 0.0
        self.processes: list[Process] = []
        self._scenario = scenario
        self._launcher = launcher
        access = scenario.deployment.engine_options.server.access
        self._client = web.client(
            headers=access_headers(access),
            timeout_s=CONTROL_TIMEOUT_S,
            over=launcher.web(access),
            access=access,
        )
        self._connector: Connector = profile_of(scenario, plan.connector, plan.label)
        self._specs = [] if self.external else process_specs(scenario, plan, launcher.log_dir.absolute())
        options = scenario.connector_options(plan.label)
        transport = self._connector.requested_transport(options) if self._specs else ""
        self._watch = ProcessWatch(scenario.deployment.engine_options.logs_like, self._connector, transport)
        self.endpoints = self._endpoints()
        self._single_requests = SingleRequests(
            scenario, self._client, self.endpoints.base_url, self.check_alive, self._explained
        )

    @property
    def connector(self) -> Connector:
        return self._connector

    @property
    def external(self) -> bool:
        return not self._scenario.deployment.engine_options.starts_processes

    def __enter__(self) -> RunningDeployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and wait until ready. Raises PortInUseError, ProcessDiedError or LaunchError;
        the caller stops what was started."""
        began = time.monotonic()
        deployment = self._scenario.deployment
        if deployment.several_hosts and not deployment.hosts:
            raise several_hosts_problem()
        if not self.external:
            require_free_ports(self.plan, deployment, self._launcher)
        for spec in self._specs:
            self._watch.follow(spec, self._launcher.log_path(spec))
            self.processes.append(self._launcher.start(spec))
        self._wait_ready(began + self._scenario.deployment.ready_timeout_s)
        self._watch.started(self.processes)
        self.ready_s = time.monotonic() - began

    def stop(self) -> None:
        self._watch.close()
        started, self.processes = self.processes, []
        if started:
            grace_s = PROFILER_GRACE_S if has_prefix(self._scenario.deployment) else GRACE_S
            self._launcher.stop(started, grace_s)
        self._client.close()

    def check_alive(self) -> None:
        """Raise HostLostError, ProcessDiedError, or LaunchError for a fatal log line."""
        self._launcher.check()
        self._watch.check(self.processes)

    def process(self, name: str) -> Process:
        found = next((process for process in self.processes if process.name == name), None)
        if found is None:
            raise LookupError(f"there is no {name}, but {', '.join(self.pids())}")
        return found

    def start_again(self, name: str) -> Process:
        """Restart an ended process: same command, ports, log. Raises LookupError, LaunchError."""
        old = self.process(name)
        again = self._launcher.start(old.spec)
        self.processes[self.processes.index(old)] = again
        return again

    def is_ready(self, name: str) -> bool:
        """Whether a process passes its readiness check. Raises LookupError."""
        return self._is_ready(self.process(name).spec)[0]

    def diagnoses(self) -> list[Diagnosis]:
        """Non-fatal diagnoses of start-up, and since the last call."""
        return self._watch.take()

    def transports(self) -> list[LoggedTransport]:
        """KV transports in the logs since the start."""
        return self._watch.transports() if self._connector.disaggregated else []

    def pids(self) -> dict[str, int]:
        return {process.name: process.pid for process in self.processes}

    def gpus(self) -> tuple[str, ...]:
        """GPUs of its engines as in host figures; empty unless all are known."""
        found: dict[str, None] = {}
        names = {instance.name for instance in self.plan.instances}
        for spec in self._specs:
            if spec.name.partition(NODE)[0] not in names:
                continue
            host = self._launcher.host_of(spec.name)
            given = self._launcher.env_of(spec).get(VISIBLE, "").replace(" ", "")
            if not given:
                return ()
            found |= dict.fromkeys(f"{host}/{gpu}" if host else gpu for gpu in given.split(","))
        return tuple(found)

    def metrics(self) -> dict[str, Metrics | None]:
        """Read /metrics of each instance, and of the router as ``router``."""
        pages = {name: scrape(self._client, url) for name, url in self.endpoints.metrics_urls.items()}
        if self.endpoints.router_metrics_url:
            pages["router"] = scrape(self._client, self.endpoints.router_metrics_url)
        return pages

    @property
    def empties_caches(self) -> bool:
        return bool(self.endpoints.cache_reset_urls)

    def reset_caches(self) -> None:
        """Empty all prefix caches, where the endpoint exists. vLLM (reported by 0.28 and newer) keeps its
        cache while KV blocks are held, such as unfetched KV; then it is retried. Older vLLM keeps it without
        saying so, until a request lets P's engine free them. Raises ServerError at the deadline."""
        deadline = time.monotonic() + KV_HELD_S
        for url in self.endpoints.keeping_urls:
            self._send_a_token(url)
        for url in self.endpoints.cache_reset_urls:
            while not self._reset_cache(url):
                if time.monotonic() > deadline:
                    raise ServerError(
                        f"POST {url} did not empty the prefix cache within {KV_HELD_S:g} s: the engine "
                        "answers success: false, so it still holds KV blocks",
                        hint="check for other clients; otherwise restart the deployment; its log "
                        "shows how many blocks are not freed",
                    )
                self.check_alive()
                time.sleep(RESET_POLL_S)

    def _reset_cache(self, url: str) -> bool:
        """Request a reset; return False if the engine kept its cache."""
        try:
            response = self._client.post(url)
        except httpx.HTTPError as error:
            raise ServerError(f"POST {url} failed: {error}") from error
        try:
            answer = web.json_of(response)
        except ValueError:
            return True  # older vLLM and SGLang answer without JSON
        return not (isinstance(answer, dict) and answer.get("success") is False)

    def _send_a_token(self, url: str) -> None:
        body = greedy_body(self._scenario.model.served_model_name, {"prompt": [1]}, 1)
        try:
            self._client.post(f"{url}{COMPLETIONS}", json=body).raise_for_status()
        except httpx.HTTPError as error:
            raise ServerError(f"POST {url}{COMPLETIONS} failed: {error}") from error

    def under_way(self) -> float | None:
        """Running and waiting requests of all instances, or None if one does not report them."""
        reported = [self._reported_under_way(url) for url in self.endpoints.metrics_urls.values()]
        known = sum(count for count in reported if count is not None)
        return known if known or (reported and None not in reported) else None

    def _reported_under_way(self, url: str) -> float | None:
        """Running and waiting requests of an instance, or None. Reads nothing else. A busy or hung one counts
        as one request; ``check_alive`` decides."""
        try:
            response = self._client.get(url, timeout=ASK_TIMEOUT_S)
        except httpx.TimeoutException:
            return 1.0
        except httpx.HTTPError:
            return None
        values = _UNDER_WAY.findall(response.text) if response.status_code == 200 else ()
        found = [number for value in values if (number := finite(value)) is not None]
        return sum(found) if found else None

    def complete(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Return the text of one greedy completion, not streamed. Raises ServerError."""
        return self._single_requests.complete([prompt], max_tokens)[0].text

    def complete_scored(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Completion]:
        """Return completions with log-probabilities, if offered."""
        return self.complete_all(prompts, max_tokens, scored=True)

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool = False
    ) -> list[Completion]:
        """Return concurrent greedy completions. ``scored``: with log-probabilities. Raises ServerError."""
        return self._single_requests.complete(prompts, max_tokens, scored=scored)

    def streamed_s(self, prompt: Sequence[int], max_tokens: int) -> float:
        """Seconds of one streamed answer, as in a trial. Raises ServerError."""
        return self._single_requests.streamed_s(prompt, max_tokens)

    def chat_length(self) -> ChatLength:
        """Tokens per word of a chat message. Raises ServerError."""
        return self._single_requests.chat_length()

    def _explained(self) -> tuple[str, str]:
        """Cause of a failed request in the logs, and a hint."""
        return self._watch.explained(self.processes)

    def _wait_ready(self, deadline: float) -> None:
        # A process without URL and port serves another one, whose check covers both.
        waiting = [process.spec for process in self.processes if process.spec.ready_url or process.spec.port]
        last_answer = ""
        began = time.monotonic()
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
                time.sleep(min(max(POLL_S, (time.monotonic() - began) / 50), SLOWEST_POLL_S))

    def _is_ready(self, spec: ProcessSpec) -> tuple[bool, str]:
        if not spec.ready_url:
            listens = self._launcher.place_of(spec.name).listens(spec.host, spec.port)
            return listens, f"nothing listens on {spec.host}:{spec.port}"
        try:
            response = self._client.get(spec.ready_url, timeout=2.0)
        except httpx.HTTPError as error:
            return False, f"{type(error).__name__}"
        return response.status_code == 200, f"HTTP {response.status_code} {visible(response.text[:200])}"

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
            message += "\n" + "\n".join(diagnosis.text() for diagnosis in found)
        advice = [diagnosis.hint for diagnosis in found[:1]] or ["see the logs"]
        raise LaunchError(message, hint=f"{advice[0]}, or raise deployment.ready_timeout_s")

    def _endpoints(self) -> Endpoints:
        if self.external:
            return _external_endpoints(self._scenario, self._connector)
        members = instances(self._scenario, self.plan)
        at = self._scenario.deployment.address_of
        host = members[0].host if self.plan.router_port is None else at("router")
        engine = engines.get(self._scenario.deployment.engine)
        port = self.plan.router_port if self.plan.router_port is not None else members[0].port
        router = f"http://{host}:{port}" if self.plan.router_port is not None else ""
        # A PlainConnector's KV is sent in the step, and P2pNccl accepts no request without D's address.
        keeps = not isinstance(self._connector, PlainConnector)
        keeps = keeps and engine.keeps_fetched_kv(self._scenario.deployment.engine_options)
        return Endpoints(
            base_url=f"http://{host}:{port}",
            metrics_urls={member.name: f"{member.url}/metrics" for member in members},
            cache_reset_urls=[f"{member.url}{engine.cache_reset_path}" for member in members],
            keeping_urls=[member.url for member in members if keeps and member.role == "prefill"],
            router_metrics_url=f"{router}/metrics" if router else "",
            direct=dispatch_spec(self._scenario, self.plan),
        )


def _external_endpoints(scenario: Scenario, connector: Connector) -> Endpoints:
    server = scenario.deployment.engine_options.server
    found = server.metrics_urls
    if not connector.disaggregated:
        found = {name.replace("decode-", "aggregated-"): url for name, url in found.items()}
    return Endpoints(server.base_url, found, access=server.access)
