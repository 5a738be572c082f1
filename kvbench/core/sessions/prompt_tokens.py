"""Tokens of prompts that are known by their blocks: equal blocks have equal tokens, and others differ.

A block is a node of the tree of a trial's prompts (``chained``). Its tokens begin with the digits of its
number, scrambled with the trial's salt: no two blocks of a trial have the same, and none another trial's.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.prompts import lowest_id
from kvbench.core.simulation.kv_cache import mix64, mix64_array
from kvbench.errors import InputError

Tokens = NDArray[np.int32]

_STREAM: Final = 0x5E5510
"""Sets these tokens apart from those of single prompts with the same seed."""
_ODD: Final = 0x9E3779B97F4A7C15


class BlockTokens:
    """Token ids of blocks 0 … ``blocks`` - 1 of ``block_tokens`` each, a function of the seed alone.

    Raises InputError where blocks are too short, or the vocabulary too small, to tell so many apart.
    """

    def __init__(self, vocab_size: int, block_tokens: int, blocks: int, seed: int) -> None:
        self._low = lowest_id(vocab_size)
        self._choices = vocab_size - self._low
        if self._choices < 2:
            raise InputError(f"vocab_size must be at least 2, it is {vocab_size}")
        self._bits = min(64, math.floor(block_tokens * math.log2(self._choices)))
        if blocks > 1 << self._bits:
            raise InputError(
                f"{blocks:,} blocks of {block_tokens} tokens cannot differ with {self._choices} token ids",
                hint="raise workload.sessions.length_scale, or use a larger vocab_size",
            )
        self._digits = min(block_tokens, math.ceil(self._bits / math.log2(self._choices)))
        self._salt = np.uint64(mix64(mix64(_STREAM) ^ seed))

    def of(self, blocks: NDArray[np.int64], length: int) -> Tokens:
        """Their first ``length`` tokens, a row each."""
        keys = self._keys(blocks.astype(np.uint64))
        found = np.empty((len(keys), length), np.int32)
        left, choices = keys.copy(), np.uint64(self._choices)
        for place in range(min(length, self._digits)):
            found[:, place] = left % choices
            left //= choices
        if length > self._digits:
            places = np.arange(self._digits, length, dtype=np.uint64)
            found[:, self._digits :] = mix64_array(mix64_array(keys)[:, None] + places[None, :]) % choices
        found += np.int32(self._low)
        return found

    def _keys(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Each number as another one of so many bits, no two as the same."""
        if self._bits == 64:
            return mix64_array(numbers ^ self._salt)
        found: NDArray[np.uint64] = numbers * np.uint64(_ODD) + self._salt
        return found & np.uint64((1 << self._bits) - 1)
