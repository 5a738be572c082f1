"""The push handshake (vLLM's MooncakeConnector): P and D get the request at once, P writes into D's blocks.

1. The router chooses a ``transfer_id``. 2. P's bootstrap server (HTTP, ``GET /query``) gives D the address of
P's side channel. 3. D calls ``push`` there with its agent and block ids. 4. P answers when it has written. D
may call before P's prefill has ended, or before P has the request: P then makes the entry and waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from kvbench.errors import InputError, KvbenchError, TransferError
from kvbench.processes import http1
from kvbench.processes.emulator.handoffs.handoff import (
    RENEWALS_PER_LEASE,
    Handoff,
    HeldKv,
    consumer_params,
    log,
    producer_params,
)
from kvbench.processes.emulator.handoffs.rpc import RpcClient, RpcServer, RpcSilenceError
from kvbench.processes.emulator.protocol import ApiError, Generate
from kvbench.processes.emulator.running_request import LiveRequest


async def worker_address(bootstrap: str, engine_id: str, timeout_s: float) -> tuple[str, int]:
    """Ask P's bootstrap server for the named engine's side channel. Raises TransferError."""
    try:
        pool = http1.Pool(bootstrap, connect_timeout_s=timeout_s)
    except InputError as error:
        raise TransferError(f"remote_bootstrap_addr: {error.message}") from None
    try:
        reply = await asyncio.wait_for(http1.fetch(pool, pool.request("GET", "/query")), timeout_s)
        addresses: dict[str, str] = {
            str(rank["engine_id"]): rank["worker_addr"]["0"]["0"] for rank in reply.json().values()
        }
    except asyncio.TimeoutError:
        raise TransferError(f"no answer from the bootstrap server {bootstrap}") from None
    except (OSError, KvbenchError) as error:
        raise TransferError(f"cannot reach the bootstrap server {bootstrap}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TransferError(f"{bootstrap} is not a bootstrap server: {error!r}") from None
    finally:
        await pool.close()
    address = urlsplit(addresses.get(engine_id, ""))
    if not address.hostname or not address.port:
        raise TransferError(f"{bootstrap} serves engine {', '.join(addresses) or 'none'}, not {engine_id}")
    return address.hostname, address.port


_REQUIRED: Final = ("transfer_id", "remote_bootstrap_addr", "remote_engine_id")


class _CancelledError(TransferError):
    """P's client has gone: the transfer is cancelled, not failed."""


@dataclass
class _Transfer:
    """P's state of one transfer id: its request, its held blocks, and whether D has called."""

    seen: asyncio.Event = field(default_factory=asyncio.Event)
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    held: HeldKv | None = None
    requested: bool = False


