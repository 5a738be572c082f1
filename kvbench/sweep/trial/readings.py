"""What is read of a deployment around a trial, as one value: metrics before and after it, logs, samples."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final

from kvbench.core.gates.evidence import EngineFigures, HostFigures, LoggedTransport, RouterFigures
from kvbench.core.metrics.engine_use import sampled_use
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.sweep.trial.evidence import (
    Reading,
    engine_figures,
    engine_summary,
    router_figures,
    transport_of,
    with_slots,
)
from kvbench.sweep.trial.host_samples import Observer
from kvbench.sweep.trial.kv_counters import DEFAULT_LOG_INTERVAL_S, LOG_INTERVAL_ENV, KvLogs, RoleKv, role_kv
from kvbench.sweep.trial.load_progress import LoadResult

LOG_WAIT_S: Final = 2.5
"""A KV log line that comes more seldom than this is not waited for after each trial."""


@dataclass(frozen=True)
class Readings:
    """``before``, ``after``: /metrics by instance. ``logged``: KV by role from logs, where no metric has it.
    ``rows``: the sampler's. ``slots``: an instance's ``max_num_seqs``, if known. ``logged_transports``:
    what the logs prove of the KV's way. ``gpus``: those of the deployment, where all are known.
    """

    before: Reading
    after: Reading
    logged: Mapping[str, RoleKv]
    rows: Sequence[Mapping[str, Any]]
    host: HostFigures
    slots: int | None = None
    logged_transports: Sequence[LoggedTransport] = ()
    gpus: Sequence[str] = ()

    @cached_property
    def engines(self) -> dict[str, EngineFigures]:
        """By role."""
        return with_slots(engine_figures(self.before, self.after, self.logged), self.rows, self.slots)

    @property
    def transport(self) -> str:
        """The transport that really ran: what the engines report, else what their logs prove."""
        logged = dict.fromkeys(name for each in self.logged_transports for name in each.transports)
        return transport_of(self.after) or ",".join(logged)

    @property
    def gpu_watts(self) -> dict[str, float]:
        """Mean power of each of the deployment's GPUs; empty unless it is known of all."""
        watts = {gpu: round(self.host.gpu_watts[gpu], 3) for gpu in self.gpus if gpu in self.host.gpu_watts}
        return watts if len(watts) == len(self.gpus) else {}

    @property
    def watts(self) -> float | None:
        """Mean power of all of them together; None unless it is known of all."""
        return sum(self.gpu_watts.values()) if self.gpu_watts else None

    @property
    def kv_lost(self) -> float:
        """Requests whose KV was given up or failed to move."""
        return sum((role.kv_expired or 0.0) + (role.kv_failures or 0.0) for role in self.engines.values())

    def router(self, seconds: float) -> RouterFigures:
        """What kvbench's router did in a load of so many seconds."""
        return replace(router_figures(self.before, self.after), seconds=seconds)

    def columns(self, load: LoadResult) -> dict[str, Any]:
        """The engine columns of the result table."""
        columns = engine_summary(self.before, self.after, self.engines, load, self.logged)
        ways = {"rdma": 0.0, "nvlink": 0.0, "ip": 0.0, "loopback": 0.0}
        for nic in self.host.nics.values():
            ways["loopback" if nic.loopback else nic.kind] += nic.most_bytes
        return {
            **columns,
            "transport": self.transport,
            "logged_transports": [asdict(each) for each in self.logged_transports],
            "carried_bytes": {way: carried for way, carried in ways.items() if carried},
            **({"gpu_watts": self.watts, "watts_by_gpu": self.gpu_watts} if self.gpu_watts else {}),
        }

    def use(self) -> dict[str, dict[str, Any]]:
        """How much of each role's engines was in use, as JSON."""
        return {role: each.to_json() for role, each in sampled_use(self.rows, self.slots).items()}


class MetricsReader:
    """Reads what the engines of one deployment report of themselves, trial after trial."""

    def __init__(self, deployment: RunningDeployment) -> None:
        self._deployment = deployment
        self._kv_logs = KvLogs({p.name: p.log_path for p in deployment.processes if p.name != "router"})

    def before(self) -> Reading:
        """/metrics of each instance before a load; what was logged of KV so far is another trial's."""
        pages = self._deployment.metrics()
        if self._reads_logs(pages):
            self._logged_kv(pages)
            pages = self._deployment.metrics()
        return pages

    def after(self, before: Reading, observer: Observer, slots: int | None) -> Readings:
        """The whole of a trial's readings, once it is drained."""
        pages = self._deployment.metrics()
        logged = self._logged_kv(pages)
        transports = self._deployment.transports()
        gpus = self._deployment.gpus()
        return Readings(before, pages, logged, observer.rows, observer.host, slots, transports, gpus)

    def _reads_logs(self, pages: Reading) -> bool:
        """Whether KV moves and no engine reports it in its metrics."""
        sources = (role_kv([(page, page)]).source for page in pages.values() if page is not None)
        return self._deployment.connector.disaggregated and not any(sources)

    def _logged_kv(self, pages: Reading) -> dict[str, RoleKv]:
        """What engines without KV metrics log of their transfers since the last call.

        Their lines come at seconds. If they come often, one interval is waited for, so that a trial's
        transfers are all counted and no others; if not, only means of a transfer are taken from them.
        """
        if not self._reads_logs(pages):
            return {}
        whole = self._log_interval_s() <= LOG_WAIT_S
        if whole:
            deadline = time.monotonic() + self._log_interval_s() + 0.5
            while time.monotonic() < deadline:
                self._deployment.check_alive()
                self._kv_logs.poll()
                time.sleep(0.05)
        return self._kv_logs.take(whole=whole)

    def _log_interval_s(self) -> float:
        said = [process.spec.env.get(LOG_INTERVAL_ENV, "") for process in self._deployment.processes]
        try:
            return float(next(filter(None, said), os.environ.get(LOG_INTERVAL_ENV) or DEFAULT_LOG_INTERVAL_S))
        except ValueError:
            return DEFAULT_LOG_INTERVAL_S


def kv_bytes_per_request(
    scenario: Scenario, input_len: int, engines: Mapping[str, EngineFigures]
) -> tuple[float | None, float]:
    """KV bytes that one request has to move, in whole blocks, and how much of it may stay behind.

    The block size is what the engines report. None if that, or the model's shape, is not known.
    """
    shape, deployed = scenario.model.shape, scenario.deployment
    blocks = {role.block_tokens for role in engines.values() if role.block_tokens}
    if not shape.known or len(blocks) != 1:
        return None, 0.0
    block_tokens = blocks.pop()
    per_block = float(shape.block_bytes(block_tokens, deployed.wire_ranks) * shape.regions())
    partial = not deployed.engine_options.kv_bytes_certain and input_len % block_tokens > 0
    return shape.blocks(input_len, block_tokens) * per_block, per_block if partial else 0.0
