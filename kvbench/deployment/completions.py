"""Single completions of a server: what is asked, and what an answer tells of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvbench.core.records import TokenChoice

TOLD: Final = 5
"""Likeliest tokens that are asked for in each place; vLLM tells 20 at most."""
REFUSALS: Final = frozenset({400, 404, 422, 501})
"""What a server answers that does not know, or does not offer, log-probabilities."""


@dataclass(frozen=True)
class Completion:
    """``choices``: its tokens with the likeliest others; () where the server does not tell."""

    text: str
    choices: tuple[TokenChoice, ...] = ()


def greedy_body(
    model: str, prompt: Mapping[str, Any], max_tokens: int, *, scored: bool = False
) -> dict[str, Any]:
    """A request for just so many tokens. ``prompt``: the field that it stands in. ``scored``: with
    log-probabilities, which completions alone are asked for.
    """
    body = {
        "model": model,
        **prompt,
        "max_tokens": max_tokens,
        "min_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return {**body, "logprobs": TOLD} if scored else body


def completion_of(answer: Mapping[str, Any]) -> Completion:
    """An answer's text and tokens. Raises LookupError or TypeError if it is no completion."""
    choice = answer["choices"][0]
    if "text" in choice:
        return Completion(str(choice["text"]), _choices(choice))
    message = choice["message"]
    reasoning = message.get("reasoning")
    # As in streams: vLLM up to 0.13 has another name for it.
    said = [
        reasoning if isinstance(reasoning, str) else message.get("reasoning_content"),
        message.get("content"),
    ]
    return Completion("".join(text for text in said if isinstance(text, str)))


def prompt_tokens_of(answer: Mapping[str, Any]) -> int:
    """The prompt's length as the server counted it. Raises LookupError or TypeError if it does not tell."""
    return int(answer["usage"]["prompt_tokens"])


def _choices(choice: Mapping[str, Any]) -> tuple[TokenChoice, ...]:
    """The tokens that make up the beginning of the text: a piece of a character is told otherwise than
    written.
    """
    told: Any = choice.get("logprobs")
    found: list[TokenChoice] = []
    before = ""
    try:
        rows = zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True)
        for token, own, top in rows:
            before += token
            if not choice["text"].startswith(before):
                break
            others = {str(name): float(value) for name, value in (top or {}).items()}
            found.append(TokenChoice(token, {**others, token: float(own)}))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()
    return tuple(found)
