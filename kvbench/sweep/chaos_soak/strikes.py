"""Inject faults into a running deployment and undo them; only processes that kvbench started are touched.

Beginning and end return at once or by a deadline. ``undo`` leaves no stopped process, no request and no
network rule at any stage. KV pools are filled with kvbench's own requests, which have a deadline."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import httpx

from kvbench.connectors.base import peer_at
from kvbench.core.chaos_soak.fault_plan import FaultTarget, PlannedFault
from kvbench.core.load.arrivals import trial_seed
from kvbench.core.load.dispatch import COMPLETIONS, BackendSpec
from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.deployment.single_requests import greedy_body
from kvbench.errors import InputError
from kvbench.hosts import web
from kvbench.hosts.lab.faults import heal, place
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.procfs import family
from kvbench.hosts.server_access import access_headers
from kvbench.hosts.telemetry import Metrics, scrape
from kvbench.launchers.base import Launcher, Process

USAGE: Final = "vllm:kv_cache_usage_perc"
LEASED: Final = 8
"""Requests for which the fault ``lease`` leaves KV on P."""
MOST: Final = 4000
AT_ONCE: Final = 16
ASK_S: Final = 10.0
"""Deadline of a request sent by a fault, in seconds."""
BEGIN_S: Final = 5.0
"""Longest wait for a pool to fill, in seconds; filling then continues in the background."""


def kv_blocks(page: Metrics | None) -> tuple[float, int] | None:
    """Return (used blocks, all blocks) by an engine's /metrics, or None."""
    if page is None:
        return None
    usage, label = page.total(USAGE), page.label("vllm:cache_config_info", "num_gpu_blocks")
    return (usage * int(label), int(label)) if usage is not None and label.isdecimal() else None


@dataclass(frozen=True)
class PooledEngine:
    """One engine instance, addressed directly, and its pool."""

    name: str
    url: str
    metrics_url: str
    backend: BackendSpec


class _PoolFault:
    """Common part of both pool faults: targets and unique prompts."""

    def __init__(
        self, scenario: Scenario, deployment: RunningDeployment, launcher: Launcher, fault: PlannedFault
    ) -> None:
        self._fault = fault
        self._scenario = scenario
        self._deployment = deployment
        self._remote_web = launcher.web(deployment.endpoints.access)
        self._access = deployment.endpoints.access
        self._over = threading.Event()
        self._salt = uuid.uuid4().hex
        self._workers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kv-hog")

    def _server(self, role: str, index: int) -> PooledEngine:
        direct = self._deployment.endpoints.direct
        names = [instance.name for instance in self._deployment.plan.instances if instance.role == role]
        if direct is None or index >= len(names):
            raise InputError(f"no {role} instance of this deployment can be addressed directly")
        backend = BackendSpec(**direct["prefill" if role == "prefill" else "decode"][index])
        metrics = self._deployment.endpoints.metrics_urls[names[index]]
        return PooledEngine(names[index], backend.url, metrics, backend)

    def _client(self) -> httpx.Client:
        return web.client(
            headers=access_headers(self._access), timeout_s=ASK_S, over=self._remote_web, access=self._access
        )

    def _prompt(self, number: int) -> list[int]:
        length = min(self._scenario.workload.input_len)
        shape = PromptShape(length, self._scenario.model.vocab_size)
        (prompt,) = token_prompts(1, shape, trial_seed(self._scenario.seed, self._salt, number)).tolist()
        return [int(token) for token in prompt]

    def _fits(self, server: PooledEngine) -> int:
        """Number of prompts that fit into a server's pool; if unknown, as many as are sent."""
        with self._client() as client:
            page = scrape(client, server.metrics_url)
        known = kv_blocks(page)
        size = page.label("vllm:cache_config_info", "block_size") if page is not None else ""
        if known is None or not size.isdecimal():
            return MOST
        return math.ceil(known[1] / math.ceil(min(self._scenario.workload.input_len) / int(size)))

    def _used_share(self, server: PooledEngine) -> float:
        with self._client() as client:
            known = kv_blocks(scrape(client, server.metrics_url))
        return known[0] / known[1] if known is not None and known[1] else 0.0

    def undo(self, *, ending: bool = False) -> None:
        """Send nothing more; open requests end by their deadline."""
        self._over.set()
        self._workers.shutdown(wait=False, cancel_futures=True)


