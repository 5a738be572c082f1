"""No P/D: each engine prefills and decodes. The baseline in each table."""

from __future__ import annotations

from kvbench.connectors.base import LoneConnector


class Aggregated(LoneConnector):
    """Engines that each do all of it, taken in turn; no KV transfer."""

    name = "aggregated"
    title = "aggregated (no P/D)"


CONNECTOR = Aggregated()
