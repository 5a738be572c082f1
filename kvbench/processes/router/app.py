"""The router: takes a request, sends it to P and D as the connector says, passes D's answer on."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable
from typing import Final

from kvbench.core.plan.dispatch import engine_id_in
from kvbench.errors import ServerError
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.http1 import Pool, ReceivedRequest, Reply, Response, error_body, fetch
from kvbench.processes.router.dispatch import Dispatch
from kvbench.processes.router.metrics import CONTENT_TYPE, RouterMetrics
from kvbench.processes.router.request import RoutedRequest
from kvbench.processes.router.spec import RouterBackend, RouterSpec

BOOTSTRAP_RETRY_S: Final = 0.1
CONTROL_DEADLINE_S: Final = 5.0


class Router:
    """Everything but the listening socket. ``handle`` is the server's handler."""

    def __init__(
        self, spec: RouterSpec, metrics: RouterMetrics | None = None, spans: SpanLog | None = None
    ) -> None:
        """``metrics`` and ``spans`` are given where several processes share them."""
        self._bootstrap_timeout_s = spec.bootstrap_timeout_s
        self.metrics = metrics or RouterMetrics()
        self._dispatch = Dispatch(
            spec, self.metrics, spans or (SpanLog(spec.trace_path) if spec.trace_path else None)
        )
        if self._dispatch.connector.needs_bootstrap:
            self._dispatch.not_ready = "the prefill servers' engine ids are not known yet"

    async def bootstrap(self) -> None:
        """Asks each prefill's bootstrap address for its engine id. Raises ServerError after the deadline."""
        dispatch, timeout_s = self._dispatch, self._bootstrap_timeout_s
        if dispatch.connector.needs_bootstrap:
            await asyncio.gather(*(_ask_engine_id(backend, timeout_s) for backend in dispatch.prefills))
        dispatch.not_ready = ""
        self.metrics.ready()

    async def close(self) -> None:
        """Drops all connections to the backends."""
        await self._dispatch.close()

    def handle(self, request: ReceivedRequest, response: Response) -> Awaitable[None] | None:
        """The server's handler."""
        if request.method == "POST" and request.path.startswith("/v1/"):
            RoutedRequest(self._dispatch, request, response).start()
            return None
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            return self._health(response)
        if route == ("GET", "/v1/models"):
            return self._models(response)
        if route == ("POST", "/reset_prefix_cache"):
            return self._reset(request, response)
        if route == ("GET", "/metrics"):
            response.send(200, self.metrics.page(), CONTENT_TYPE)
            return None
        response.send(404, error_body(404, f"there is no {request.method} {request.path}"))
        return None

    # everything else

    async def _ask_all(self, method: str, path: str) -> dict[str, str]:
        """Asks every backend; returns what is wrong, by backend (empty: all answered 200)."""
        backends = self._dispatch.backends
        answers = await asyncio.gather(*(_ask(b.pool, method, path) for b in backends))
        return {
            backend.name: f"{method} {path}: {answer if isinstance(answer, str) else answer.status}"
            for backend, answer in zip(backends, answers, strict=True)
            if isinstance(answer, str) or answer.status != 200
        }

    async def _health(self, response: Response) -> None:
        problems = await self._ask_all("GET", "/health")
        if not self.metrics.all_ready:
            problems["router"] = self._dispatch.not_ready or "another process of the router is not ready yet"
        response.send(503 if problems else 200, json.dumps({"problems": problems}).encode())

    async def _reset(self, request: ReceivedRequest, response: Response) -> None:
        path = request.path + (f"?{request.query}" if request.query else "")
        problems = await self._ask_all("POST", path)
        response.send(502 if problems else 200, json.dumps({"problems": problems}).encode())

    async def _models(self, response: Response) -> None:
        backend = self._dispatch.decodes[0]
        answer = await _ask(backend.pool, "GET", "/v1/models")
        if isinstance(answer, str):
            response.send(502, error_body(502, f"{backend.name}: {answer}", "decode_connect"))
        else:
            response.send(answer.status, answer.body, answer.headers.get("content-type", "application/json"))


async def _ask(pool: Pool, method: str, path: str) -> Reply | str:
    """A control request: the answer, or what went wrong."""
    asked = asyncio.ensure_future(fetch(pool, pool.request(method, path)))
    # Cancelled as it fails, it fails with nobody left to hear of it, which asyncio would log.
    asked.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        return await asyncio.wait_for(asked, CONTROL_DEADLINE_S)
    except asyncio.TimeoutError:
        return f"no answer within {CONTROL_DEADLINE_S:g} s"
    except OSError as error:
        return str(error) or type(error).__name__


async def _ask_engine_id(backend: RouterBackend, timeout_s: float) -> None:
    pool = Pool(backend.bootstrap_url)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            answer = await _ask(pool, "GET", "/query")
            problem = answer if isinstance(answer, str) else f"status {answer.status}"
            if isinstance(answer, Reply) and answer.status == 200:
                backend.engine_id = engine_id_in(answer.body)
                if backend.engine_id:
                    return
                problem = "the answer carries no engine_id"
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{backend.name}: its bootstrap address {backend.bootstrap_url} told no engine id"
                    f" within {timeout_s:g} s: {problem}",
                    hint="is it a prefill server with this connector, and is the bootstrap port right?",
                )
            await asyncio.sleep(BOOTSTRAP_RETRY_S)
    finally:
        await pool.close()
