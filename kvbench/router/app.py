"""The router: takes a request, sends it to P and D as the connector says, passes D's answer on."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Final

from kvbench.core.handoff import engine_id_in
from kvbench.core.records import TIMING_REQUEST_HEADER
from kvbench.errors import InputError, ServerError
from kvbench.http1 import Pool, Reply, Request, Response, error_body, fetch
from kvbench.router.body import ClientBody
from kvbench.router.dispatch import Dispatch
from kvbench.router.legs import LegError, Timing
from kvbench.router.lies import Liar
from kvbench.router.metrics import CONTENT_TYPE, RouterMetrics
from kvbench.router.spec import Backend, RouterSpec
from kvbench.router.tracing import request_spans
from kvbench.spans import SpanLog

log = logging.getLogger(__name__)

BOOTSTRAP_RETRY_S: Final = 0.1
CONTROL_DEADLINE_S: Final = 5.0


class Router:
    """Everything but the listening socket. ``handle`` is the server's handler."""

    def __init__(
        self, spec: RouterSpec, metrics: RouterMetrics | None = None, spans: SpanLog | None = None
    ) -> None:
        """``metrics`` and ``spans`` are given where several processes share them."""
        self._spec = spec
        self._connector = spec.profile()
        self._prefills = spec.backends("prefill", self._connector)
        self._decodes = spec.backends("decode", self._connector)
        self.metrics = metrics or RouterMetrics()
        # Each process goes round by itself; they begin at different servers.
        self._next_prefill = _round(self._prefills, self.metrics.process)
        self._next_decode = _round(self._decodes, self.metrics.process)
        self._not_ready = "the prefill servers' engine ids are not known yet" if self._asks_bootstrap else ""
        self._liar = Liar(spec.lie, self._connector)
        self._spans = spans or (SpanLog(spec.trace_path) if spec.trace_path else None)

    @property
    def _asks_bootstrap(self) -> bool:
        return self._connector.needs_bootstrap

    @property
    def _backends(self) -> list[Backend]:
        return [*(self._prefills if self._connector.disaggregated else []), *self._decodes]

    async def bootstrap(self) -> None:
        """Asks each prefill's bootstrap address for its engine id. Raises ServerError past the deadline."""
        if self._asks_bootstrap:
            timeout_s = self._spec.bootstrap_timeout_s
            await asyncio.gather(*(_ask_engine_id(backend, timeout_s) for backend in self._prefills))
        self._not_ready = ""
        self.metrics.ready()

    async def close(self) -> None:
        """Drops all connections to the backends."""
        for backend in self._backends:
            await backend.pool.close()
        if self._spans is not None:
            self._spans.close()

    def handle(self, request: Request, response: Response) -> Awaitable[None] | None:
        """The server's handler."""
        route = (request.method, request.path)
        if request.method == "POST" and request.path.startswith("/v1/"):
            return self._complete(request, response)
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

    # requests

    async def _complete(self, request: Request, response: Response) -> None:
        began = time.monotonic()
        timing = Timing(received=began, asked=request.headers.get(TIMING_REQUEST_HEADER) == "1")
        error = ""
        answer: Callable[[], None] = _nothing
        self.metrics.add("requests")
        self.metrics.add("in_flight")
        try:
            answer = await self._until_deadline(request, response, timing)
        except LegError as failure:
            error = failure.error
            answer = partial(_answer_failure, response, failure)
        except asyncio.CancelledError:
            if not response.closed:
                raise
            error = "client_disconnect"  # the client is gone, and with this the requests on P and D are too
        except BaseException:
            error = "internal"
            raise
        finally:
            self.metrics.add("in_flight", -1)
            self._observe(timing, began, error)
            self._trace(timing, began, error)
        answer()  # after the counting: who has the answer finds it counted, whichever process is asked

    async def _until_deadline(
        self, request: Request, response: Response, timing: Timing
    ) -> Callable[[], None]:
        """The request, cancelled when the client leaves or the time is up. Returns how to end the answer."""
        task = asyncio.current_task()
        assert task is not None
        late = False

        def leave() -> None:
            task.cancel()

        def expire() -> None:
            nonlocal late
            late = True
            task.cancel()

        response.on_disconnect(leave)
        timer = asyncio.get_running_loop().call_later(self._spec.request_timeout_s, expire)
        try:
            return await self._dispatch(request, response, timing)
        except asyncio.CancelledError:
            if not late or response.closed:
                raise
            message = f"no complete answer within {self._spec.request_timeout_s:g} s"
            raise LegError("timeout", 504, error_body(504, message, "timeout")) from None
        finally:
            timer.cancel()

    async def _dispatch(self, request: Request, response: Response, timing: Timing) -> Callable[[], None]:
        if self._not_ready:
            raise LegError("not_ready", 503, error_body(503, self._not_ready, "not_ready"))
        try:
            body = ClientBody(request.body)
        except InputError as error:
            raise LegError("bad_request", 400, error_body(400, error.message)) from error
        request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        timing.request_id = request_id
        exchange = Dispatch(self._connector, request, response, body, request_id, timing)
        chosen = next(self._next_prefill) if self._connector.disaggregated else None
        p = await self._liar.before(request, body, request_id, chosen)
        return (await exchange.run(p, next(self._next_decode))).finish

    def _observe(self, timing: Timing, began: float, error: str) -> None:
        metrics = self.metrics
        if error:
            metrics.error(error)
        else:
            metrics.observe("request_seconds", time.monotonic() - began)
        if timing.prefill_sent is not None and timing.prefill_answered is not None:
            metrics.observe("prefill_seconds", timing.prefill_answered - timing.prefill_sent)
            if timing.decode_sent is not None and self._connector.dispatch == "sequential":
                metrics.observe("handoff_seconds", timing.decode_sent - timing.prefill_answered)
        if timing.decode_sent is not None and timing.decode_first_byte is not None:
            metrics.observe("decode_first_byte_seconds", timing.decode_first_byte - timing.decode_sent)
        if timing.stream is not None:
            metrics.stream(timing.stream)

    def _trace(self, timing: Timing, began: float, error: str) -> None:
        if self._spans is not None and self._spans.wants(timing.request_id):
            spans = request_spans(timing, began, time.monotonic(), error)
            self._spans.write(timing.request_id, list(spans))

    # everything else

    async def _ask_all(self, method: str, path: str) -> dict[str, str]:
        """Asks every backend; returns what is wrong, by backend (empty: all answered 200)."""
        backends = self._backends
        answers = await asyncio.gather(*(_ask(b.pool, method, path) for b in backends))
        return {
            backend.name: f"{method} {path}: {answer if isinstance(answer, str) else answer.status}"
            for backend, answer in zip(backends, answers, strict=True)
            if isinstance(answer, str) or answer.status != 200
        }

    async def _health(self, response: Response) -> None:
        problems = await self._ask_all("GET", "/health")
        if not self.metrics.all_ready:
            problems["router"] = self._not_ready or "another process of the router is not ready yet"
        response.send(503 if problems else 200, json.dumps({"problems": problems}).encode())

    async def _reset(self, request: Request, response: Response) -> None:
        path = request.path + (f"?{request.query}" if request.query else "")
        problems = await self._ask_all("POST", path)
        response.send(502 if problems else 200, json.dumps({"problems": problems}).encode())

    async def _models(self, response: Response) -> None:
        backend = self._decodes[0]
        answer = await _ask(backend.pool, "GET", "/v1/models")
        if isinstance(answer, str):
            response.send(502, error_body(502, f"{backend.name}: {answer}", "decode_connect"))
        else:
            response.send(answer.status, answer.body, answer.headers.get("content-type", "application/json"))


def _round(backends: list[Backend], first: int) -> Iterator[Backend]:
    """All of them in turn for ever, beginning with the ``first``."""
    begin = first % len(backends) if backends else 0
    return itertools.cycle(backends[begin:] + backends[:begin])


def _nothing() -> None:
    """There is nobody to answer."""


def _answer_failure(response: Response, failure: LegError) -> None:
    if response.closed or response.ended:
        return
    if response.started:
        # The status is long with the client: only a broken stream can still tell that it failed.
        log.warning("a stream is cut short: %s", failure)
        response.abort()
    else:
        response.send(failure.status, failure.body, failure.content_type)


async def _ask(pool: Pool, method: str, path: str) -> Reply | str:
    """A control request: the answer, or what went wrong."""
    try:
        return await asyncio.wait_for(fetch(pool, pool.request(method, path)), CONTROL_DEADLINE_S)
    except asyncio.TimeoutError:
        return f"no answer within {CONTROL_DEADLINE_S:g} s"
    except OSError as error:
        return str(error) or type(error).__name__


async def _ask_engine_id(backend: Backend, timeout_s: float) -> None:
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
