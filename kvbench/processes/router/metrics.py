"""The router's metrics. Its processes count in one table of shared memory, and any of them reports the sum.

Each process writes only its row, one aligned number at a time, and a reader adds up all rows: without locks,
a scrape is right in every process.

| metric | meaning |
|---|---|
| ``requests_total``, ``errors_total{error}``, ``requests_in_flight`` | requests received, failed, active |
| ``streams_total``, ``stream_reads_total``, ``stream_bytes_total`` | streams passed on; reads, bytes |
| ``stream_compiled_reads_total`` | those of the reads by compiled code |
| ``prefill_seconds``, ``handoff_seconds``, ``decode_first_byte_seconds``, ``request_seconds`` | times |
| ``cpu_seconds_total{process}`` | user and system time; at most one second per second and process |
| ``run_queue_wait_seconds_total`` | time in which a process was ready to run but had no core |
| ``loop_lag_seconds`` | lateness of each process's timer, every ``BEAT_S`` |
| ``processes`` | processes that share the port |
"""

from __future__ import annotations

import asyncio
import mmap
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from kvbench.core.exposition import Kind, family, histogram, page
from kvbench.processes.common.entry import run_queue_wait_s
from kvbench.processes.http1 import ChunkWatch
from kvbench.processes.router.backend_request import Timing

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BEAT_S: Final = 0.05
PREFIX: Final = "kvbench:router_"

COUNTERS: Final = {
    "requests": "Requests received.",
    "streams": "Streams of D passed on as bytes.",
    "stream_reads": "Reads of those streams: about one a chunk while the router keeps up.",
    "stream_compiled_reads": "Reads of these streams by compiled code.",
    "stream_bytes": "Bytes of those streams, with their framing.",
}
ERRORS: Final = (
    *(f"{role}_{kind}" for role in ("prefill", "decode") for kind in ("connect", "early_close", "malformed")),
    *("prefill_bad_answer", "prefill_http", "decode_http"),
    *("bad_request", "client_disconnect", "not_ready", "timeout", "router_full", "internal"),
)
HISTOGRAMS: Final = {
    "prefill_seconds": "Request sent to P until its whole answer.",
    "handoff_seconds": "P's answer until the request to D is sent.",
    "decode_first_byte_seconds": "Request sent to D until the first byte of its answer's body.",
    "request_seconds": "Request received until the answer is complete.",
    "loop_lag_seconds": "How late a timer came: work of the router itself, or another process on its core.",
}
BOUNDS_S: Final = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)

_SLOTS: Final = (
    *COUNTERS,
    *(f"error {name}" for name in ERRORS),
    *("in_flight", "cpu_seconds", "wait_seconds", "ready"),
    *(f"{name} {slot}" for name in HISTOGRAMS for slot in ("sum", *range(len(BOUNDS_S) + 1))),
)
_AT: Final = {name: index for index, name in enumerate(_SLOTS)}
_AT_SUM: Final = {name: _AT[f"{name} sum"] for name in HISTOGRAMS}
_REQUESTS: Final = _AT["requests"]
_IN_FLIGHT: Final = _AT["in_flight"]
_STREAM: Final = tuple(
    _AT[name] for name in ("streams", "stream_reads", "stream_compiled_reads", "stream_bytes")
)


class RouterMetrics:
    """Metrics of all processes; ``process`` is the row that this one writes (``write_as``)."""

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes
        self.waited_s: Callable[[], float] = run_queue_wait_s
        # Anonymous and shared: later forked processes see the same memory.
        self._table = memoryview(mmap.mmap(-1, 8 * len(_SLOTS) * processes)).cast("d")
        self.write_as(0)

    def write_as(self, process: int) -> None:
        self.process = process
        self._row = self._table[process * len(_SLOTS) : (process + 1) * len(_SLOTS)]

    def began(self) -> None:
        row = self._row
        row[_REQUESTS] += 1.0
        row[_IN_FLIGHT] += 1.0

    def ended(self, timing: Timing, began: float, ended: float, error: str, sequential: bool) -> None:
        """Count a request's end and its times as far as it came. ``sequential``: D waited for P."""
        self._row[_IN_FLIGHT] -= 1.0
        if error:
            self.error(error)
        else:
            self.observe("request_seconds", ended - began)
        if timing.prefill_sent is not None and timing.prefill_answered is not None:
            self.observe("prefill_seconds", timing.prefill_answered - timing.prefill_sent)
            if timing.decode_sent is not None and sequential:
                self.observe("handoff_seconds", timing.decode_sent - timing.prefill_answered)
        if timing.decode_sent is not None and timing.decode_first_byte is not None:
            self.observe("decode_first_byte_seconds", timing.decode_first_byte - timing.decode_sent)
        if timing.stream is not None:
            self._stream(timing.stream)

    def _stream(self, watch: ChunkWatch) -> None:
        for at, amount in zip(
            _STREAM, (1, watch.reads, watch.compiled_reads, watch.passed_bytes), strict=True
        ):
            self._row[at] += amount

    def error(self, name: str) -> None:
        self._row[_AT[f"error {name if name in ERRORS else 'internal'}"]] += 1.0

    def observe(self, histogram: str, seconds: float) -> None:
        first = _AT_SUM[histogram]
        self._row[first] += seconds
        self._row[first + 1 + bisect_left(BOUNDS_S, seconds)] += 1.0

    def ready(self) -> None:
        self._row[_AT["ready"]] = 1.0

    @property
    def all_ready(self) -> bool:
        return self._sum("ready") == self.processes

    async def beat(self) -> None:
        """Measure this process's load until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.observe("loop_lag_seconds", max(0.0, clock() - due))
            self._note_cpu()

    def page(self) -> bytes:
        self._note_cpu()
        return page(self._lines()).encode()

    def _lines(self) -> Iterator[str]:
        for name, text in COUNTERS.items():
            yield from _single(f"{name}_total", "counter", self._sum(name), text)
        errors = [({"error": name}, count) for name in ERRORS if (count := self._sum(f"error {name}"))]
        yield from family(f"{PREFIX}errors_total", "counter", errors, "Requests that failed, by class.")
        yield from _single("requests_in_flight", "gauge", self._sum("in_flight"), "Requests under way.")
        yield from _single("processes", "gauge", self.processes, "Processes of the router.")
        cpu_s = self._table[_AT["cpu_seconds"] :: len(_SLOTS)]
        by_process = [({"process": str(process)}, seconds) for process, seconds in enumerate(cpu_s)]
        text = "CPU time, user and system, by process."
        yield from family(f"{PREFIX}cpu_seconds_total", "counter", by_process, text)
        text = "Ready to run, but without a core."
        yield from _single("run_queue_wait_seconds_total", "counter", self._sum("wait_seconds"), text)
        for name, text in HISTOGRAMS.items():
            counts = [self._sum(f"{name} {index}") for index in range(len(BOUNDS_S) + 1)]
            yield from histogram(PREFIX + name, {}, BOUNDS_S, counts, self._sum(f"{name} sum"), text)

    def _sum(self, name: str) -> float:
        return sum(self._table[_AT[name] :: len(_SLOTS)])

    def _note_cpu(self) -> None:
        self._row[_AT["cpu_seconds"]] = time.process_time()
        self._row[_AT["wait_seconds"]] = self.waited_s()


def _single(name: str, kind: Kind, value: float, text: str) -> list[str]:
    return family(PREFIX + name, kind, [({}, value)], text)
