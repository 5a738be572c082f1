"""What the requests of one router share: targets, deadlines, counts, the client's body, and planted lies.

A prompt of 32k token ids is 200 kB of JSON, and coding it anew for P and for D would cost some 10 ms of TTFT.
So the list is cut out as bytes before decoding (``ClientBody``) and put back after encoding. ``Liar`` is what
a router can do behind a benchmark's back (core/gates/lies.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvbench.connectors.base import Connector
from kvbench.core.plan.dispatch import SESSION_HEADER, server_of_session
from kvbench.errors import InputError
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.http1 import ReceivedRequest, Splicing, answer_of, error_body
from kvbench.processes.router.backend_request import BackendError
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.spec import RouterBackend, RouterSpec

_PROMPT_LIST: Final = re.compile(rb'"prompt"\s*:\s*\[')
"""Cannot match inside a JSON string: there a quote is always preceded by a backslash."""
_DECODE: Final = json.JSONDecoder().decode
_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_NUMBERS: Final = (b'"', b"[", b"{", b"\\")
"""What a list of numbers does not hold; four plain searches are much faster than one pattern."""


_PLACEHOLDER: Final = f"prompt-{secrets.token_hex(16)}"
"""Stands for the list while a body is changed. It never leaves this process, so nobody can send it."""
_PLACEHOLDER_JSON: Final = f'"{_PLACEHOLDER}"'.encode()


class ClientBody:
    """``fields`` is the decoded body, to be left as it is; a prompt of token ids is a placeholder in it."""

    def __init__(self, raw: bytes) -> None:
        """Raises InputError if the body is no JSON object."""
        self._raw = raw
        self._prompt = b""
        match = _PROMPT_LIST.search(raw)
        if match is not None:
            start, end = match.end() - 1, raw.find(b"]", match.end()) + 1
            if end and all(raw.find(mark, start + 1, end) < 0 for mark in _NO_NUMBERS):
                self._prompt = raw[start:end]
                raw = b"%b%b%b" % (raw[:start], _PLACEHOLDER_JSON, raw[end:])
        try:
            fields = _DECODE(raw.decode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"the request body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise InputError("the request body must be a JSON object")
        self.fields: dict[str, Any] = fields

    def encode(self, fields: Mapping[str, Any]) -> bytes:
        """JSON of a body made from ``fields`` by a connector, with the prompt's bytes back in place."""
        if fields is self.fields:
            return self._raw  # nothing was changed
        data = _ENCODE(fields).encode()
        return data.replace(_PLACEHOLDER_JSON, self._prompt) if self._prompt else data


QUIET: Final = 4
"""The first requests, which check the outputs, are handled honestly."""
RETRY_EVERY: Final = 5
DROP_EVERY: Final = 4
CROSS_EVERY: Final = 4
CROSS_WAIT_S: Final = 1.0
STARVED_LAG_S: Final = 0.2
"""What a router without a core was seen to be late by."""
CONTENT_TYPE: Final = "application/json"


@dataclass
class _Held:
    """A request that waits for another one, to get its answer."""

    body: ClientBody
    crossed: asyncio.Event


class Liar:
    """Tells one lie; ``before`` is asked once for each request that is about to be sent to P and D."""

    def __init__(self, lie: str, connector: Connector, metrics: RouterMetrics) -> None:
        self._lie = lie
        self._connector = connector
        self._metrics = metrics
        self._count = 0
        self._waiting: _Held | None = None
        if lie == "starved_router":
            waited_s = metrics.waited_s
            metrics.waited_s = lambda: waited_s() + STARVED_LAG_S * self._count

    async def before(
        self, request: ReceivedRequest, body: ClientBody, request_id: str, p: RouterBackend | None
    ) -> RouterBackend | None:
        """The prefill server to send it to in truth; None: to D alone. Raises BackendError to fail it."""
        self._count += 1
        late = self._count - QUIET
        if self._lie == "starved_router":
            self._metrics.observe("loop_lag_seconds", STARVED_LAG_S)
        if self._lie == "decode_only" and late > 0:
            return None
        if self._lie == "swapped_answers" and late > 0 and p is not None:
            await self._cross(body)
        if self._lie == "router_drops" and late > 0 and late % DROP_EVERY == 0:
            raise BackendError(
                "router_full", 502, error_body(502, "the router has no room for more", "router_full")
            )
        if self._lie == "router_retry" and late > 0 and late % RETRY_EVERY == 0 and p is not None:
            await asyncio.shield(self._try_in_vain(request, body, f"{request_id}-first", p))
        return p

    def decode_of(self, in_turn: RouterBackend, backends: Sequence[RouterBackend]) -> RouterBackend:
        """The decode server to send it to in truth; ``in_turn``: whose turn it is."""
        return backends[0] if self._lie == "idle_decode" and self._count > QUIET else in_turn

    async def _cross(self, body: ClientBody) -> None:
        """Every so-manyth request gets the next one's body, and that its: each client the other's answer."""
        if self._waiting is not None:
            other, self._waiting = self._waiting, None
            mine = dict(vars(body))
            vars(body).update(vars(other.body))
            vars(other.body).update(mine)
            other.crossed.set()
        elif self._count % CROSS_EVERY == 0:
            self._waiting = held = _Held(body, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(held.crossed.wait(), CROSS_WAIT_S)
            if self._waiting is held:
                self._waiting = None

    async def _try_in_vain(
        self, request: ReceivedRequest, body: ClientBody, request_id: str, p: RouterBackend
    ) -> None:
        """P does the work, and its answer is thrown away as if it had come too late."""
        fields = self._connector.prefill_request(body.fields, request_id, p.next_peer())
        headers = {"content-type": CONTENT_TYPE, "x-request-id": request_id}
        data = p.pool.request("POST", request.path, headers, body.encode(fields))
        try:
            connection = await p.pool.acquire()
        except OSError as error:
            raise BackendError.of(p, "connect", 502, f"cannot be reached: {error}") from error
        try:
            reply = await answer_of(connection, data)
        except ConnectionError as error:
            raise BackendError.broken(p, error) from error
        if reply.status != 200:
            raise BackendError.answered(p, reply)


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
        return self._choose(request, self.prefills, self._next_prefill)

    def decode_for(self, request: ReceivedRequest) -> RouterBackend:
        """Return the D of a request, or its aggregated engine."""
        return self._choose(request, self.decodes, self._next_decode)

    def session_of(self, request: ReceivedRequest) -> str | None:
        """The session whose requests go to the same engines; None: they go in turn."""
        return request.headers.get(SESSION_HEADER) if self._by_session else None

    def _choose(
        self, request: ReceivedRequest, backends: list[RouterBackend], in_turn: Iterator[RouterBackend]
    ) -> RouterBackend:
        session = self.session_of(request)
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
