"""Lies on the KV's way from P to D."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from kvbench.processes.emulator.handoffs.handoff import Handoff
from kvbench.processes.emulator.lies.wrapping import Turns, role, wrap
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.server import EngineServer

LEASE_S: Final = 0.2


def corrupt_kv(server: EngineServer) -> None:
    engine = server.engine

    async def kv_arrived(original: Callable[[LiveRequest], Any], live: LiveRequest) -> None:
        engine.compute.pool.words[0, live.request.blocks[0], 0, 0] ^= np.uint64(1)
        await original(live)

    wrap(engine, "kv_arrived", kv_arrived)


def double_kv(server: EngineServer) -> None:
    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        await original(*arguments)
        return await original(*arguments)

    if server.transfers is not None:
        wrap(server.transfers, "move", move)


def failing_kv(server: EngineServer) -> None:
    turn = Turns(5)

    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        server.metrics.transfer.failed += turn()
        return await original(*arguments)

    if server.transfers is not None:
        wrap(server.transfers, "move", move)


def impossible_transfer(server: EngineServer) -> None:
    def observe(original: Callable[..., None], seconds: float, nbytes: int, descriptors: int) -> None:
        original(seconds / 1000.0, nbytes, descriptors)

    wrap(server.metrics.transfer, "observe", observe)


def silent_tcp(server: EngineServer) -> None:
    config = server.spec.kv_transfer_config
    if config is None:
        return
    os.environ.pop("MC_FORCE_HCA", None)
    os.environ.update(MC_FORCE_TCP="1", UCX_TLS="tcp")
    if "mooncake_protocol" in config.kv_connector_extra_config:
        config.kv_connector_extra_config["mooncake_protocol"] = "tcp"


def claimed_rdma(server: EngineServer) -> None:
    silent_tcp(server)

    def infos(original: Callable[[], dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
        labels = original()
        if "kvbench:transport" in labels:
            labels["kvbench:transport"]["transport"] = "rdma"
        return labels

    wrap(server.metrics, "infos", infos)


def emulated_reads(server: EngineServer) -> None:
    """The log is UCX's in the case of vllm-project/vllm issue 52607; the bytes move as they always do."""
    if role(server) == "decode":
        prefix = f"[1795390662.118731] [host:{os.getpid()}:0]   |"
        what = "remote memory read by ucp_get*(multi) into cuda/GPU1 from cuda/dev[0]"
        print(f"{prefix} ucx_context_0 intra-node cfg#9 | {what} |", file=sys.stderr)
        print(f"{prefix} 0..inf | software emulation | tcp/eth0 |", file=sys.stderr, flush=True)


def wrong_nics(server: EngineServer) -> None:
    os.environ["UCX_NET_DEVICES"] = "lo"


def decode_recomputes(server: EngineServer, handoff: Handoff) -> None:
    if role(server) != "decode":
        return

    def accept(original: Callable[..., None], live: LiveRequest, wanted: Any) -> None:
        original(live, wanted)
        if live.request.remote_kv:
            handoff.on_dropped(live)  # as a request that has ended: P may let its blocks go
            live.request.remote_kv = False

    wrap(handoff, "accept", accept)


def unreleased_kv(server: EngineServer, handoff: Handoff) -> None:
    if role(server) != "prefill":
        return
    handoff.lease_s = LEASE_S

    async def release(args: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"held": list(args["ids"])}  # and keeps them

    handlers: dict[str, Any] = getattr(getattr(handoff, "_rpc"), "_handlers")  # noqa: B009 - its own secrets
    handlers["release"] = release


PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "impossible_transfer": impossible_transfer,
    "corrupt_kv": corrupt_kv,
    "double_kv": double_kv,
    "failing_kv": failing_kv,
    "silent_tcp": silent_tcp,
    "claimed_rdma": claimed_rdma,
    "emulated_reads": emulated_reads,
    "wrong_nics": wrong_nics,
}
HANDOFF_PLANTS: Final[dict[str, Callable[[EngineServer, Handoff], None]]] = {
    "decode_recomputes": decode_recomputes,
    "unreleased_kv": unreleased_kv,
}
"""For these the hand-off must be there."""
