"""vLLM's NixlConnector: D pulls the KV from P with a NIXL READ over UCX."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, Role
from kvbench.connectors.pull import PullConnector


class NixlOptions(ConnectorOptions):
    """Options of the nixl connector."""

    ucx_tls: str = Field(
        "tcp", description="UCX_TLS: the transports UCX may use; explicit, never UCX's own choice"
    )
    num_threads: int = Field(0, ge=0, le=64, description="NIXL worker threads beside the progress thread")


class Nixl(PullConnector):
    """D pulls from P; both bind a side channel for the agents' metadata."""

    name = "nixl"
    title = "NIXL (UCX, D pulls)"
    kv_connector = "NixlConnector"
    transfer_backend = "nixl"
    options_model = NixlOptions

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, NixlOptions)
        return {"backends": ["UCX"], "num_threads": options.num_threads}

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None, host: str) -> dict[str, str]:
        assert isinstance(options, NixlOptions)
        return {
            "UCX_TLS": options.ucx_tls,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        }

    def transport_asked(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlOptions)
        return options.ucx_tls


CONNECTOR = Nixl()