class OrphanedKvFault(_PoolFault):
    """Prefills on P without a decode: a few (``lease``), or until the pool is full (``pool``). P keeps the
    blocks until their lease ends, as after a client or D that fails between P and D."""

    def begin(self) -> str:
        server = self._server("prefill", self._fault.index)
        count = LEASED if self._fault.kind == "lease" else min(MOST, self._fits(server) + 1)
        prefills = [self._workers.submit(self._prefill_only, server, number) for number in range(count)]
        wait(prefills, BEGIN_S)
        held = sum(prefill.done() and not prefill.cancelled() and prefill.result() for prefill in prefills)
        share = self._used_share(server)
        return (
            f"{server.name} holds KV of {held} requests that no D fetches; {share:.0%} of its pool is in use"
        )

    def _prefill_only(self, server: PooledEngine, number: int) -> bool:
        """Send one prefill; return whether P accepted it."""
        if self._over.is_set():
            return False
        spec, connector = server.backend, self._deployment.connector
        peer = peer_at(spec, spec.engine_ids, number)
        request_id = uuid.uuid4().hex
        body = greedy_body(self._scenario.model.served_model_name, {"prompt": self._prompt(number)}, 1)
        fields = connector.prefill_request(body, request_id, peer)
        backend_id = connector.backend_request_id(request_id, peer, "")
        headers = {"x-request-id": backend_id, **peer.headers}
        return _post(self._client(), f"{server.url}{COMPLETIONS}", fields, headers)


