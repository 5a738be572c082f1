"""Which request is to be sent next: in the order of a plan, at planned times or as slots become free.

A closed loop's slot sends its next request when the one before has ended. Unlike an open loop's, its load
follows the server: one that is slow is asked less. It measures a latency and a throughput at so many requests
at once, never a rate that is held.
"""

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
    """Gives a load's requests one after the other. Times are seconds since the run's start."""

    @property
    def unsent(self) -> int:
        """Requests that are still to be sent, or may be once others are answered."""

    @property
    def whole(self) -> bool:
        """Whether all were sent that were to be."""

    @property
    def ahead_s(self) -> float:
        """How long before it is due a request is made: not sooner where another may come before it."""

    def upcoming(self, made: Container[int]) -> PlannedRequest | None:
        """The next request; None where none is known yet. ``made``: places of those that are made already."""

    def take(self, planned: PlannedRequest) -> None:
        """The upcoming one is sent."""

    def ended(self, request: InFlightRequest, now_s: float) -> bool:
        """A request has ended, its record is filled in; whether others are due for that."""

    def beat(self, now_s: float) -> None:
        """Time goes by."""

    def stop(self) -> None:
        """Nothing more is to be sent."""


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
