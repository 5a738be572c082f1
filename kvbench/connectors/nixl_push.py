"""vLLM's NixlPushConnector (from 0.24 on): P pushes the KV to D with a NIXL WRITE over UCX.

The handshake is the pull connector's, with ``transfer_mode`` in P's answer. D asks P for the
write, so the transfer's metrics are P's. Sequential dispatch was tried with vLLM 0.32; the
concurrent one of vLLM's example needs P's fixed engine id and is not used here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.connectors.base import ConnectorOptions, Role
from kvbench.connectors.pull import PullConnector
from kvbench.connectors.ucx import UcxOptions, side_channel_env, ucx_warnings
from kvbench.connectors.versions import Releases


class NixlPushOptions(UcxOptions):
    """Options of the nixl_push connector."""


class NixlPush(PullConnector):
    """P pushes to D; both bind a side channel."""

    name = "nixl_push"
    title = "NIXL (UCX, P pushes)"
    kv_connector = "NixlPushConnector"
    options_model = NixlPushOptions
    releases = Releases((0, 24))
    history = "NixlPushConnector is in vLLM 0.24 and newer; `nixl` pulls, and is in older ones too"

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, NixlPushOptions)
        return options.extra_config()

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None, host: str) -> dict[str, str]:
        assert isinstance(options, NixlPushOptions)
        return {**options.env(), **side_channel_env(side_port, host)}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return ucx_warnings(env)

    def transport_asked(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlPushOptions)
        return options.ucx_tls


CONNECTOR = NixlPush()
