"""kvbench's reference: D reads KV from P over plain sockets; always available. The handshake is NIXL's
(sequential, P returns its block addresses), so only the transfer differs."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from kvbench.connectors.base import ConnectorOptions, PullConnector, Role
from kvbench.core.engine_versions import Releases


class TcpOptions(ConnectorOptions):
    streams: int = Field(1, ge=1, le=64, description="TCP connections per pair of instances")


class Tcp(PullConnector):
    """D reads from P with plain sockets."""

    name = "tcp"
    title = "plain TCP (reference, D pulls)"
    kv_connector = "KvbenchTcpConnector"
    transfer_backend = "tcp"
    options_model = TcpOptions
    releases = Releases(until=(0,))
    history = "plain TCP is kvbench's own and moves KV for the emulated engine only"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, TcpOptions)
        return {"streams": options.streams}

    def requested_transport(self, options: ConnectorOptions) -> str:
        return "tcp"


CONNECTOR = Tcp()
