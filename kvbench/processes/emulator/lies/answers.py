"""Faults in answers and counters, and occasional wrong KV, which no check before the load detects."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.processes import http1
from kvbench.processes.emulator.answers import ApiAnswer, error_json
from kvbench.processes.emulator.lies.streams import QUIET, Turns, role, wrap
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.server import EngineServer


def early_eos(server: EngineServer) -> None:
    if role(server) == "prefill":
        return
    turn = Turns(3)

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        if turn():
            live.request.max_tokens = max(1, live.request.max_tokens // 2)
        original(live)

    wrap(server.engine, "submit", submit)


def wrong_usage(server: EngineServer) -> None:
    if role(server) == "prefill":
        return

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        claimed = live.request.max_tokens
        live.request.max_tokens = max(1, claimed // 2)
        if isinstance(live.sink, ApiAnswer):
            wrap(live.sink, "usage", lambda usage, _: usage(claimed))
        original(live)

    wrap(server.engine, "submit", submit)


class _Discard:
    def on_token(self, token: int, finish_reason: str | None) -> None:
        return None

    def on_error(self, status: int, message: str) -> None:
        return None


def hidden_retry(server: EngineServer) -> None:
    if role(server) == "decode":
        return

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        original(live)
        again = EngineRequest(f"{live.request.request_id}-again", live.request.prompt_len, 1)
        original(LiveRequest(again, live.prompt_hashes ^ np.uint64(1), _Discard(), ignore_eos=True))

    wrap(server.engine, "submit", submit)


def lost_requests(server: EngineServer) -> None:
    if role(server) == "prefill":
        return
    turn, success = Turns(4), server.metrics.success

    def end(original: Callable[[LiveRequest, str], None], live: LiveRequest, reason: str) -> None:
        original(live, reason)
        if turn():
            success[reason] -= 1

    wrap(server.engine, "_end", end)


def restart(server: EngineServer) -> None:
    turn, metrics = Turns(10), server.metrics

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        original(live)
        if turn():
            metrics.started_s = time.time()
            metrics.prompt_tokens = metrics.generation_tokens = 0
            for counts in (metrics.by_source, metrics.success):
                counts.update(dict.fromkeys(counts, 0))

    wrap(server.engine, "submit", submit)


def shedding(server: EngineServer) -> None:
    if role(server) == "decode":  # requests are rejected on arrival
        return
    turn = Turns(4)

    def generate(
        original: Callable[..., None], request: http1.ReceivedRequest, response: http1.Response, chat: bool
    ) -> None:
        if turn():
            response.send(503, error_json(503, "the server is overloaded", "ServiceUnavailableError"))
        else:
            original(request, response, chat)

    wrap(server.api, "_generate", generate)


COUNTER_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "early_eos": early_eos,
    "wrong_usage": wrong_usage,
    "hidden_retry": hidden_retry,
    "lost_requests": lost_requests,
    "restart": restart,
    "shedding": shedding,
}


CROWD: Final = 3
"""KV is corrupted while more requests than this are active."""
FAULTY_S: Final = 0.5
"""Duration of faulty answers after a failure, in seconds."""


def _on_arrival(server: EngineServer, spoil: Callable[[LiveRequest], None]) -> None:
    """Apply ``spoil`` to each request's KV on D, after its arrival and before it is read."""
    if role(server) != "decode":
        return

    async def kv_arrived(original: Callable[[LiveRequest], Any], live: LiveRequest) -> None:
        spoil(live)
        await original(live)

    wrap(server.engine, "kv_arrived", kv_arrived)


def _flip(server: EngineServer, live: LiveRequest, token: int) -> None:
    index, slot = divmod(token, server.engine.config.block_tokens)
    server.engine.compute.pool.words[0, live.request.blocks[index], slot, 0] ^= np.uint64(1)


def stale_kv(server: EngineServer) -> None:
    turn, words = Turns(3), server.engine.compute.pool.words
    last: list[tuple[Any, Any]] = []

    def spoil(live: LiveRequest) -> None:
        blocks = np.array(live.request.blocks)
        current = words[:, blocks].copy(), live.prompt_hashes
        previous = last[0] if last else current
        if turn() and previous[0].shape == current[0].shape and len(previous[1]) == len(current[1]):
            words[:, blocks] = previous[0]
            live.prompt_hashes = previous[1]
        last[:] = [current]

    _on_arrival(server, spoil)


def corrupt_last_block(server: EngineServer) -> None:
    turn = Turns(2)

    def spoil(live: LiveRequest) -> None:
        if turn():
            _flip(server, live, live.request.prompt_len - 1)

    _on_arrival(server, spoil)


def corrupt_under_load(server: EngineServer) -> None:
    def spoil(live: LiveRequest) -> None:
        if len(server.engine.active) > CROWD:
            _flip(server, live, 0)

    _on_arrival(server, spoil)


def corrupt_after_failure(server: EngineServer) -> None:
    turn = Turns(15)
    failed_s = [0.0]

    def generate(
        original: Callable[..., None], request: http1.ReceivedRequest, response: http1.Response, chat: bool
    ) -> None:
        if turn():
            failed_s[0] = time.monotonic()
            response.send(
                500, error_json(500, "the engine has recovered from a fault", "InternalServerError")
            )
        else:
            original(request, response, chat)

    def spoil(live: LiveRequest) -> None:
        if time.monotonic() < failed_s[0] + FAULTY_S:
            _flip(server, live, 0)

    if role(server) == "decode":
        wrap(server.api, "_generate", generate)
        _on_arrival(server, spoil)


def recompute_silently(server: EngineServer) -> None:
    """D computes the KV and counts it as received; no bytes move, and the answers are right."""
    engine = server.engine
    arrivals = [0]

    def spoil(live: LiveRequest) -> None:
        arrivals[0] += 1
        if arrivals[0] > QUIET:
            engine.compute.pool.write(live.request.blocks, 0, live.prompt_hashes)

    async def move(original: Callable[..., Any], *arguments: Any) -> Any:
        if arrivals[0] < QUIET:
            return await original(*arguments)
        return {"bytes": 0, "descriptors": 0, "seconds": 0.0}

    if server.transfers is not None:
        wrap(server.transfers, "move", move)
    _on_arrival(server, spoil)


def last_chunk_only(server: EngineServer) -> None:
    """Count only a prompt's last chunk in the transfer metrics."""
    config = server.engine.config
    of_block = server.engine.compute.pool.token_bytes * config.block_tokens

    def observe(original: Callable[..., None], seconds: float, nbytes: int, descriptors: int) -> None:
        tokens = nbytes // of_block * config.block_tokens
        chunk = config.max_num_batched_tokens
        rest = tokens % chunk or min(tokens, chunk)
        original(seconds, nbytes * rest // max(1, tokens), descriptors)

    wrap(server.metrics.transfer, "observe", observe)


ANSWER_PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "stale_kv": stale_kv,
    "corrupt_last_block": corrupt_last_block,
    "corrupt_under_load": corrupt_under_load,
    "corrupt_after_failure": corrupt_after_failure,
    "recompute_silently": recompute_silently,
    "last_chunk_only": last_chunk_only,
}
