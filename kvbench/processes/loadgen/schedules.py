"""Chooses the next request to send: in plan order, at planned times or as slots become free. A slot of a
closed loop sends its next request when the one before has ended. Its load follows the server: a slow one gets
less. It measures latency and throughput at a concurrency, never a sustained rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, MutableSequence, Sequence
from typing import Final, Protocol

from kvbench.processes.loadgen.in_flight import InFlightRequest, InFlightRun
from kvbench.processes.loadgen.plan import PlannedRequest, Spares
from kvbench.processes.loadgen.spec import LoadSpec

Begin = Callable[[InFlightRun, PlannedRequest, float], InFlightRequest]
"""Makes a planned request that is due."""


class Schedule(Protocol):
    """Yields a load's requests. Times are seconds since the run's start."""

    @property
    def unsent(self) -> int:
        """Requests still to be sent, including those that depend on answers."""

    @property
    def whole(self) -> bool:
        """Whether all planned requests were sent."""

    @property
    def ahead_s(self) -> float:
        """How long before its due time a request is made; short if another may precede it."""

    def upcoming(self, made: Container[int]) -> PlannedRequest | None:
        """Return the next request, if known. ``made``: indices of those already made."""

    def take(self, planned: PlannedRequest) -> None:
        """Mark the upcoming request as sent."""

    def ended(self, request: InFlightRequest, now_s: float) -> bool:
        """Handle an ended request with its record; return whether others became due."""

    def beat(self, now_s: float) -> None:
        """Handle the passing of time."""

    def stop(self) -> None:
        """Send nothing more."""


AFTER_FAILURE_S: Final = 0.1
"""Delay of a slot after a failed request, so that a dead server is not asked in a tight loop."""


class ClosedLoop:
    """Sets a planned request's time when a slot becomes free; infinite until then."""

    def __init__(self, plan: Sequence[PlannedRequest], slots: int, duration_s: float) -> None:
        self._plan = plan
        self._let_in = min(slots, len(plan))
        self._duration_s = duration_s or math.inf
        for place, request in enumerate(plan):
            request.offset_s = 0.0 if place < self._let_in else math.inf

    def freed(self, now_s: float, *, failed: bool) -> None:
        """Make the next request due: a slot is free at ``now_s``."""
        if self._let_in < len(self._plan):
            due_s = now_s + (AFTER_FAILURE_S if failed else 0.0)
            # Requests are sent in plan order, so due times must not decrease.
            before_s = self._plan[self._let_in - 1].offset_s
            self._plan[self._let_in].offset_s = max(due_s, before_s)
            self._let_in += 1

    def is_over(self, now_s: float) -> bool:
        return now_s >= self._duration_s


class PlannedSchedule:
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
        # A closed loop whose time has ended did not send the whole plan.
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
