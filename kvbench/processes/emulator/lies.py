"""Plants a lie (core/gates/lies.py) in an engine that is otherwise honest. All are here, and only here.

Each function takes a server that has been put together and not started, and wraps one thing in it. Prefill
instances ("producer"), decode instances ("consumer") and aggregated servers may lie differently.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvbench.core.simulation.kv_cache import U64, BlockPool
from kvbench.core.simulation.step import Request
from kvbench.core.simulation.step_time import StepLoad, TimingProfile
from kvbench.processes.emulator.answers import Answer, StreamAnswer, error_json
from kvbench.processes.emulator.handoff import Handoff
from kvbench.processes.emulator.running_request import Live

if TYPE_CHECKING:
    from kvbench.processes import http1
    from kvbench.processes.emulator.server import EngineServer

QUIET: Final = 4
"""The first requests are honest, as are all that are not part of a load, such as checks of the outputs."""
LEASE_S: Final = 0.2
CAP: Final = 2
DRIFT_PER_S: Final = 1.5
REST_S: Final = 1.0
LATE_S: Final = 0.12
MERGED: Final = 4


def plant(server: EngineServer) -> None:
    """Makes an engine tell its spec's lie; called before it starts. An honest one is left alone."""
    lie = server.spec.lie
    if lie in _PLANTS:
        _PLANTS[lie](server)


def plant_in_handoff(server: EngineServer, handoff: Handoff) -> None:
    """The same for lies of the hand-off, once that is there."""
    lie = server.spec.lie
    if lie in _HANDOFF_PLANTS:
        _HANDOFF_PLANTS[lie](server, handoff)


def _role(server: EngineServer) -> str:
    config = server.spec.kv_transfer_config
    return "aggregated" if config is None else "prefill" if config.is_producer else "decode"


