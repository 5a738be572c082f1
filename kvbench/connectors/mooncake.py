"""vLLM's MooncakeConnector (0.24 to 0.33): P pushes the KV to D with Mooncake's Transfer Engine.

Dispatch is concurrent: P and D get the request at the same time, joined by a ``transfer_id``
that the router invents; D asks P's side channel, whose address P's bootstrap server tells
(mooncake_connector_proxy.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from kvbench.connectors.base import Connector, ConnectorOptions, PrefillPeer, Role, one_token_prefill


class MooncakeOptions(ConnectorOptions):
    """Options of the mooncake connector."""

    protocol: Literal["tcp", "rdma"] = Field(
        "tcp", description="transport; enforced by MC_FORCE_TCP or MC_FORCE_HCA"
    )
    device_name: str = Field("", description="comma-separated RDMA devices; empty takes all")
    num_workers: int = Field(2, ge=1, le=64, description="sender threads on P")


class Mooncake(Connector):
    """P pushes to D; P serves a bootstrap address."""

    name = "mooncake"
    title = "Mooncake (Transfer Engine, P pushes)"
    dispatch = "concurrent"
    kv_connector = "MooncakeConnector"
    transfer_backend = "mooncake"
    needs_bootstrap = True
    side_port_roles = ("prefill",)
    options_model = MooncakeOptions

    def extra_config(self, role: Role, options: ConnectorOptions) -> dict[str, Any]:
        assert isinstance(options, MooncakeOptions)
        config: dict[str, Any] = {"mooncake_protocol": options.protocol, "num_workers": options.num_workers}
        if options.device_name:
            config["device_name"] = options.device_name
        return config

    def env(self, role: Role, options: ConnectorOptions, side_port: int | None, host: str) -> dict[str, str]:
        assert isinstance(options, MooncakeOptions)
        # Mooncake's own protocol argument selects nothing; these two do, by their mere presence.
        forced = "MC_FORCE_TCP" if options.protocol == "tcp" else "MC_FORCE_HCA"
        env = {forced: "1"}
        if side_port is not None:
            env["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(side_port)
        return env

    def transport_asked(self, options: ConnectorOptions) -> str:
        assert isinstance(options, MooncakeOptions)
        return options.protocol

    def prefill_request(self, body: Mapping[str, Any], request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(
            body, {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": request_id}
        )

    def decode_request(
        self,
        body: Mapping[str, Any],
        prefill_response: Mapping[str, Any] | None,
        request_id: str,
        peer: PrefillPeer,
    ) -> dict[str, Any]:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": request_id,
            "remote_bootstrap_addr": peer.bootstrap_url,
            "remote_engine_id": peer.engine_id,
        }
        return {**body, "kv_transfer_params": params}


CONNECTOR = Mooncake()
