"""The engine's HTTP side: what vLLM's server answers, as far as a router and a benchmark ask."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable
from typing import Final

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.errors import InputError
from kvbench.processes import http1
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.emulator.answers import StreamAnswer, WholeAnswer, error_json
from kvbench.processes.emulator.engine import RunningEngine
from kvbench.processes.emulator.handoffs.handoff import Handoff
from kvbench.processes.emulator.protocol import ApiError, parse
from kvbench.processes.emulator.running_request import LiveRequest, RequestTrace
from kvbench.processes.emulator.spec import EngineSpec
from kvbench.version import __version__

log = logging.getLogger(__name__)

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Api:
    """Routes requests to the engine. ``problem`` is why the engine is not healthy, or empty."""

    def __init__(self, spec: EngineSpec, engine: RunningEngine, created: int) -> None:
        self.spec = spec
        self.engine = engine
        self.handoff: Handoff | None = None
        self.problem: Callable[[], str] = str
        self._created = created
        self._count = 0
        self.spans = SpanLog(spec.trace_path) if spec.trace_path else None
        self._gets = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/version": self._version,
        }
        self._posts = {
            "/v1/completions": self._completions,
            "/v1/chat/completions": self._chat,
            "/reset_prefix_cache": self._reset,
        }

    def handle(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        """One HTTP request."""
        routes = self._posts if request.method == "POST" else self._gets
        route = routes.get(request.path)
        if route is not None and request.method in ("GET", "HEAD", "POST"):
            route(request, response)
        elif request.path in self._gets or request.path in self._posts:
            _error(
                response, 405, f"{request.method} is not allowed on {request.path}", "MethodNotAllowedError"
            )
        else:
            _error(response, 404, f"there is no {request.path}", "NotFoundError")

    # -- generation -------------------------------------------------------------------------------

    def _completions(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        self._generate(request, response, chat=False)

    def _chat(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        self._generate(request, response, chat=True)

    def _generate(self, request: http1.ReceivedRequest, response: http1.Response, chat: bool) -> None:
        try:
            problem = self.problem()
            if problem:
                raise ApiError(503, f"the engine is not ready: {problem}", "ServiceUnavailableError")
            self._submit(request, response, chat)
        except ApiError as error:
            _error(response, error.status, error.message, error.kind)
        except InputError as error:
            _error(response, 400, str(error), "BadRequestError")

    def _submit(self, request: http1.ReceivedRequest, response: http1.Response, chat: bool) -> None:
        engine, spec = self.engine, self.spec
        wanted = parse(request.body, chat, spec.served_model_name, spec.model.vocab_size)
        prompt_len = len(wanted.prompt)
        max_tokens = wanted.max_tokens or max(1, spec.max_model_len - prompt_len)
        engine.scheduler.check_fits(prompt_len, max_tokens)
        self._count += 1
        name = request.headers.get("x-request-id") or uuid.uuid4().hex
        public_id = f"{'chatcmpl' if chat else 'cmpl'}-{name}"
        answer = (StreamAnswer if wanted.stream else WholeAnswer)(
            response, wanted, public_id, spec.served_model_name, spec.reasoning_tokens
        )
        live = LiveRequest(
            # Two clients may send one X-Request-Id, so the engine's own id has a number of its own.
            request=EngineRequest(f"{public_id}-{self._count}", prompt_len, max_tokens),
            prompt_hashes=engine.compute.hash_prompt(wanted.prompt, wanted.cache_salt),
            sink=answer,
            ignore_eos=wanted.ignore_eos,
            min_tokens=wanted.min_tokens,
        )
        answer.live = live
        if self.spans is not None and self.spans.wants(name):
            live.trace = RequestTrace(name, self.spans)
        if self.handoff is not None:
            self.handoff.accept(live, wanted)
        elif wanted.kv_transfer_params:
            raise ApiError(400, "kv_transfer_params were sent to an engine without a kv_transfer_config")
        engine.submit(live)
        response.on_disconnect(lambda: engine.abort(live))

    # -- the rest ---------------------------------------------------------------------------------

    def _health(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        problem = self.problem()
        response.send(503 if problem else 200, json.dumps({"status": problem or "ok"}).encode())

    def _metrics(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        response.send(200, self.engine.metrics.text(), content_type=_METRICS_TYPE)

    def _models(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        model = {
            "id": self.spec.served_model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvbench-emulator",
            "root": self.spec.model.name,
            "max_model_len": self.spec.max_model_len,
        }
        response.send(200, json.dumps({"object": "list", "data": [model]}).encode())

    def _version(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        response.send(200, json.dumps({"version": f"{__version__}+emulated"}).encode())

    def _reset(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        self.engine.scheduler.pool.reset_cache()
        # As vLLM 0.28 and newer answer; here blocks in use are forgotten, too, so it cannot fail.
        response.send(200, json.dumps({"success": True}).encode())


def _error(response: http1.Response, status: int, message: str, kind: str) -> None:
    response.send(status, error_json(status, message, kind))
