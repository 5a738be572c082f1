"""Token ids of answers, as servers send them beside the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.connectors.base import one_token_prefill
from kvbench.processes.loadgen.stream import MAX_EVENT_BYTES, StreamReader, without_prompt_ids


def event(ids: list[int] | None, **more: object) -> bytes:
    choice = {"index": 0, "text": " a", "token_ids": ids, **more}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@given(st.lists(st.lists(st.integers(0, 2**31 - 2), max_size=4), min_size=1, max_size=5), st.data())
def test_ids_are_kept_however_the_reads_are_cut(answer: list[list[int]], data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, 9), max_size=30))
    body = event(answer[0], prompt_token_ids=prompt) + b"".join(map(event, answer[1:])) + b"data: [DONE]\n\n"
    reader, cuts = (
        StreamReader(token_ids=[]),
        sorted(data.draw(st.sets(st.integers(1, len(body)), max_size=6))),
    )
    for begin, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        reader.feed(body[begin:end], 1)
    reader.finish()
    assert reader.token_ids == [each for ids in answer for each in ids]
    assert (reader.error, reader.done, len(reader.token_stamps)) == ("", True, len(answer))


@pytest.mark.parametrize("ids", [None, "12", [1.5], [True], [-1], [2**40], {"a": 1}])
def test_what_is_no_list_of_ids_gives_none(ids: object) -> None:
    reader = StreamReader(token_ids=[])
    reader.feed(event(ids), 1)  # type: ignore[arg-type]
    assert (reader.token_ids, reader.error, len(reader.token_stamps)) == ([], "", 1)


def test_a_prompt_that_is_sent_back_is_not_decoded() -> None:
    prompt = list(range(200_000))
    first = event([5], prompt_token_ids=prompt)
    assert len(first) > MAX_EVENT_BYTES
    assert json.loads(without_prompt_ids(first[6:]))["choices"][0] == {
        "index": 0, "text": " a", "token_ids": [5], "prompt_token_ids": None,
    }  # fmt: skip
    reader = StreamReader(token_ids=[], event_bytes=MAX_EVENT_BYTES + 12 * len(prompt))
    for begin in range(0, len(first), 65_536):
        reader.feed(first[begin : begin + 65_536], 1)
    assert (reader.token_ids, reader.error) == ([5], "")
    for text in (
        b"{}",
        b'{"prompt_token_ids": null}',
        b'{"prompt_token_ids": [1',
        b'{"a":"prompt_token_ids"}',
    ):
        assert without_prompt_ids(text) == text


def test_p_is_not_asked_for_ids() -> None:
    asked = one_token_prefill({"prompt": [1], "return_token_ids": True, "stream_options": {}})
    assert "return_token_ids" not in asked
