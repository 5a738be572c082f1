"""Reading traces, counting what a prefix cache would find, and making their prompts."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.core.load import traces
from kvbench.core.load.traces import BLOCK_TOKENS, TracedRequest, expected_hits, parse_trace, traced_prompt
from kvbench.errors import InputError

MOONCAKE = """\
{"timestamp": 3000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [1, 9]}

{"timestamp": 3052, "input_length": 512, "output_length": 1, "hash_ids": [1]}
"""

requests = st.lists(
    st.builds(
        TracedRequest, st.floats(0, 1e6), st.integers(1, 4 * BLOCK_TOKENS), st.integers(1, 100),
        st.none() | st.lists(st.integers(0, 3), max_size=4).map(tuple),
    ).map(
        lambda r: TracedRequest(
            r.offset_s, max(r.input_len, BLOCK_TOKENS * (len(r.blocks) - 1) + 1) if r.blocks else r.input_len,
            r.output_len, r.blocks,
        )
    ),
    min_size=1,
    max_size=20,
)  # fmt: skip


def test_a_mooncake_trace_is_read_in_order_of_time() -> None:
    found = parse_trace(MOONCAKE, "t.jsonl")
    assert [request.offset_s for request in found] == pytest.approx([0, 0.052, 24.482])
    assert found[0] == TracedRequest(0.0, 1100, 5, (1, 2, 3))
    assert traces.request_rate(found) == pytest.approx(2 / 24.482)


@pytest.mark.parametrize(
    "text",
    [
        "offset_s,input_len,output_len\n1.5,10,2\n0.5,20,3\n",
        "\ufeffTimestamp, Input_Len ,output_len,note\n1.5,10,2,x\n\n0.5,20,3,y\n",
        '{"timestamp": 1.5, "input_len": 10, "output_len": 2}\n'
        '{"offset_s": 0.5, "input_len": 20, "output_len": 3}',
    ],
)
def test_plain_files_are_read(text: str) -> None:
    assert parse_trace(text, "t") == [TracedRequest(0.0, 20, 3), TracedRequest(1.0, 10, 2)]


def test_all_mistakes_come_with_their_lines() -> None:
    text = (
        '{"timestamp": 0, "input_length": 100, "output_length": 5, "hash_ids": [1, 2]}\n'
        "nonsense\n"
        '{"timestamp": -1, "input_length": 1.5, "output_length": 5, "hash_ids": []}\n'
        '{"timestamp": NaN, "input_length": 1, "output_length": 5}\n'
        '[1]\n{"timestamp": 1, "input_length": 1, "hash_ids": "x"}\n'
    )
    with pytest.raises(InputError) as caught:
        parse_trace(text, "my.jsonl")
    lines = caught.value.message.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"my.jsonl:{n}" for n in (1, 2, 3, 3, 4, 5, 6, 6)]
    assert "2 hash_ids cover more than its 100 prompt tokens" in lines[0]
    assert "lacks output_len or output_length" in lines[6]
    assert "hash_ids" in (caught.value.hint or "")


@pytest.mark.parametrize(("text", "message"), [
    ("", "t:1: the file has no request"),
    ("a,b\n1,2\n", "t:1: the header lacks offset_s, input_len, output_len; it has: a, b"),
    ("offset_s,input_len,output_len\n1,2\n", "t:2: has 2 columns where the header has 3"),
    ("offset_s,input_len,output_len\n1,0,x\n", "t:2: input_len must be a whole number from 1"),
    ("offset_s,input_len,input_len,output_len\n1,1,1,1\n", "t:1: the header names 'input_len' twice"),
])  # fmt: skip
def test_what_is_no_trace_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_trace(text, "t")
    assert message in caught.value.message


def test_many_mistakes_are_counted() -> None:
    with pytest.raises(InputError, match="and 80 more mistakes"):
        parse_trace("{\n" * 100, "t")


@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda raw: raw.decode("utf-8", "replace")))
def test_any_text_is_read_or_refused_clearly(text: str) -> None:
    refused = ""
    found: list[TracedRequest] = []
    try:
        found = parse_trace(text, "t")
    except InputError as error:
        refused = error.message
    assert found or refused.startswith("t:")


@given(requests)
# Apart in milliseconds, and no longer so in seconds: by rounding to 0, and to the nearest number.
@example([TracedRequest(5e-324, 1, 1), TracedRequest(0.0, 2, 1)])
@example([TracedRequest(math.nextafter(7.9, 9), 1, 1), TracedRequest(7.9, 2, 1)])
def test_what_is_written_as_mooncake_is_read_back(wanted: list[TracedRequest]) -> None:
    lines = [
        json.dumps(
            {
                "timestamp": request.offset_s,
                "input_length": request.input_len,
                "output_length": request.output_len,
                "hash_ids": request.blocks,
            }
        )
        for request in wanted
    ]
    read = parse_trace("\n".join(lines), "t", "mooncake")
    key = [(r.input_len, r.output_len, r.blocks) for r in sorted(wanted, key=lambda r: r.offset_s)]
    assert ([(r.input_len, r.output_len, r.blocks) for r in read], read[0].offset_s) == (key, 0)
    assert all(a.offset_s <= b.offset_s for a, b in pairwise(read))


def test_gaps_of_milliseconds_since_1970_keep_their_digits() -> None:
    row = {"input_length": 1, "output_length": 1}
    rows = [json.dumps({"timestamp": 1_732_300_000_000 + gap, **row}) for gap in (52, 0, 3000)]
    offsets = [request.offset_s for request in parse_trace("\n".join(rows), "t")]
    assert offsets == pytest.approx([0.0, 0.052, 3.0], rel=1e-12)


def test_times_in_seconds_and_in_milliseconds_may_stand_side_by_side() -> None:
    row = '"input_length": 1, "output_length": 1, "hash_ids": []}'
    text = f'{{"timestamp": 1500, {row}\n{{"offset_s": 1.25, {row}\n{{"timestamp": 1000, {row}'
    assert [request.offset_s for request in parse_trace(text, "t")] == [0.0, 0.25, 0.5]


def test_time_scaling_and_cutting() -> None:
    wanted = [TracedRequest(float(second), 1, 1) for second in range(10)]
    half = traces.scaled(wanted, 0.5, 4)
    assert [request.offset_s for request in half] == [0, 0.5, 1.0, 1.5]
    assert traces.request_rate(half) == pytest.approx(2.0)
    with pytest.raises(InputError, match="more than 0"):
        traces.scaled(wanted, 0.0)


def test_expected_hits_follow_the_prefix() -> None:
    def ask(length: int, *blocks: int) -> TracedRequest:
        return TracedRequest(0.0, length, 1, blocks)

    trace = [
        ask(1100, 1, 2, 3),
        ask(1100, 1, 2, 4),  # two whole blocks
        ask(1100, 5, 2, 3),  # another beginning: nothing
        ask(1100, 1, 2, 3),  # all of it, but one token is always computed
        ask(700, 1, 2),  # ends inside block 2
        ask(512, 1),
    ]
    assert expected_hits(trace) == [0, 1024, 0, 1088, 688, 496]
    # Of a partial last block only what was there is known.
    assert expected_hits([ask(700, 1, 2), ask(1024, 1, 2), ask(1024, 1, 2)], 1) == [0, 700, 1023]
    assert traces.shares_prefixes(trace)
    assert not traces.shares_prefixes([ask(10, 1), ask(10, 2), TracedRequest(0, 5, 1)])


@given(requests, st.integers(0, 2**63 - 1), st.sampled_from([1, 16, 128]))
@settings(max_examples=40, deadline=None)
def test_expected_hits_are_the_prompts_own(trace: list[TracedRequest], seed: int, block_tokens: int) -> None:
    """Against a cache that keeps every prompt and compares tokens."""
    prompts = [
        traced_prompt(request.input_len, request.blocks, seed, index, 50_000)
        for index, request in enumerate(trace)
    ]
    for index, (prompt, hit) in enumerate(zip(prompts, expected_hits(trace, block_tokens), strict=True)):
        common = 0
        for earlier in prompts[:index]:
            same = next(
                (n for n, (a, b) in enumerate(zip(prompt, earlier, strict=False)) if a != b),
                min(len(prompt), len(earlier)),
            )
            common = max(common, same)
        # Fresh tokens may agree by chance, one in 50,000.
        assert 0 <= min(common, len(prompt) - 1) // block_tokens * block_tokens - hit <= block_tokens


@given(
    st.integers(1, 3 * BLOCK_TOKENS), st.none() | st.lists(st.integers(0, 2**63 - 1), max_size=5),
    st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(1, 200_000),
)  # fmt: skip
def test_prompts_have_their_length_and_are_functions_of_the_seed(
    input_len: int, blocks: list[int] | None, seed: int, index: int, vocab_size: int
) -> None:
    prompt = traced_prompt(input_len, blocks, seed, index, vocab_size)
    assert len(prompt) == input_len
    assert all(type(token) is int and 0 <= token < vocab_size for token in prompt)
    assert prompt == traced_prompt(input_len, blocks, seed, index, vocab_size)


def test_equal_blocks_give_equal_tokens_and_another_seed_others() -> None:
    one, two = (traced_prompt(1000, blocks, 7, n, 32_000) for n, blocks in enumerate([(1, 2), (1, 3)]))
    assert one[:512] == two[:512]
    assert one[512:] != two[512:]
    assert one != traced_prompt(1000, (1, 2), 8, 0, 32_000)
    assert traced_prompt(100, None, 7, 0, 32_000) != traced_prompt(100, None, 7, 1, 32_000)


def test_figures() -> None:
    figures = traces.figures([TracedRequest(0.0, 1024, 10, (1, 2)), TracedRequest(2.0, 1024, 30, (1, 3))])
    assert (figures.requests, figures.duration_s, figures.request_rate) == (2, 2.0, 0.5)
    assert (figures.mean_input_len, figures.mean_output_len, figures.longest, figures.longest_output) == (
        1024, 20, 1054, 30,
    )  # fmt: skip
    assert figures.hit_rate == pytest.approx(0.25)
    assert math.isinf(traces.request_rate([TracedRequest(0.0, 1, 1)] * 2))
