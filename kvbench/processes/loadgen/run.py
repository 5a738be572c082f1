"""Runs a plan: sends on schedule, enforces deadlines, parses answers, reports progress. Answers are parsed
when there is time. Progress lines have counts and single outcomes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from kvbench.core.records import RequestRecord
from kvbench.hosts.server_access import redact, variables
from kvbench.processes.loadgen.heartbeat import BEAT_S, GeneratorFigures
from kvbench.processes.loadgen.http_request import HttpRequest, HttpRequestOwner
from kvbench.processes.loadgen.in_flight import InFlightRequest
from kvbench.processes.loadgen.plan import PlannedRequest
from kvbench.processes.loadgen.schedules import Begin, Schedule
from kvbench.processes.loadgen.sockets.clock import StampClock
from kvbench.processes.loadgen.sockets.loop import EVENTS_AT_ONCE, READABLE, SocketLoop, TimerFd
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.spec import LoadSpec

SETTLED_A_LINE: Final = 60
"""Maximum outcomes in a progress line; a pipe takes PIPE_BUF (4096) bytes at once."""
TURNS_A_LINE: Final = 30
DUE_A_LINE: Final = 100
"""Maximum outcomes of turns in a line: turn, session's time, and times of sent turns."""


class Counts:
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
        """Record a sent turn of a session, whose time no plan contains."""
        if self._turns:
            self._due.append(record.scheduled_s)

    def first_token(self, request: InFlightRequest, at_s: float) -> None:
        if at_s - request.scheduled_s > self._ttft_s:
            self._late_first.add(request)

    def settled(self, request: InFlightRequest, record: RequestRecord) -> None:
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
        """Count waiting requests (in scheduled order) that exceed the TTFT limit."""
        count = 0
        for request in waiting:
            if request.scheduled_s > now - self._ttft_s:
                break
            count += 1
        return count

    def report_due(self, state: Callable[[], dict[str, Any]], now: float) -> None:
        """Print lines if one is due; outcomes that cannot be printed now are printed later."""
        if now < self._next_line:
            return
        self._next_line = now + self._interval_s
        while True:
            line = self._line(state())
            if not self._report(line):
                return
            if not self._mark_printed(line):
                return

    def last_lines(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the lines for everything not reported yet."""
        lines = []
        while True:
            line = self._line(state)
            lines.append(line)
            if not self._mark_printed(line):
                return lines

    def _mark_printed(self, line: dict[str, Any]) -> bool:
        for _ in line["settled"]:
            self._unreported.popleft()
        for _ in line.get("offsets_s", ()):
            self._due.popleft()
        return bool(self._unreported or self._due)

    def _line(self, state: dict[str, Any]) -> dict[str, Any]:
        """Make a line. A request without a first token past the TTFT limit is a miss."""
        count = min(TURNS_A_LINE if self._turns else SETTLED_A_LINE, len(self._unreported))
        due = {}
        if self._turns:
            due = {"offsets_s": [self._due[place] for place in range(min(DUE_A_LINE, len(self._due)))]}
            count = count if len(self._due) <= DUE_A_LINE else 0  # no request ends before it is sent
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


START_DELAY_S: Final = 0.01
EARLY_S: Final = 8e-5
"""Seconds of busy-waiting before a send: a sleeping core needs that long to wake."""
PAUSE_S: Final = 0.0005
"""Delay of reads on a busy client, so that chunks are read together: waking up for a few costs more than
reading them. The kernel's stamps give the arrival times."""
SHORTEST_S: Final = 5e-5
"""Shortest useful sleep, in seconds; shorter ones overrun."""
BUSY_READS: Final = 200
"""Reads per beat above which a client is busy (20,000 per second)."""
VERY_BUSY_READS: Final = 600
SLICE_S: Final = 0.0002
"""Time for parsing answers between two turns of the loop, in seconds."""
SLICES_APART_S: Final = 0.002
"""Answers are parsed at least this often, even under heavy reads, in seconds."""
PENDING_BYTES: Final = 6_000_000
"""Above this many buffered bytes, streams are parsed before their end."""
LOOK_BEATS: Final = 20
"""Beats between two checks of that number."""


class Stop(Protocol):
    def is_set(self) -> bool: ...


class LoadRun:
    """One run of a schedule. ``run`` returns when every request that came due has ended. ``report`` prints a
    progress line, or refuses to."""

    def __init__(
        self,
        spec: LoadSpec,
        schedule: Schedule,
        loop: SocketLoop,
        pools: Sequence[ConnectionPool],
        report: Callable[[dict[str, Any]], bool],
        begin: Begin = InFlightRequest,
    ) -> None:
        self.loop = loop
        self.pools = pools
        self.clock = StampClock()
        self.figures = GeneratorFigures()
        self.monotonic = time.monotonic
        self.records: list[RequestRecord] = []
        self._spec = spec
        self._schedule = schedule
        self._begin = begin
        self._counts = Counts(spec, report)
        self._start = 0.0
        self._alarm = TimerFd()
        self._due = self._wake = 0.0
        self._next_beat = 0.0
        self._made: dict[int, InFlightRequest] = {}
        """Requests made before they are due: the next one, and any that another one preceded."""
        self._beats = 0
        self._reads = 0
        self._early_s = EARLY_S
        self._busy = False
        self._next_slice = 0.0
        self._behind = False
        """Much more was read than parsed."""
        self._in_flight: dict[InFlightRequest, None] = {}
        self._waiting: dict[HttpRequestOwner, InFlightRequest] = {}
        self._work: deque[HttpRequest] = deque()
        self._close: set[HttpRequest] = set()
        self._stopped = False
        self._grace_ends = float("inf")

    def run(self, stop: Stop, start_at: float | None = None) -> dict[str, Any]:
        """Run the load, up to ``stop``, from ``start_at`` on. Return the end event."""
        self._start = time.monotonic() + START_DELAY_S if start_at is None else start_at
        started_unix_s = time.time() + self._start - time.monotonic()
        self._next_beat = min(self._start, time.monotonic()) + BEAT_S
        self.loop.watch(self._alarm.fd, READABLE, lambda _event: None)
        self.figures.begin()
        self._arm()
        while self._schedule.unsent or self._in_flight:
            events = self.loop.turn(0.0 if self._work or self._busy else -1.0, self._wake)
            self._reads += events
            now = time.monotonic()
            if now >= self._wake:
                while now < self._due:
                    now = time.monotonic()
                self._on_time(stop)
                self._arm()
            # Read the kernel's buffers first, but not for ever.
            if self._work and (events < EVENTS_AT_ONCE or self._behind or now >= self._next_slice):
                self._take_slice()
            if self._busy and not self._work and events < EVENTS_AT_ONCE:
                self._pause()
        duration_s = max(0.0, time.monotonic() - self._start)
        client = {
            **self.figures.to_json(),
            "connections": sum(pool.size for pool in self.pools),
            "clock_steps": self.clock.steps,
            # Both clocks at the start, to compare with other processes' times.
            "started_monotonic_s": self._start,
            "started_unix_s": started_unix_s,
        }
        self.loop.unwatch(self._alarm.fd)
        self._alarm.close()
        return {
            "event": "end",
            "reason": "stopped" if self._stopped else "complete" if self._schedule.whole else "over",
            "duration_s": round(duration_s, 6),
            "started_unix_s": started_unix_s,
            "client": client,
        }

    def last_lines(self) -> list[dict[str, Any]]:
        return self._counts.last_lines(self._state(time.monotonic()))

    def _pause(self) -> None:
        left = min(PAUSE_S, self._wake - time.monotonic())
        if left > SHORTEST_S:
            time.sleep(left)

    # on time: sends and beats

    def _arm(self) -> None:
        self._due = self._wake = self._next_beat
        if (planned := self._schedule.upcoming(self._made)) is not None:
            scheduled = self._start + planned.offset_s
            if scheduled < self._due:
                self._due, self._wake = scheduled, scheduled - self._early_s
            near = scheduled < math.inf and scheduled < time.monotonic() + self._schedule.ahead_s
            if near and planned.index not in self._made:
                self._made[planned.index] = self._begin(self, planned, scheduled)
        if not self._busy:
            self._alarm.set(self._wake)

    def _on_time(self, stop: Stop) -> None:
        while (planned := self._schedule.upcoming(self._made)) is not None:
            scheduled = self._start + planned.offset_s
            if scheduled > time.monotonic():
                break
            self._schedule.take(planned)
            self._send(planned, scheduled)
        now = time.monotonic()
        if now >= self._next_beat:
            self._beat(now, stop)

    def _send(self, planned: PlannedRequest, scheduled: float) -> None:
        request = self._made.pop(planned.index, None) or self._begin(self, planned, scheduled)
        if planned.turn is not None:
            request.index = len(self.records)
        self._in_flight[request] = None
        self._waiting[request] = request
        self.records.append(request.record)
        self._counts.sent(request.record)
        request.start(planned)
        planned.prompt, planned.parts = b"", ()
        http_request = request.first_http_request()
        if http_request is not None and http_request.sent_s is not None:
            self.figures.sent(http_request.sent_s - scheduled)
        self.figures.streams_peak = max(self.figures.streams_peak, len(self._in_flight))
        for pool in self.pools:
            pool.grow(self._schedule.unsent)

    def _beat(self, now: float, stop: Stop) -> None:
        # Beats due while the loop was busy come as one: record each one's lateness, and
        # the first one's for all.
        self.figures.held_up(max(0.0, now - self._next_beat))
        while self._next_beat <= now:
            self.figures.beat(now - self._next_beat)
            self._next_beat += BEAT_S
        self._beats += 1
        # Urgent answers block others, and without kernel stamps a pause would be measured.
        was_busy = self._busy
        self._busy = self._reads > BUSY_READS and not self._close and not self.figures.fallbacks
        if self._busy and not was_busy:
            self._alarm.clear()  # pauses are short, and a timer costs as much as ten reads
        self._early_s = EARLY_S if self._reads < VERY_BUSY_READS else 0.0
        self._reads = 0
        self._schedule.beat(now - self._start)
        if self.clock.stepped():
            for request in list(self._in_flight):
                for http_request in request.http_requests:
                    http_request.take_all()
        self.clock.follow()
        self._expire(now)
        if stop.is_set():
            self._stop(now)
        for pool in self.pools:
            pool.expire()
        self._look_closely()
        if self._beats % LOOK_BEATS == 0:
            self._take_in_early()
        self._counts.report_due(lambda: self._state(now), now)

    def _expire(self, now: float) -> None:
        expired = now - self._spec.timeout_s
        late = []
        for request in self._in_flight:  # in scheduled order, and all have the same timeout
            if request.scheduled_s > expired:
                break
            late.append(request)
        for request in late:
            request.end(("timeout", f"no complete answer within {self._spec.timeout_s:g} s"))

    def _stop(self, now: float) -> None:
        """Send nothing more; let active requests end within the grace, then cancel them."""
        if not self._stopped:
            self._stopped = True
            self._schedule.stop()
            self._grace_ends = now + self._spec.stop_grace_s
        if now >= self._grace_ends:
            for request in list(self._in_flight):
                request.end(("cancelled", "the trial was stopped"))

    # parsing

    def take_soon(self, http_request: HttpRequest) -> None:
        if not http_request.queued:
            http_request.queued = True
            self._work.append(http_request)

    def watch_closely(self, http_request: HttpRequest) -> None:
        self._close.add(http_request)

    def _look_closely(self) -> None:
        """Find first tokens and ends that the loop's hot path missed."""
        for request in list(self._waiting.values()):
            http_request = request.stream
            if http_request is not None and http_request.log:
                self.take_soon(http_request)
        for http_request in [stream for stream in self._close if stream.ended]:
            self._close.discard(http_request)
        for http_request in self._close:
            if http_request.log:
                self.take_soon(http_request)

    def _take_in_early(self) -> None:
        reading = [stream for request in self._in_flight for stream in request.http_requests if stream.log]
        excess = sum(stream.log.held for stream in reading) - PENDING_BYTES
        self._behind = excess > PENDING_BYTES
        if excess > 0:
            average = (excess + PENDING_BYTES) / len(reading)
            for http_request in reading:
                size = http_request.log.held
                if size >= average:
                    self.take_soon(http_request)
                    excess -= size
                    if excess <= 0:
                        break

    def _take_slice(self) -> None:
        """Do at least one piece of work, however busy the loop is."""
        until = time.monotonic() + SLICE_S
        self._next_slice = until + SLICES_APART_S
        while self._work:
            http_request = self._work.popleft()
            http_request.queued = False
            if http_request.take():
                self.take_soon(http_request)
            if not http_request.ended and (request := self._waiting.get(http_request.owner)) is not None:
                self._first_token(request, http_request)
            now = time.monotonic()
            if now >= until or now >= self._wake:
                return

    def _first_token(self, request: InFlightRequest, http_request: HttpRequest) -> bool:
        """Count the first token if it has come; return whether it has."""
        first_ns = http_request.first_token_ns() if http_request is request.stream else None
        if first_ns is None:
            return False
        self._waiting.pop(request, None)
        self._counts.first_token(request, first_ns / 1e9)
        return True

    # callbacks of requests

    def finished(self, request: InFlightRequest) -> None:
        self._in_flight.pop(request)
        self._waiting.pop(request, None)
        record = request.settle(self._start)
        if record.error_detail:
            record.error_detail = redact(record.error_detail, variables(self._spec.access))
        due = self._schedule.ended(request, time.monotonic() - self._start)
        self.figures.chunks += request.chunks
        if request.chunks and request.stream is not None:
            answer = request.stream.answer
            self.figures.doubted(answer.doubts_ns, answer.first_doubt_ns)
        self._counts.settled(request, record)
        if due:
            self._arm()

    def _state(self, now: float) -> dict[str, Any]:
        return {
            "t_s": round(now - self._start, 3),
            "sent": len(self.records),
            "in_flight": len(self._in_flight),
            "waiting_first": len(self._waiting),
            "overdue": self._counts.overdue(self._waiting.values(), now),
            "lag_ms": self.figures.worst_ms(),
        }
