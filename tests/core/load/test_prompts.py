"""Prompts: exact length, ids in range, nothing that a prefix cache could reuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.load.prompts import PromptShape, lowest_id, token_prompts
from kvbench.errors import InputError

seeds = st.integers(0, 2**64)


@given(st.integers(0, 60), st.integers(4, 80), st.integers(8, 200_000), seeds)
def test_length_range_and_distinct_beginnings(n: int, length: int, vocab: int, seed: int) -> None:
    prompts = token_prompts(n, PromptShape(length, vocab), seed)
    assert prompts.shape == (n, length)
    if n:
        assert prompts.min() >= lowest_id(vocab)
        assert prompts.max() < vocab
    assert len({tuple(row[:4]) for row in prompts.tolist()}) == n
    if n <= vocab - lowest_id(vocab):
        assert len(set(prompts[:, 0].tolist())) == n
    assert np.array_equal(prompts, token_prompts(n, PromptShape(length, vocab), seed))


@given(st.integers(1, 20), st.integers(1, 40), st.integers(4, 40), seeds)
def test_a_shared_prefix_is_shared_and_no_longer_than_asked(n: int, shared: int, own: int, seed: int) -> None:
    prompts = token_prompts(n, PromptShape(shared + own, 5000, shared), seed)
    assert all(np.array_equal(row[:shared], prompts[0, :shared]) for row in prompts)
    assert len(set(prompts[:, shared].tolist())) == n


@given(seeds)
def test_another_seed_shares_no_first_block(seed: int) -> None:
    shape = PromptShape(32, 8192)
    first = {tuple(row[:16]) for row in token_prompts(50, shape, seed).tolist()}
    second = {tuple(row[:16]) for row in token_prompts(50, shape, seed + 1).tolist()}
    assert not first & second


def test_prompts_do_not_nest_across_lengths() -> None:
    short = token_prompts(20, PromptShape(16, 8192), 7).tolist()
    long = token_prompts(20, PromptShape(64, 8192), 7).tolist()
    assert not {tuple(row) for row in short} & {tuple(row[:16]) for row in long}


def test_arrivals_and_prompts_draw_from_independent_streams() -> None:
    uniform = np.random.Generator(np.random.PCG64(np.random.SeedSequence([1, 5]))).random(8)
    other = np.random.Generator(np.random.PCG64(np.random.SeedSequence([2, 5]))).random(8)
    assert not np.allclose(uniform, other)
    before = token_prompts(5, PromptShape(8, 1000), 5)
    planned_offsets(1.0, 10, 1.0, 5)
    assert np.array_equal(before, token_prompts(5, PromptShape(8, 1000), 5))


def test_plain_lists_for_json() -> None:
    prompts = token_prompts(2, PromptShape(5, 1000), 3).tolist()
    assert [len(prompt) for prompt in prompts] == [5, 5]
    assert all(type(token) is int for prompt in prompts for token in prompt)


@pytest.mark.parametrize(
    "shape", [PromptShape(0, 100), PromptShape(4, 0), PromptShape(4, 100, 4), PromptShape(4, 100, -1)]
)
def test_impossible_shapes_are_refused(shape: PromptShape) -> None:
    with pytest.raises(InputError):
        token_prompts(2, shape, 1)


def test_too_short_to_tell_apart() -> None:
    with pytest.raises(InputError, match="cannot all differ"):
        token_prompts(100, PromptShape(1, 20), 1)
