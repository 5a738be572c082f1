"""TPOT is of the tokens that came between the first text and the last, whatever events bundle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.metrics.untimed_tokens import StreamShape, untimed_tokens
from kvbench.core.records import RequestRecord

TOKEN_S = 0.005


def tpot_ms(tokens: int, gaps_s: list[float], shape: StreamShape) -> float:
    untimed = untimed_tokens(tokens, gaps_s, shape)
    record = RequestRecord("r", 0.0, 8, tokens, 0.0, 0.1, 0.1 + sum(gaps_s), tokens, untimed_tokens=untimed)
    return 1e3 * record.tpot_s


@given(tokens=st.integers(2, 500), gap_s=st.floats(2e-4, 1.0), empty=st.integers(0, 3))
def test_one_token_an_event_is_divided_as_ever(tokens: int, gap_s: float, empty: int) -> None:
    shape = StreamShape(first_text=9, text=40 * tokens, empty=empty, outside=empty)
    assert untimed_tokens(tokens, [gap_s] * (tokens - 1), shape) == 1.0


@given(bundle=st.integers(2, 16), bundles=st.integers(2, 20), known=st.booleans())
def test_bundles_of_equal_size_take_their_true_time(bundle: int, bundles: int, known: bool) -> None:
    shape = StreamShape(5 * bundle, 5 * bundle * bundles) if known else StreamShape()
    found = tpot_ms(bundle * bundles, [bundle * TOKEN_S] * (bundles - 1), shape)
    assert found == pytest.approx(1e3 * TOKEN_S)


def test_a_first_token_of_its_own_before_bundles_counts_once() -> None:
    """As vLLM does with a stream interval, and with speculation."""
    shape = StreamShape(first_text=5, text=5 * 65)
    assert tpot_ms(65, [8 * TOKEN_S] * 8, shape) == pytest.approx(1e3 * TOKEN_S)


@pytest.mark.parametrize("prompt_bytes", [0, 40_000])
def test_a_prompt_repeated_in_the_first_event_is_no_token_of_the_answer(prompt_bytes: int) -> None:
    """Else 63 of 64 tokens would have come with it, and three bundles of 16 taken 80 ms a token."""
    shape = StreamShape(first_text=112 + prompt_bytes, text=448 + prompt_bytes)
    assert untimed_tokens(64, [0.08] * 3, shape) == pytest.approx(16)


def test_what_the_first_usage_tells_is_believed_if_it_can_be() -> None:
    for first_tokens in (1, 16, 61):  # each later event has one at least
        assert untimed_tokens(64, [0.08] * 3, StreamShape(first_tokens=first_tokens)) == first_tokens
    assert (
        untimed_tokens(64, [0.08] * 3, StreamShape(64, 256, first_tokens=64)) == 16
    )  # of all tokens, in each event


def test_events_that_were_flushed_together_are_one() -> None:
    gaps = ([1e-6] * 15 + [16 * TOKEN_S]) * 3 + [1e-6] * 15
    assert tpot_ms(64, gaps, StreamShape()) == pytest.approx(1e3 * TOKEN_S, rel=1e-3)
    assert untimed_tokens(32, [1e-6, 8 * TOKEN_S] * 3 + [1e-6], StreamShape()) == 8


def test_an_answer_in_one_instant_has_no_time_per_token() -> None:
    untimed = untimed_tokens(64, [1e-6] * 63, StreamShape())
    assert RequestRecord("r", 0.0, 8, 64, 0.0, 0.1, 0.1, 64, untimed_tokens=untimed).tpot_s is None


def test_ends_of_sequence_without_text_are_no_part_of_the_text_s_time() -> None:
    """20 of 64 tokens have text; the others came as events without, after it."""
    shape = StreamShape(5, 100, empty=44, outside=44)
    assert tpot_ms(64, [TOKEN_S] * 19, shape) == pytest.approx(1e3 * TOKEN_S)
    assert untimed_tokens(36, [8 * TOKEN_S] * 3, StreamShape(40, 160, empty=4, outside=4)) == 8 + 4
    assert untimed_tokens(20, [TOKEN_S] * 14, StreamShape(empty=5)) == 1  # within the text


@given(
    tokens=st.integers(1, 300), gaps=st.lists(st.floats(0, 1), max_size=300), first=st.integers(0, 50),
    text=st.integers(0, 900), first_tokens=st.none() | st.integers(0, 400), empty=st.integers(0, 400),
    outside=st.integers(0, 400),
)  # fmt: skip
def test_it_is_never_beyond_the_answer(
    tokens: int, gaps: list[float], first: int, text: int, first_tokens: int | None, empty: int, outside: int
) -> None:
    shape = StreamShape(min(first, text), text, first_tokens, empty, min(empty, outside))
    assert 1.0 <= untimed_tokens(tokens, gaps, shape) <= max(1, tokens)
