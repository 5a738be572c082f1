"""Direct mode: the generator itself sends to P and D, without a router. It uses the connectors' dispatch
functions, the same as the router. If P fails, the request fails (D never answers alone), and the other's
connection is dropped."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from kvbench import connectors
from kvbench.connectors.base import Connector, PrefillPeer, peer_at
from kvbench.core.load.dispatch import AroundPrompt, BackendSpec, engine_ids_in, prompt_key, server_of_session
from kvbench.core.records import RequestRecord, abort_text
from kvbench.errors import InputError, ServerError
from kvbench.processes.common.entry import parse_spec
from kvbench.processes.loadgen.answer import ServerAnswer
from kvbench.processes.loadgen.http_request import Failure, HttpRequest
from kvbench.processes.loadgen.in_flight import (
    InFlightRequest,
    InFlightRun,
    http_failure,
    relative_s,
    timeout_failure,
)
from kvbench.processes.loadgen.plan import PlannedRequest, completion_fields, request_headers
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.processes.loadgen.sockets.pool import ConnectionPool
from kvbench.processes.loadgen.sockets.wire import ServerAddress
from kvbench.processes.loadgen.spec import LoadSpec
from kvbench.processes.loadgen.stream import clip, whole_body_error

BOOTSTRAP_RETRY_S: Final = 0.1
BOOTSTRAP_ANSWER_S: Final = 5.0
MAX_ANSWER_BYTES: Final = 64 * 1024 * 1024


class DirectBackend:
    """P or D. ``engine_ids`` of its ranks are known after the bootstrap query."""

    def __init__(self, role: str, spec: BackendSpec, loop: SocketLoop) -> None:
        self.name = f"{role} {spec.url}"
        self.spec = spec
        self.server = ServerAddress(spec.url)
        self.pool = ConnectionPool(self.server, loop)
        self.engine_ids = tuple(spec.engine_ids)


def query_engine_ids(backend: DirectBackend, timeout_s: float) -> tuple[str, ...]:
    """Return the engine ids from a prefill server's bootstrap address. Raises ServerError on timeout."""
    import httpx  # this import takes 0.1 s

    from kvbench.hosts import web

    ServerAddress(backend.spec.bootstrap_url)  # raises InputError for an invalid URL
    url = httpx.URL(backend.spec.bootstrap_url).join("/query")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with web.client(timeout_s=BOOTSTRAP_ANSWER_S) as client:
                answer = client.get(url)
            least = backend.spec.data_parallel_size
            engine_ids = engine_ids_in(answer.content, least) if answer.status_code == 200 else ()
            lacking = "the answer carries no engine_id, or not that of every rank"
            problem = lacking if answer.status_code == 200 else f"status {answer.status_code}"
        except httpx.HTTPError as error:
            engine_ids, problem = (), str(error) or type(error).__name__
        if engine_ids:
            return engine_ids
        if time.monotonic() > deadline:
            raise ServerError(
                f"{backend.name}: its bootstrap address {backend.spec.bootstrap_url} reported no engine id"
                f" within {timeout_s:g} s: {problem}",
                hint="is it a prefill server with this connector, and is the bootstrap port right?",
            )
        time.sleep(BOOTSTRAP_RETRY_S)


@dataclass(frozen=True)
class DirectSpec:
    """The connector and the servers; the same keys as in the router's spec."""

    connector: str
    decode: list[Any]
    prefill: list[Any] = field(default_factory=list)
    version: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    bootstrap_timeout_s: float = 30.0
    routing: str = "session"

    def profile(self) -> Connector:
        """Return the connector whose dispatch functions are used. Raises InputError."""
        connector = connectors.get(self.connector)
        try:
            options = connector.options_model.model_validate_json(json.dumps(self.options))
        except ValidationError as error:
            raise InputError(f"the spec's direct.options: {error.errors()[0]['msg']}") from error
        return connector.profile(self.version, options)


@dataclass
class DirectHandoff:
    """One request's P (None without one) and D, and D's request if it does not depend on P's answer."""

    prefill: DirectBackend | None
    decode: DirectBackend
    around: AroundPrompt
    headers: Mapping[str, str]
    prompt: bytes
    request_id: str
    """The id that P and D get."""
    peer: PrefillPeer | None = None
    """The rank of P that computes the prompt."""
    decode_parts: tuple[bytes, ...] = ()


