"""What the requests of one router share: where they go, how long they may take, what is counted."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Final, Protocol

from kvbench.core.plan.dispatch import SESSION_HEADER, server_of_session
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.http1 import ReceivedRequest, Splicing
from kvbench.processes.router.lies import Liar
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.spec import RouterBackend, RouterSpec

_PASSED_ON: Final = ("authorization", "user-agent", "traceparent")
"""The client's headers that P and D get too."""


class Late(Protocol):
    """What may take too long."""

    def expire(self) -> None: ...


class Deadlines:
    """Expires what is under way for ``limit_s``. One timer does for all: who came first is late first."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._under_way: dict[Late, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: Late, began: float) -> None:
        """From ``began`` (monotonic; no less than the last one's) its time runs, until ``discard``."""
        self._under_way[one] = began + self.limit_s
        if self._timer is None:
            self._wait(self.limit_s)

    def discard(self, one: Late) -> None:
        self._under_way.pop(one, None)

    def close(self) -> None:
        """Expires nothing any more."""
        self._under_way.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        while self._under_way:
            one, due = next(iter(self._under_way.items()))
            left_s = due - time.monotonic()
            if left_s > 0:
                self._wait(left_s)
                return
            del self._under_way[one]
            one.expire()


class Dispatch:
    """Chooses the servers of each request, and holds what all requests share (app.py)."""

    def __init__(self, spec: RouterSpec, metrics: RouterMetrics, spans: SpanLog | None) -> None:
        """Raises InputError for a spec that cannot be worked with."""
        self.connector = spec.profile()
        self.splicing = Splicing(spec.compiled)
        self.prefills = spec.backends("prefill", self.connector)
        self.decodes = spec.backends("decode", self.connector, self.splicing)
        # Each process goes round by itself; they begin at different servers.
        self._next_prefill = _round(self.prefills, metrics.process)
        self._next_decode = _round(self.decodes, metrics.process)
        self._by_session = spec.routing == "session"
        self.liar = Liar(spec.lie, self.connector, metrics) if spec.lie else None
        self.deadlines = Deadlines(spec.request_timeout_s)
        self.metrics = metrics
        self.spans = spans
        self.not_ready = ""
        """Why no request can be taken yet."""

    @property
    def backends(self) -> list[RouterBackend]:
        """All that requests may go to."""
        return [*(self.prefills if self.connector.disaggregated else []), *self.decodes]

    def prefill_for(self, request: ReceivedRequest) -> RouterBackend:
        """Return the P of a request."""
        return self._choose(request, self.prefills, self._next_prefill)

    def decode_for(self, request: ReceivedRequest) -> RouterBackend:
        """Return the D of a request, or its aggregated engine."""
        return self._choose(request, self.decodes, self._next_decode)

    def _choose(
        self, request: ReceivedRequest, backends: list[RouterBackend], in_turn: Iterator[RouterBackend]
    ) -> RouterBackend:
        session = request.headers.get(SESSION_HEADER) if self._by_session else None
        return backends[server_of_session(session, len(backends))] if session else next(in_turn)

    async def close(self) -> None:
        """Drops all connections to the backends."""
        self.deadlines.close()
        for backend in self.backends:
            await backend.pool.close()
        self.splicing.close()
        if self.spans is not None:
            self.spans.close()


def passed_on(request: ReceivedRequest) -> dict[str, str]:
    """The client's headers that P and D are sent."""
    headers = request.headers
    return {name: headers[name] for name in _PASSED_ON if name in headers}


def _round(backends: list[RouterBackend], first: int) -> Iterator[RouterBackend]:
    """All of them in turn for ever, beginning with the ``first``."""
    begin = first % len(backends) if backends else 0
    return itertools.cycle(backends[begin:] + backends[:begin])
