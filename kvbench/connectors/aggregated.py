"""The baseline without P/D: each engine prefills and decodes."""

from __future__ import annotations

from kvbench.connectors.base import LoneConnector


class Aggregated(LoneConnector):
    """Independent engines, used in turn, without KV transfer."""

    name = "aggregated"
    title = "aggregated (no P/D)"


CONNECTOR = Aggregated()
