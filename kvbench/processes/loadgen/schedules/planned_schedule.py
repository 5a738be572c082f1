"""Requests in the order of a plan: at their planned times, or as slots of a closed loop become free."""

from __future__ import annotations

import math
from collections.abc import Container, MutableSequence
from typing import Final

from kvbench.processes.loadgen.in_flight import InFlightRequest
from kvbench.processes.loadgen.plan import PlannedRequest, Spares
from kvbench.processes.loadgen.schedules.closed_loop import ClosedLoop
from kvbench.processes.loadgen.spec import LoadSpec


class PlannedSchedule:
    """A plan's requests, one after the other. ``spares``: what takes the place of some after a failure."""

    ahead_s: Final = math.inf

    def __init__(
        self, spec: LoadSpec, plan: MutableSequence[PlannedRequest], spares: Spares | None = None
    ) -> None:
        self._plan = plan
        self._spares = spares or Spares()
        self._slots = ClosedLoop(plan, spec.slots, spec.duration_s) if spec.slots else None
        self._next = self._sent = 0

    @property
    def unsent(self) -> int:
        return len(self._plan) - self._next

    @property
    def whole(self) -> bool:
        # Of a closed loop whose time is up, not all of the plan was sent.
        return self._slots is None or self._sent == len(self._plan)

    def upcoming(self, made: Container[int]) -> PlannedRequest | None:
        if self._next >= len(self._plan):
            return None
        if self._plan[self._next].index not in made:
            self._spares.put(self._plan, self._next)
        return self._plan[self._next]

    def take(self, planned: PlannedRequest) -> None:
        self._next += 1
        self._sent += 1

    def ended(self, request: InFlightRequest, now_s: float) -> bool:
        record = request.record
        if not record.ok and record.error != "cancelled":
            self._spares.failed()
        if self._slots is None:
            return False
        self._slots.freed(now_s, failed=not record.ok)
        return True

    def beat(self, now_s: float) -> None:
        if self._slots is not None and self._slots.is_over(now_s):
            self.stop()

    def stop(self) -> None:
        self._next = len(self._plan)
