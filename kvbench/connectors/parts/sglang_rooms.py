"""SGLang's hand-off: P and D get the same request at once and meet in a "room" on P's bootstrap server.

The router adds ``bootstrap_host``, ``bootstrap_port`` and ``bootstrap_room`` (a random number of 63
bits) to both bodies (SGLang 0.5, sglang_router). Not run here: SGLang needs a GPU.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvbench.connectors.base import Body, Connector, PrefillPeer, Role


class RoomConnector(Connector):
    """Concurrent dispatch; only P binds a bootstrap port."""

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
