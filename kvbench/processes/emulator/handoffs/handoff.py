"""Common code of the pull and the push handshake: roles, leases, the transfer process, modelled times.

A request on P (``do_remote_decode``) keeps its blocks after its one token until they are taken or a lease
ends; D renews the lease until it fetches. A request on D (``do_remote_prefill``) without KV gets an error: it
is never silently prefilled again. The bytes really move, and then wait for the modelled end::

    end = max(begin, link free) + bytes / bandwidth + start-up + per descriptor · descriptors

An engine has one link, first come, first served; only the side that moves the bytes is paced. A transfer that
took longer is late, and its lateness is counted (``kvbench:emulator_transfer_lag_seconds``)."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvbench.errors import TransferError
from kvbench.processes.emulator.engine import Alarm, RunningEngine
from kvbench.processes.emulator.kvbytes import KvPool
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.protocol import ApiError, Generate
from kvbench.processes.emulator.running_request import LiveRequest, RequestTrace
from kvbench.processes.emulator.spec import EngineSpec, KvPace, KvTransferConfig
from kvbench.processes.transfer_worker.remote import TransferProcess
from kvbench.transfer.base import Op


class Pacer:
    """Paces transfers over one engine's link. ``time_scale`` multiplies every time."""

    def __init__(self, pace: KvPace, time_scale: float, metrics: EngineMetrics) -> None:
        self._fixed_s = pace.start_s * time_scale
        self._descriptor_s = pace.per_descriptor_s * time_scale
        self._byte_s = time_scale / (pace.gb_per_s * 1e9) if pace.gb_per_s else 0.0
        self._metrics = metrics
        self._free_s = 0.0
        metrics.paced = True

    def begin(self, now_s: float, nbytes: int) -> float:
        """Reserve the link for ``nbytes``; return the moment at which they are through."""
        self._free_s = max(self._free_s, now_s) + nbytes * self._byte_s
        return self._free_s

    async def end(self, began_s: float, through_s: float, descriptors: int) -> float:
        """Wait for the modelled end; return the seconds since ``began_s``."""
        due = through_s + self._fixed_s + self._descriptor_s * descriptors
        if due > time.monotonic():
            alarm = Alarm()
            try:
                await alarm.until(due)
            finally:
                alarm.close()
        now = time.monotonic()
        self._metrics.transfer_lag.observe(max(0.0, now - due))
        self._metrics.paced_s += due - began_s
        return now - began_s


_TRANSFER_NAMES: Final = {"mooncake_protocol": "protocol"}
"""vLLM's name of a key → option of the transfer backends."""