class PushProducer(Handoff):
    """P: serves the bootstrap address and the side channel, writes into D's blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._entries: dict[str, _Transfer] = {}
        self._peers: dict[str, str] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._rpc = RpcServer({"push": self._push, "renew": self._renew, "release": self._release})
        self._bootstrap: http1.Server | None = None

    async def start(self) -> None:
        await self._rpc.start(self.spec.host, 0)
        self._bootstrap = await http1.serve(self._query, self.spec.host, self.spec.side_channel_port or 0)

    def _query(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        if request.method != "GET" or request.path != "/query":
            response.send(404, http1.error_body(404, "the bootstrap server answers GET /query"))
            return
        worker = {"0": {"0": f"tcp://{self.spec.host}:{self._rpc.port}"}}
        answer = {"0": {"engine_id": self.config.engine_id, "worker_addr": worker}}
        response.send(200, json.dumps(answer).encode())

    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        params = producer_params(wanted)
        if params is None:
            return
        transfer_id = params.get("transfer_id")
        if not isinstance(transfer_id, str) or not transfer_id:
            raise ApiError(400, "Missing transfer_id in kv_transfer_params from router")
        entry = self._entries.setdefault(transfer_id, _Transfer())
        if entry.seen.is_set():
            raise ApiError(400, f"transfer_id {transfer_id!r} is in use")
        entry.seen.set()
        live.remote = transfer_id
        live.request.hold_kv = True
        live.ignore_eos = True

    def on_prefilled(self, live: LiveRequest) -> None:
        entry = self._entries[live.remote]
        entry.held = HeldKv(live, self.lease_s, self._expire)
        entry.prefilled.set()

    def on_dropped(self, live: LiveRequest) -> None:
        entry = self._entries.pop(live.remote, None) if live.request.hold_kv else None
        if entry is not None:
            entry.prefilled.set()

    def _expire(self, held: HeldKv) -> None:
        log.warning("releasing KV of %s: D did not request it within %g s", held.live.remote, self.lease_s)
        self.metrics.transfer.expired += 1
        self._entries.pop(held.live.remote, None)
        self.engine.release(held.live)

    async def _push(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        self.check_peer(args["status"])
        transfer_id: str = args["transfer_id"]
        entry = self._entries.setdefault(transfer_id, _Transfer())
        if entry.requested:
            raise TransferError(f"transfer {transfer_id} was already requested")
        entry.requested = True
        try:
            held = await self._wait_for_prefill(transfer_id, entry)
            held.using += 1
            return await self._write(held.live, args)
        except _CancelledError:
            return {"cancelled": True}
        except TransferError:
            self.metrics.transfer.failed += 1
            raise
        finally:
            self._drop(transfer_id, entry)

    async def _wait_for_prefill(self, transfer_id: str, entry: _Transfer) -> HeldKv:
        """Return the prefilled request. A long queue on P is no failure; a request that never arrives is."""
        try:
            await asyncio.wait_for(entry.seen.wait(), self.transfers.timeout_s)
        except asyncio.TimeoutError:
            raise TransferError(
                f"P got no request with transfer_id {transfer_id!r} within {self.transfers.timeout_s:g} s"
            ) from None
        await entry.prefilled.wait()
        if entry.held is None:
            raise _CancelledError("the request was cancelled")
        return entry.held

    async def _write(self, live: LiveRequest, args: Mapping[str, Any]) -> Mapping[str, Any]:
        first, remote = args["first_block"], args["block_ids"]
        local = live.request.blocks[first:]
        if args["num_tokens"] != live.request.prompt_len or len(local) != len(remote):
            raise TransferError(
                f"P computed {live.request.prompt_len} prompt tokens in {len(local)} blocks to send, "
                f"D expects {args['num_tokens']} tokens in {len(remote)}"
            )
        engine_id = args["status"]["engine_id"]
        peer_id = await self._peer(engine_id, args["agent"])
        try:
            return await self.transfers.move(peer_id, "write", local, remote, live.trace)
        except TransferError:
            self._peers.pop(engine_id, None)
            raise

    async def _peer(self, engine_id: str, agent: Mapping[str, Any]) -> str:
        async with self._locks.setdefault(engine_id, asyncio.Lock()):
            if engine_id not in self._peers:
                self._peers[engine_id] = await self.transfers.connect(agent)
            return self._peers[engine_id]

    def _drop(self, transfer_id: str, entry: _Transfer) -> None:
        if self._entries.get(transfer_id) is entry:
            del self._entries[transfer_id]
        if entry.held is not None:
            entry.held.stop()
            self.engine.release(entry.held.live)

    async def _renew(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        entries = [(name, self._entries.get(name)) for name in args["ids"]]
        for _, entry in entries:
            if entry is not None and entry.held is not None:
                entry.held.renew()
        return {"known": [name for name, entry in entries if entry is not None]}

    async def _release(self, args: Mapping[str, Any]) -> Mapping[str, Any]:
        """D's client has gone: free the blocks and stop waiting for the request."""
        for name in args["ids"]:
            entry = self._entries.get(name)
            if entry is None:
                continue
            if not entry.seen.is_set():
                entry.seen.set()
                entry.prefilled.set()
            elif not entry.requested and entry.held is not None:
                self._drop(name, entry)
        return {}

    async def close(self) -> None:
        for entry in self._entries.values():
            if entry.held is not None:
                entry.held.stop()
        if self._bootstrap is not None:
            await self._bootstrap.close(0.0)
        await self._rpc.close()
        await super().close()


