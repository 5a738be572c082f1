"""The pull handshake (vLLM's NixlConnector): P reports its block ids, D reads them. P's side channel:
``agent`` returns how to connect; ``offer`` (KV on GPUs) makes the blocks readable; ``renew`` extends leases;
``release`` says that blocks were read or are not needed, and returns which were still held, so that a read
that outlived its lease is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvbench.errors import TransferError
from kvbench.processes.emulator.handoffs.handoff import (
    RENEWALS_PER_LEASE,
    Handoff,
    HeldKv,
    consumer_params,
    log,
    producer_params,
)
from kvbench.processes.emulator.handoffs.rpc import RpcClient, RpcServer
from kvbench.processes.emulator.protocol import ApiError, Generate
from kvbench.processes.emulator.running_request import LiveRequest

_REQUIRED: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class PullProducer(Handoff):
    """P: holds blocks, serves the side channel."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held: dict[str, HeldKv] = {}
        self._rpc = RpcServer(
            {"agent": self.agent, "offer": self._offer, "renew": self._renew, "release": self._release}
        )

    async def start(self) -> None:
        await self._rpc.start(self.spec.host, self.spec.side_channel_port or 0)

    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        live.request.hold_kv = producer_params(wanted) is not None
        live.ignore_eos = live.ignore_eos or live.request.hold_kv

    def on_prefilled(self, live: LiveRequest) -> None:
        request = live.request
        self._held[request.request_id] = HeldKv(live, self.lease_s, self._expire)
        live.hand_off_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(request.blocks)],
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": request.request_id,
            "remote_host": self.spec.host,
            "remote_port": self._rpc.port,
            "tp_size": self.spec.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_len,
            "remote_blocks_expiry_time": time.time() + self.lease_s,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached_tokens,
        }

    def _expire(self, held: HeldKv) -> None:
        log.warning("releasing KV of %s: not read within %g s", held.live.request.request_id, self.lease_s)
        self.metrics.transfer.expired += 1
        del self._held[held.live.request.request_id]
        self.engine.release(held.live)

    async def _offer(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        for name in args["ids"]:
            if held := self._held.get(name):
                await self.transfers.offer(held.live.request.blocks)
        return {}

    async def _renew(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        known = [self._held[name] for name in args["ids"] if name in self._held]
        for held in known:
            held.renew()
        return {"held": [held.live.request.request_id for held in known]}

    async def _release(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        released: list[str] = []
        for name in args["ids"]:
            if (held := self._held.pop(name, None)) is not None:
                held.stop()
                self.engine.release(held.live)
                released.append(name)
        return {"held": released}

    async def close(self) -> None:
        for held in self._held.values():
            held.stop()
        await self._rpc.close()
        await super().close()


@dataclass
class _Source:
    engine_id: str
    request_id: str
    address: tuple[str, int]
    blocks: list[int]


@dataclass
class _Peer:
    client: RpcClient
    lock: asyncio.Lock
    peer_id: str = ""


class PullConsumer(Handoff):
    """D: reads blocks, then lets P free them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._peers: dict[tuple[str, tuple[str, int]], _Peer] = {}
        self._waiting: dict[str, LiveRequest] = {}
        self._rpc = RpcServer({"agent": self.agent})

    async def start(self) -> None:
        await self._rpc.start(self.spec.host, self.spec.side_channel_port or 0)
        self.spawn(self._keep_leases())

    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        params = consumer_params(wanted, _REQUIRED)
        if params is None:
            return
        live.request.remote_kv = True
        live.remote = source = _source(params)
        tokens = params.get("remote_num_tokens")
        if tokens is not None and tokens != live.request.prompt_len:
            raise ApiError(400, f"P computed {tokens} prompt tokens and D got {live.request.prompt_len}")
        needed = -(-live.request.prompt_len // self.spec.block_tokens)
        if len(source.blocks) != needed:
            raise ApiError(
                400, f"remote_block_ids names {len(source.blocks)} blocks, the prompt has {needed}"
            )
        self._waiting[source.request_id] = live

    def on_load(self, live: LiveRequest) -> None:
        self.spawn(self._load(live))

    def on_dropped(self, live: LiveRequest) -> None:
        # During a transfer `_load` cleans up; a request that only waited notifies P here.
        if live.request.remote_kv and live.request.first_scheduled_s is None:
            self._waiting.pop(live.remote.request_id, None)
            self.spawn(self._release(live.remote))

    async def _load(self, live: LiveRequest) -> None:
        source: _Source = live.remote
        first = live.request.cached_tokens // self.spec.block_tokens
        try:
            peer = await self._peer(source)
            try:
                if self.transfers.memory != "host":  # P computes in a mirror and copies the requested blocks
                    await peer.client.call("offer", {"ids": [source.request_id]}, self.transfers.timeout_s)
                local = live.request.blocks[first:]
                await self.transfers.move(peer.peer_id, "read", local, source.blocks[first:], live.trace)
            except TransferError:
                peer.peer_id = ""  # connect again: P may have been restarted
                raise
            answer = await peer.client.call("release", {"ids": [source.request_id]}, self.transfers.timeout_s)
            if source.request_id not in answer["held"]:
                raise TransferError("P freed its KV blocks before they were read (the lease had ended)")
        except TransferError as error:
            log.error("KV of %s from engine %s: %s", live.request.request_id, source.engine_id, error)
            self.metrics.transfer.failed += 1
            self.engine.kv_failed(live)
            self.engine.fail(live, f"KV transfer from engine {source.engine_id} failed: {error.message}")
            self.spawn(self._release(source))
        else:
            self.metrics.blocks_held_locally += first
            await self.engine.kv_arrived(live)
        finally:
            self._waiting.pop(source.request_id, None)

    async def _peer(self, source: _Source) -> _Peer:
        """Return a connected P, after one handshake per engine. Raises TransferError."""
        key = (source.engine_id, source.address)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = _Peer(RpcClient(*source.address), asyncio.Lock())
        async with peer.lock:
            if not peer.peer_id:
                answer = await peer.client.call("agent", {}, self.transfers.timeout_s)
                if answer.get("engine_id") != source.engine_id:
                    raise TransferError(f"{peer.client.address} is engine {answer.get('engine_id')}")
                self.check_peer(answer)
                peer.peer_id = await self.transfers.connect(answer["agent"])
        return peer

    async def _release(self, source: _Source) -> None:
        peer = self._peers.get((source.engine_id, source.address))
        client = peer.client if peer else RpcClient(*source.address)
        try:
            await client.call("release", {"ids": [source.request_id]}, self.transfers.timeout_s)
        except TransferError as error:
            log.info("cannot make engine %s release %s: %s", source.engine_id, source.request_id, error)
        finally:
            if peer is None:
                await client.close()

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)
            by_peer: dict[tuple[str, tuple[str, int]], list[str]] = {}
            for name, live in self._waiting.items():
                by_peer.setdefault((live.remote.engine_id, live.remote.address), []).append(name)
            for key, names in by_peer.items():
                self.spawn(self._renew(key, names))

    async def _renew(self, key: tuple[str, tuple[str, int]], names: list[str]) -> None:
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = _Peer(RpcClient(*key[1]), asyncio.Lock())
        try:
            await peer.client.call("renew", {"ids": names}, self.transfers.timeout_s)
        except TransferError as error:
            log.warning("cannot renew leases at engine %s: %s", key[0], error)

    async def close(self) -> None:
        await self._rpc.close()
        await super().close()
        for peer in self._peers.values():
            await peer.client.close()


def _source(params: Mapping[str, Any]) -> _Source:
    ids = params["remote_block_ids"]
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]  # one list per KV cache group; there is one
    if not isinstance(ids, list) or not ids or set(map(type, ids)) - {int}:
        raise ApiError(400, "kv_transfer_params.remote_block_ids must be a list of lists of block ids")
    port = params["remote_port"]
    if type(port) is not int or not isinstance(params["remote_host"], str):
        raise ApiError(400, "kv_transfer_params needs remote_host (a string) and remote_port (an integer)")
    return _Source(
        str(params["remote_engine_id"]), str(params["remote_request_id"]), (params["remote_host"], port), ids
    )