class _Turns:
    """Says at every nth call that it is a lie's turn; never among the first."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._calls = 0

    def __call__(self) -> bool:
        self._calls += 1
        return self._calls > QUIET and self._calls % self._every == 0


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Puts ``wrapper(original, *arguments)`` in the place of an object's method."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


# ---------------------------------------------------------------- prompts and time


def _warm_cache(server: EngineServer) -> None:
    engine = server.engine
    if _role(server) == "decode":  # it must still get all of its KV, or that would be another lie
        engine.scheduler.config = replace(engine.config, enable_prefix_caching=False)
        engine.scheduler.pool = BlockPool(engine.config.num_blocks, False)

    def same(original: Callable[[U64, str], U64], tokens: U64, salt: str) -> U64:
        return original(np.ones_like(tokens), salt)

    _wrap(engine.compute, "hash_prompt", same)


def _faster(timing: TimingProfile, factor: float) -> TimingProfile:
    names = ("prefill_base_ms", "prefill_seq_ms", "prefill_token_ms", "prefill_attention_ms", "overhead_ms")
    return replace(timing, **{name: getattr(timing, name) * factor for name in names})


def _impossible_speed(server: EngineServer) -> None:
    server.engine.timing = _faster(server.engine.timing, 1e-3)


def _skip_prefill(server: EngineServer) -> None:
    if _role(server) == "decode":
        return
    server.engine.timing = _faster(server.engine.timing, 0.0)

    def first_token(original: Callable[[Live, float], None], live: Live, now: float) -> None:
        live.request.external_tokens = live.request.prompt_len - live.request.cached_tokens - 1
        original(live, now)

    _wrap(server.engine, "_first_token", first_token)


class _Drifting:
    """A timing profile that slows down while load lasts, and recovers when it rests."""

    def __init__(self, timing: TimingProfile) -> None:
        self._timing = timing
        self._begun = self._last = 0.0

    def step_s(self, load: StepLoad, time_scale: float = 1.0) -> float:
        now = time.monotonic()
        if now - self._last > REST_S:
            self._begun = now
        self._last = now
        return self._timing.step_s(load, time_scale) * (1 + DRIFT_PER_S * (now - self._begun))

    def overhead_s(self, time_scale: float = 1.0, tokens: int = 0) -> float:
        return self._timing.overhead_s(time_scale, tokens)


def _slow_drift(server: EngineServer) -> None:
    if _role(server) != "prefill":
        setattr(server.engine, "timing", _Drifting(server.engine.timing))  # noqa: B010 - it is no profile


def _late_engine(server: EngineServer) -> None:
    turn = _Turns(8)

    def draw(original: Callable[..., None], *arguments: Any) -> None:
        if turn():
            time.sleep(LATE_S)  # the whole process is late, as on a busy machine
        original(*arguments)

    _wrap(server.engine.compute, "draw", draw)


def _slot_cap(server: EngineServer) -> None:
    if _role(server) != "prefill":
        server.engine.scheduler.config = replace(server.engine.config, max_num_seqs=CAP)


# ---------------------------------------------------------------- answers and counters


def _early_eos(server: EngineServer) -> None:
    if _role(server) == "prefill":
        return
    turn = _Turns(3)

    def submit(original: Callable[[Live], None], live: Live) -> None:
        if turn():
            live.request.max_tokens = max(1, live.request.max_tokens // 2)
        original(live)

    _wrap(server.engine, "submit", submit)


def _wrong_usage(server: EngineServer) -> None:
    if _role(server) == "prefill":
        return

    def submit(original: Callable[[Live], None], live: Live) -> None:
        claimed = live.request.max_tokens
        live.request.max_tokens = max(1, claimed // 2)
        if isinstance(live.sink, Answer):
            _wrap(live.sink, "usage", lambda usage, _: usage(claimed))
        original(live)

    _wrap(server.engine, "submit", submit)


class _Nobody:
    """Where the tokens of a secret request go."""

    def on_token(self, token: int, finish_reason: str | None) -> None:
        return None

    def on_error(self, status: int, message: str) -> None:
        return None


def _hidden_retry(server: EngineServer) -> None:
    if _role(server) == "decode":
        return

    def submit(original: Callable[[Live], None], live: Live) -> None:
        original(live)
        again = Request(f"{live.request.request_id}-again", live.request.prompt_len, 1)
        original(Live(again, live.prompt_hashes ^ np.uint64(1), _Nobody(), ignore_eos=True))

    _wrap(server.engine, "submit", submit)


def _lost_requests(server: EngineServer) -> None:
    if _role(server) == "prefill":
        return
    turn, success = _Turns(4), server.metrics.success

    def end(original: Callable[[Live, str], None], live: Live, reason: str) -> None:
        original(live, reason)
        if turn():
            success[reason] -= 1

    _wrap(server.engine, "_end", end)


def _restart(server: EngineServer) -> None:
    turn, metrics = _Turns(10), server.metrics

    def submit(original: Callable[[Live], None], live: Live) -> None:
        original(live)
        if turn():
            metrics.started_s = time.time()
            metrics.prompt_tokens = metrics.generation_tokens = 0
            for counts in (metrics.by_source, metrics.success):
                counts.update(dict.fromkeys(counts, 0))

    _wrap(server.engine, "submit", submit)


def _shedding(server: EngineServer) -> None:
    if _role(server) == "decode":  # it sheds where requests come in
        return
    turn = _Turns(4)

    def generate(
        original: Callable[..., None], request: http1.Request, response: http1.Response, chat: bool
    ) -> None:
        if turn():
            response.send(503, error_json(503, "the server is overloaded", "ServiceUnavailableError"))
        else:
            original(request, response, chat)

    _wrap(server.api, "_generate", generate)


# ---------------------------------------------------------------- the stream


def _in_streams(server: EngineServer, wrap: Callable[[StreamAnswer], None]) -> None:
    """Puts a lie into each stream of whoever answers clients, but the first ones."""
    turn = _Turns(1)

    def submit(original: Callable[[Live], None], live: Live) -> None:
        if isinstance(live.sink, StreamAnswer) and turn():
            wrap(live.sink)
        original(live)

    if _role(server) != "prefill":
        _wrap(server.engine, "submit", submit)


def _cut_prompt(server: EngineServer) -> None:
    def halved(usage: Callable[[int], dict[str, Any]], tokens: int) -> dict[str, Any]:
        told = usage(tokens)
        return {**told, "prompt_tokens": told["prompt_tokens"] // 2}

    _in_streams(server, lambda answer: _wrap(answer, "usage", halved))


def _merged_tokens(server: EngineServer) -> None:
    def merge(answer: StreamAnswer) -> None:
        held: list[str] = []

        def event(
            original: Callable[[dict[str, str], str | None], dict[str, Any]],
            content: dict[str, str],
            reason: str | None,
        ) -> dict[str, Any]:
            told = {"text": "".join([*held, content.get("text", "")])}
            held.clear()
            return original(told, reason)

        def on_token(original: Callable[[int, str | None], None], token: int, reason: str | None) -> None:
            if reason is None and (answer.count + 1) % MERGED and answer.count:
                held.append(f" t{token}")
                answer.count += 1
            else:
                answer.plain = False
                original(token, reason)

        _wrap(answer, "_event", event)
        _wrap(answer, "on_token", on_token)

    _in_streams(server, merge)


class _Held:
    """A response whose stream is held back until its end."""

    def __init__(self, response: http1.Response) -> None:
        self._response = response
        self._data: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    def write(self, data: bytes) -> None:
        self._data.append(data)

    def end(self) -> None:
        self._response.write(b"".join(self._data))
        self._response.end()


def _answer_at_once(server: EngineServer) -> None:
    def hold(answer: StreamAnswer) -> None:
        setattr(answer, "response", _Held(answer.response))  # noqa: B010 - it is no response

    _in_streams(server, hold)


def _canned_answers(server: EngineServer) -> None:
    def can(answer: StreamAnswer) -> None:
        def on_token(original: Callable[[int, str | None], None], token: int, reason: str | None) -> None:
            original(1 + answer.count, reason)

        _wrap(answer, "on_token", on_token)

    _in_streams(server, can)


# ---------------------------------------------------------------- the KV's way


def _corrupt_kv(server: EngineServer) -> None:
    engine = server.engine

    async def kv_arrived(original: Callable[[Live], Any], live: Live) -> None:
        engine.compute.pool.words[0, live.request.blocks[0], 0, 0] ^= np.uint64(1)
        await original(live)

    _wrap(engine, "kv_arrived", kv_arrived)


def _double_kv(server: EngineServer) -> None:
    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        await original(*arguments)
        return await original(*arguments)

    if server.mover is not None:
        _wrap(server.mover, "move", move)


def _failing_kv(server: EngineServer) -> None:
    turn = _Turns(5)

    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        server.metrics.transfer.failed += turn()
        return await original(*arguments)

    if server.mover is not None:
        _wrap(server.mover, "move", move)


def _impossible_transfer(server: EngineServer) -> None:
    def observe(original: Callable[..., None], seconds: float, nbytes: int, descriptors: int) -> None:
        original(seconds / 1000.0, nbytes, descriptors)

    _wrap(server.metrics.transfer, "observe", observe)


def _silent_tcp(server: EngineServer) -> None:
    config = server.spec.kv_transfer_config
    if config is None:
        return
    os.environ.pop("MC_FORCE_HCA", None)
    os.environ.update(MC_FORCE_TCP="1", UCX_TLS="tcp")
    if "mooncake_protocol" in config.kv_connector_extra_config:
        config.kv_connector_extra_config["mooncake_protocol"] = "tcp"


def _claimed_rdma(server: EngineServer) -> None:
    _silent_tcp(server)

    def infos(original: Callable[[], dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
        told = original()
        if "kvbench:transport" in told:
            told["kvbench:transport"]["transport"] = "rdma"
        return told

    _wrap(server.metrics, "infos", infos)


def _wrong_nics(server: EngineServer) -> None:
    os.environ["UCX_NET_DEVICES"] = "lo"


def _decode_recomputes(server: EngineServer, handoff: Handoff) -> None:
    if _role(server) != "decode":
        return

    def accept(original: Callable[..., None], live: Live, wanted: Any) -> None:
        original(live, wanted)
        if live.request.remote_kv:
            handoff.on_dropped(live)  # as a request that has ended: P may let its blocks go
            live.request.remote_kv = False

    _wrap(handoff, "accept", accept)


def _unreleased_kv(server: EngineServer, handoff: Handoff) -> None:
    if _role(server) != "prefill":
        return
    handoff.lease_s = LEASE_S

    async def release(args: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"held": list(args["ids"])}  # and keeps them

    handlers: dict[str, Any] = getattr(getattr(handoff, "_rpc"), "_handlers")  # noqa: B009 - its own secrets
    handlers["release"] = release


_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "warm_cache": _warm_cache,
    "skip_prefill": _skip_prefill,
    "impossible_speed": _impossible_speed,
    "impossible_transfer": _impossible_transfer,
    "corrupt_kv": _corrupt_kv,
    "double_kv": _double_kv,
    "failing_kv": _failing_kv,
    "silent_tcp": _silent_tcp,
    "claimed_rdma": _claimed_rdma,
    "wrong_nics": _wrong_nics,
    "slot_cap": _slot_cap,
    "slow_drift": _slow_drift,
    "late_engine": _late_engine,
    "early_eos": _early_eos,
    "wrong_usage": _wrong_usage,
    "hidden_retry": _hidden_retry,
    "lost_requests": _lost_requests,
    "restart": _restart,
    "shedding": _shedding,
    "cut_prompt": _cut_prompt,
    "merged_tokens": _merged_tokens,
    "answer_at_once": _answer_at_once,
    "canned_answers": _canned_answers,
}
_HANDOFF_PLANTS: Final[dict[str, Callable[[EngineServer, Handoff], None]]] = {
    "decode_recomputes": _decode_recomputes,
    "unreleased_kv": _unreleased_kv,
}