@dataclass(frozen=True)
class _Source:
    transfer_id: str
    bootstrap: str
    engine_id: str


class PushConsumer(Handoff):
    """D: reserves blocks, has P fill them, waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._clients: dict[tuple[str, str], RpcClient] = {}
        self._waiting: dict[str, LiveRequest] = {}

    async def start(self) -> None:
        self.spawn(self._keep_leases())

    def accept(self, live: LiveRequest, wanted: Generate) -> None:
        params = consumer_params(wanted, _REQUIRED)
        if params is None:
            return
        live.request.remote_kv = True
        live.remote = _Source(
            str(params["transfer_id"]), str(params["remote_bootstrap_addr"]), str(params["remote_engine_id"])
        )
        self._waiting[live.remote.transfer_id] = live

    def on_load(self, live: LiveRequest) -> None:
        self.spawn(self._load(live))

    def on_dropped(self, live: LiveRequest) -> None:
        # Also during a transfer: P may never get the request and would wait until its deadline.
        if live.request.remote_kv and self._waiting.pop(live.remote.transfer_id, None) is not None:
            self.spawn(self._notify("release", live.remote, [live.remote.transfer_id]))

    async def _load(self, live: LiveRequest) -> None:
        source: _Source = live.remote
        held_locally = live.request.cached_tokens // self.spec.block_tokens
        try:
            client = await self._client(source)
            if live.ended:  # its client has gone, and P has been notified
                self.engine.kv_failed(live)
                return
            request = {
                "status": self.status(),
                "agent": self.transfers.started.agent,
                "transfer_id": source.transfer_id,
                "block_ids": live.request.blocks[held_locally:],
                "first_block": held_locally,
                "num_tokens": live.request.prompt_len,
            }
            answer = await client.call("push", request, self.transfers.timeout_s)
        except TransferError as error:
            log.error("KV of %s from engine %s: %s", live.request.request_id, source.engine_id, error)
            self.metrics.transfer.failed += 1
            self.engine.fail(live, f"KV transfer from engine {source.engine_id} failed: {error.message}")
            if isinstance(error, RpcSilenceError):
                # P may still be writing into these blocks: keep them until its own deadline has passed.
                await asyncio.sleep(self.transfers.timeout_s)
            self.engine.kv_failed(live)
        else:
            if answer.get("cancelled"):
                self.engine.fail(live, f"the request was cancelled on engine {source.engine_id}")
                self.engine.kv_failed(live)
                return
            self.metrics.blocks_held_locally += held_locally
            await self.engine.kv_arrived(live)
        finally:
            self._waiting.pop(source.transfer_id, None)

    async def _client(self, source: _Source) -> RpcClient:
        """Return P's side channel, found through its bootstrap address. Raises TransferError."""
        key = (source.bootstrap, source.engine_id)
        client = self._clients.get(key)
        if client is None:
            host, port = await worker_address(source.bootstrap, source.engine_id, self.transfers.timeout_s)
            client = self._clients.setdefault(key, RpcClient(host, port))
        return client

    async def _notify(self, op: str, source: _Source, names: list[str]) -> None:
        try:
            client = await self._client(source)
            await client.call(op, {"ids": names}, self.transfers.timeout_s)
        except TransferError as error:
            log.warning("cannot %s at engine %s: %s", op, source.engine_id, error)

    async def _keep_leases(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS_PER_LEASE)
            by_peer: dict[tuple[str, str], list[_Source]] = {}
            for live in self._waiting.values():
                by_peer.setdefault((live.remote.bootstrap, live.remote.engine_id), []).append(live.remote)
            for sources in by_peer.values():
                self.spawn(self._notify("renew", sources[0], [source.transfer_id for source in sources]))

    async def close(self) -> None:
        await super().close()
        for client in self._clients.values():
            await client.close()
