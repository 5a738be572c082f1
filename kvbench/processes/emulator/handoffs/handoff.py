"""What both handshakes share: the roles, who waits for whom, leases.

A request on P (``do_remote_decode``) keeps its blocks after its one token until they have been taken or a
lease ends; D renews the lease while it has not got to fetching. A request on D (``do_remote_prefill``) is
answered with an error when its KV cannot be had: it is never prefilled again in silence.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from kvbench.errors import TransferError
from kvbench.processes.emulator.engine import RunningEngine
from kvbench.processes.emulator.handoffs.transfers import EngineTransfers
from kvbench.processes.emulator.protocol import ApiError, Generate
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.spec import EngineSpec, KvTransferConfig

log = logging.getLogger(__name__)

DEFAULT_LEASE_S: Final = 30.0  # vLLM's kv_lease_duration
RENEWALS_PER_LEASE: Final = 6  # vLLM: a heartbeat every sixth of the lease


class Handoff(ABC):
    """One role of one handshake: a plain subclass for each of P and D, pull and push."""

    def __init__(
        self, spec: EngineSpec, config: KvTransferConfig, engine: RunningEngine, transfers: EngineTransfers
    ) -> None:
        self.spec = spec
        self.config = config
        self.engine = engine
        self.transfers = transfers
        self.metrics = engine.metrics
        self.lease_s = float(config.kv_connector_extra_config.get("kv_lease_duration", DEFAULT_LEASE_S))
        self._tasks: set[asyncio.Task[None]] = set()
        engine.on_load = self.on_load
        engine.on_prefilled = self.on_prefilled
        engine.on_dropped = self.on_dropped

    @abstractmethod
    async def start(self) -> None:
        """Opens the side channel. Raises PortInUseError."""

    @abstractmethod
    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        """Sets up a request from its kv_transfer_params, before it is submitted. Raises ApiError."""

    def on_load(self, live: LiveRequest) -> None:
        """D: the request's blocks are reserved."""
        raise AssertionError("only a consumer loads KV")

    def on_prefilled(self, live: LiveRequest) -> None:
        """P: the request has made its token, its blocks are held."""
        raise AssertionError("only a producer holds KV")

    def on_dropped(self, live: LiveRequest) -> None:  # noqa: B027 - optional
        """The client has gone."""

    def status(self) -> dict[str, Any]:
        """What a peer must have in common with this engine."""
        return {
            "engine_id": self.config.engine_id,
            "kv_connector": self.config.kv_connector,
            "model": self.spec.model.name,
            "block_tokens": self.spec.block_tokens,
            "regions": self.engine.compute.pool.layout.regions,
            "block_bytes": self.engine.compute.pool.layout.block_bytes,
        }

    def check_peer(self, theirs: Mapping[str, Any]) -> None:
        """Raises TransferError when the two engines' KV caches do not match."""
        ours = self.status()
        for key in ("kv_connector", "model", "block_tokens", "regions", "block_bytes"):
            if theirs.get(key) != ours[key]:
                raise TransferError(
                    f"engines {ours['engine_id']} and {theirs.get('engine_id')} do not match: "
                    f"{key} is {ours[key]!r} here and {theirs.get(key)!r} there"
                )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs something beside the steps; it ends with the engine."""
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
    """P's side of the handshake, checked; None for a request without a hand-off. Raises ApiError."""
    params = wanted.kv_transfer_params
    if params is None:
        return None
    if params.get("do_remote_prefill"):
        raise ApiError(
            400, "do_remote_prefill was sent to a kv_producer: the router has the roles the wrong way round"
        )
    if not params.get("do_remote_decode"):
        raise ApiError(400, "kv_transfer_params for a kv_producer must hold do_remote_decode: true")
    if wanted.stream:
        raise ApiError(400, "a request with do_remote_decode cannot be streamed")
    if wanted.max_tokens != 1:
        raise ApiError(400, f"a request with do_remote_decode needs max_tokens 1, not {wanted.max_tokens}")
    return params


def consumer_params(wanted: Generate, required: Sequence[str]) -> Mapping[str, Any] | None:
    """D's side of the handshake, checked; None for a request without a hand-off. Raises ApiError."""
    params = wanted.kv_transfer_params
    if params is None:
        return None
    if params.get("do_remote_decode"):
        raise ApiError(
            400, "do_remote_decode was sent to a kv_consumer: the router has the roles the wrong way round"
        )
    if not params.get("do_remote_prefill"):
        raise ApiError(400, "kv_transfer_params for a kv_consumer must hold do_remote_prefill: true")
    missing = [key for key in required if params.get(key) in (None, "")]
    if missing:
        raise ApiError(
            400, f"kv_transfer_params lacks {', '.join(missing)}: this router does not fit the engine"
        )
    return params


class HeldKv:
    """A request's blocks on P, kept until they are taken or the lease ends."""

    def __init__(self, live: LiveRequest, lease_s: float, on_expiry: Callable[[HeldKv], None]) -> None:
        self.live = live
        self.using = 0
        """Transfers that read these blocks at this moment; the lease cannot end meanwhile."""
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
