"""Parser of OpenAI API requests (into a ``Generate`` or an ``ApiError``), and a tokenizer. Tokens are
reversible for the engine's own text and deterministic for other text. Token 1234 is `` t1234``; such a word
becomes that token again. Any other word with the space before it becomes one token by its CRC-32."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pydantic_core import from_json

from kvbench.core.simulation.kv_cache import U64

_WORDS: Final = re.compile(r"\s*\S+|\s+$")
_TOKEN: Final = re.compile(r" ?t(\d{1,9})")


def encode(text: str, vocab_size: int) -> list[int]:
    """Return the token ids of a text, in 1 … vocab_size − 1; an empty text has none."""
    return [_word_token(word, vocab_size) for word in _WORDS.findall(text)]


def _word_token(word: str, vocab_size: int) -> int:
    match = _TOKEN.fullmatch(word)
    if match is not None and 0 < int(match[1]) < vocab_size:
        return int(match[1])
    return 1 + zlib.crc32(word.encode("utf-8", "surrogatepass")) % (vocab_size - 1)


def decode(tokens: Iterable[int]) -> str:
    """Return the text of tokens; the end-of-sequence token (0) has none."""
    return "".join(f" t{token}" for token in tokens if token)


DEFAULT_COMPLETION_TOKENS: Final = 16  # OpenAI's default for /v1/completions
UNSERVED: Final = (
    "best_of",
    "n",
    "echo",
    "suffix",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "stop",
    "stop_token_ids",
    "functions",
    "logit_bias",
    "bad_words",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "use_beam_search",
    "truncate_prompt_tokens",
    "prompt_embeds",
)
"""Fields that a model without a distribution cannot serve as vLLM does. Sampling parameters are accepted and
ignored."""
_MISSING: Final = object()


class ApiError(Exception):
    """An error response: HTTP status, message, OpenAI's error type."""

    def __init__(self, status: int, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or ("BadRequestError" if status == 400 else "InternalServerError")


@dataclass(frozen=True)
class Generate:
    """One generation request. ``max_tokens`` is None if the body leaves it to the server."""

    chat: bool
    prompt: U64
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    cache_salt: str
    tool: str
    """Function to call; the answer is its arguments (a named ``tool_choice``); empty: the answer is text."""
    kv_transfer_params: Mapping[str, Any] | None
    """None if the body has none; an empty mapping if it has a null."""


def parse(body: bytes, chat: bool, model_name: str, vocab_size: int) -> Generate:
    """Parse the body of /v1/completions or /v1/chat/completions. Raises ApiError."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object")
    model = data.get("model")
    if model is not None and model != model_name:
        raise ApiError(404, f"The model `{model}` does not exist; there is `{model_name}`", "NotFoundError")
    _refuse_unserved(data, chat)
    ids = _chat_prompt(data, vocab_size) if chat else _completion_prompt(data, vocab_size)
    if len(ids) == 0:
        raise ApiError(400, "the prompt must not be empty")
    max_tokens = _integer(data, "max_tokens", 1, None)
    if chat:
        max_tokens = _integer(data, "max_completion_tokens", 1, max_tokens)
    elif max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    min_tokens = _integer(data, "min_tokens", 0, 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise ApiError(400, f"min_tokens {min_tokens} must not exceed max_tokens {max_tokens}")
    stream = _flag(data, "stream")
    options = _mapping(data, "stream_options") or {}
    if options and not stream:
        raise ApiError(400, "stream_options needs stream")
    _number(data, "temperature")
    return Generate(
        chat=chat,
        prompt=ids,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_flag(data, "ignore_eos"),
        stream=stream,
        include_usage=_flag(options, "include_usage"),
        continuous_usage=_flag(options, "continuous_usage_stats"),
        return_token_ids=_flag(data, "return_token_ids"),
        cache_salt=_string(data, "cache_salt"),
        tool=_named_tool(data) if chat else "",
        kv_transfer_params=_mapping(data, "kv_transfer_params") or {}
        if "kv_transfer_params" in data
        else None,
    )


def _refuse_unserved(data: Mapping[str, Any], chat: bool) -> None:
    """Raise ApiError for a field that would be ignored; values without effect are allowed."""
    for key in UNSERVED if chat else (*UNSERVED, "tools"):
        value = data.get(key)
        nothing = value is None or value is False or value in ("", [], {}, {"type": "text"})
        alone = key in ("n", "best_of") and value == 1
        if not (nothing or alone or (key == "top_logprobs" and value == 0)):
            raise ApiError(400, f"the emulated engine has no {key}, and would ignore it: leave it out")


def _named_tool(data: Mapping[str, Any]) -> str:
    """Return the tool that a chat must call. Raises ApiError for optional tools: no model decides."""
    tools: Any = data.get("tools")
    choice: Any = data.get("tool_choice")
    if not tools or choice == "none":
        return ""
    try:
        name = choice["function"]["name"]
        known = [tool["function"]["name"] for tool in tools]
    except (LookupError, TypeError):
        raise ApiError(
            400, "the emulated engine cannot choose a tool: name one in tool_choice, or leave tools out"
        ) from None
    if name not in known:
        raise ApiError(400, f"tool_choice names {name!r}, which is not among the tools")
    return str(name)


def _completion_prompt(data: Mapping[str, Any], vocab_size: int) -> U64:
    prompt = data.get("prompt", _MISSING)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return np.array(encode(prompt, vocab_size), dtype=np.uint64)
    if not isinstance(prompt, list):
        raise ApiError(400, "prompt must be a string, a list of token ids, or a list with one of these")
    if prompt and isinstance(prompt[0], (str, list)):
        raise ApiError(400, "one prompt per request")
    if set(map(type, prompt)) - {int}:
        raise ApiError(400, "prompt must hold token ids (integers)")
    if prompt and (min(prompt) < 0 or max(prompt) >= vocab_size):
        raise ApiError(400, f"a token id of the prompt is out of vocabulary (0 to {vocab_size - 1})")
    return np.array(prompt, dtype=np.uint64)


def _chat_prompt(data: Mapping[str, Any], vocab_size: int) -> U64:
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages must be a list with at least one message")
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, "each message needs a role")
        parts.append(f"<|{message['role']}|> {_content(message.get('content'))}")
    parts.append("<|assistant|>")
    return np.array(encode("\n".join(parts), vocab_size), dtype=np.uint64)


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        strings = [item for item in texts if isinstance(item, str)]
        if len(strings) == len(content):
            return " ".join(strings)
    raise ApiError(400, "a message's content must be a string or a list of text parts")


def _integer(data: Mapping[str, Any], key: str, least: int, default: int | None) -> int | None:
    value = data.get(key)
    if value is None:
        return default
    if type(value) is not int or value < least:
        raise ApiError(400, f"{key} must be an integer of at least {least}, not {value!r}")
    return value


def _flag(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ApiError(400, f"{key} must be true or false, not {value!r}")
    return value


def _number(data: Mapping[str, Any], key: str) -> None:
    value = data.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0):
        raise ApiError(400, f"{key} must be a number of at least 0, not {value!r}")


def _string(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if value is not None and not isinstance(value, str):
        raise ApiError(400, f"{key} must be a string, not {value!r}")
    return value or ""


def _mapping(data: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = data.get(key)
    if value is not None and not isinstance(value, dict):
        raise ApiError(400, f"{key} must be an object, not {value!r}")
    return value
