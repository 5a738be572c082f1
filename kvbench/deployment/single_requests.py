"""Single requests besides the load: greedy completions, their tokens, and chat lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

import httpx

from kvbench.core.foreign_text import visible
from kvbench.core.load.dispatch import CHATS, COMPLETIONS
from kvbench.core.load.prompts import ChatLength, messages
from kvbench.core.records import TokenChoice, abort_text
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.liveness import beside
from kvbench.errors import ServerError
from kvbench.hosts import web
from kvbench.hosts.server_access import redact, variables
from kvbench.hosts.web import failure_hint, status_hint, status_text

LOGPROBS: Final = 5
"""Log-probabilities per position; vLLM's limit is 20."""
REFUSALS: Final = frozenset({400, 404, 422, 501})
"""Status codes of servers without log-probabilities."""


@dataclass(frozen=True)
class Completion:
    """``choices``: tokens with the likeliest alternatives; () if not reported."""

    text: str
    choices: tuple[TokenChoice, ...] = ()


def greedy_body(
    model: str, prompt: Mapping[str, Any], max_tokens: int, *, scored: bool = False
) -> dict[str, Any]:
    """Body of a request for exactly these tokens. ``scored``: with log-probabilities (completions)."""
    body = {
        "model": model,
        **prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return {**body, "logprobs": LOGPROBS} if scored else body


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """Text and tokens of a response. Raises LookupError or TypeError for an invalid one."""
    choice = answer["choices"][0]
    if "text" in choice:
        return Completion(str(choice["text"]), _choices(choice))
    message = choice["message"]
    reasoning = message.get("reasoning")
    # As in streams: vLLM up to 0.13 has another name for it.
    parts = [
        reasoning if isinstance(reasoning, str) else message.get("reasoning_content"),
        message.get("content"),
    ]
    return Completion("".join(text for text in parts if isinstance(text, str)))


def prompt_tokens_of(answer: Mapping[str, Any]) -> int:
    """Prompt tokens counted by the server. Raises LookupError or TypeError if missing."""
    return int(answer["usage"]["prompt_tokens"])


def _choices(choice: Mapping[str, Any]) -> tuple[TokenChoice, ...]:
    """Tokens that form the text's beginning; partial characters are reported differently than written."""
    logprobs: Any = choice.get("logprobs")
    found: list[TokenChoice] = []
    before = ""
    try:
        rows = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
        for token, logprob, top in rows:
            before += token
            if not choice["text"].startswith(before):
                break
            others = {str(name): float(value) for name, value in (top or {}).items()}
            found.append(TokenChoice(token, {**others, token: float(logprob)}))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()
    return tuple(found)


PROBE_WORDS: Final = (64, 320)
"""Words of the two messages that measure chat tokens; fewer for shorter workloads."""
COMPILE_S: Final = 180.0
"""Seconds for compiling vLLM's log-probability kernel on first use (``torch.compile`` in
``v1/sample/ops/logprobs.py``, also with ``--enforce-eager``), perhaps longer than a request's timeout."""
GATEWAY_TIMEOUT: Final = 504
STREAMED: Final = {"stream": True, "stream_options": {"include_usage": True}}
"""Further fields of a trial's requests, as the load generator sends them."""


class SingleRequests:
    """Sends requests to ``base_url`` via ``/v1/completions`` or, if configured, chats. ``explained``: cause
    in the logs, and a hint; ``check_alive`` raises for a dead process."""

    def __init__(
        self,
        scenario: Scenario,
        client: httpx.Client,
        base_url: str,
        check_alive: Callable[[], None],
        explained: Callable[[], tuple[str, str]],
    ) -> None:
        self._chats = scenario.load.endpoint == "chat"
        self._url = f"{base_url}{CHATS if self._chats else COMPLETIONS}"
        self._scenario = scenario
        self._client = client
        self._check_alive = check_alive
        self._explained = explained
        self._access = scenario.deployment.engine_options.server.access
        self._length: ChatLength | None = None

    def complete(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, scored: bool = False
    ) -> list[Completion]:
        """Return concurrent greedy completions. Raises ServerError."""
        fields = [self._prompt(prompt) for prompt in prompts]
        return [self._read(answer, completion_of) for answer in self._post(fields, max_tokens, scored)]

    def streamed_s(self, prompt: Sequence[int], max_tokens: int) -> float:
        """Seconds of one streamed answer, as in a trial. Raises ServerError."""
        fields = [{**self._prompt(prompt), **STREAMED}]
        began = time.monotonic()
        (response,) = self._post(fields, max_tokens, scored=False)
        took_s = time.monotonic() - began
        if response.status_code != 200:
            raise self._failed(f"POST {self._url} answered {status_text(response.status_code)} to a stream")
        return took_s

    def chat_length(self) -> ChatLength:
        """Tokens per word of a chat, measured once with two messages. Raises ServerError, InputError."""
        if self._length is None:
            room = min(self._scenario.workload.input_len)  # which fits the server, including the output
            words = max(1, min(PROBE_WORDS[0], room // 8)), max(2, min(PROBE_WORDS[1], room // 2))
            fields = [{"messages": messages(range(count))} for count in words]
            tokens = [self._read(answer, prompt_tokens_of) for answer in self._post(fields, 1, scored=False)]
            if tokens[1] <= tokens[0]:
                raise ServerError(
                    f"POST {self._url} counted {tokens[0]} prompt tokens for {words[0]} words and "
                    f"{tokens[1]} for {words[1]}: its usage does not count the prompt",
                    hint="prompts of a known length need it; use /v1/completions",
                )
            self._length = ChatLength.of(words, (tokens[0], tokens[1]))
        return self._length

    def _prompt(self, prompt: Sequence[int]) -> dict[str, Any]:
        if not self._chats:
            return {"prompt": list(prompt)}
        count = self.chat_length().words(len(prompt))
        return {"messages": messages(islice(cycle(prompt), count))}

    def _post(
        self, fields: Sequence[Mapping[str, Any]], max_tokens: int, scored: bool
    ) -> list[httpx.Response]:
        model, timeout_s = self._scenario.model.served_model_name, self._scenario.request_timeout_s
        scored = scored and not self._chats

        begun = time.monotonic()

        def post(prompt: Mapping[str, Any]) -> httpx.Response:
            plain = greedy_body(model, prompt, max_tokens)
            while scored:
                body = greedy_body(model, prompt, max_tokens, scored=True)
                late = time.monotonic() - begun > COMPILE_S
                try:
                    response = self._client.post(self._url, json=body, timeout=timeout_s)
                except httpx.ReadTimeout:
                    if late:
                        raise
                    continue
                if response.status_code in REFUSALS:
                    break
                if late or response.status_code != GATEWAY_TIMEOUT:
                    return response
            return self._client.post(self._url, json=plain, timeout=timeout_s)

        def post_all() -> list[httpx.Response]:
            with ThreadPoolExecutor(len(fields)) as together:
                return list(together.map(post, fields))

        try:
            return beside(post_all, self._check_alive)
        except httpx.HTTPError as error:
            self._check_alive()
            late = f" (workload.request_timeout_s is {timeout_s:g})" * isinstance(
                error, httpx.TimeoutException
            )
            what = f"POST {self._url} failed: {type(error).__name__} {error}".rstrip()
            raise self._failed(what + late, failure_hint(self._url, error)) from error

    def _read(self, response: httpx.Response, what: Callable[[Any], Any]) -> Any:
        text = redact(visible(response.text[:300]), variables(self._access))
        if response.status_code != 200:
            sent_key = bool(self._access.api_key_env)
            status = response.status_code
            raise self._failed(
                f"POST {self._url} answered {status_text(status)}: {text}", status_hint(status, sent_key)
            )
        try:
            answer = web.json_of(response)
            aborted = abort_text(answer.get("choices"))
            found = what(answer)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            lacks = "no completion" if what is completion_of else "no usage.prompt_tokens"
            raise self._failed(f"POST {self._url} answered {lacks}: {text}") from error
        if aborted:
            raise self._failed(f"POST {self._url}: {aborted}: {text}")
        return found

    def _failed(self, what: str, of_answer: str = "") -> ServerError:
        """Create the error for a failed request, by the logs, else by the response."""
        words, hint = self._explained()
        outside = not self._scenario.deployment.engine_options.starts_processes
        return ServerError(what + words, hint=of_answer if outside and of_answer else hint)
