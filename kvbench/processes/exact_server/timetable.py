"""When the exact server's tokens are due: all requests by their deadlines, behind a queue or not. Pure."""

from __future__ import annotations

import contextlib
import heapq
from collections import deque

from kvbench.processes.exact_server.script import Script
from kvbench.processes.exact_server.served import ServedStream
from kvbench.processes.exact_server.spec import ExactSpec


class Timetable:
    """Times are seconds of CLOCK_MONOTONIC. Who sends takes the streams out, and puts them back in."""

    def __init__(self, spec: ExactSpec) -> None:
        self._spec = spec
        self.firsts: list[tuple[float, int, ServedStream]] = []
        """Those that wait for their first token: a heap of (deadline, number, stream)."""
        self.gaps: deque[ServedStream] = deque()
        """The others, in order of their deadlines: the gap is the same for all."""
        self._free_at = 0.0

    def admit(self, stream: ServedStream, script: Script) -> None:
        """A request has come in: what it gets, and when its first token is due."""
        spec = self._spec
        stream.head, stream.plain, stream.last = script.head, script.plain, script.last
        stream.then, stream.scripted, stream.last_tokens = script.then, script.outcome, script.last_tokens
        if spec.queue == "md1":
            self._free_at = max(self._free_at, stream.arrival) + spec.service_s
            due = self._free_at
        else:
            due = stream.arrival + spec.first_token_s
        stream.first_due = stream.due = due + script.later_gaps * spec.gap_s
        if not script.never:
            heapq.heappush(self.firsts, (stream.due + script.late_s, stream.index, stream))
            stream.due += script.late_s

    def go_on(self, stream: ServedStream) -> None:
        """Into the order of deadlines; a request that was read late belongs before some that were not."""
        gaps = self.gaps
        place = len(gaps)
        while place and gaps[place - 1].due > stream.due:
            place -= 1
        if place == len(gaps):
            gaps.append(stream)
        else:
            gaps.insert(place, stream)

    def drop(self, stream: ServedStream) -> None:
        """Nothing more is due for it. One that waits for its first token is passed over when that is due."""
        with contextlib.suppress(ValueError):
            self.gaps.remove(stream)

    def waiting(self, now: float) -> int:
        """Requests in the queue that are not being served yet."""
        if self._spec.queue != "md1":
            return 0
        begun = now + self._spec.service_s
        return sum(stream.first_due > begun for _, _, stream in self.firsts)

    def busy(self, now: float) -> bool:
        """Whether the queue's server works on a request, be it one that was dropped."""
        return self._spec.queue == "md1" and self._free_at > now
