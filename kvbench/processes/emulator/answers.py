"""Answers of the OpenAI API: where a request's tokens become JSON or server-sent events."""

from __future__ import annotations

import json
import time
from typing import Any, Final

from kvbench.processes.emulator.protocol import Generate
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.processes.http1 import Response

_MARK: Final = "\u0000text\u0000"


def error_json(status: int, message: str, kind: str) -> bytes:
    """An error as vLLM and OpenAI write it."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": status}}).encode()


class ApiAnswer:
    """What both kinds of answers know. ``live`` is set once the request is submitted."""

    def __init__(self, response: Response, wanted: Generate, public_id: str, model: str) -> None:
        self.response = response
        self.wanted = wanted
        self.public_id = public_id
        self.model = model
        self.created = int(time.time())
        self.live: LiveRequest | None = None

    def on_error(self, status: int, message: str) -> None:
        """Before the first token a plain error; after it, an error event, and the stream breaks off."""
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
    """One JSON document when the last token is there."""

    def __init__(self, response: Response, wanted: Generate, public_id: str, model: str) -> None:
        super().__init__(response, wanted, public_id, model)
        self._tokens: list[int] = []

    def on_token(self, token: int, finish_reason: str | None) -> None:
        self._tokens.append(token)
        if finish_reason is None or self.response.closed:
            return
        content = "".join(f" t{item}" for item in self._tokens if item)
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": None,
        }
        if self.wanted.chat:
            choice["message"] = {"role": "assistant", "content": content}
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
    """Server-sent events, one for each token. The stream begins with the first token, so that a hand-off
    that fails before it is answered with an error status."""

    def __init__(self, response: Response, wanted: Generate, public_id: str, model: str) -> None:
        super().__init__(response, wanted, public_id, model)
        self.count = 0
        self.plain = not (wanted.continuous_usage or wanted.return_token_ids)
        head, _, tail = json.dumps(self._event({"text": _MARK}, None)).partition(json.dumps(_MARK)[1:-1])
        self._head = f"data: {head}".encode()
        self._tail = f"{tail}\n\n".encode()

    def on_token(self, token: int, finish_reason: str | None) -> None:
        response = self.response
        if response.closed:
            return
        self.count += 1
        if not response.started:
            response.start_stream(200, "text/event-stream; charset=utf-8")
            if self.wanted.chat:
                self._write(self._event({"role": "assistant"}, None))
        if finish_reason is None and self.plain:
            response.write(b"%b t%d%b" % (self._head, token, self._tail))
            return
        self._write(self._token_event(token, finish_reason))
        if finish_reason is not None:
            self._last()

    def _token_event(self, token: int, finish_reason: str | None) -> dict[str, Any]:
        event = self._event({"text": f" t{token}" if token else ""}, finish_reason)
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
            event = self._event({"text": ""}, None)
            self._write({**event, "choices": [], "usage": self.usage(self.count)})
        self.response.write(b"data: [DONE]\n\n")
        self.response.end()

    def _event(self, content: dict[str, str], finish_reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0}
        if not self.wanted.chat:
            choice.update(content)
        elif "role" in content:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["delta"] = {"content": content["text"]}
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
