"""One emulated engine: assembles, starts and stops pool, engine, hand-off and HTTP server. The HTTP side
implements those parts of vLLM's server that a router and a benchmark use."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.errors import InputError, TransferError
from kvbench.processes import http1
from kvbench.processes.common.spans import SpanLog
from kvbench.processes.emulator.answers import StreamAnswer, WholeAnswer, error_json
from kvbench.processes.emulator.engine import RunningEngine
from kvbench.processes.emulator.handoffs.handoff import EngineTransfers, Handoff
from kvbench.processes.emulator.handoffs.pull import PullConsumer, PullProducer
from kvbench.processes.emulator.handoffs.push import PushConsumer, PushProducer
from kvbench.processes.emulator.kvbytes import KvCompute, KvPool
from kvbench.processes.emulator.metrics import EngineMetrics
from kvbench.processes.emulator.protocol import ApiError, parse
from kvbench.processes.emulator.running_request import LiveRequest, RequestTrace
from kvbench.processes.emulator.spec import EngineSpec, KvTransferConfig
from kvbench.version import __version__

log = logging.getLogger(__name__)

_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Api:
    """Routes requests to the engine. ``problem`` is why the engine is not healthy, or empty."""

    spec: EngineSpec
    engine: RunningEngine
    created: int

    def __post_init__(self) -> None:
        self.handoff: Handoff | None = None
        self.problem: Callable[[], str] = str
        self._count = 0
        self.spans = SpanLog(self.spec.trace_path) if self.spec.trace_path else None
        self._gets = {
            "/health": self._health,
            "/metrics": self._metrics,
            "/v1/models": self._models,
            "/version": self._version,
        }
        self._posts: dict[str, http1.Handler] = {
            # Looked up at each request: a planted lie replaces the method.
            "/v1/completions": lambda request, response: self._generate(request, response, chat=False),
            "/v1/chat/completions": lambda request, response: self._generate(request, response, chat=True),
            "/reset_prefix_cache": self._reset,
        }

    def handle(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
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

    def _generate(self, request: http1.ReceivedRequest, response: http1.Response, chat: bool) -> None:
        try:
            if problem := self.problem():
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
            # Two clients may send the same X-Request-Id, so the engine's id adds a number.
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
            "created": self.created,
            "owned_by": "kvbench-emulator",
            "root": self.spec.model.name,
            "max_model_len": self.spec.max_model_len,
        }
        response.send(200, json.dumps({"object": "list", "data": [model]}).encode())

    def _version(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        response.send(200, json.dumps({"version": f"{__version__}+emulated"}).encode())

    def _reset(self, request: http1.ReceivedRequest, response: http1.Response) -> None:
        self.engine.scheduler.pool.reset_cache()
        # As in vLLM 0.28 and newer, but blocks in use are forgotten too, so it cannot fail.
        response.send(200, json.dumps({"success": True}).encode())


def _error(response: http1.Response, status: int, message: str, kind: str) -> None:
    response.send(status, error_json(status, message, kind))


_PARENT_POLL_S: Final = 0.25
_STOP_GRACE_S: Final = 0.2
_CHILD_GRACE_S: Final = 1.0


class EngineServer:
    """The process's main object: call ``start``, wait for ``stopped``, call ``close``."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        config = spec.kv_transfer_config
        self.metrics = EngineMetrics(spec.served_model_name, config.kv_connector if config else "")
        self.pool = KvPool(spec.layout(), spec.block_tokens)
        self.engine = RunningEngine(
            spec.engine_config(),
            spec.timing_profile(),
            spec.time_scale,
            KvCompute(self.pool, spec.model.vocab_size, spec.max_model_len, spec.output_noise),
            self.metrics,
        )
        self.transfers = EngineTransfers(config, spec, self.metrics) if config else None
        self.handoff: Handoff | None = None
        self.api = Api(spec, self.engine, int(time.time()))
        self.on_handoff: Callable[[Handoff], None] = lambda handoff: None
        """Called once the hand-off exists, before it starts."""
        self.stopped = asyncio.Event()
        self._problem = "starting"
        self._http: http1.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics.infos = self._infos

    async def start(self) -> None:
        """Listen, run the engine, start the transfer process. Raises PortInUseError, TransferError."""
        config = self.spec.kv_transfer_config
        self.api.problem = self.problem
        self._http = await http1.serve(self.api.handle, self.spec.host, self.spec.port)
        if config is not None and self.transfers is not None:
            self.handoff = self.api.handoff = _handoff_class(config)(
                self.spec, config, self.engine, self.transfers
            )
            self.on_handoff(self.handoff)
            await self.handoff.start()
            await self.transfers.start(self.pool, self.spec.host)
        self._tasks.append(asyncio.ensure_future(self.engine.run()))
        self._tasks[0].add_done_callback(self._engine_ended)
        self._tasks.append(asyncio.ensure_future(self._watch_parent(os.getppid())))
        # Existing objects stay alive; a full collection during a step costs milliseconds.
        gc.collect()
        gc.freeze()
        self._problem = ""
        log.info("serving %s on http://%s:%d", self.spec.served_model_name, self.spec.host, self._http.port)

    def problem(self) -> str:
        """Return why this engine cannot serve, or an empty text."""
        return self._problem

    def _engine_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            log.critical("the engine's loop ended", exc_info=task.exception())
            self._problem = "the engine's loop ended; see its log"
            for live in list(self.engine.active.values()):
                self.engine.fail(live, self._problem)

    async def _watch_parent(self, parent: int) -> None:
        while os.getppid() == parent:
            await asyncio.sleep(_PARENT_POLL_S)
        log.warning("the parent process is gone: stopping")
        self.stopped.set()

    def _infos(self) -> dict[str, dict[str, str]]:
        spec = self.spec
        infos = {
            "kvbench:engine": {
                "emulated": "1",
                "timing": spec.timing_profile().name,
                "time_scale": f"{spec.time_scale:g}",
                "role": spec.kv_transfer_config.kv_role if spec.kv_transfer_config else "aggregated",
                **({"kv_pace": spec.kv_pace.model_dump_json()} if spec.kv_pace else {}),
                **({"lie": spec.lie} if spec.lie else {}),
            },
            "vllm:cache_config": {
                "block_size": str(spec.block_tokens),
                "num_gpu_blocks": str(spec.num_blocks),
                "enable_prefix_caching": str(spec.enable_prefix_caching),
            },
        }
        process = self.transfers.process if self.transfers else None
        if process is not None:
            infos["kvbench:transport"] = {
                "transport": process.transport,
                "library": process.library["name"],
                "version": process.library["version"],
            }
        return infos

    async def close(self) -> None:
        self._problem = "stopping"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for live in list(self.engine.active.values()):
            self.engine.fail(live, "the engine was stopped")
        if self._http is not None:
            await self._http.close(_STOP_GRACE_S)
        if self.handoff is not None:
            await self.handoff.close()
        if self.transfers is not None:
            await self._close_transfers(self.transfers)
        if self.api.spans is not None:
            self.api.spans.close()

    async def _close_transfers(self, transfers: EngineTransfers) -> None:
        closing = asyncio.ensure_future(transfers.close())
        done, _ = await asyncio.wait({closing}, timeout=_CHILD_GRACE_S)
        if not done and transfers.process is not None:
            log.warning("the transfer process does not exit: killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(transfers.process.pid, signal.SIGKILL)
        with contextlib.suppress(TransferError):
            await closing


def _handoff_class(config: KvTransferConfig) -> type[Handoff]:
    if config.handshake == "pull":
        return PullProducer if config.is_producer else PullConsumer
    return PushProducer if config.is_producer else PushConsumer


async def serve(server: EngineServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stopped.set)
    try:
        starting = asyncio.ensure_future(server.start())
        stopping = asyncio.ensure_future(server.stopped.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        await stopping
    finally:
        await server.close()
