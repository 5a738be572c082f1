"""What a run asks of whoever knows which request is to be sent next."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Protocol

from kvbench.processes.loadgen.in_flight import InFlightRequest, InFlightRun
from kvbench.processes.loadgen.plan import PlannedRequest

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