class DirectDispatch:
    """Shared state of one run's requests. Raises InputError if they cannot be dispatched."""

    def __init__(self, spec: LoadSpec, loop: SocketLoop) -> None:
        self._spec = spec
        self._direct = parse_spec(DirectSpec, spec.direct, "the spec's direct")
        self.connector = self._direct.profile()
        self._decodes = self._backends("decode", self._direct.decode, loop)
        paired = self.connector.disaggregated
        self._prefills = self._backends("prefill", self._direct.prefill, loop) if paired else []
        self._handoffs: dict[int, DirectHandoff] = {}

    def _backends(self, role: str, items: Sequence[Any], loop: SocketLoop) -> list[DirectBackend]:
        found = [
            parse_spec(BackendSpec, item, f"the spec's direct.{role}[{index}]")
            for index, item in enumerate(items)
        ]
        if not found:
            raise InputError(f"the spec: connector {self.connector.name!r} needs at least one {role} server")
        if role == "prefill" and self.connector.needs_bootstrap and not all(s.bootstrap_url for s in found):
            raise InputError(
                f"the spec: connector {self.connector.name!r} needs a bootstrap_url for each prefill"
            )
        return [DirectBackend(role, server, loop) for server in found]

    @property
    def pools(self) -> list[ConnectionPool]:
        return [backend.pool for backend in (*self._prefills, *self._decodes)]

    def find(self) -> None:
        """Resolve the hosts and, if the connector needs them, P's engine ids. Raises ServerError."""
        for pool in self.pools:
            pool.server.resolve()
        if self.connector.needs_bootstrap:
            for backend in self._prefills:
                backend.engine_ids = query_engine_ids(backend, self._direct.bootstrap_timeout_s)

    def prepare(self, plan: Iterable[PlannedRequest]) -> None:
        """Make each request's bytes as far as they are known beforehand."""
        fields: dict[tuple[int, bool], AroundPrompt] = {}
        for request in plan:
            kind = request.output_len, request.keeps_ids
            if kind not in fields:
                fields[kind] = AroundPrompt(
                    completion_fields(self._spec, request), prompt_key(self._spec.path)
                )
            around = fields[kind]
            d = self._choose(request, self._decodes)
            p = self._choose(request, self._prefills) if self._prefills else None
            peer_id = request.request_id
            peer = self._peer(request, p) if p is not None else None
            if peer is not None:
                peer_id = self.connector.backend_request_id(peer_id, peer, d.spec.side_address)
            headers = request_headers(self._spec, peer_id, request.session_id)
            handoff = DirectHandoff(p, d, around, headers, request.prompt, request.request_id, peer)
            if p is not None and peer is not None:
                body = self.connector.prefill_request(around.fields, request.request_id, peer)
                request.parts = self._parts(p, handoff, body, peer.headers)
            if p is None or self.connector.dispatch == "concurrent":
                handoff.decode_parts = self.decode_parts(handoff, request.request_id, None)
            self._handoffs[id(request)] = handoff
            request.prompt = b""

    def _choose(self, request: PlannedRequest, backends: Sequence[DirectBackend]) -> DirectBackend:
        if request.session_id and self._direct.routing == "session":
            return backends[server_of_session(request.session_id, len(backends))]
        # Round robin by index in the plan, so that all workers together act as one.
        return backends[request.index % len(backends)]

    def _peer(self, request: PlannedRequest, backend: DirectBackend) -> PrefillPeer:
        """The rank of a prefill server that takes a request: all pairs of server and rank in turn."""
        turn = request.index // len(self._prefills)
        if request.session_id and self._direct.routing == "session":
            turn = server_of_session(request.session_id, max(1, len(backend.engine_ids)))
        return peer_at(backend.spec, backend.engine_ids, turn)

    def decode_parts(
        self, handoff: DirectHandoff, request_id: str, answer: Mapping[str, Any] | None
    ) -> tuple[bytes, ...]:
        """Return D's request, which may depend on P's answer."""
        fields = handoff.around.fields
        if handoff.peer is not None:
            fields = self.connector.decode_request(fields, answer, request_id, handoff.peer)
        return self._parts(handoff.decode, handoff, fields)

    def _parts(
        self,
        backend: DirectBackend,
        handoff: DirectHandoff,
        fields: Mapping[str, Any],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[bytes, ...]:
        before, after = handoff.around.encode(fields)
        length = len(before) + len(handoff.prompt) + len(after)
        return (
            backend.server.head(self._spec.path, {**handoff.headers, **headers}, length) + before,
            handoff.prompt,
            after,
        )

    def begin(self, run: InFlightRun, request: PlannedRequest, scheduled_s: float) -> InFlightRequest:
        """Begin a due request; make its bytes if they depend on earlier answers."""
        if id(request) not in self._handoffs:
            self.prepare([request])
        return DirectRequest(run, request, scheduled_s, self, self._handoffs.pop(id(request)))


class DirectRequest(InFlightRequest):
    def __init__(
        self,
        run: InFlightRun,
        plan: PlannedRequest,
        scheduled_s: float,
        dispatch: DirectDispatch,
        handoff: DirectHandoff,
    ) -> None:
        self._dispatch = dispatch
        self._handoff: DirectHandoff = handoff
        super().__init__(run, plan, scheduled_s)
        self._prefill: HttpRequest | None = None
        if handoff.prefill is not None:
            self._prefill = HttpRequest(self, handoff.prefill.pool, MAX_ANSWER_BYTES)

    def start(self, plan: PlannedRequest) -> None:
        if self._prefill is not None:
            self._prefill.start(plan.parts)
        # P may have failed at once, and the request with it.
        if self.stream is not None and not self.over:
            self.stream.start(self._handoff.decode_parts)

    def _stream_request(self) -> HttpRequest | None:
        return self._new_stream(self._handoff.decode.pool) if self._handoff.decode_parts else None

    @property
    def http_requests(self) -> tuple[HttpRequest, ...]:
        return tuple(
            http_request for http_request in (self._prefill, self.stream) if http_request is not None
        )

    def answered(self, http_request: HttpRequest) -> None:
        if http_request is not self._prefill:
            if self._prefill is None or self._prefill.done:
                self._end()
            return
        failure, answer = self._prefill_outcome(http_request.answer)
        if failure is not None:
            self.end(failure, http_request)
        elif self.stream is None:
            self.stream = self._new_stream(self._handoff.decode.pool)
            self.stream.start(self._dispatch.decode_parts(self._handoff, self._handoff.request_id, answer))
        elif self.stream.done:
            self._end()

    def _prefill_outcome(self, answer: ServerAnswer) -> tuple[Failure | None, dict[str, Any]]:
        """Return P's failure, if any, and its answer."""
        if answer.status != 200:
            return http_failure(answer), {}
        body = bytes(answer.body)
        try:
            fields = json.loads(body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return ("bad_stream", "the answer is not a JSON object: " + clip(body)), {}
        if aborted := abort_text(fields.get("choices")):
            return ("aborted", aborted), {}
        if missing := self._dispatch.connector.missing_in_prefill_response(fields):
            error, detail = whole_body_error(body)
            lacks = f"the answer lacks {', '.join(missing)}"
            return (error, detail if error == "error_body" else lacks), {}
        return None, fields

    # after the end

    def settle(self, start_s: float) -> RequestRecord:
        record, prefill, decode = super().settle(start_s), self._prefill, self.stream
        start_ns = int(start_s * 1e9)
        if prefill is not None:
            record.prefill_sent_s = relative_s(prefill.sent_ns or None, start_ns)
            if prefill.done and prefill.answer.status == 200:
                record.prefill_answered_s = relative_s(prefill.last_ns, start_ns)
            if decode is None or self.failed_request is prefill:
                record.status = prefill.answer.status
        if decode is not None:
            record.decode_sent_s = relative_s(decode.sent_ns or None, start_ns)
            record.decode_first_byte_s = relative_s(decode.answer.first_body_ns, start_ns)
        # The rest of the request's bytes.
        self._handoff.prompt, self._handoff.decode_parts = b"", ()
        return record

    def first_http_request(self) -> HttpRequest | None:
        return self._prefill or self.stream

    def _class(self) -> Failure:
        prefill, failure = self._prefill, self.failure
        if prefill is None or failure is None or failure[0] == "cancelled":
            return super()._class()
        if self.failed_request is not prefill and (prefill.done or self.failed_request is not None):
            return super()._class()
        if failure[0] == "timeout" and not prefill.reads:
            failure = timeout_failure(prefill, failure)
        elif prefill.answer.status not in (0, 200):
            failure = http_failure(prefill.answer)
        backend = self._handoff.prefill
        assert backend is not None
        return failure[0], f"{backend.name}: {failure[1]}"
