"""Single completions: what is asked, and what is understood of vLLM's and of others' answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.core.records import TokenChoice
from kvbench.deployment.single_requests import completion_of, greedy_body


def answer(text: str, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, **choice}]}


TOLD = {
    "tokens": [" the", " cat"],
    "token_logprobs": [-0.5, -0.1],
    "top_logprobs": [{" the": -0.5, " a": -0.9}, {" cat": -0.1}],
    "text_offset": [0, 4],
}
"""As vLLM and OpenAI answer ``logprobs`` of /v1/completions."""


def test_log_probabilities_are_asked_for_only_where_they_are_wanted() -> None:
    assert "logprobs" not in greedy_body("m", {"prompt": [1, 2]}, 16)
    assert greedy_body("m", {"prompt": [1, 2]}, 16, scored=True)["logprobs"] == 5


def test_tokens_come_with_their_rivals() -> None:
    found = completion_of(answer(" the cat", logprobs=TOLD))
    assert found.text == " the cat"
    assert found.choices == (
        TokenChoice(" the", {" the": -0.5, " a": -0.9}),
        TokenChoice(" cat", {" cat": -0.1}),
    )


@pytest.mark.parametrize(
    "told", [None, {}, {"tokens": [" the"]}, {"content": []}, "none", {**TOLD, "tokens": 5}]
)
def test_servers_that_tell_no_log_probabilities_are_taken_as_they_are(told: Any) -> None:
    assert completion_of(answer(" the cat", logprobs=told)).choices == ()
    assert completion_of(answer(" the cat")).choices == ()


def test_pieces_of_a_character_end_what_can_be_placed() -> None:
    broken = {**TOLD, "tokens": [" the", "\ufffd"]}
    assert [each.token for each in completion_of(answer(" thé", logprobs=broken)).choices] == []
    assert [each.token for each in completion_of(answer(" the\u20ac", logprobs=broken)).choices] == [" the"]


@pytest.mark.parametrize("wrong", [{}, {"choices": []}, {"choices": [{}]}, {"choices": [None]}, []])
def test_what_is_no_completion_is_an_error(wrong: Any) -> None:
    with pytest.raises((LookupError, TypeError)):
        completion_of(wrong)
