"""A closed loop: a slot sends its next request when the one before has ended.

Unlike an open loop's, its load follows the server: one that is slow is asked less. What it finds is a
latency and a throughput at so many requests at once, never a rate that is held.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from kvbench.processes.loadgen.plan import PlannedRequest

AFTER_FAILURE_S: Final = 0.1
"""A slot whose request has failed waits for so long, so that one that is down is not asked ever faster."""


class ClosedLoop:
    """Gives each request of a plan its time as slots become free; until then that is never."""

    def __init__(self, plan: Sequence[PlannedRequest], slots: int, duration_s: float) -> None:
        self._plan = plan
        self._let_in = min(slots, len(plan))
        self._duration_s = duration_s or math.inf
        for place, request in enumerate(plan):
            request.offset_s = 0.0 if place < self._let_in else math.inf

    def freed(self, now_s: float, *, failed: bool) -> None:
        """A slot is free at ``now_s`` after the start: the next request is due."""
        if self._let_in < len(self._plan):
            due_s = now_s + (AFTER_FAILURE_S if failed else 0.0)
            # Requests are sent in the plan's order, so none may be due before the one ahead of it.
            before_s = self._plan[self._let_in - 1].offset_s
            self._plan[self._let_in].offset_s = max(due_s, before_s)
            self._let_in += 1

    def is_over(self, now_s: float) -> bool:
        """Whether the time is up in which requests are let in."""
        return now_s >= self._duration_s
