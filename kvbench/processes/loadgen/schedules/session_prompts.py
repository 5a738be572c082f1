"""Prompts of sessions as JSON: of blocks that are encoded once, and of answers as the server gave them.

Equal blocks are equal bytes, those that an answer has filled as well: what a prompt is made of is kept by
block, and a later one that has the block takes it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.sessions.corpus import Blocks
from kvbench.core.sessions.prompt_tokens import BlockTokens, Tokens
from kvbench.core.sessions.session_load import SessionLoad

PREPARED_BYTES: Final = 256_000_000
"""So much of the prompts is encoded before the run; the rest when it is needed."""

Encode = Callable[[Tokens], bytes]
"""Token ids as the items of a JSON list, each with a comma behind it."""


class SessionPrompts:
    """Makes the prompt of each request of a load, once what it waits for is answered."""

    def __init__(self, load: SessionLoad, vocab_size: int, seed: int, encode: Encode) -> None:
        """Raises InputError where blocks cannot be told apart by tokens."""
        self._load = load
        self._encode = encode
        size = load.block_tokens
        self._own = [
            nodes[: length // size] for nodes, length in zip(load.prompts, load.input_len, strict=True)
        ]
        self._blocks = 1 + max((int(nodes.max()) for nodes in self._own if len(nodes)), default=-1)
        # Behind the blocks of the tree: one for the end of each prompt, which is like no other's.
        self._tokens = BlockTokens(vocab_size, size, self._blocks + load.requests, seed)
        self._encoded: list[bytes | None] = [None] * self._blocks
        self._followers = {earlier: later for later, earlier in enumerate(load.goes_on) if earlier >= 0}
        self._ends: dict[int, Tokens] = {}
        """Of requests that others go on from: what stands behind their blocks, and then their answers."""

    def prepare(self) -> None:
        """Encodes what is known before any answer, first the prompts that need none."""
        count, reserved = 0, self._of_answers()
        waits = [bool(each) for each in self._load.following.after]
        for place in sorted(range(len(waits)), key=waits.__getitem__):
            nodes = self._own[place]
            for node in self._fill(nodes[~reserved[nodes]]):
                count += len(self._encoded[node] or b"")
            if count > PREPARED_BYTES:
                return

    def _of_answers(self) -> NDArray[np.bool_]:
        """Of each block whether an answer reaches into it."""
        found, load = np.zeros(self._blocks, np.bool_), self._load
        for earlier, later in self._followers.items():
            until = load.input_len[earlier] + load.output_len[earlier]
            found[self._own[later][len(self._own[earlier]) : -(-until // load.block_tokens)]] = True
        return found

    def needs_answer(self, place: int) -> bool:
        """Whether another prompt is to have its answer."""
        return place in self._followers

    def answered(self, place: int, token_ids: list[int]) -> None:
        """Its answer, as the server gave it."""
        if place in self._followers:
            self._ends[place] = np.concatenate([self._ends[place], np.array(token_ids, np.int32)])

    def forget(self, place: int) -> None:
        """It has no answer, and nothing goes on from it."""
        self._ends.pop(place, None)

    def json(self, place: int) -> bytes:
        """A prompt's token ids as a JSON list."""
        nodes, size = self._own[place], self._load.block_tokens
        length = self._load.input_len[place]
        behind = length - size * len(nodes)
        own = np.array([self._blocks + place])
        earlier = self._load.goes_on[place] if self._load.goes_on else -1
        end = self._tokens.of(own, behind)[0]
        if earlier >= 0:
            given, begins = self._ends.pop(earlier), len(self._own[earlier])
            self._put(given, nodes[begins:])
            rest = given[size * (len(nodes) - begins) :][:behind]
            end[: len(rest)] = rest
        self._fill(nodes)
        if place in self._followers:
            self._ends[place] = end
        pieces = [b"[", *map(self._block, nodes.tolist()), self._encode(end)]
        while not pieces[-1]:
            pieces.pop()
        pieces[-1] = pieces[-1][:-1]  # its comma
        return b"".join([*pieces, b"]"])  # once, as a long prompt is long to copy

    def _block(self, node: int) -> bytes:
        return self._encoded[node] or b""

    def _put(self, given: Tokens, nodes: Blocks) -> None:
        """What an answer, and the end of the prompt before it, bring to the blocks that they reach into."""
        size = self._load.block_tokens
        reached = nodes[: -(-len(given) // size)]
        for begin, node in zip(range(0, len(given), size), reached.tolist(), strict=False):
            if self._encoded[node] is not None:
                continue
            tokens = given[begin : begin + size]
            if len(tokens) < size:
                own = self._tokens.of(np.array([node]), size)[0]
                tokens = np.concatenate([tokens, own[len(tokens) :]])
            self._encoded[node] = self._encode(tokens)

    def _fill(self, nodes: Blocks) -> list[int]:
        """Encodes those that are not yet; returns them."""
        missing = [node for node in nodes.tolist() if self._encoded[node] is None]
        if missing:
            size = self._load.block_tokens
            tokens = self._tokens.of(np.array(missing), size)
            for node, each in zip(missing, _rows(self._encode(tokens.ravel()), size), strict=True):
                self._encoded[node] = each
        return missing


def _rows(encoded: bytes, size: int) -> Iterator[bytes]:
    """The bytes of each ``size`` items of a list."""
    commas = np.flatnonzero(np.frombuffer(encoded, np.uint8) == ord(","))
    ends = [0, *(commas[size - 1 :: size] + 1).tolist()]
    return (encoded[begin:end] for begin, end in pairwise(ends))
