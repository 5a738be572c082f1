"""What to send: token ids of exact length that no prefix cache has seen.

Prompts of one trial differ in their first tokens already, so none is a prefix of another and no two
share a first cache block. Another seed gives other prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

_STREAM: Final = 2
"""Sets the prompts' random numbers apart from the arrivals', so that neither moves the other."""
_LOW_IDS: Final = 256
"""Tokenizers keep their special tokens (begin, end, padding, unknown) among the lowest ids, and
byte-level ones their single bytes below 256 or so."""


@dataclass(frozen=True)
class PromptShape:
    """Lengths in tokens. ``shared_prefix_len`` leading tokens are common to all prompts of a trial."""

    input_len: int
    vocab_size: int
    shared_prefix_len: int = 0


def lowest_id(vocab_size: int) -> int:
    """The lowest token id used: above the special ones, at most a quarter of a small vocabulary."""
    return min(_LOW_IDS, vocab_size // 4)


def token_prompts(num_prompts: int, shape: PromptShape, seed: int) -> NDArray[np.int32]:
    """Token ids, shape (num_prompts, input_len), each in [lowest_id(vocab_size), vocab_size).

    Raises InputError when the prompts are too short, or the vocabulary too small, to tell them apart.
    """
    own_len = shape.input_len - shape.shared_prefix_len
    if shape.shared_prefix_len < 0 or own_len < 1:
        raise InputError(
            f"input_len {shape.input_len} must exceed shared_prefix_len {shape.shared_prefix_len}"
        )
    low = lowest_id(shape.vocab_size)
    choices = shape.vocab_size - low
    if choices < 1:
        raise InputError(f"vocab_size must be at least 1, it is {shape.vocab_size}")
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    shared = random.integers(low, shape.vocab_size, shape.shared_prefix_len)
    digits = _digits_needed(num_prompts, choices)
    if digits > own_len:
        raise InputError(
            f"{num_prompts} prompts of {own_len} tokens cannot all differ with {choices} token ids",
            hint="use longer prompts or a larger vocab_size",
        )
    prompts = random.integers(low, shape.vocab_size, (num_prompts, shape.input_len), dtype=np.int32)
    prompts[:, : shape.shared_prefix_len] = shared
    # The leading tokens are the digits of numbers drawn without replacement: distinct by construction.
    numbers = random.choice(choices**digits, num_prompts, replace=False)
    for position in range(digits):
        prompts[:, shape.shared_prefix_len + position] = low + numbers % choices
        numbers //= choices
    return prompts


def _digits_needed(count: int, base: int) -> int:
    """How many digits in that base give ``count`` distinct numbers (a large number if none can)."""
    digits, numbers = 1, base
    while numbers < count:
        if base == 1:
            return count
        digits += 1
        numbers *= base
    return digits
