"""The router's own metrics, on a registry of their own."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)


class RouterMetrics:
    """Counters and histograms under ``kvbench:router_*``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "kvbench:router_"
        self.requests = Counter(f"{prefix}requests", "Requests received.", registry=self.registry)
        self.errors = Counter(
            f"{prefix}errors", "Requests that failed, by class.", ["error"], registry=self.registry
        )
        self.in_flight = Gauge(f"{prefix}requests_in_flight", "Requests under way.", registry=self.registry)
        self.prefill = self._histogram("prefill_seconds", "Request sent to P until its whole answer.")
        self.handoff = self._histogram("handoff_seconds", "P's answer until the request to D is sent.")
        self.first_byte = self._histogram(
            "decode_first_byte_seconds", "Request sent to D until the first byte of its answer's body."
        )
        self.request = self._histogram("request_seconds", "Request received until the answer is complete.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"kvbench:router_{name}", text, registry=self.registry, buckets=_SECONDS)

    def page(self) -> bytes:
        """The text of ``GET /metrics``."""
        return generate_latest(self.registry)