class EngineTransfers:
    """The transfer process of one engine and its counters."""

    def __init__(self, config: KvTransferConfig, spec: EngineSpec, metrics: EngineMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self.timeout_s = spec.transfer_timeout_s
        self.memory = spec.memory
        layout = spec.layout()
        self._bytes_of_block = layout.regions * layout.block_bytes
        self._pacer = Pacer(spec.kv_pace, spec.time_scale, metrics) if spec.kv_pace else None
        self.process: TransferProcess | None = None

    async def start(self, pool: KvPool, host: str) -> None:
        extra = self._config.kv_connector_extra_config
        options = {_TRANSFER_NAMES.get(k, k): v for k, v in extra.items() if k != "kv_lease_duration"}
        if self.memory != "host":
            options["memory"] = self.memory
        self.process = await TransferProcess.start(self._config.backend, options, pool.fd, pool.layout, host)

    @property
    def started(self) -> TransferProcess:
        if self.process is None:
            raise TransferError("the transfer process is not ready yet")
        return self.process

    async def connect(self, agent: Mapping[str, Any]) -> str:
        return await self.started.connect(dict(agent), self.timeout_s)

    async def move(
        self,
        peer_id: str,
        op: Op,
        local: Sequence[int],
        remote: Sequence[int],
        trace: RequestTrace | None = None,
    ) -> dict[str, Any]:
        began = time.monotonic()
        pacer = self._pacer if local else None
        through = pacer.begin(began, len(local) * self._bytes_of_block) if pacer else 0.0
        result = await self.started.transfer(peer_id, op, local, remote, self.timeout_s)
        seconds = await pacer.end(began, through, result.descriptors) if pacer else result.transfer_s
        self._metrics.transfer.observe(seconds, result.nbytes, result.descriptors)
        self._metrics.blocks_moved += len(local)
        figures = {"bytes": result.nbytes, "descriptors": result.descriptors, "seconds": seconds}
        if trace is not None:
            trace.moved(began, op, figures)
        return figures

    async def offer(self, blocks: Sequence[int]) -> None:
        """Make blocks readable if peers read a mirror of the memory. Raises TransferError."""
        if self.memory != "host":
            await self.started.offer(blocks, self.timeout_s)

    async def close(self) -> None:
        if self.process is not None:
            await self.process.close()


log = logging.getLogger(__name__)

DEFAULT_LEASE_S: Final = 30.0  # vLLM's kv_lease_duration
RENEWALS_PER_LEASE: Final = 6  # vLLM: a heartbeat every sixth of the lease


@dataclass
class Handoff(ABC):
    """One role in one handshake, with a subclass for P and D of pull and push."""

    spec: EngineSpec
    config: KvTransferConfig
    engine: RunningEngine
    transfers: EngineTransfers

    def __post_init__(self) -> None:
        self.metrics = self.engine.metrics
        self.lease_s = float(self.config.kv_connector_extra_config.get("kv_lease_duration", DEFAULT_LEASE_S))
        self._tasks: set[asyncio.Task[None]] = set()
        self.engine.on_load = self.on_load
        self.engine.on_prefilled = self.on_prefilled
        self.engine.on_dropped = self.on_dropped

    @abstractmethod
    async def start(self) -> None:
        """Open the side channel. Raises PortInUseError."""

    @abstractmethod
    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        """Set up a request from its kv_transfer_params, before it is submitted. Raises ApiError."""

    def on_load(self, live: LiveRequest) -> None:
        """D: the request's blocks are reserved."""
        raise AssertionError("only a consumer loads KV")

    def on_prefilled(self, live: LiveRequest) -> None:
        """P: the request has its one token; its blocks are held."""
        raise AssertionError("only a producer holds KV")

    def on_dropped(self, live: LiveRequest) -> None:  # noqa: B027 - optional
        """The client has gone."""

    def status(self) -> dict[str, Any]:
        """Return what a peer must have in common with this engine."""
        return {
            "engine_id": self.config.engine_id,
            "kv_connector": self.config.kv_connector,
            "model": self.spec.model.name,
            "block_tokens": self.spec.block_tokens,
            "regions": self.engine.compute.pool.layout.regions,
            "block_bytes": self.engine.compute.pool.layout.block_bytes,
        }

    async def agent(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer how to connect to this engine."""
        return {**self.status(), "agent": self.transfers.started.agent}

    def check_peer(self, peer: Mapping[str, Any]) -> None:
        local = self.status()
        for key in ("kv_connector", "model", "block_tokens", "regions", "block_bytes"):
            if peer.get(key) != local[key]:
                raise TransferError(
                    f"engines {local['engine_id']} and {peer.get('engine_id')} do not match: "
                    f"{key} is {local[key]!r} here, {peer.get(key)!r} at the peer"
                )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a background task that ends with the engine."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("hand-off task failed", exc_info=error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def producer_params(wanted: Generate) -> Mapping[str, Any] | None:
    """Check and return P's parameters; None for a request without a hand-off. Raises ApiError."""
    params = _params_for("kv_producer", "do_remote_decode", "do_remote_prefill", wanted)
    if params is not None and wanted.stream:
        raise ApiError(400, "a request with do_remote_decode cannot be streamed")
    if params is not None and wanted.max_tokens != 1:
        raise ApiError(400, f"a request with do_remote_decode needs max_tokens 1, not {wanted.max_tokens}")
    return params


def consumer_params(wanted: Generate, required: Sequence[str]) -> Mapping[str, Any] | None:
    """Check and return D's parameters; None for a request without a hand-off. Raises ApiError."""
    params = _params_for("kv_consumer", "do_remote_prefill", "do_remote_decode", wanted)
    if params and (missing := [key for key in required if params.get(key) in (None, "")]):
        raise ApiError(
            400, f"kv_transfer_params lacks {', '.join(missing)}: this router does not fit the engine"
        )
    return params


def _params_for(role: str, key: str, other: str, wanted: Generate) -> Mapping[str, Any] | None:
    params = wanted.kv_transfer_params
    if params is not None and params.get(other):
        raise ApiError(400, f"{other} was sent to a {role}: the router has the roles the wrong way round")
    if params is not None and not params.get(key):
        raise ApiError(400, f"kv_transfer_params for a {role} must hold {key}: true")
    return params


class HeldKv:
    """A request's blocks on P, kept until they are taken or the lease ends."""

    def __init__(self, live: LiveRequest, lease_s: float, on_expiry: Callable[[HeldKv], None]) -> None:
        self.live = live
        self.using = 0
        """Number of transfers that currently read these blocks; the lease cannot end meanwhile."""
        self._lease_s = lease_s
        self._on_expiry = on_expiry
        self._timer = asyncio.get_running_loop().call_later(lease_s, self._expire)

    def renew(self) -> None:
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._lease_s, self._expire)

    def _expire(self) -> None:
        if self.using:
            self.renew()
        else:
            self._on_expiry(self)

    def stop(self) -> None:
        self._timer.cancel()
