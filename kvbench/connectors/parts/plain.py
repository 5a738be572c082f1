"""The hand-off without any parameters: P computes the whole prompt first, then D gets the request as it is.

D finds the KV by the prompt's tokens or by the request id, so nothing has to be said in the request
(proxy_server.py of vLLM 0.6, and connectors over a shared store).
"""

from __future__ import annotations

from typing import Any

from kvbench.connectors.base import Body, Connector, PrefillPeer, one_token_prefill


class _UnchangedOnD(Connector):
    """D gets a client's body as it is."""

    def decode_request(
        self, body: Body, prefill_response: Body | None, request_id: str, peer: PrefillPeer
    ) -> dict[str, Any]:
        return dict(body)


class PlainConnector(_UnchangedOnD):
    """Sequential dispatch with unchanged bodies, except that P makes one token only."""

    dispatch = "sequential"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        return one_token_prefill(body)


class LoneConnector(_UnchangedOnD):
    """One server with a connector of its own: no P/D, requests are passed on as they are."""

    dispatch = "none"

    def prefill_request(self, body: Body, request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        raise NotImplementedError(f"{self.name} runs one server and has no prefill request")
