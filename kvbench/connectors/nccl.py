"""vLLM's P2pNcclConnector (up to 0.23): D receives each layer into a tensor of its own, over NCCL.

The addresses of both sides travel in the request id, so P and D need no discovery by a proxy:
without ``proxy_ip`` the connector's ping thread stays off. Symmetric tensor parallelism only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, PrefillPeer, Role, Seat
from kvbench.connectors.parts.plain import PlainConnector
from kvbench.core.plan.engine_versions import Releases


class NcclOptions(ConnectorOptions):
    """Options of the nccl connector."""

    send_type: Literal["PUT_ASYNC", "PUT", "GET"] = Field(
        "PUT_ASYNC", description="PUT_ASYNC sends layers while P still computes; GET lets D ask for them"
    )
    nccl_num_channels: int = Field(8, ge=1, le=64, description="NCCL channels of the transfer")
    kv_buffer_size: float = Field(
        1e9, gt=0, description="bytes that D receives into GPU memory before it takes host memory"
    )
    mem_pool_size_gb: float = Field(32, gt=0, description="host memory of each rank for what exceeds that")


class Nccl(PlainConnector):
    """Both sides bind one port for each rank, from kv_port upwards."""

    name = "nccl"
    title = "NCCL (P2pNcclConnector)"
    kv_connector = "P2pNcclConnector"
    gpu_only = True
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    side_port_per_rank = True
    options_model = NcclOptions
    releases = Releases((0, 10), (0, 24))
    history = (
        "P2pNcclConnector is in vLLM 0.10 to 0.23 and was removed in 0.24: use an older vLLM for it, "
        "or compare nixl and mooncake"
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
            "mem_pool_size_gb": str(options.mem_pool_size_gb),
        }

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None, host: str) -> dict[str, str]:
        # Both sides must see the same request id. vLLM 0.13 leaves it as it is, later ones add a random
        # part unless that is disabled, and D then waits for ever.
        return {"VLLM_HOST_IP": host, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        names = [name for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE", "UCX_TLS") if name in env]
        return [f"{name} is set, but P2pNcclConnector never reads it" for name in names]

    def backend_request_id(self, request_id: str, peer: PrefillPeer, decode_side_address: str) -> str:
        # vLLM finds the addresses by greedy patterns up to a colon, and up to three underscores.
        own = request_id.replace(":", "-").replace("_", "-")
        return f"___prefill_addr_{peer.side_address}___decode_addr_{decode_side_address}_{own}"


CONNECTOR = Nccl()
