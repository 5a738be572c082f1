"""Hand-offs that several connectors share: without any parameters, by pull, and SGLang's by rooms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from kvbench.connectors.base import Body, Connector, DispatchMode, PrefillPeer, Role, one_token_prefill


class _UnchangedOnD(Connector):
    """D gets a client's body as it is."""

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return dict(body)


class PlainConnector(_UnchangedOnD):
    """Sequential dispatch with unchanged bodies, except that P makes one token only.

    P computes the whole prompt first. D finds the KV by the prompt's tokens or by the request id, so the
    request needs no parameters (proxy_server.py of vLLM 0.6, and connectors over a shared store).
    """

    dispatch = "sequential"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(body)


class LoneConnector(_UnchangedOnD):
    """One server with a connector of its own: no P/D, requests are passed on as they are."""

    dispatch = "none"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        raise NotImplementedError(f"{self.name} runs one server and has no prefill request")


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


class RoomConnector(Connector):
    """SGLang's hand-off: P and D get the request at once and meet in a "room" on P's bootstrap server.

    The router adds ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room`` (a random number of 63 bits)
    to both bodies (SGLang 0.5, sglang_router). Only P binds a bootstrap port. Not run here: SGLang needs a
    GPU.
    """

    dispatch = "concurrent"
    side_port_roles: tuple[Role, ...] = ("prefill",)

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        # P's own answer is thrown away, so it need not come as a stream.
        request = {key: value for key, value in body.items() if key != "stream_options"}
        return {**request, "stream": False, **room_of(request_id, peer)}

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return {**body, **room_of(request_id, peer)}


def room_of(request_id: str, peer: PrefillPeer) -> dict[str, Any]:
    """The three fields that join a request on P and on D. The room follows from the request's id."""
    host, _, port = peer.side_address.rpartition(":")
    number = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "big") >> 1
    return {"bootstrap_host": host, "bootstrap_port": int(port or 0), "bootstrap_room": number}
