"""Hand-overs of KV in modelled time: the bytes really move, and then wait until the model's time is over.

    end = max(begin, link free) + bytes / bandwidth + start-up + per descriptor · descriptors

An engine has one link, as in ``core.simulation``: who comes later waits for those before. Only the side that
moves the bytes is paced, so of several P that one D reads from, none waits for another's link. A transfer
that really took longer is late, never shortened; by how much is counted, as for steps that end late
(``kvbench:emulator_transfer_lag_seconds``).
"""

from __future__ import annotations

import time

from kvbench.processes.emulator.clock import Alarm
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.spec import KvPace


class Pacer:
    """Of one engine's link. ``time_scale`` is a factor on every time."""

    def __init__(self, pace: KvPace, time_scale: float, metrics: EngineMetrics) -> None:
        self._fixed_s = pace.start_s * time_scale
        self._descriptor_s = pace.per_descriptor_s * time_scale
        self._byte_s = time_scale / (pace.gb_per_s * 1e9) if pace.gb_per_s else 0.0
        self._metrics = metrics
        self._free_s = 0.0
        metrics.paced = True

    def begin(self, now_s: float, nbytes: int) -> float:
        """Takes the link for so many bytes; returns the moment at which they are through."""
        self._free_s = max(self._free_s, now_s) + nbytes * self._byte_s
        return self._free_s

    async def end(self, began_s: float, through_s: float, descriptors: int) -> float:
        """Waits for the modelled end; returns the seconds since ``began_s``."""
        due = through_s + self._fixed_s + self._descriptor_s * descriptors
        if due > time.monotonic():
            alarm = Alarm()
            try:
                await alarm.until(due)
            finally:
                alarm.close()
        now = time.monotonic()
        self._metrics.transfer_lag.observe(max(0.0, now - due))
        self._metrics.paced_s += due - began_s
        return now - began_s
