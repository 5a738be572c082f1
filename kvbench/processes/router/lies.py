"""What a router can do behind a benchmark's back, planted on purpose (core/gates/lies.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvbench.connectors.base import Connector
from kvbench.processes.http1 import ReceivedRequest, answer_of, error_body
from kvbench.processes.router.backend_request import BackendError
from kvbench.processes.router.body import ClientBody
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.spec import RouterBackend

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
        fields = self._connector.prefill_request(body.fields, request_id, p.peer())
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
