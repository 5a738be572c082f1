"""What the progress lines count, and the outcomes that they report one by one."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.processes.loadgen.in_flight import InFlightRequest
from kvbench.processes.loadgen.spec import LoadSpec

SETTLED_A_LINE: Final = 60
"""So many fit into a line that a pipe takes at once (PIPE_BUF, 4096 bytes)."""
TURNS_A_LINE: Final = 30
DUE_A_LINE: Final = 100
"""Of sessions: so many that have settled, with turn and session's time, and so many times of turns sent."""


class Counts:
    """Requests that met the limits and requests that missed them, so far."""

    def __init__(self, spec: LoadSpec, report: Callable[[dict[str, Any]], bool]) -> None:
        limits = spec.limits()
        self._ttft_s = math.inf if limits.ttft_ms is None else limits.ttft_ms / 1e3
        self._tpot_s = math.inf if limits.tpot_ms is None else limits.tpot_ms / 1e3
        self._report = report
        self._interval_s = spec.progress_interval_s
        self._next_line = 0.0
        self._done = self._met = self._missed = 0
        self._late_first: set[InFlightRequest] = set()
        self._unreported: deque[list[Any]] = deque()
        self._due: deque[float] = deque()
        self._turns = bool(spec.sessions_path)

    def sent(self, record: RequestRecord) -> None:
        """A turn of a session has been sent, which no plan knows the time of."""
        if self._turns:
            self._due.append(record.scheduled_s)

    def first_token(self, request: InFlightRequest, at_s: float) -> None:
        """A request in flight has its first token."""
        if at_s - request.scheduled_s > self._ttft_s:
            self._late_first.add(request)

    def settled(self, request: InFlightRequest, record: RequestRecord) -> None:
        """A request has ended."""
        self._late_first.discard(request)
        self._done += 1
        times = (_rounded(record.ttft_s), _rounded(record.tpot_s), _rounded(record.e2el_s))
        turn = [record.turn, _rounded(record.session_s)] if self._turns else []
        self._unreported.append([request.index, *times, record.error, *turn])
        if record.error == "cancelled":
            return
        if record.ok and (record.ttft_s or 0.0) <= self._ttft_s and (record.tpot_s or 0.0) <= self._tpot_s:
            self._met += 1
        else:
            self._missed += 1

    def overdue(self, waiting: Iterable[InFlightRequest], now: float) -> int:
        """Of the requests that wait for a first token, in scheduled order, those past the TTFT limit."""
        count = 0
        for request in waiting:
            if request.scheduled_s > now - self._ttft_s:
                break
            count += 1
        return count

    def report_due(self, state: Callable[[], dict[str, Any]], now: float) -> None:
        """Prints lines if one is due; outcomes that do not go out now go out later."""
        if now < self._next_line:
            return
        self._next_line = now + self._interval_s
        while True:
            line = self._line(state())
            if not self._report(line):
                return
            if not self._told(line):
                return

    def last_lines(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines that report all that has not been reported."""
        lines = []
        while True:
            line = self._line(state)
            lines.append(line)
            if not self._told(line):
                return lines

    def _told(self, line: dict[str, Any]) -> bool:
        """A line is out; whether there is more to tell."""
        for _ in line["settled"]:
            self._unreported.popleft()
        for _ in line.get("offsets_s", ()):
            self._due.popleft()
        return bool(self._unreported or self._due)

    def _line(self, state: dict[str, Any]) -> dict[str, Any]:
        """A request that is past the TTFT limit without a first token has missed."""
        count = min(TURNS_A_LINE if self._turns else SETTLED_A_LINE, len(self._unreported))
        due = {}
        if self._turns:
            due = {"offsets_s": [self._due[place] for place in range(min(DUE_A_LINE, len(self._due)))]}
            count = count if len(self._due) <= DUE_A_LINE else 0  # none has settled before it was sent
        return {
            "event": "progress",
            "t_s": state["t_s"],
            "sent": state["sent"],
            "done": self._done,
            "met": self._met,
            "missed": self._missed + state["overdue"] + len(self._late_first),
            "in_flight": state["in_flight"],
            "waiting_first": state["waiting_first"],
            "lag_ms": state["lag_ms"],
            "settled": [self._unreported[place] for place in range(count)],
            **due,
        }


def _rounded(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 7)
