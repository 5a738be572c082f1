"""The client measures its own delays, which would otherwise be attributed to the server."""

from __future__ import annotations

import gc
import math
import time
from array import array
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from kvbench.processes.common.entry import run_queue_wait_s
from kvbench.processes.loadgen.sockets.clock import WAY

BEAT_S: Final = 0.01
STALL_S: Final = 0.005
"""A beat later than this counts as a stall of the loop, in seconds."""


class GeneratorFigures:
    def __init__(self) -> None:
        self.streams_peak = 0
        self.fallbacks = 0
        self.chunks = 0
        self._chunk_lags_ns = array("i")
        self._doubts_ns = array("i")
        self._first_doubts_ns = array("i")
        self._send_lags_s = array("d")
        self._beat_lags_s = array("d")
        self._worst_s = 0.0
        self.begin()

    def begin(self) -> None:
        self._held_up_s = 0.0
        self._began = time.monotonic()
        self._cpu = time.process_time()
        self._waited = run_queue_wait_s()
        self._collections = _collections()

    def beat(self, lag_s: float) -> None:
        self._beat_lags_s.append(lag_s)
        self._worst_s = max(self._worst_s, lag_s)

    def held_up(self, lag_s: float) -> None:
        self._held_up_s += lag_s

    def sent(self, lag_s: float) -> None:
        self._send_lags_s.append(lag_s)
        self._worst_s = max(self._worst_s, lag_s)

    def read(self, lags_ns: bytes, fallbacks: int) -> None:
        """Record reads: delay after the kernel's stamp (int32 ns each), and how many had no stamp."""
        self._chunk_lags_ns.frombytes(lags_ns)
        self.fallbacks += fallbacks

    def doubted(self, doubts_ns: array[int], first_doubt_ns: int) -> None:
        """Record by how many ns a request's token times may be late, and its first token's."""
        self._doubts_ns.extend(doubts_ns)
        self._first_doubts_ns.append(first_doubt_ns)

    def worst_ms(self) -> float:
        """The largest lag since the last call."""
        worst, self._worst_s = self._worst_s, 0.0
        return round(worst * 1e3, 3)

    def to_json(self) -> dict[str, Any]:
        """Lags in milliseconds, CPU and run-queue wait as shares of the time since ``begin``."""
        wall_s = max(time.monotonic() - self._began, 1e-9)
        cpu_s = time.process_time() - self._cpu
        reads = len(self._chunk_lags_ns)
        stamps = "mixed" if 0 < self.fallbacks < reads else "read" if self.fallbacks else "kernel"
        return {
            **_percentiles("send_lag", self._send_lags_s, 1e3),
            **_percentiles("chunk_lag", self._chunk_lags_ns, 1e-6),
            **_percentiles("loop_lag", self._beat_lags_s, 1e3),
            **_doubts("token_error", self._doubts_ns, self.chunks),
            **_doubts("first_error", self._first_doubts_ns, len(self._first_doubts_ns)),
            "loop_lag_share": round(self._held_up_s / wall_s, 4),
            "loop_stalls": sum(lag > STALL_S for lag in self._beat_lags_s),
            "cpu_share": round(cpu_s / wall_s, 4),
            "run_queue_wait_share": round((run_queue_wait_s() - self._waited) / wall_s, 4),
            "cpu_s": round(cpu_s, 4),
            "chunks": self.chunks,
            "reads": reads,
            "reads_by": WAY,
            "reads_without_stamp": self.fallbacks,
            "streams_peak": self.streams_peak,
            "stamps": stamps,
            "gc_collections": _collections() - self._collections,
        }


def _percentiles(name: str, values: Sequence[float], factor: float) -> dict[str, float]:
    found = np.percentile(values, (50, 99, 100)) * factor if len(values) else (0.0, 0.0, 0.0)
    return {
        f"{name}_{what}_ms": round(float(value), 4)
        for what, value in zip(("p50", "p99", "max"), found, strict=True)
    }


def _doubts(name: str, doubts_ns: array[int], of: int) -> dict[str, float]:
    """How late times may be (ms): median, 99th percentile, maximum. ``of``: number of all times; those not in
    ``doubts_ns`` are exact."""
    ordered = np.sort(doubts_ns)
    figures = {}
    for what, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        place = math.ceil(share * of) - 1 - (of - len(ordered))
        value_ns = float(ordered[place]) if 0 <= place < len(ordered) else 0.0
        figures[f"{name}_{what}_ms"] = round(value_ns * 1e-6, 4)
    return figures


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
