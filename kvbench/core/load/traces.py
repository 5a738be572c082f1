"""Recorded requests and their replay: rates, prefixes that they share, prompts that share them, too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from kvbench.core.load.prompts import lowest_id
from kvbench.errors import InputError

BLOCK_TOKENS: Final = 512
"""Tokens that one hash id of a Mooncake trace stands for."""

_BLOCK_STREAM: Final = 3
_FRESH_STREAM: Final = 4
"""Set the random numbers of shared blocks and of fresh tokens apart from each other and from all others."""


@dataclass(frozen=True)
class TracedRequest:
    """One recorded request. ``blocks``: hash ids of its prompt's blocks of 512 tokens, or None."""

    offset_s: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """A line of the file that the load generator reads."""
        return {
            "offset_s": self.offset_s,
            "input_len": self.input_len,
            "output_len": self.output_len,
            "blocks": None if self.blocks is None else list(self.blocks),
        }


@dataclass(frozen=True)
class TraceFigures:
    """What a trace asks for. Rates per second; ``hit_rate`` as ``expected_hits`` counts it."""

    requests: int
    duration_s: float
    request_rate: float
    mean_input_len: float
    mean_output_len: float
    longest: int
    """Most tokens of one request, prompt and output together."""
    longest_output: int
    hit_rate: float


def scaled(requests: Sequence[TracedRequest], factor: float, most: int | None = None) -> list[TracedRequest]:
    """The first ``most`` requests, the time between them multiplied by ``factor`` (0.5: twice as fast)."""
    if not 0 < factor < math.inf:
        raise InputError(f"the time between requests must be multiplied by more than 0, not {factor}")
    return [replace(request, offset_s=request.offset_s * factor) for request in requests[:most]]


def request_rate(requests: Sequence[TracedRequest]) -> float:
    """Mean arrivals per second: the gaps over the time that they take; of no time at all infinite."""
    length_s = requests[-1].offset_s - requests[0].offset_s if requests else 0.0
    return (len(requests) - 1) / length_s if length_s > 0 else math.inf


def figures(requests: Sequence[TracedRequest], block_tokens: int = 16) -> TraceFigures:
    """What a trace asks for. ``requests`` must not be empty."""
    prompts = sum(request.input_len for request in requests)
    return TraceFigures(
        requests=len(requests),
        duration_s=requests[-1].offset_s,
        request_rate=request_rate(requests),
        mean_input_len=prompts / len(requests),
        mean_output_len=sum(request.output_len for request in requests) / len(requests),
        longest=max(request.input_len + request.output_len for request in requests),
        longest_output=max(request.output_len for request in requests),
        hit_rate=sum(expected_hits(requests, block_tokens)) / prompts,
    )


def shares_prefixes(requests: Iterable[TracedRequest]) -> bool:
    """Whether a prefix cache can find anything: two requests begin with the same block."""
    seen: set[int] = set()
    for request in requests:
        if request.blocks:
            if request.blocks[0] in seen:
                return True
            seen.add(request.blocks[0])
    return False


def expected_hits(requests: Sequence[TracedRequest], block_tokens: int = 16) -> list[int]:
    """Prompt tokens of each request that an infinite prefix cache would have, in the order of arrival.

    A request finds the blocks with which it begins, as far as one and the same earlier request began so
    too. Engines look up whole blocks of ``block_tokens`` and always compute at least one token (vLLM's
    rule). An earlier request counts as soon as it has arrived, so real caches hit less.
    """
    tree: dict[tuple[int, int], int] = {}  # (node, block) → the node that it leads to
    covered = [0]  # tokens of a prompt that are known at each node; the root is 0
    found = []
    for request in requests:
        node, hit = 0, 0
        for place, block in enumerate(request.blocks or ()):
            end = min((place + 1) * BLOCK_TOKENS, request.input_len)
            node = tree.setdefault((node, block), len(covered))
            if node == len(covered):
                covered.append(0)
            if hit == place * BLOCK_TOKENS:
                hit = max(hit, min(end, covered[node]))
            covered[node] = max(covered[node], end)
        found.append(min(hit, request.input_len - 1) // block_tokens * block_tokens)
    return found


def traced_prompt(
    input_len: int, blocks: Sequence[int] | None, seed: int, index: int, vocab_size: int
) -> list[int]:
    """Token ids of a traced request's prompt, ``input_len`` of them.

    Each hash id is 512 tokens that are a function of (seed, id) alone, so equal ids give equal tokens in one
    trial and others in the next. What no id covers is fresh: a function of (seed, index).
    """
    low = lowest_id(vocab_size)
    if vocab_size - low < 1:
        raise InputError(f"vocab_size must be at least 1, it is {vocab_size}")
    parts = []
    for block in list(blocks or ())[: math.ceil(input_len / BLOCK_TOKENS)]:
        # A seed sequence takes 32-bit words: a large id is two of them.
        words = [_BLOCK_STREAM, seed, block & 0xFFFFFFFF, block >> 32]
        parts.append(_generator(words).integers(low, vocab_size, BLOCK_TOKENS, dtype=np.int32))
    covered = min(input_len, BLOCK_TOKENS * len(parts))
    if covered < input_len:
        fresh = _generator([_FRESH_STREAM, seed, index])
        parts.append(fresh.integers(low, vocab_size, input_len - covered, dtype=np.int32))
    tokens: list[int] = np.concatenate(parts)[:input_len].tolist() if parts else []
    return tokens


def _generator(words: Sequence[int]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(list(words))))
