"""The KV links of a simulated deployment: each instance has one, and transfers take their turns on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbench.core.simulation.data import Link
from kvbench.core.simulation.engine import StepEngine
from kvbench.core.simulation.roles import Moved


@dataclass
class KvLinks:
    """When each link is free again, and what has been moved over all of them."""

    link: Link
    moved: Moved = field(default_factory=Moved)
    _free_at: dict[StepEngine, float] = field(default_factory=dict)
    _busy_s: dict[StepEngine, float] = field(default_factory=dict)

    def move(self, ends: tuple[StepEngine, StepEngine], nbytes: float, now_s: float) -> float:
        """Sends so many bytes on their way as soon as both links are free; returns when they arrive."""
        start = max(now_s, *(self._free_at.get(end, 0.0) for end in ends))
        busy = self.link.busy_s(nbytes)
        for end in ends:
            self._free_at[end] = start + busy
            self._busy_s[end] = self._busy_s.get(end, 0.0) + busy
        arrival = start + busy + self.link.latency_ms / 1e3
        self.moved.count += 1
        self.moved.seconds += arrival - now_s
        self.moved.nbytes += nbytes
        return arrival

    def busy_share(self, duration_s: float) -> float:
        """Of the busiest link."""
        return min(1.0, max(self._busy_s.values(), default=0.0) / max(duration_s, 1e-9))
