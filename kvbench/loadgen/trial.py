"""The trial: sends on schedule, keeps deadlines, and settles answers when there is time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from kvbench.core.records import RequestRecord
from kvbench.http1 import Pool
from kvbench.loadgen.alarm import Alarm
from kvbench.loadgen.exchange import DECIMALS, Exchange
from kvbench.loadgen.spec import LoadSpec, PlannedRequest
from kvbench.loadgen.watch import Heartbeat, percentile_ms

log = logging.getLogger(__name__)

SPARE_CONNECTIONS: Final = 16
"""New connections are opened in the background when fewer are idle."""
START_DELAY_S: Final = 0.01
QUIET_S: Final = 0.001
"""Answers are settled only if no send is due within this time and the last beat was not later."""


class Trial:
    """One run of a plan. ``run`` returns when every request that came due has ended."""

    def __init__(
        self,
        spec: LoadSpec,
        plan: Sequence[PlannedRequest],
        pool: Pool,
        report: Callable[[dict[str, Any]], None],
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._pool = pool
        self._report = report
        limits = spec.limits()
        self._ttft_s = float("inf") if limits.ttft_ms is None else limits.ttft_ms / 1e3
        self._tpot_s = float("inf") if limits.tpot_ms is None else limits.tpot_ms / 1e3
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._start = 0.0
        self._next = 0
        self._exchanges: list[Exchange] = []
        self._in_flight: dict[Exchange, None] = {}
        self._waiting: dict[Exchange, None] = {}
        self._late_first = 0
        self._done = self._met = self._missed = 0
        self._unsettled: deque[tuple[RequestRecord, Iterator[None]]] = deque()
        self._settling = False
        self._connecting: set[asyncio.Task[None]] = set()
        self._growing: asyncio.Task[None] | None = None
        self._connect_failed_at = float("-inf")
        self._next_report = 0.0
        self._stopped = False

    async def run(self, stop: asyncio.Event) -> dict[str, Any]:
        """Runs the plan, or the part of it before ``stop``. Returns the end event."""
        self._start = time.monotonic() + START_DELAY_S
        started_unix_s = time.time() + START_DELAY_S
        heartbeat = Heartbeat(self._start, self._beat)
        self._alarm = Alarm(self._send_due)
        self._arm()
        stopping = asyncio.ensure_future(stop.wait())
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait({stopping, over}, return_when=asyncio.FIRST_COMPLETED)
        if not self._over.is_set():
            await self._stop(over)
        stopping.cancel()
        over.cancel()
        duration = time.monotonic() - self._start
        watched = heartbeat.close()
        self._alarm.close()
        if self._growing is not None:
            self._growing.cancel()
        while self._unsettled:
            self._settle_slice()
        self._report(self._progress(duration))
        return {
            "event": "end",
            "reason": "stopped" if self._stopped else "complete",
            "duration_s": round(max(duration, 0.0), 6),
            "started_unix_s": started_unix_s,
            "client": {
                **self._lags(),
                **watched,
                "connections": self._pool.size,
                # The two clocks at the start, so that what other processes timed can be put beside it.
                "started_monotonic_s": self._start,
                "started_unix_s": started_unix_s,
            },
        }

    @property
    def records(self) -> list[RequestRecord]:
        """All requests that came due, in scheduled order."""
        return [exchange.record for exchange in self._exchanges]

    # sending

    def _arm(self) -> None:
        if self._next < len(self._plan):
            self._alarm.set(self._start + self._plan[self._next].offset_s)
        else:
            self._check_over()

    def _send_due(self) -> None:
        while self._next < len(self._plan):
            plan = self._plan[self._next]
            scheduled = self._start + plan.offset_s
            if scheduled > time.monotonic():
                break
            self._next += 1
            record = RequestRecord(
                request_id=plan.request_id,
                scheduled_s=round(plan.offset_s, DECIMALS),
                input_len=self._spec.input_len,
                requested_output_len=self._spec.output_len,
            )
            self._send(Exchange(self, plan, scheduled, record))
        self._arm()

    def _send(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        self._in_flight[exchange] = None
        self._waiting[exchange] = None
        connection = self._pool.take()
        if connection is None:
            task = asyncio.ensure_future(self._connect_and_send(exchange))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
        else:
            exchange.connection = connection
            exchange.sent = time.monotonic()
            connection.send(exchange.plan.data, exchange)
        if self._pool.idle < SPARE_CONNECTIONS:
            self._grow()

    async def _connect_and_send(self, exchange: Exchange) -> None:
        try:
            connection = await self._pool.connect()
        except OSError as error:
            self._connect_failed_at = time.monotonic()
            if exchange in self._in_flight:
                exchange.fail("connect", str(error) or type(error).__name__)
            return
        if exchange not in self._in_flight:
            self._pool.release(connection)
            return
        exchange.connection = connection
        exchange.sent = time.monotonic()
        connection.send(exchange.plan.data, exchange)

    def _grow(self) -> None:
        """Opens spare connections, but never more than the rest of the plan can use."""
        remaining = len(self._plan) - self._next
        if self._growing is not None or remaining <= self._pool.idle:
            return
        if time.monotonic() - self._connect_failed_at < 1.0:
            return
        self._growing = asyncio.ensure_future(self._open_spares(min(remaining, 2 * SPARE_CONNECTIONS)))

    async def _open_spares(self, count: int) -> None:
        try:
            await self._pool.warm(count)
        except OSError as error:
            self._connect_failed_at = time.monotonic()
            log.warning("cannot open spare connections: %s", error)
        finally:
            self._growing = None

    # what the exchanges tell

    def first_token(self, exchange: Exchange) -> None:
        self._waiting.pop(exchange, None)
        if self._first_is_late(exchange):
            self._late_first += 1

    def finished(self, exchange: Exchange) -> None:
        if self._in_flight.pop(exchange, False) is False:
            return
        self._waiting.pop(exchange, None)
        if exchange.first_stamp is not None and self._first_is_late(exchange):
            self._late_first -= 1
        exchange.connection = None
        self._done += 1
        self._unsettled.append((exchange.record, exchange.settle(self._spec, self._start)))
        self._check_over()

    def _first_is_late(self, exchange: Exchange) -> bool:
        return exchange.first_stamp is not None and exchange.first_stamp - exchange.scheduled > self._ttft_s

    def _check_over(self) -> None:
        if self._next >= len(self._plan) and not self._in_flight:
            self._over.set()

    async def _stop(self, over: asyncio.Future[Any]) -> None:
        """Sends nothing more; what is in flight may end within the grace, and is cancelled after it."""
        self._stopped = True
        self._next = len(self._plan)
        if self._spec.stop_grace_s > 0:
            self._check_over()
            await asyncio.wait({over}, timeout=self._spec.stop_grace_s)
        for exchange in list(self._in_flight):
            exchange.fail("cancelled", "the trial was stopped")

    # the beat: deadlines, settling, progress

    def _beat(self, lag_s: float) -> None:
        now = time.monotonic()
        expired = now - self._spec.timeout_s
        late = []
        for exchange in self._in_flight:  # in scheduled order, and all have the same timeout
            if exchange.scheduled > expired:
                break
            late.append(exchange)
        for exchange in late:
            exchange.fail("timeout", f"no complete answer within {self._spec.timeout_s:g} s")
        if self._unsettled and not self._settling and lag_s < QUIET_S:
            self._settling = True
            self._loop.call_soon(self._settle_soon)
        if now >= self._next_report:
            self._next_report = now + self._spec.progress_interval_s
            self._report(self._progress(now - self._start))

    def _settle_soon(self) -> None:
        """A slice, then the loop's other work, then the next slice, as long as nothing is due."""
        self._settling = False
        due = self._plan[self._next].offset_s + self._start if self._next < len(self._plan) else float("inf")
        if not self._unsettled or due - time.monotonic() < QUIET_S:
            return
        self._settle_slice()
        self._settling = True
        self._loop.call_soon(self._settle_soon)

    def _settle_slice(self) -> None:
        record, work = self._unsettled[0]
        for _ in work:
            return
        self._unsettled.popleft()
        if record.error == "cancelled":
            return
        if record.ok and (record.ttft_s or 0.0) <= self._ttft_s and (record.tpot_s or 0.0) <= self._tpot_s:
            self._met += 1
        else:
            self._missed += 1

    def _progress(self, t_s: float) -> dict[str, Any]:
        """Counts for the line; a request that is past the TTFT limit without a first token has missed."""
        oldest = time.monotonic() - self._ttft_s
        overdue = 0
        for exchange in self._waiting:
            if exchange.scheduled > oldest:
                break
            overdue += 1
        return {
            "event": "progress",
            "t_s": round(t_s, 3),
            "sent": len(self._exchanges),
            "done": self._done,
            "met": self._met,
            "missed": self._missed + overdue + self._late_first,
            "in_flight": len(self._in_flight),
            "waiting_first": len(self._waiting),
        }

    def _lags(self) -> dict[str, float]:
        lags = [item.sent - item.scheduled for item in self._exchanges if item.sent is not None]
        return {
            "send_lag_p50_ms": percentile_ms(lags, 50),
            "send_lag_p99_ms": percentile_ms(lags, 99),
            "send_lag_max_ms": percentile_ms(lags, 100),
        }
