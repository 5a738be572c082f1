"""The client watches itself: what it was late with would otherwise be blamed on the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from kvbench.loadgen.alarm import Alarm

BEAT_S: Final = 0.01


class Heartbeat:
    """Calls back every 10 ms and notes how late the event loop was."""

    def __init__(self, start: float, callback: Callable[[float], None]) -> None:
        self._start = start
        self._callback = callback
        self._next = 1
        self.lags_s: list[float] = []
        self._cpu = time.process_time()
        self._waited = _run_queue_wait_s()
        self._began = time.monotonic()
        self._alarm = Alarm(self._beat)
        self._alarm.set(start + BEAT_S, BEAT_S)

    def _beat(self) -> None:
        now = time.monotonic()
        # Beats that fell due while the loop was busy arrive as one: each was late by its own amount.
        while (lag := now - (self._start + self._next * BEAT_S)) >= 0:
            self.lags_s.append(lag)
            self._next += 1
        self._callback(self.lags_s[-1] if self.lags_s else 0.0)

    def close(self) -> dict[str, float]:
        """Stops and tells: lags in milliseconds, CPU and run-queue wait as shares of the wall time."""
        self._alarm.close()
        wall = max(time.monotonic() - self._began, 1e-9)
        return {
            "loop_lag_p99_ms": percentile_ms(self.lags_s, 99),
            "loop_lag_max_ms": percentile_ms(self.lags_s, 100),
            "cpu_share": round((time.process_time() - self._cpu) / wall, 4),
            "run_queue_wait_share": round((_run_queue_wait_s() - self._waited) / wall, 4),
        }


def percentile_ms(values_s: Sequence[float], percent: float) -> float:
    """A percentile of seconds, in milliseconds; 0 of nothing."""
    return round(float(np.percentile(values_s, percent)) * 1e3, 4) if len(values_s) else 0.0


def _run_queue_wait_s() -> float:
    """Seconds this process was ready to run but had no core (second field of schedstat, nanoseconds)."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
