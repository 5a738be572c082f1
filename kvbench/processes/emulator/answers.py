"""Responses of the OpenAI API: turn a request's tokens into JSON or server-sent events."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any, Final

from kvbench.processes.emulator.protocol import Generate
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.http1 import Response

_MARK: Final = "\u0000text\u0000"


def error_json(status: int, message: str, kind: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


def _call(name: str, arguments: str, public_id: str) -> dict[str, Any]:
    """A tool call; ``arguments`` may be its first piece only."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{public_id}", "type": "function", "function": function}


@dataclass(eq=False)
class ApiAnswer:
    """Base of both kinds of response. ``live`` is set once the request is submitted. ``reasoning``: number of
    a chat's tokens that are reasoning, before its text or tool call."""

    response: Response
    wanted: Generate
    public_id: str
    model: str
    reasoning: int = 0

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.reasoning = self.reasoning if self.wanted.chat else 0
        self.live: LiveRequest | None = None

    def on_error(self, status: int, message: str) -> None:
        """Send a plain error before the first token; later an error event, then break off the stream."""
        if self.response.closed:
            return
        body = error_json(status, message, "InternalServerError")
        if self.response.started:
            self.response.write(b"data: " + body + b"\n\n")
            self.response.end()
        else:
            self.response.send(status, body)

    def usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self.wanted.prompt)
        cached = self.live.request.cached_tokens + self.live.request.external_tokens if self.live else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def prompt_ids(self) -> list[int] | None:
        if not self.wanted.return_token_ids:
            return None
        ids: list[int] = self.wanted.prompt.tolist()
        return ids


class WholeAnswer(ApiAnswer):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokens: list[int] = []

    def on_token(self, token: int, finish_reason: str | None) -> None:
        self._tokens.append(token)
        if finish_reason is None or self.response.closed:
            return
        reasoning, content = (
            "".join(f" t{item}" for item in part if item)
            for part in (self._tokens[: self.reasoning], self._tokens[self.reasoning :])
        )
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }
        if self.wanted.chat:
            message: dict[str, Any] = {"role": "assistant", "content": content}
            if self.wanted.tool:
                message |= {"content": None, "tool_calls": [_call(self.wanted.tool, content, self.public_id)]}
            choice["message"] = message | ({"reasoning": reasoning} if reasoning else {})
        else:
            choice["text"] = content
        document: dict[str, Any] = {
            "id": self.public_id,
            "object": "chat.completion" if self.wanted.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": self.usage(len(self._tokens)),
        }
        if self.wanted.return_token_ids:
            choice["token_ids"] = self._tokens
            (document if self.wanted.chat else choice)["prompt_token_ids"] = self.prompt_ids()
        if self.live is not None and self.live.hand_off_params is not None:
            document["kv_transfer_params"] = self.live.hand_off_params
        self.response.send(200, json.dumps(document).encode())


class StreamAnswer(ApiAnswer):
    """Server-sent events, one per token. The stream begins with the first token, so a failed hand-off before
    it gets an error status."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.count = 0
        self.plain = not (self.wanted.continuous_usage or self.wanted.return_token_ids)
        head, _, tail = json.dumps(self._event(self._content(_MARK), None)).partition(json.dumps(_MARK)[1:-1])
        self._head = f"data: {head}".encode()
        self._tail = f"{tail}\n\n".encode()

    def on_token(self, token: int, finish_reason: str | None) -> None:
        response = self.response
        if response.closed:
            return
        self.count += 1
        if not response.started:
            response.start_stream("text/event-stream; charset=utf-8")
            if self.wanted.chat:
                self._write(self._event({"delta": {"role": "assistant", "content": ""}}, None))
        if finish_reason is None and self.plain and self.count > self.reasoning and not self.wanted.tool:
            response.write(b"%b t%d%b" % (self._head, token, self._tail))
            return
        self._write(self._token_event(token, finish_reason))
        if finish_reason is not None:
            self._last()

    def _token_event(self, token: int, finish_reason: str | None) -> dict[str, Any]:
        event = self._event(self._content(f" t{token}" if token else "", self.count), finish_reason)
        choice = event["choices"][0]
        if self.wanted.return_token_ids:
            choice["token_ids"] = [token]
            if self.count == 1:
                (event if self.wanted.chat else choice)["prompt_token_ids"] = self.prompt_ids()
        if self.wanted.continuous_usage:
            event["usage"] = self.usage(self.count)
        return event

    def _last(self) -> None:
        if self.wanted.include_usage:
            event = self._event({}, None)
            self._write({**event, "choices": [], "usage": self.usage(self.count)})
        self.response.write(b"data: [DONE]\n\n")
        self.response.end()

    def _content(self, text: str, number: int | None = None) -> dict[str, Any]:
        """Put a token's text into the API's field. ``number``: the token's index."""
        if not self.wanted.chat:
            return {"text": text}
        if number is not None and number <= self.reasoning:
            return {"delta": {"reasoning": text}}
        if not self.wanted.tool:
            return {"delta": {"content": text}}
        # As in vLLM, the name comes once; later pieces have arguments only.
        first = number == self.reasoning + 1
        call = _call(self.wanted.tool, text, self.public_id) if first else {"function": {"arguments": text}}
        return {"delta": {"tool_calls": [{"index": 0, **call}]}}

    def _event(self, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, **content}
        choice.update(logprobs=None, finish_reason=finish_reason, stop_reason=None)
        return {
            "id": self.public_id,
            "object": "chat.completion.chunk" if self.wanted.chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def _write(self, event: dict[str, Any]) -> None:
        self.response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
