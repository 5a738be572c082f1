"""The pull handshake that several connectors share: P answers where its blocks lie, D reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvbench.connectors.base import Body, Connector, DispatchMode, PrefillPeer, Role, one_token_prefill


class PullConnector(Connector):
    """Sequential dispatch: P's answer carries ``kv_transfer_params`` that go to D untouched.

    This is the dialect of vLLM's NixlConnector from 0.13 to 0.33 (toy_proxy_server.py).
    """

    dispatch: DispatchMode = "sequential"
    side_port_roles: tuple[Role, ...] = ("prefill", "decode")
    answer_fields: ClassVar[tuple[str, ...]] = (
        "remote_block_ids",
        "remote_engine_id",
        "remote_host",
        "remote_port",
    )
    """What P's ``kv_transfer_params`` must hold for D to find the blocks."""

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(
            body,
            {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        )

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return {**body, "kv_transfer_params": (prefill_response or {}).get("kv_transfer_params")}

    def missing_in_prefill_response(self, prefill_response: Mapping[str, Any]) -> Sequence[str]:
        params = prefill_response.get("kv_transfer_params")
        if not isinstance(params, Mapping):
            return ("kv_transfer_params",)
        return tuple(f"kv_transfer_params.{key}" for key in self.answer_fields if params.get(key) is None)
