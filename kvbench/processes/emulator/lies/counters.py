"""Lies about answers and counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.processes import http1
from kvbench.processes.emulator.answers import ApiAnswer, error_json
from kvbench.processes.emulator.lies.wrapping import Turns, role, wrap
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


class _Nobody:
    """Where the tokens of a secret request go."""

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
        original(LiveRequest(again, live.prompt_hashes ^ np.uint64(1), _Nobody(), ignore_eos=True))

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
    if role(server) == "decode":  # it sheds where requests come in
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


PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "early_eos": early_eos,
    "wrong_usage": wrong_usage,
    "hidden_retry": hidden_retry,
    "lost_requests": lost_requests,
    "restart": restart,
    "shedding": shedding,
}
