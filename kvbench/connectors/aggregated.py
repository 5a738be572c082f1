"""No P/D: each engine prefills and decodes. The baseline in each table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.connectors.base import Connector, PrefillPeer


class Aggregated(Connector):
    """Engines that each do all of it, taken in turn; no KV transfer."""

    name = "aggregated"
    title = "aggregated (no P/D)"
    dispatch = "none"

    def prefill_request(self, body: Mapping[str, Any], request_id: str, peer: PrefillPeer) -> dict[str, Any]:
        raise NotImplementedError("an aggregated server has no prefill request")

    def decode_request(
        self,
        body: Mapping[str, Any],
        prefill_response: Mapping[str, Any] | None,
        request_id: str,
        peer: PrefillPeer,
    ) -> dict[str, Any]:
        return dict(body)


CONNECTOR = Aggregated()
