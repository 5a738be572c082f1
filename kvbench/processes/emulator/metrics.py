"""The engine's metrics, under vLLM's names where they exist and under ``kvbench:`` otherwise. ``observe``
runs for every token, so counting is plain Python."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvbench.core.exposition import Kind, family, histogram, page

# vLLM's upper bounds, plus smaller ones for loopback transfers and small steps.
_TTFT: Final = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_TOKEN: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
)
_REQUEST: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1,
    1.5,
    2,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
)
_TRANSFER_S: Final = (
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    5,
)
_BYTES: Final = tuple(float(2**power) for power in range(12, 35, 2))
_COUNT: Final = tuple(
    float(value) for value in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 100_000)
)
_LAG: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.01),
    *(0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5),
)


class Histogram:
    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class TransferMetrics:
    """One family of transfer metrics: ``<prefix>xfer_time_seconds`` and so on."""

    def __init__(self) -> None:
        self.seconds = Histogram(_TRANSFER_S)
        self.nbytes = Histogram(_BYTES)
        self.descriptors = Histogram(_COUNT)
        self.failed = 0
        self.expired = 0

    def observe(self, seconds: float, nbytes: int, descriptors: int) -> None:
        self.seconds.observe(seconds)
        self.nbytes.observe(nbytes)
        self.descriptors.observe(descriptors)


# Connector's metric names, used in addition to the uniform family.
TRANSFER_PREFIX: Final = {
    "NixlConnector": "vllm:nixl_",
    "MooncakeConnector": "vllm:mooncake_",
    "KvbenchTcpConnector": "kvbench:kv_xfer_",
}


class EngineMetrics:
    def __init__(self, model_name: str, connector: str = "") -> None:
        self._labels = {"model_name": model_name, "engine": "0"}
        self._connector = connector
        self.started_s = time.time()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.by_source = {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 0}
        self.success = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.ttft = Histogram(_TTFT)
        self.itl = Histogram(_TOKEN)
        self.tpot = Histogram(_TOKEN)
        self.e2e = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self.inference = Histogram(_REQUEST)
        self.step_lag = Histogram(_LAG)
        self.transfer_lag = Histogram(_LAG)
        """Lateness of KV transfers against their paced end, in seconds."""
        self.paced_s = 0.0
        self.paced = False
        self.busy_s = 0.0
        self.steps = 0
        self.blocks_held_locally = 0
        self.blocks_moved = 0
        self.transfer = TransferMetrics()
        self.gauges: Callable[[], dict[str, float]] = dict
        """Set by the engine: current values by full name; names in ``_total`` are counters."""
        self.infos: Callable[[], dict[str, dict[str, str]]] = dict
        """Set by the server: labels of the ``…_info`` metrics, by name without ``_info``."""

    def text(self) -> bytes:
        return page(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for name, value in self.gauges().items():
            kind: Kind = "counter" if name.endswith("_total") else "gauge"
            yield from family(name, kind, [(self._labels, value)])
        yield from family("process_start_time_seconds", "gauge", [({}, self.started_s)])
        yield from self._counter("vllm:prompt_tokens_total", self.prompt_tokens)
        yield from self._counter("vllm:generation_tokens_total", self.generation_tokens)
        yield from self._labelled("vllm:prompt_tokens_by_source_total", "source", self.by_source)
        yield from self._labelled("vllm:request_success_total", "finished_reason", self.success)
        yield from self._histogram("vllm:time_to_first_token_seconds", self.ttft)
        yield from self._histogram("vllm:inter_token_latency_seconds", self.itl)
        yield from self._histogram("vllm:request_time_per_output_token_seconds", self.tpot)
        yield from self._histogram("vllm:e2e_request_latency_seconds", self.e2e)
        yield from self._histogram("vllm:request_queue_time_seconds", self.queue)
        yield from self._histogram("vllm:request_prefill_time_seconds", self.prefill)
        yield from self._histogram("vllm:request_decode_time_seconds", self.decode)
        yield from self._histogram("vllm:request_inference_time_seconds", self.inference)
        yield from self._histogram("kvbench:emulator_step_lag_seconds", self.step_lag)
        yield from self._counter("kvbench:emulator_busy_seconds_total", self.busy_s)
        yield from self._counter("kvbench:emulator_steps_total", self.steps)
        yield from self._transfers()
        for name, labels in self.infos().items():
            yield from family(f"{name}_info", "gauge", [({**self._labels, **labels}, 1)])

    def _transfers(self) -> Iterator[str]:
        if not self._connector:
            return
        moved = self.transfer
        prefix = TRANSFER_PREFIX[self._connector]
        time_name = "time_seconds" if prefix.endswith("xfer_") else "xfer_time_seconds"
        yield from self._histogram(f"{prefix}{time_name}", moved.seconds)
        yield from self._histogram(f"{prefix}bytes_transferred", moved.nbytes)
        yield from self._histogram(f"{prefix}num_descriptors", moved.descriptors)
        yield from self._counter(f"{prefix}num_failed_transfers_total", moved.failed)
        yield from self._counter(f"{prefix}num_kv_expired_reqs_total", moved.expired)
        yield from self._histogram("kvbench:kv_transfer_seconds", moved.seconds)
        yield from self._histogram("kvbench:kv_transfer_bytes", moved.nbytes)
        yield from self._histogram("kvbench:kv_transfer_descriptors", moved.descriptors)
        if self.paced:
            yield from self._histogram("kvbench:emulator_transfer_lag_seconds", self.transfer_lag)
            yield from self._counter("kvbench:emulator_paced_transfer_seconds_total", self.paced_s)
        yield from self._counter("kvbench:kv_transfer_failures_total", moved.failed)
        yield from self._counter("kvbench:kv_blocks_moved_total", self.blocks_moved)
        yield from self._counter("kvbench:kv_blocks_held_locally_total", self.blocks_held_locally)

    def _counter(self, name: str, value: float) -> list[str]:
        return family(name, "counter", [(self._labels, value)])

    def _labelled(self, name: str, label: str, values: dict[str, int]) -> list[str]:
        return family(
            name, "counter", [({**self._labels, label: key}, value) for key, value in values.items()]
        )

    def _histogram(self, name: str, values: Histogram) -> list[str]:
        return histogram(name, self._labels, values.bounds, values.counts, values.total)
