"""vLLM's P2pNcclConnector (0.9.2 to 0.23): D receives each layer over NCCL into a new tensor. The request id
contains both addresses, so no proxy discovery is needed: without ``proxy_ip`` the ping thread is off.
Symmetric tensor parallelism only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvbench.connectors.base import (
    ConnectorOptions,
    ExtraKeys,
    KvOptions,
    PlainConnector,
    PrefillPeer,
    Role,
    Seat,
    key_since,
)
from kvbench.core.engine_versions import Releases
from kvbench.core.ranks import Ranks


class NcclOptions(KvOptions):
    keys: ClassVar[ExtraKeys] = {
        name: key_since((0, 9, 2), str, int, until=(0, 24))
        for name in ("http_port", "proxy_ip", "proxy_port")
    }

    send_type: Literal["PUT_ASYNC", "PUT", "GET"] = Field(
        "PUT_ASYNC", description="PUT_ASYNC sends layers while P still computes; GET lets D request them"
    )
    nccl_num_channels: int = Field(8, ge=1, le=64, description="NCCL channels of the transfer")
    kv_buffer_size: float = Field(
        1e9, gt=0, description="bytes that D receives into GPU memory before it takes host memory"
    )
    mem_pool_size_gb: float = Field(32, gt=0, description="host memory of each rank for what exceeds that")

    @property
    def pinned_gib(self) -> float:
        """Pinned host memory of a rank: the requested size, rounded up to a power of two by vLLM's pool."""
        return 2.0 ** math.ceil(math.log2(self.mem_pool_size_gb))

    @property
    def memory(self) -> str:
        kept = f"{self.kv_buffer_size / 1e9:g} GB of GPU memory in addition to gpu_memory_utilization"
        if self.send_type == "GET":
            used = f"P keeps KV in at most {kept} until D requests it, and drops the oldest beyond that"
        else:
            used = f"D receives into {kept}, then into pinned host memory"
        pinned = f"each rank of P and D pins {self.pinned_gib:g} GiB of host memory at its start"
        return f"{pinned}; with send_type {self.send_type} {used}"


class Nccl(PlainConnector):
    """Profile for vLLM 0.11.1 to 0.23. Both sides bind a port per world rank, from kv_port upwards."""

    name = "nccl"
    title = "NCCL (P2pNcclConnector)"
    kv_connector = "P2pNcclConnector"
    gpu_only = True
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    options_model = NcclOptions
    releases = Releases((0, 11, 1), (0, 24))
    history = (
        "P2pNcclConnector is in vLLM 0.9.2 to 0.23 and was removed in 0.24 (PyNcclConnector, up to 0.10.0, "
        "is the V0 engine's, and kvbench does not start it): use such a vLLM, or compare nixl and mooncake"
    )

    def side_ports(self, role: str, ranks: Ranks) -> int:
        return ranks.gpus if role in self.side_port_roles else 0

    def ranks_problem(self, version: str, prefill: Ranks, decode: Ranks) -> str:
        if prefill == decode:
            return ""
        return (
            f"P2pNcclConnector requires equal ranks of P and D, unlike {prefill.text()} and {decode.text()}"
        )

    def kv_transfer_config(
        self, role: Role, engine_id: str, options: ConnectorOptions, seat: Seat | None = None
    ) -> dict[str, Any] | None:
        assert isinstance(options, NcclOptions)
        config = super().kv_transfer_config(role, engine_id, options, seat)
        assert config is not None
        port = {"kv_port": seat.side_port} if seat is not None and seat.side_port else {}
        return {**config, "kv_buffer_size": options.kv_buffer_size, **port}

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, NcclOptions)
        return {
            "send_type": options.send_type,
            "nccl_num_channels": str(options.nccl_num_channels),
            "mem_pool_size_gb": options.mem_pool_size_gb,  # a number: 0.9.2 cannot read "32.0"
        }

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        # Both sides must see the same request id. vLLM 0.13 keeps it, later releases add a random
        # part unless that is disabled, and D then waits for ever.
        return {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        assert isinstance(options, NcclOptions)
        names = [name for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE", "UCX_TLS") if name in env]
        ignored = [f"{name} is set, but P2pNcclConnector never reads it" for name in names]
        return [*ignored, options.memory]

    def backend_request_id(self, request_id: str, peer: PrefillPeer, decode_side_address: str) -> str:
        # vLLM finds the addresses by greedy patterns up to a colon, and up to three underscores.
        safe_id = request_id.replace(":", "-").replace("_", "-")
        return f"___prefill_addr_{peer.side_address}___decode_addr_{decode_side_address}_{safe_id}"


class NcclWithHttpPort(Nccl):
    """Profile for vLLM 0.9.2 to 0.11.0, which requires the port of its ping thread."""

    releases = Releases((0, 9, 2), (0, 11, 1))

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        return {**super().extra_config(role, options), "http_port": "0"}


Nccl.older = (NcclWithHttpPort,)
CONNECTOR = Nccl()
