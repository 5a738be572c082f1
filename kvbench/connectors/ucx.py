"""What the connectors over NIXL share: options, UCX's environment, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions


class UcxOptions(ConnectorOptions):
    """Options of a connector over NIXL."""

    ucx_tls: str = Field(
        "tcp", description="UCX_TLS: the transports UCX may use; explicit, never UCX's own choice"
    )
    ucx_net_devices: str = Field("", description="UCX_NET_DEVICES: comma-separated devices, or all")
    num_threads: int = Field(0, ge=0, le=64, description="NIXL worker threads beside the progress thread")

    def extra_config(self) -> dict[str, Any]:
        """The keys of vLLM's kv_connector_extra_config."""
        return {"backends": ["UCX"], "num_threads": self.num_threads}

    def env(self) -> dict[str, str]:
        """UCX's environment; without devices UCX chooses among all."""
        devices = {"UCX_NET_DEVICES": self.ucx_net_devices} if self.ucx_net_devices else {}
        return {"UCX_TLS": self.ucx_tls, **devices}


def side_channel_env(side_port: int | None, host: str) -> dict[str, str]:
    """Where an instance tells the other side about its NIXL agent."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}


def ucx_warnings(env: Mapping[str, str]) -> list[str]:
    """Environment of the user that fights with the connector's."""
    found = []
    for name in ("MOONCAKE_PROTOCOL", "MOONCAKE_DEVICE"):
        if name in env:
            found.append(f"{name} is set, but NIXL never reads it")
    if "VLLM_NIXL_ABORT_REQUEST_TIMEOUT" in env:
        found.append(
            "VLLM_NIXL_ABORT_REQUEST_TIMEOUT is read up to vLLM 0.13 only; later releases have leases"
        )
    return found
