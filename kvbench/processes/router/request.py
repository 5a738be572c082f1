"""One request on its way to P and D, in the order that the connector wants, and back."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

from kvbench.core.records import TIMING_REQUEST_HEADER
from kvbench.errors import InputError
from kvbench.processes.http1 import ReceivedRequest, Response, error_body
from kvbench.processes.router.backend_request import (
    BackendError,
    BackendRequest,
    PrefillRequest,
    Splice,
    Timing,
)
from kvbench.processes.router.body import ClientBody
from kvbench.processes.router.dispatch import Dispatch, passed_on
from kvbench.processes.router.spec import RouterBackend
from kvbench.processes.router.tracing import request_spans

log = logging.getLogger(__name__)


class RoutedRequest:
    """A request from its arrival to the end of its answer, driven by what its requests to P and D report.

    It ends once: with D's answer when both have succeeded, with the first failure of one, when its time is
    up, or when the client leaves. Whatever is under way then is dropped.

    A body that the connector does not change (that of ``aggregated``) is not looked at: if it is no JSON
    object, D says so. Else that is a 400 of the router's own.
    """

    __slots__ = (
        *("_began", "_body", "_decode", "_dispatch", "_lying", "_over", "_p", "_prefill"),
        *("_request", "_response", "_timing"),
    )

    def __init__(self, dispatch: Dispatch, request: ReceivedRequest, response: Response) -> None:
        self._began = time.monotonic()
        self._dispatch = dispatch
        self._request = request
        self._response = response
        self._timing = Timing(received=self._began, asked=request.headers.get(TIMING_REQUEST_HEADER) == "1")
        self._over = False
        self._body: ClientBody | None = None
        self._p: RouterBackend | None = None
        self._prefill: BackendRequest | None = None
        self._decode: Splice | None = None
        self._lying: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Sends what can be sent, and only then does all else."""
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
        """What the liar does first, and then what it leaves to be done."""
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
        self._p = p
        dispatch = self._dispatch
        d = dispatch.decode_for(self._request)
        if dispatch.liar is not None:
            d = dispatch.liar.decode_of(d, dispatch.decodes)
        self._decode = Splice(
            d, self, self._response, {"x-request-id": self._timing.request_id}, self._timing
        )
        if p is None:
            self._send_decode(None)
            return
        fields = self._dispatch.connector.prefill_request(self._fields, self._timing.request_id, p.peer())
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
            fields = connector.decode_request(self._fields, answer, self._timing.request_id, p.peer())
        decode.start(self._bytes_for(decode.backend, fields))

    def _bytes_for(self, backend: RouterBackend, fields: dict[str, Any] | None) -> bytes:
        """The request to a backend, with a changed body or (None) with the client's."""
        assert self._decode is not None
        request, peer_id, p = self._request, self._timing.request_id, self._p
        if p is not None:
            side_address = self._decode.backend.side_address
            peer_id = self._dispatch.connector.backend_request_id(peer_id, p.peer(), side_address)
        body = request.body
        if fields is not None:
            assert self._body is not None
            body = self._body.encode(fields)
        return backend.request(request.path, passed_on(request), peer_id, body)

    # what happens on the way

    def backend_answered(self, request: BackendRequest) -> None:
        """P or D has answered."""
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
        """Whatever came up, away from the handler's caller."""
        if not isinstance(error, BackendError):
            log.error("a request cannot be passed on", exc_info=error)
            message = "internal error; see the router's log"
            error = BackendError("internal", 500, error_body(500, message))
        self.backend_failed(error)

    def _prefilled(self, request: BackendRequest) -> None:
        """P has answered: that is what D waits for, or was only to be known."""
        self._timing.prefill_answered = time.monotonic()
        reply = request.answer()
        try:
            answer = reply.json()
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise BackendError.of(request.backend, "bad_answer", 502, "answered no JSON object")
        connector = self._dispatch.connector
        if connector.dispatch != "sequential":
            return
        missing = connector.missing_in_prefill_response(answer)
        if missing:
            raise BackendError.of(
                request.backend, "bad_answer", 502, f"the answer lacks {', '.join(missing)}"
            )
        self._send_decode(answer)

    def backend_failed(self, failure: BackendError) -> None:
        """P or D has failed, and so the request. It is counted before the client can know of it."""
        if not self._over:
            self._end(failure.error)
            _answer_failure(self._response, failure)

    def expire(self) -> None:
        """The request's time is up."""
        message = f"no complete answer within {self._dispatch.deadlines.limit_s:g} s"
        self.backend_failed(BackendError("timeout", 504, error_body(504, message, "timeout")))

    def _left(self) -> None:
        """The client is gone, and with this the requests on P and D are too."""
        if not self._over:
            self._end("client_disconnect")

    def _finish(self, decode: Splice) -> None:
        self._end("")
        decode.finish()  # after the counting: who has the answer finds it counted, whichever process is asked

    def _end(self, error: str) -> None:
        self._over = True
        for each in (self._prefill, self._decode):
            if each is not None:
                each.drop()
        if self._lying is not None:
            self._lying.cancel()
        self._prefill = self._decode = self._lying = None  # no circles, which would have to be collected
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
        # The status is long with the client: only a broken stream can still show that it failed.
        log.warning("a stream is cut short: %s", failure)
        response.abort()
    else:
        response.send(failure.status, failure.body, failure.content_type)
