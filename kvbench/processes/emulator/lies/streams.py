"""Faults in prompts, timing, the token stream, and the KV's way from P to D; each wraps one method."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvbench.core.simulation.kv_cache import U64, BlockPool
from kvbench.core.simulation.step_time import StepLoad, TimingProfile
from kvbench.processes import http1
from kvbench.processes.emulator.answers import StreamAnswer
from kvbench.processes.emulator.handoffs.handoff import Handoff
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.server import EngineServer

QUIET: Final = 4
"""Number of correct first requests; requests outside the load, such as output checks, stay correct too."""


def role(server: EngineServer) -> str:
    config = server.spec.kv_transfer_config
    return "aggregated" if config is None else "prefill" if config.is_producer else "decode"


class Turns:
    """Returns true at every nth call, except the first ``QUIET``."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._calls = 0

    def __call__(self) -> bool:
        self._calls += 1
        return self._calls > QUIET and self._calls % self._every == 0


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace an object's method by ``wrapper(original, *arguments)``."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **named: wrapper(original, *arguments, **named))


MERGED: Final = 4
HELD_S: Final = 0.6


def _in_streams(server: EngineServer, spoil: Callable[[StreamAnswer], None]) -> None:
    """Apply a fault to the streams of the server that clients use, except the first ones."""
    turn = Turns(1)

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        if isinstance(live.sink, StreamAnswer) and turn():
            spoil(live.sink)
        original(live)

    if role(server) != "prefill":
        wrap(server.engine, "submit", submit)


def cut_prompt(server: EngineServer) -> None:
    def halved(usage: Callable[[int], dict[str, Any]], tokens: int) -> dict[str, Any]:
        true_usage = usage(tokens)
        return {**true_usage, "prompt_tokens": true_usage["prompt_tokens"] // 2}

    _in_streams(server, lambda answer: wrap(answer, "usage", halved))


def merged_tokens(server: EngineServer) -> None:
    def merge(answer: StreamAnswer) -> None:
        pending: list[str] = []

        def event(
            original: Callable[[dict[str, str], str | None], dict[str, Any]],
            content: dict[str, str],
            reason: str | None,
        ) -> dict[str, Any]:
            merged = {"text": "".join([*pending, content.get("text", "")])}
            pending.clear()
            return original(merged, reason)

        def on_token(original: Callable[[int, str | None], None], token: int, reason: str | None) -> None:
            if reason is None and (answer.count + 1) % MERGED and answer.count:
                pending.append(f" t{token}")
                answer.count += 1
            else:
                answer.plain = False
                original(token, reason)

        wrap(answer, "_event", event)
        wrap(answer, "on_token", on_token)

    _in_streams(server, merge)


class _Buffered:
    """A response that sends its stream at the end."""

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


def answer_at_once(server: EngineServer) -> None:
    def hold(answer: StreamAnswer) -> None:
        setattr(answer, "response", _Buffered(answer.response))  # noqa: B010 - not a real Response

    _in_streams(server, hold)


def canned_answers(server: EngineServer) -> None:
    def can(answer: StreamAnswer) -> None:
        def on_token(original: Callable[[int, str | None], None], token: int, reason: str | None) -> None:
            original(1 + answer.count, reason)

        wrap(answer, "on_token", on_token)

    _in_streams(server, can)


def _send_ahead(text: str) -> Callable[[EngineServer], None]:
    """Send an event at once, and the answer after a while."""

    def plant(server: EngineServer) -> None:
        def ahead(answer: StreamAnswer) -> None:
            answer.response.start_stream("text/event-stream; charset=utf-8")
            event = json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            answer.response.write(f"data: {event}\n\n".encode())

        _delay_requests(server, 1)
        _in_streams(server, ahead)

    return plant


def _delay_requests(server: EngineServer, every: int) -> None:
    """Delay each ``every``-th request before it is served."""
    turn = Turns(every)

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        if turn():
            asyncio.get_running_loop().call_later(HELD_S, later, original, live)
        else:
            original(live)

    def later(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        if not live.ended:
            original(live)

    if role(server) != "prefill":
        wrap(server.engine, "submit", submit)


def slow_turns(server: EngineServer) -> None:
    _delay_requests(server, 2)


def empty_text(server: EngineServer) -> None:
    def empty(answer: StreamAnswer) -> None:
        answer.plain = False
        wrap(answer, "_event", lambda event, content, reason: event({**content, "text": ""}, reason))

    _in_streams(server, empty)


STREAM_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "cut_prompt": cut_prompt,
    "merged_tokens": merged_tokens,
    "answer_at_once": answer_at_once,
    "canned_answers": canned_answers,
    "empty_first": _send_ahead(""),
    "blank_first": _send_ahead(" "),
    "empty_text": empty_text,
    "slow_turns": slow_turns,
}


CAP: Final = 2
DRIFT_PER_S: Final = 1.5
REST_S: Final = 1.0
LATE_S: Final = 0.12


def warm_cache(server: EngineServer) -> None:
    engine = server.engine
    if role(server) == "decode":  # it must still get all of its KV, or that would be another fault
        engine.scheduler.config = replace(engine.config, enable_prefix_caching=False)
        engine.scheduler.pool = BlockPool(engine.config.num_blocks, False)

    def same(original: Callable[[U64, str], U64], tokens: U64, salt: str) -> U64:
        return original(np.ones_like(tokens), salt)

    wrap(engine.compute, "hash_prompt", same)


def _faster(timing: TimingProfile, factor: float) -> TimingProfile:
    names = ("prefill_base_ms", "prefill_seq_ms", "prefill_token_ms", "prefill_attention_ms", "overhead_ms")
    return replace(timing, **{name: getattr(timing, name) * factor for name in names})


def impossible_speed(server: EngineServer) -> None:
    server.engine.timing = _faster(server.engine.timing, 1e-3)


def skip_prefill(server: EngineServer) -> None:
    if role(server) == "decode":
        return
    server.engine.timing = _faster(server.engine.timing, 0.0)

    def first_token(original: Callable[[LiveRequest, float], None], live: LiveRequest, now: float) -> None:
        live.request.external_tokens = live.request.prompt_len - live.request.cached_tokens - 1
        original(live, now)

    wrap(server.engine, "_first_token", first_token)


class _Drifting:
    """A timing profile that slows down under load and recovers when idle."""

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


def slow_drift(server: EngineServer) -> None:
    if role(server) != "prefill":
        setattr(server.engine, "timing", _Drifting(server.engine.timing))  # noqa: B010 - not a real profile


def late_engine(server: EngineServer) -> None:
    turn = Turns(8)

    def draw(original: Callable[..., None], *arguments: Any) -> None:
        if turn():
            time.sleep(LATE_S)  # delays the whole process, as on a busy machine
        original(*arguments)

    wrap(server.engine.compute, "draw", draw)


def slot_cap(server: EngineServer) -> None:
    if role(server) != "prefill":
        server.engine.scheduler.config = replace(server.engine.config, max_num_seqs=CAP)


SPEED_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "warm_cache": warm_cache,
    "skip_prefill": skip_prefill,
    "impossible_speed": impossible_speed,
    "slot_cap": slot_cap,
    "slow_drift": slow_drift,
    "late_engine": late_engine,
}


