"""Taking up an engine's KV pool on purpose: prefills that no D fetches, generations that go on and on.

The first is what a client that leaves between P and D, or a D that dies there, does to P: its blocks stay
held until their lease ends. All requests are kvbench's own, and end by a deadline.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import httpx

from kvbench.connectors.base import PrefillPeer
from kvbench.core.held_rate.fault_plan import PlannedFault
from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.plan.dispatch import COMPLETIONS, BackendSpec
from kvbench.core.plan.plan import trial_seed
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.deployment.single_requests import greedy_body
from kvbench.errors import InputError
from kvbench.hosts import web
from kvbench.hosts.server_access import access_headers
from kvbench.hosts.telemetry import Metrics, scrape
from kvbench.launchers.base import Launcher

USAGE: Final = "vllm:kv_cache_usage_perc"
LEASED: Final = 8
"""Requests whose KV is left behind on P by the fault ``lease``."""
MOST: Final = 4000
AT_ONCE: Final = 16
ASK_S: Final = 10.0
"""A request of ours that has no answer by then is given up."""
BEGIN_S: Final = 5.0
"""So long is waited for a pool to fill; what has not begun by then goes on beside."""


def kv_blocks(page: Metrics | None) -> tuple[float, int] | None:
    """(blocks in use, blocks of the pool) by an engine's /metrics; None where it does not say."""
    if page is None:
        return None
    usage, label = page.total(USAGE), page.label("vllm:cache_config_info", "num_gpu_blocks")
    return (usage * int(label), int(label)) if usage is not None and label.isdecimal() else None


@dataclass(frozen=True)
class PooledEngine:
    """One engine instance as it is asked without the router, and its pool."""

    name: str
    url: str
    metrics_url: str
    backend: BackendSpec


class _Hog:
    """What both ways have in common: where to ask, and prompts like no others."""

    def __init__(self, scenario: Scenario, deployment: RunningDeployment, launcher: Launcher) -> None:
        self._scenario = scenario
        self._deployment = deployment
        self._far = launcher.web(deployment.endpoints.access)
        self._access = deployment.endpoints.access
        self._over = threading.Event()
        self._salt = uuid.uuid4().hex
        self._workers = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="kv-hog")

    def _server(self, role: str, index: int) -> PooledEngine:
        direct = self._deployment.endpoints.direct
        names = [each.name for each in self._deployment.plan.instances if each.role == role]
        if direct is None or index >= len(names):
            raise InputError(f"no {role} instance of this deployment can be asked by itself")
        backend = BackendSpec(**direct["prefill" if role == "prefill" else "decode"][index])
        metrics = self._deployment.endpoints.metrics_urls[names[index]]
        return PooledEngine(names[index], backend.url, metrics, backend)

    def _client(self) -> httpx.Client:
        return web.client(
            headers=access_headers(self._access), timeout_s=ASK_S, over=self._far, access=self._access
        )

    def _prompt(self, number: int) -> list[int]:
        length = min(self._scenario.workload.input_len)
        shape = PromptShape(length, self._scenario.model.vocab_size)
        (prompt,) = token_prompts(1, shape, trial_seed(self._scenario.seed, self._salt, number)).tolist()
        return [int(token) for token in prompt]

    def _fits(self, server: PooledEngine) -> int:
        """How many of our prompts the pool of a server holds; where it does not say, as many as we send."""
        with self._client() as client:
            page = scrape(client, server.metrics_url)
        known = kv_blocks(page)
        size = page.label("vllm:cache_config_info", "block_size") if page is not None else ""
        if known is None or not size.isdecimal():
            return MOST
        return math.ceil(known[1] / math.ceil(min(self._scenario.workload.input_len) / int(size)))

    def _used(self, server: PooledEngine) -> float:
        """The share of its pool that a server says is in use."""
        with self._client() as client:
            known = kv_blocks(scrape(client, server.metrics_url))
        return known[0] / known[1] if known is not None and known[1] else 0.0

    def undo(self, *, ending: bool = False) -> None:
        """Nothing more is asked; what was asked ends by its deadline."""
        self._over.set()
        self._workers.shutdown(wait=False, cancel_futures=True)


class OrphanedKv(_Hog):
    """Prefills on P of which no D is told: some of them (``lease``), or until the pool is full (``pool``)."""

    def __init__(
        self, scenario: Scenario, deployment: RunningDeployment, launcher: Launcher, fault: PlannedFault
    ) -> None:
        super().__init__(scenario, deployment, launcher)
        self._fault = fault

    def begin(self) -> str:
        server = self._server("prefill", self._fault.index)
        wanted = LEASED if self._fault.kind == "lease" else min(MOST, self._fits(server) + 1)
        asked = [self._workers.submit(self._orphan, server, number) for number in range(wanted)]
        wait(asked, BEGIN_S)
        held = sum(each.done() and not each.cancelled() and each.result() for each in asked)
        share = self._used(server)
        return (
            f"{server.name} holds KV of {held} requests that no D fetches; {share:.0%} of its pool is in use"
        )

    def _orphan(self, server: PooledEngine, number: int) -> bool:
        """Whether P has taken it."""
        if self._over.is_set():
            return False
        spec, connector = server.backend, self._deployment.connector
        peer = PrefillPeer(
            spec.url, spec.bootstrap_url, spec.engine_id, spec.side_address, spec.tensor_parallel_size
        )
        request_id = uuid.uuid4().hex
        body = greedy_body(self._scenario.model.served_model_name, {"prompt": self._prompt(number)}, 1)
        fields = connector.prefill_request(body, request_id, peer)
        named = connector.backend_request_id(request_id, peer, "")
        return _post(self._client(), f"{server.url}{COMPLETIONS}", fields, {"x-request-id": named})


class DecodeFlood(_Hog):
    """Generations asked of D itself, one after the other in so many threads, until the fault is undone."""

    def __init__(
        self, scenario: Scenario, deployment: RunningDeployment, launcher: Launcher, fault: PlannedFault
    ) -> None:
        super().__init__(scenario, deployment, launcher)
        self._fault = fault
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
            most = max(most, self._used(server))
            time.sleep(0.05)
        return f"{count} generations were asked of {server.name} at once; {most:.0%} of its pool was in use"

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
