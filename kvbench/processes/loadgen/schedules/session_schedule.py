"""Turns of sessions: the first of each at its planned time, every later one think time after its answers."""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Container
from typing import Final

from kvbench.core.load.arrivals import Sends
from kvbench.core.sessions.session_load import SessionLoad
from kvbench.processes.loadgen.in_flight import InFlightRequest, InFlightRun
from kvbench.processes.loadgen.plan import PlannedRequest
from kvbench.processes.loadgen.schedules.base import Begin
from kvbench.processes.loadgen.schedules.session_prompts import SessionPrompts


class SessionSchedule:
    """The requests of a load of sessions, as they become due."""

    ahead_s: Final = 0.05
    """A turn of another session may become due before the next one that is known, and a long prompt that is
    made for nothing costs memory."""
    whole: Final = True

    def __init__(self, load: SessionLoad, prompts: SessionPrompts) -> None:
        self._load = load
        self._prompts = prompts
        self._sends = Sends(load.offsets_s, load.following)
        self._run_id = uuid.uuid4().hex[:12]
        self._due: list[tuple[float, int]] = []
        self._known: dict[int, PlannedRequest] = {}
        """Of those that are due next, until they are sent."""
        self._planned = -1
        """Place of the next one with a planned time, which is among those that are due."""
        self._stopped = False
        self._next_planned()

    def _next_planned(self) -> None:
        found = self._sends.planned()
        self._planned = -1 if found is None else found[1]
        if found is not None:
            heapq.heappush(self._due, found)

    @property
    def unsent(self) -> int:
        return 0 if self._stopped or not self._sends.left else max(1, len(self._due))

    def upcoming(self, made: Container[int]) -> PlannedRequest | None:
        if not self._due or self._stopped:
            return None
        due_s, place = self._due[0]
        found = self._known.get(place)
        if found is None:
            load = self._load
            found = self._known[place] = PlannedRequest(
                index=place,
                request_id=f"kvb-{self._run_id}-{place}",
                offset_s=due_s,
                input_len=load.input_len[place],
                output_len=load.output_len[place],
                prompt=b"",
                session=load.following.session[place],
                turn=load.following.turn[place],
                session_id=f"kvb-{self._run_id}-{load.following.session[place]}",
                keeps_ids=self._prompts.needs_answer(place),
            )
        return found

    def take(self, planned: PlannedRequest) -> None:
        _, place = heapq.heappop(self._due)
        assert place == planned.index
        del self._known[place]
        self._sends.sent(place, planned.offset_s)
        if place == self._planned:
            self._next_planned()

    def ended(self, request: InFlightRequest, now_s: float) -> bool:
        place, record = request.place, request.record
        if not record.ok:
            self._sends.failed(place)
            self._prompts.forget(place)
            return False
        self._prompts.answered(place, request.answer_ids())
        begun_s, answered_s = self._sends.begun_s(place), record.last_token_s or now_s
        if self._load.following.last[place] and begun_s is not None:
            record.session_s = answered_s - begun_s
        due = self._sends.answered(place, answered_s)
        for each in due:
            heapq.heappush(self._due, each)
        return bool(due)

    def beat(self, now_s: float) -> None:
        """Turns wait for answers, not for time."""

    def stop(self) -> None:
        self._stopped = True
        self._due.clear()
        self._known.clear()

    def filling(self, begin: Begin) -> Begin:
        """``begin`` for requests whose prompts are made only then, as they may hold answers."""

        def filled(run: InFlightRun, request: PlannedRequest, scheduled_s: float) -> InFlightRequest:
            request.prompt = self._prompts.json(request.index)
            return begin(run, request, scheduled_s)

        return filled