LEASE_S: Final = 0.2


def corrupt_kv(server: EngineServer) -> None:
    engine = server.engine

    async def kv_arrived(original: Callable[[LiveRequest], Any], live: LiveRequest) -> None:
        engine.compute.pool.words[0, live.request.blocks[0], 0, 0] ^= np.uint64(1)
        await original(live)

    wrap(engine, "kv_arrived", kv_arrived)


def double_kv(server: EngineServer) -> None:
    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        await original(*arguments)
        return await original(*arguments)

    if server.transfers is not None:
        wrap(server.transfers, "move", move)


def failing_kv(server: EngineServer) -> None:
    turn = Turns(5)

    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        server.metrics.transfer.failed += turn()
        return await original(*arguments)

    if server.transfers is not None:
        wrap(server.transfers, "move", move)


def impossible_transfer(server: EngineServer) -> None:
    def observe(original: Callable[..., None], seconds: float, nbytes: int, descriptors: int) -> None:
        original(seconds / 1000.0, nbytes, descriptors)

    wrap(server.metrics.transfer, "observe", observe)


def silent_tcp(server: EngineServer) -> None:
    config = server.spec.kv_transfer_config
    if config is None:
        return
    os.environ.pop("MC_FORCE_HCA", None)
    os.environ.update(MC_FORCE_TCP="1", UCX_TLS="tcp")
    if "mooncake_protocol" in config.kv_connector_extra_config:
        config.kv_connector_extra_config["mooncake_protocol"] = "tcp"


def claimed_rdma(server: EngineServer) -> None:
    silent_tcp(server)

    def infos(original: Callable[[], dict[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
        labels = original()
        if "kvbench:transport" in labels:
            labels["kvbench:transport"]["transport"] = "rdma"
        return labels

    wrap(server.metrics, "infos", infos)


def emulated_reads(server: EngineServer) -> None:
    if role(server) == "decode":
        prefix = f"[1795390662.118731] [host:{os.getpid()}:0]   |"
        what = "remote memory read by ucp_get*(multi) into cuda/GPU1 from cuda/dev[0]"
        print(f"{prefix} ucx_context_0 intra-node cfg#9 | {what} |", file=sys.stderr)
        print(f"{prefix} 0..inf | software emulation | tcp/eth0 |", file=sys.stderr, flush=True)


def wrong_nics(server: EngineServer) -> None:
    os.environ["UCX_NET_DEVICES"] = "lo"


def decode_recomputes(server: EngineServer, handoff: Handoff) -> None:
    if role(server) != "decode":
        return

    def accept(original: Callable[..., None], live: LiveRequest, wanted: Any) -> None:
        original(live, wanted)
        if live.request.remote_kv:
            handoff.on_dropped(live)  # as after the request's end: P may free its blocks
            live.request.remote_kv = False

    wrap(handoff, "accept", accept)


def unreleased_kv(server: EngineServer, handoff: Handoff) -> None:
    if role(server) != "prefill":
        return
    handoff.lease_s = LEASE_S

    async def release(args: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"held": list(args["ids"])}  # and keeps them

    handlers: dict[str, Any] = getattr(getattr(handoff, "_rpc"), "_handlers")  # noqa: B009 - private
    handlers["release"] = release


KV_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "impossible_transfer": impossible_transfer,
    "corrupt_kv": corrupt_kv,
    "double_kv": double_kv,
    "failing_kv": failing_kv,
    "silent_tcp": silent_tcp,
    "claimed_rdma": claimed_rdma,
    "emulated_reads": emulated_reads,
    "wrong_nics": wrong_nics,
}
HANDOFF_PLANTS: Final[dict[str, Callable[[EngineServer, Handoff], None]]] = {
    "decode_recomputes": decode_recomputes,
    "unreleased_kv": unreleased_kv,
}
"""Planted faults that need the hand-off object."""
