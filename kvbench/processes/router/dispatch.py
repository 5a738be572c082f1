"""Shared state of one router's requests: targets, deadlines, counts, client bodies, and planted faults. A
prompt of 32k token ids is 200 kB of JSON, and encoding it again for P and D would add about 10 ms to TTFT. So
the list is cut out as bytes before decoding (``ClientBody``) and put back after encoding. ``Liar`` plants a
router's faults (core/gates/lies.py)."""

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
from kvbench.core.load.dispatch import SESSION_HEADER, server_of_session
from kvbench.errors import InputError
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.http1 import ReceivedRequest, Splicing, answer_of, error_body
from kvbench.processes.router.backend_request import BackendError
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.spec import RouterBackend, RouterSpec

_PROMPT_LIST: Final = re.compile(rb'"prompt"\s*:\s*\[')
"""Cannot match inside a JSON string: a quote there follows a backslash."""
_DECODE: Final = json.JSONDecoder().decode
_ENCODE: Final = json.JSONEncoder(separators=(",", ":")).encode
_NO_NUMBERS: Final = (b'"', b"[", b"{", b"\\")
"""Bytes that a list of numbers does not contain; four plain searches are faster than one pattern."""


_PLACEHOLDER: Final = f"prompt-{secrets.token_hex(16)}"
"""Replaces the list while a body is changed. It never leaves this process, so no client can send it."""
_PLACEHOLDER_JSON: Final = f'"{_PLACEHOLDER}"'.encode()


class ClientBody:
    """``fields`` is the decoded body (do not change it), with a placeholder for a prompt of token ids."""

    def __init__(self, raw: bytes) -> None:
        """Raises InputError if the body is not a JSON object."""
        self._raw = raw
        self._prompt = b""
        if (match := _PROMPT_LIST.search(raw)) is not None:
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
        """Return a connector's ``fields`` as JSON, with the prompt's bytes back in place."""
        if fields is self.fields:
            return self._raw  # nothing was changed
        data = _ENCODE(fields).encode()
        return data.replace(_PLACEHOLDER_JSON, self._prompt) if self._prompt else data


QUIET: Final = 4
"""Number of first requests handled correctly; they check the outputs."""
RETRY_EVERY: Final = 5
DROP_EVERY: Final = 4
CROSS_EVERY: Final = 4
CROSS_WAIT_S: Final = 1.0
STARVED_LAG_S: Final = 0.2
"""Measured lateness of a router without a core, in seconds."""
CONTENT_TYPE: Final = "application/json"


@dataclass
class _WaitingRequest:
    """A request that waits for another one's answer."""

    body: ClientBody
    crossed: asyncio.Event


class Liar:
    """Applies one planted fault; ``before`` is called once for each request before it is sent to P and D."""

    def __init__(self, lie: str, connector: Connector, metrics: RouterMetrics) -> None:
        self._lie = lie
        self._connector = connector
        self._metrics = metrics
        self._count = 0
        self._waiting: _WaitingRequest | None = None
        if lie == "starved_router":
            waited_s = metrics.waited_s
            metrics.waited_s = lambda: waited_s() + STARVED_LAG_S * self._count

    async def before(
        self, request: ReceivedRequest, body: ClientBody, request_id: str, p: RouterBackend | None
    ) -> RouterBackend | None:
        """Return the prefill server to use; None: D alone. Raises BackendError to fail the request."""
        self._count += 1
        late = self._count - QUIET
        if self._lie == "starved_router":
            self._metrics.observe("loop_lag_seconds", STARVED_LAG_S)
        if self._lie == "decode_only" and late > 0:
            return None
        if self._lie == "swapped_answers" and late > 0 and p is not None:
            await self._swap_bodies(body)
        if self._lie == "router_drops" and late > 0 and late % DROP_EVERY == 0:
            raise BackendError("router_full", 502, error_body(502, "the router is full", "router_full"))
        if self._lie == "router_retry" and late > 0 and late % RETRY_EVERY == 0 and p is not None:
            await asyncio.shield(self._discard_prefill(request, body, f"{request_id}-first", p))
        return p

    def decode_of(self, in_turn: RouterBackend, backends: Sequence[RouterBackend]) -> RouterBackend:
        """Return the decode server to use instead of ``in_turn``."""
        return backends[0] if self._lie == "idle_decode" and self._count > QUIET else in_turn

    async def _swap_bodies(self, body: ClientBody) -> None:
        """Swap the bodies of two requests, so that each client gets the other's answer."""
        if self._waiting is not None:
            other, self._waiting = self._waiting, None
            fields = dict(vars(body))
            vars(body).update(vars(other.body))
            vars(other.body).update(fields)
            other.crossed.set()
        elif self._count % CROSS_EVERY == 0:
            self._waiting = held = _WaitingRequest(body, asyncio.Event())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(held.crossed.wait(), CROSS_WAIT_S)
            if self._waiting is held:
                self._waiting = None

    async def _discard_prefill(
        self, request: ReceivedRequest, body: ClientBody, request_id: str, p: RouterBackend
    ) -> None:
        """Send a request to P and discard its answer, as after a timeout."""
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


_FORWARDED: Final = ("authorization", "user-agent", "traceparent")
"""Client headers that P and D also get."""


class Late(Protocol):
    def expire(self) -> None: ...


class Deadlines:
    """Expires each item after ``limit_s``. One timer suffices: the first added expires first."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._under_way: dict[Late, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, one: Late, began: float) -> None:
        """Start the time of an item at ``began`` (monotonic, not decreasing); ``discard`` ends it."""
        self._under_way[one] = began + self.limit_s
        if self._timer is None:
            self._wait(self.limit_s)

    def discard(self, one: Late) -> None:
        self._under_way.pop(one, None)

    def close(self) -> None:
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
    """Chooses the servers of each request; state shared by all requests (app.py)."""

    def __init__(self, spec: RouterSpec, metrics: RouterMetrics, spans: SpanLog | None) -> None:
        """Raises InputError for an unusable spec."""
        self.connector = spec.profile()
        self.splicing = Splicing(spec.compiled)
        self.prefills = spec.backends("prefill", self.connector)
        self.decodes = spec.backends("decode", self.connector, self.splicing)
        # Each process has its own round robin; they begin at different servers.
        self._next_prefill = _round(self.prefills, metrics.process)
        self._next_decode = _round(self.decodes, metrics.process)
        self._by_session = spec.routing == "session"
        self.liar = Liar(spec.lie, self.connector, metrics) if spec.lie else None
        self.deadlines = Deadlines(spec.request_timeout_s)
        self.metrics = metrics
        self.spans = spans
        self.not_ready = ""

    @property
    def backends(self) -> list[RouterBackend]:
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
        self.deadlines.close()
        for backend in self.backends:
            await backend.pool.close()
        self.splicing.close()
        if self.spans is not None:
            self.spans.close()


def forwarded_headers(request: ReceivedRequest) -> dict[str, str]:
    headers = request.headers
    return {name: headers[name] for name in _FORWARDED if name in headers}


def _round(backends: list[RouterBackend], first: int) -> Iterator[RouterBackend]:
    """Yield the backends in turn for ever, beginning with number ``first``."""
    begin = first % len(backends) if backends else 0
    return itertools.cycle(backends[begin:] + backends[:begin])
