"""The router: sends a request to P and D as the connector requires, and passes on D's answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Iterator
from typing import Any, Final

from kvbench.connectors.base import PrefillPeer
from kvbench.core.load.dispatch import engine_ids_in
from kvbench.core.records import TIMING_REQUEST_HEADER, abort_text, error_in
from kvbench.errors import InputError, ServerError
from kvbench.processes.common.spans import Span, SpanLog
from kvbench.processes.http1 import Pool, ReceivedRequest, Reply, Response, error_body, fetch
from kvbench.processes.router.backend_request import (
    BackendError,
    BackendRequest,
    PrefillRequest,
    Splice,
    Timing,
)
from kvbench.processes.router.dispatch import ClientBody, Dispatch, forwarded_headers
from kvbench.processes.router.metrics import CONTENT_TYPE, RouterMetrics
from kvbench.processes.router.spec import RouterBackend, RouterSpec


def request_spans(timing: Timing, began_s: float, ended_s: float, error: str) -> Iterator[Span]:
    """Yield the span of the whole request, then what P and D did as far as they came."""
    yield Span("request", began_s, ended_s, {"error": error} if error else {})
    sent, answered = timing.prefill_sent, timing.prefill_answered
    if sent is not None:
        yield Span("prefill call", sent, ended_s if answered is None else answered)
    if timing.decode_sent is None:
        return
    if answered is not None and answered <= timing.decode_sent:
        yield Span("hand-off", answered, timing.decode_sent)
    yield Span("decode call", timing.decode_sent, ended_s)
    if timing.decode_first_byte is not None:
        yield Span("first byte from D", timing.decode_sent, timing.decode_first_byte)


log = logging.getLogger(__name__)


class RoutedRequest:
    """A request from arrival to the end of its answer, driven by the events of its requests to P and D. It
    ends once: with D's answer when both have succeeded, with the first failure, at its deadline, or when the
    client leaves. Whatever is active then is dropped. A body that the connector does not change
    (``aggregated``) is not parsed: if it is not a JSON object, D rejects it; otherwise the router answers
    400."""

    __slots__ = (
        *("_began", "_body", "_decode", "_dispatch", "_lying", "_over", "_p", "_prefill"),
        *("_request", "_response", "_timing"),
    )

    def __init__(self, dispatch: Dispatch, request: ReceivedRequest, response: Response) -> None:
        self._began = time.monotonic()
        self._dispatch = dispatch
        self._request = request
        self._response = response
        self._timing = Timing(received=self._began, wanted=request.headers.get(TIMING_REQUEST_HEADER) == "1")
        self._over = False
        self._body: ClientBody | None = None
        self._p: PrefillPeer | None = None
        self._prefill: BackendRequest | None = None
        self._decode: Splice | None = None
        self._lying: asyncio.Task[None] | None = None

    def start(self) -> None:
        failure = None
        try:
            self._start()
        except BackendError as error:
            failure = error
        except BaseException:
            self._enter()
            self._end("internal")
            raise
        self._enter()
        if failure is not None:
            self.backend_failed(failure)

    def _enter(self) -> None:
        dispatch = self._dispatch
        self._response.on_disconnect(self._left)
        dispatch.deadlines.add(self, self._began)
        dispatch.metrics.began()

    def _start(self) -> None:
        dispatch, request = self._dispatch, self._request
        if dispatch.not_ready:
            raise BackendError("not_ready", 503, error_body(503, dispatch.not_ready, "not_ready"))
        self._timing.request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
        paired = dispatch.connector.disaggregated
        if paired or dispatch.liar is not None:
            try:
                self._body = ClientBody(request.body)
            except InputError as error:
                raise BackendError("bad_request", 400, error_body(400, error.message)) from error
        p = dispatch.prefill_for(self._request) if paired else None
        if dispatch.liar is None:
            self._send(p)
        else:
            self._lying = asyncio.ensure_future(self._lie(p))

    async def _lie(self, p: RouterBackend | None) -> None:
        """Apply the planted fault, then handle the rest of the request."""
        liar, body = self._dispatch.liar, self._body
        assert liar is not None
        assert body is not None
        try:
            prefill = await liar.before(self._request, body, self._timing.request_id, p)
            self._lying = None
            self._send(prefill)
        except Exception as error:
            self._lying = None
            self._failed(error)

    def _send(self, p: RouterBackend | None) -> None:
        dispatch = self._dispatch
        if p is not None:
            self._p = p.next_peer(dispatch.session_of(self._request))
        d = dispatch.decode_for(self._request)
        if dispatch.liar is not None:
            d = dispatch.liar.decode_of(d, dispatch.decodes)
        self._decode = Splice(
            d, self, self._response, {"x-request-id": self._timing.request_id}, self._timing
        )
        if p is None or self._p is None:
            self._send_decode(None)
            return
        fields = self._dispatch.connector.prefill_request(self._fields, self._timing.request_id, self._p)
        self._prefill = PrefillRequest(p, self, self._timing)
        self._prefill.start(self._bytes_for(p, fields))
        if self._dispatch.connector.dispatch == "concurrent" and not self._over:
            self._send_decode(None)

    @property
    def _fields(self) -> dict[str, Any]:
        assert self._body is not None
        return self._body.fields

    def _send_decode(self, answer: dict[str, Any] | None) -> None:
        decode, p = self._decode, self._p
        assert decode is not None
        fields = None
        if p is not None:
            connector = self._dispatch.connector
            fields = connector.decode_request(self._fields, answer, self._timing.request_id, p)
        decode.start(self._bytes_for(decode.backend, fields))

    def _bytes_for(self, backend: RouterBackend, fields: dict[str, Any] | None) -> bytes:
        assert self._decode is not None
        request, peer_id, p = self._request, self._timing.request_id, self._p
        if p is not None:
            side_address = self._decode.backend.side_address
            peer_id = self._dispatch.connector.backend_request_id(peer_id, p, side_address)
        body = request.body
        if fields is not None:
            assert self._body is not None
            body = self._body.encode(fields)
        headers = forwarded_headers(request)
        if p is not None and backend is not self._decode.backend:
            headers |= p.headers
        return backend.request(request.path, headers, peer_id, body)

    # events

    def backend_answered(self, request: BackendRequest) -> None:
        if self._over:
            return
        try:
            if request is self._prefill:
                self._prefilled(request)
            else:
                request.answer()
            decode = self._decode
            if decode is None or not decode.done:
                return
            if self._prefill is None or self._prefill.done:
                self._finish(decode)
            else:
                decode.flush()
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, BackendError):
            log.error("a request cannot be passed on", exc_info=error)
            message = "internal error; see the router's log"
            error = BackendError("internal", 500, error_body(500, message))
        self.backend_failed(error)

    def _prefilled(self, request: BackendRequest) -> None:
        self._timing.prefill_answered = time.monotonic()
        reply = request.answer()
        try:
            answer = reply.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise BackendError.of(request.backend, "bad_answer", 502, "did not answer a JSON object")
        if problem := error_in(answer) or abort_text(answer.get("choices")):
            raise BackendError.of(request.backend, "bad_answer", 502, problem)
        connector = self._dispatch.connector
        if connector.dispatch != "sequential":
            return
        if missing := connector.missing_in_prefill_response(answer):
            raise BackendError.of(
                request.backend, "bad_answer", 502, f"the answer lacks {', '.join(missing)}"
            )
        self._send_decode(answer)

    def backend_failed(self, failure: BackendError) -> None:
        """Fail the request. It is counted before the client can know of it."""
        if not self._over:
            self._end(failure.error)
            _answer_failure(self._response, failure)

    def expire(self) -> None:
        message = f"no complete answer within {self._dispatch.deadlines.limit_s:g} s"
        self.backend_failed(BackendError("timeout", 504, error_body(504, message, "timeout")))

    def _left(self) -> None:
        """Drop the requests on P and D: the client has gone."""
        if not self._over:
            self._end("client_disconnect")

    def _finish(self, decode: Splice) -> None:
        self._end("")
        decode.finish()  # count first: a client with its answer finds it in every process's counters

    def _end(self, error: str) -> None:
        self._over = True
        for request in (self._prefill, self._decode):
            if request is not None:
                request.drop()
        if self._lying is not None:
            self._lying.cancel()
        self._prefill = self._decode = self._lying = None  # break reference cycles
        dispatch, timing = self._dispatch, self._timing
        dispatch.deadlines.discard(self)
        ended = time.monotonic()
        dispatch.metrics.ended(timing, self._began, ended, error, dispatch.connector.dispatch == "sequential")
        spans = dispatch.spans
        if spans is not None and spans.wants(timing.request_id):
            spans.write(timing.request_id, list(request_spans(timing, self._began, ended, error)))


def _answer_failure(response: Response, failure: BackendError) -> None:
    if response.closed or response.ended:
        return
    if response.started:
        # The client already has the status: only a broken stream can show the failure.
        log.warning("a stream was cut off: %s", failure)
        response.abort()
    else:
        response.send(failure.status, failure.body, failure.content_type)


BOOTSTRAP_RETRY_S: Final = 0.1
CONTROL_DEADLINE_S: Final = 5.0


class Router:
    """Everything except the listening socket. ``handle`` is the server's handler."""

    def __init__(
        self, spec: RouterSpec, metrics: RouterMetrics | None = None, spans: SpanLog | None = None
    ) -> None:
        """``metrics`` and ``spans`` are given if several processes share them."""
        self._bootstrap_timeout_s = spec.bootstrap_timeout_s
        self.metrics = metrics or RouterMetrics()
        self._dispatch = Dispatch(
            spec, self.metrics, spans or (SpanLog(spec.trace_path) if spec.trace_path else None)
        )
        if self._dispatch.connector.needs_bootstrap:
            self._dispatch.not_ready = "the prefill servers' engine ids are not known yet"

    async def bootstrap(self) -> None:
        """Query each prefill's bootstrap address for its engine id. Raises ServerError after the deadline."""
        dispatch, timeout_s = self._dispatch, self._bootstrap_timeout_s
        if dispatch.connector.needs_bootstrap:
            await asyncio.gather(*(_ask_engine_id(backend, timeout_s) for backend in dispatch.prefills))
        dispatch.not_ready = ""
        self.metrics.ready()

    async def close(self) -> None:
        await self._dispatch.close()

    def handle(self, request: ReceivedRequest, response: Response) -> Awaitable[None] | None:
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
        """Query every backend; return the errors by backend (empty: all answered 200)."""
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
    """Make a control request; return the answer, or the error as text."""
    future = asyncio.ensure_future(fetch(pool, pool.request(method, path)))
    # If it fails while being cancelled, asyncio would log an unhandled error.
    future.add_done_callback(lambda task: task.cancelled() or task.exception())
    try:
        return await asyncio.wait_for(future, CONTROL_DEADLINE_S)
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
                backend.engine_ids = engine_ids_in(answer.body, backend.spec.data_parallel_size)
                if backend.engine_ids:
                    return
                problem = "the answer carries no engine_id, or not that of every rank"
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{backend.name}: its bootstrap address {backend.bootstrap_url} reported no engine id"
                    f" within {timeout_s:g} s: {problem}",
                    hint="is it a prefill server with this connector, and is the bootstrap port right?",
                )
            await asyncio.sleep(BOOTSTRAP_RETRY_S)
    finally:
        await pool.close()
