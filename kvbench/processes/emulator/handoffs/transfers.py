"""An engine's transfer process, which moves its KV, and what it counts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvbench.errors import TransferError
from kvbench.processes.emulator.handoffs.pacing import Pacer
from kvbench.processes.emulator.kvbytes import KvPool
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.running_request import RequestTrace
from kvbench.processes.emulator.spec import EngineSpec, KvTransferConfig
from kvbench.processes.transfer_worker.remote import TransferProcess
from kvbench.transfer.base import Op

_OWN_KEYS: Final = frozenset({"kv_lease_duration"})
_TRANSFER_NAMES: Final = {"mooncake_protocol": "protocol"}
"""vLLM's name of a key → the transfer backends' option."""


class EngineTransfers:
    """The transfer process of one engine, and what its transfers count."""

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
        """Starts the child. Raises TransferError."""
        extra = self._config.kv_connector_extra_config
        options = {_TRANSFER_NAMES.get(k, k): v for k, v in extra.items() if k not in _OWN_KEYS}
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
        """One transfer, counted. Raises TransferError."""
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
        """Make blocks readable that lie in a mirror of the memory that peers read. Raises TransferError."""
        if self.memory != "host":
            await self.started.offer(blocks, self.timeout_s)

    async def close(self) -> None:
        if self.process is not None:
            await self.process.close()
