"""Lies in the stream of tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final

from kvbench.processes import http1
from kvbench.processes.emulator.answers import StreamAnswer
from kvbench.processes.emulator.lies.wrapping import Turns, role, wrap
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.emulator.server import EngineServer

MERGED: Final = 4
HELD_S: Final = 0.6


def _in_streams(server: EngineServer, spoil: Callable[[StreamAnswer], None]) -> None:
    """Puts a lie into each stream of whoever answers clients, but the first ones."""
    turn = Turns(1)

    def submit(original: Callable[[LiveRequest], None], live: LiveRequest) -> None:
        if isinstance(live.sink, StreamAnswer) and turn():
            spoil(live.sink)
        original(live)

    if role(server) != "prefill":
        wrap(server.engine, "submit", submit)


def cut_prompt(server: EngineServer) -> None:
    def halved(usage: Callable[[int], dict[str, Any]], tokens: int) -> dict[str, Any]:
        honest = usage(tokens)
        return {**honest, "prompt_tokens": honest["prompt_tokens"] // 2}

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
    """A response whose stream waits for its end."""

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
        setattr(answer, "response", _Buffered(answer.response))  # noqa: B010 - it is no response

    _in_streams(server, hold)


def canned_answers(server: EngineServer) -> None:
    def can(answer: StreamAnswer) -> None:
        def on_token(original: Callable[[int, str | None], None], token: int, reason: str | None) -> None:
            original(1 + answer.count, reason)

        wrap(answer, "on_token", on_token)

    _in_streams(server, can)


def _sent_ahead(text: str) -> Callable[[EngineServer], None]:
    """An event at once, and the answer after a while."""

    def plant(server: EngineServer) -> None:
        def ahead(answer: StreamAnswer) -> None:
            answer.response.start_stream(200, "text/event-stream; charset=utf-8")
            event = json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": None}]})
            answer.response.write(f"data: {event}\n\n".encode())

        _held(server, 1)
        _in_streams(server, ahead)

    return plant


def _held(server: EngineServer, every: int) -> None:
    """Each so-manyth request waits before it is served."""
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
    _held(server, 2)


def empty_text(server: EngineServer) -> None:
    def empty(answer: StreamAnswer) -> None:
        answer.plain = False
        wrap(answer, "_event", lambda event, content, reason: event({**content, "text": ""}, reason))

    _in_streams(server, empty)


PLANTS: Final[dict[str, Callable[[EngineServer], None]]] = {
    "cut_prompt": cut_prompt,
    "merged_tokens": merged_tokens,
    "answer_at_once": answer_at_once,
    "canned_answers": canned_answers,
    "empty_first": _sent_ahead(""),
    "blank_first": _sent_ahead(" "),
    "empty_text": empty_text,
    "slow_turns": slow_turns,
}
