"""vLLM's NixlPushConnector (0.24 and newer): P pushes KV to D with a NIXL WRITE over UCX, so P has the
transfer metrics.

Sequential dispatch (default) is the pull connector's handshake with ``transfer_mode`` in P's response.
Concurrent dispatch follows vLLM's example (disagg_proxy_pushconnector_demo.py): D gets P's address and
registers blocks while P computes; P joins them by request id. It needs P's fixed engine id and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from kvbench.connectors.base import (
    Body,
    Connector,
    ConnectorOptions,
    PrefillPeer,
    PullConnector,
    Role,
    UcxOptions,
    ucx_warnings,
)
from kvbench.core.engine_versions import Releases


class NixlPushOptions(UcxOptions):
    dispatch: Literal["sequential", "concurrent"] = Field(
        "sequential", description="whether D gets a request when P has answered, or at once"
    )


class NixlPush(PullConnector):
    """P pushes to D; both bind a side channel."""

    name = "nixl_push"
    title = "NIXL (UCX, P pushes)"
    kv_connector = "NixlPushConnector"
    kv_operation = "write"
    options_model = NixlPushOptions
    side_port_per_data_rank = True
    releases = Releases((0, 24))
    history = "NixlPushConnector is in vLLM 0.24 and newer; `nixl` pulls, and is in older ones too"

    def profile(self, version: str = "", options: ConnectorOptions | None = None) -> Connector:
        found = super().profile(version, options)
        at_once = isinstance(options, NixlPushOptions) and options.dispatch == "concurrent"
        return NixlPushAtOnce() if at_once else found

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, NixlPushOptions)
        return options.nixl_config()

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None) -> dict[str, str]:
        assert isinstance(options, NixlPushOptions)
        return {**options.env(), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}

    def warnings(self, options: ConnectorOptions, env: Mapping[str, str]) -> list[str]:
        return ucx_warnings(options, env)

    def requested_transport(self, options: ConnectorOptions) -> str:
        assert isinstance(options, NixlPushOptions)
        return options.ucx_tls


class NixlPushAtOnce(NixlPush):
    """Concurrent dispatch with the same request id on P and D."""

    dispatch = "concurrent"
    needs_engine_id = True

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        host, _, port = peer.side_address.rpartition(":")
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": peer.engine_id,
            "remote_request_id": request_id,
            "remote_host": host,
            "remote_port": int(port or 0),
            "tp_size": peer.tensor_parallel_size,
            "pp_size": peer.pipeline_parallel_size,
        }
        return {**body, "kv_transfer_params": params}


CONNECTOR = NixlPush()