class DecodePoolFault(_PoolFault):
    """Sends generations to D directly in several threads until the fault is undone."""

    def __init__(
        self, scenario: Scenario, deployment: RunningDeployment, launcher: Launcher, fault: PlannedFault
    ) -> None:
        super().__init__(scenario, deployment, launcher, fault)
        self._threads: list[threading.Thread] = []

    def begin(self) -> str:
        server = self._server("decode", self._fault.index)
        count = min(128, self._fits(server))
        for number in range(count):
            thread = threading.Thread(target=self._generate, args=(server, number), daemon=True)
            self._threads.append(thread)
            thread.start()
        deadline, most = time.monotonic() + min(BEGIN_S, self._fault.down_s / 2), 0.0
        while time.monotonic() < deadline and most < 0.95:
            most = max(most, self._used_share(server))
            time.sleep(0.05)
        return f"{count} generations were sent to {server.name} at once; {most:.0%} of its pool was in use"

    def _generate(self, server: PooledEngine, number: int) -> None:
        length = self._scenario.workload.output_len
        model, rounds = self._scenario.model.served_model_name, 0
        while not self._over.is_set():
            prompt = {"prompt": self._prompt(number + 1000 * rounds)}
            _post(self._client(), f"{server.url}{COMPLETIONS}", greedy_body(model, prompt, length), {})
            rounds += 1

    def undo(self, *, ending: bool = False) -> None:
        super().undo(ending=ending)
        deadline = time.monotonic() + ASK_S + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _post(client: httpx.Client, url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    with client, contextlib.suppress(httpx.HTTPError):
        return client.post(url, json=dict(body), headers=dict(headers)).status_code == 200
    return False


SLOW_SHARE: Final = 0.02
"""Remaining share of a slowed lab NIC's rate."""


class Strike(Protocol):
    def begin(self) -> str:
        """Inject the fault; return a description. Raises KvbenchError on failure."""

    def undo(self, *, ending: bool = False) -> None:
        """Undo the fault as far as possible; may be called twice, or without ``begin``. ``ending``: the
        deployment is about to stop, so restart nothing."""


class _Kill:
    """SIGKILL to the process and its group."""

    def __init__(self, deployment: RunningDeployment, name: str, *, restart: bool) -> None:
        self._deployment = deployment
        self._name = name
        self._restart = restart
        self._done = False

    def begin(self) -> str:
        process = self._deployment.process(self._name)
        pid = process.pid
        process.kill()
        self._done = True
        return f"{self._name} {pid} was killed"

    def undo(self, *, ending: bool = False) -> None:
        if self._restart and self._done and not ending:
            self._restart = False
            self._deployment.start_again(self._name)


class _Freeze:
    """SIGSTOP to the process and its children, and SIGCONT."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stopped: list[int] = []

    def begin(self) -> str:
        self._stopped = family(self._process.pid)
        for pid in self._stopped:
            _signal(pid, signal.SIGSTOP)
        return f"{self._process.name} {self._process.pid} was stopped, with {len(self._stopped) - 1} children"

    def undo(self, *, ending: bool = False) -> None:
        stopped, self._stopped = self._stopped, []
        if self._process.poll() is None:
            for pid in reversed(stopped):
                _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _NicFault:
    """Faults of one lab NIC, or of all NICs to the isolated process."""

    def __init__(self, lab: Lab, kind: str, nics: list[int], amount: str = "") -> None:
        self._lab = lab
        self._kind = kind
        self._nics = nics
        self._amount = amount
        self._placed: list[int] = []

    def begin(self) -> str:
        words = []
        for nic in self._nics:
            words.append(place(self._lab, self._kind, nic, self._amount).words())
            self._placed.append(nic)
        return "; ".join(words)

    def undo(self, *, ending: bool = False) -> None:
        while self._placed:
            heal(self._lab, self._kind, self._placed.pop())


def process_name(fault: PlannedFault, planned: DeploymentPlan, names: list[str]) -> str:
    """Name of the process that a fault hits. Raises InputError."""
    if fault.target == "metadata":
        engines = {instance.name for instance in planned.instances} | {"router"}
        helpers = [name for name in names if name not in engines]
        if fault.index < len(helpers):
            return helpers[fault.index]
        raise InputError(f"{planned.label} has no metadata service of its own")
    if fault.process not in names:
        raise InputError(f"{planned.label} has no {fault.process}", hint=f"it has {', '.join(names)}")
    return fault.process


def target_counts(planned: DeploymentPlan, lab: Lab | None = None) -> dict[FaultTarget, int]:
    roles = [instance.role for instance in planned.instances]
    return {
        "prefill": roles.count("prefill"),
        "decode": roles.count("decode"),
        "router": int(planned.router_port is not None),
        "metadata": int(bool(planned.service_ports)),
        "nic": 0 if lab is None else lab.plan.nics,
    }


def strike_of(
    fault: PlannedFault,
    deployment: RunningDeployment,
    lab: Lab | None,
    fill_pool: Callable[[PlannedFault], OrphanedKvFault | DecodePoolFault],
) -> Strike:
    """Create a fault's strike. ``fill_pool`` creates pool faults. Raises InputError if impossible."""
    if fault.kind in ("lease", "pool"):
        return fill_pool(fault)
    if fault.kind in ("partition", "pull", "slow"):
        if lab is None:
            raise InputError(
                f"{fault.name}: kvbench may drop packets only in a lab's network",
                hint="--lab runs the deployment on two separate hosts (network namespaces)",
            )
        isolate = fault.target != "nic"
        nics = list(range(lab.plan.nics)) if isolate else [fault.index]
        rate = f"{lab.plan.bits_per_s * SLOW_SHARE / 1e6:g}mbit" if fault.kind == "slow" else ""
        return _NicFault(lab, fault.kind, nics, rate)
    name = process_name(fault, deployment.plan, list(deployment.pids()))
    if fault.kind == "freeze":
        return _Freeze(deployment.process(name))
    return _Kill(deployment, name, restart=fault.kind == "restart")
