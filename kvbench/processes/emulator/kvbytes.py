"""The KV cache's bytes: written from tokens, and read back as the only source of the next token.

A token's KV in region r is one vector of 64-bit words, ``mix(H_t) · pattern[r]``, with H_t the chained hash
of all tokens up to t. Like real KV it depends on the whole prefix and on the region. Reading combines every
word of every region into one digest per token, and the digests, weighted by position, into the sequence's
state, which determines the next token. One flipped bit, a stale block or two swapped blocks therefore change
the tokens; block ids and the chunking of the prompt do not."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.core.simulation.kv_cache import U64, extend_hashes, mix64_array, powers, prefix_hashes, salt_seed
from kvbench.core.simulation.scheduler import Chunk
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.transfer.base import Layout

_CHUNK_BYTES: Final = 512 * 1024  # worked on at once: stays in the second-level cache
_PATTERN_START: Final = 1
_WEIGHT_START: Final = 1 << 32
_TOKEN_SALT: Final = np.uint64(0x5851F42D4C957F2D)
_EOS_SALT: Final = np.uint64(0x2545F4914F6CDD1D)
EOS_TOKEN: Final = 0
EOS_ONE_IN: Final = 256
"""One token in this many is end-of-sequence, unless ignore_eos is set."""


def _odd_words(start: int, regions: int, words: int) -> U64:
    numbers = np.arange(start, start + regions * words, dtype=np.uint64)
    return (mix64_array(numbers) | np.uint64(1)).reshape(regions, words)


def _balance(weights: U64, pattern: U64) -> U64:
    """Adjust the last weight so that intact KV has the same digest in a vector of any length. Answers then do
    not depend on how many ranks hold each head. Every weight stays odd, so that any changed bit changes the
    sum; the sum becomes 1 or 2, by the parity of the number of weights."""
    last, modulus = int(pattern[-1, -1]), 1 << 64
    others = int(np.sum(pattern * weights)) - last * int(weights[-1, -1])
    wanted = 2 - weights.size % 2
    weights[-1, -1] = np.uint64((wanted - others) * pow(last, -1, modulus) % modulus)
    return weights


class KvPool:
    """A memfd of ``layout.nbytes`` bytes, which a transfer process can map too; the owner calls ``close``.
    ``words`` views it as [regions, blocks, block_tokens, words per token]."""

    def __init__(self, layout: Layout, block_tokens: int) -> None:
        self.layout = layout
        self.block_tokens = block_tokens
        self.fd = os.memfd_create("kvbench-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, layout.nbytes)
        self._map = mmap.mmap(self.fd, layout.nbytes)
        slot_words = layout.block_bytes // block_tokens // 8
        flat = np.frombuffer(self._map, dtype=np.uint64)
        self.words: U64 = flat.reshape(layout.regions, layout.blocks, block_tokens, slot_words)
        self._pattern = _odd_words(_PATTERN_START, layout.regions, slot_words)
        self._weights = _balance(_odd_words(_WEIGHT_START, layout.regions, slot_words), self._pattern)
        self._chunk_blocks = max(1, _CHUNK_BYTES // layout.block_bytes)

    @property
    def token_bytes(self) -> int:
        return self.layout.regions * self.layout.block_bytes // self.block_tokens

    def close(self) -> None:
        """Unmap the pool; ``words`` must not be used afterwards."""
        self.words = np.empty((0, 0, 0, 0), dtype=np.uint64)
        self._map.close()
        os.close(self.fd)

    # -- runs of tokens of one sequence -----------------------------------------------------------

    def write(self, blocks: Sequence[int], start: int, hashes: U64) -> None:
        """Write the KV of tokens from ``start`` on, given their chained hashes, into a sequence's blocks."""
        keys = mix64_array(hashes)
        size = self.block_tokens
        position, end = start, start + len(hashes)
        while position < end:
            index, slot = divmod(position, size)
            if slot or end - position < size:  # part of a block
                stop = min(end, position + size - slot)
                part = keys[position - start : stop - start]
                target = self.words[:, blocks[index], slot : slot + stop - position]
                np.multiply(part[None, :, None], self._pattern[:, None, :], out=target)
                position = stop
                continue
            count = min((end - position) // size, self._chunk_blocks)
            ids = _selector(blocks[index : index + count])
            part = keys[position - start : position - start + count * size].reshape(count, size, 1)
            for region in range(self.layout.regions):
                self.words[region, ids] = part * self._pattern[region]
            position += count * size

    def digest(self, blocks: Sequence[int], start: int, end: int) -> U64:
        """Return one number per token that depends on every bit of its KV."""
        size = self.block_tokens
        first, last = start // size, -(-end // size)
        out = np.zeros((last - first, size), dtype=np.uint64)
        for index in range(first, last, self._chunk_blocks):
            stop = min(last, index + self._chunk_blocks)
            ids = _selector(blocks[index:stop])
            for region in range(self.layout.regions):
                vectors = self.words[region, ids]
                out[index - first : stop - first] += np.einsum("bsw,w->bs", vectors, self._weights[region])
        return out.reshape(-1)[start - first * size : end - first * size]

    # -- one token each of several sequences --------------------------------------------------------

    def write_slots(self, blocks: NDArray[np.int64], slots: NDArray[np.int64], hashes: U64) -> None:
        """Write one token's KV for each sequence, at its block and slot."""
        keys = mix64_array(hashes)
        self.words[:, blocks, slots] = keys[None, :, None] * self._pattern[:, None, :]

    def digest_slots(self, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> U64:
        """Return the digest of one token's KV for each sequence."""
        vectors = self.words[:, blocks, slots]
        digests: U64 = np.einsum("rsw,rw->s", vectors, self._weights)
        return digests


def _selector(blocks: Sequence[int]) -> slice | NDArray[np.int64]:
    """Return a slice if the blocks are consecutive (no copy), else their ids."""
    first, count = blocks[0], len(blocks)
    if blocks[-1] == first + count - 1 and list(blocks) == list(range(first, first + count)):
        return slice(first, first + count)
    return np.array(blocks, dtype=np.int64)


def fold(state: int, digests: U64, position_powers: U64) -> int:
    """Return a sequence's state after the tokens with these digests, given the powers of their positions."""
    total = np.sum(mix64_array(digests) * position_powers, dtype=np.uint64)
    return (state + int(total)) & 0xFFFF_FFFF_FFFF_FFFF


def next_tokens(states: U64, vocab_size: int) -> NDArray[np.int64]:
    """Return the token that follows each state, never the end-of-sequence token."""
    picked = mix64_array(states ^ _TOKEN_SALT) % np.uint64(vocab_size - 1)
    return picked.astype(np.int64) + 1


def wants_eos(states: U64) -> NDArray[np.bool_]:
    """Whether each sequence ends at this state if end-of-sequence is allowed."""
    ends: NDArray[np.bool_] = mix64_array(states ^ _EOS_SALT) % np.uint64(EOS_ONE_IN) == 0
    return ends


Work = tuple[LiveRequest, Chunk]


class KvCompute:
    """The emulated model over one KV pool. All state is in the ``LiveRequest`` objects."""

    def __init__(self, pool: KvPool, vocab_size: int, max_model_len: int, output_noise: float = 0.0) -> None:
        """``output_noise``: share of tokens that differ in a batch; the differences vary between runs."""
        self.pool = pool
        self.vocab_size = vocab_size
        self._powers = powers(max_model_len + 1)
        self._noise = output_noise
        self._draws = np.random.default_rng()

    def hash_prompt(self, tokens: U64, cache_salt: str) -> U64:
        """Return the chained hashes of a prompt; different salts share no prefix."""
        return prefix_hashes(tokens, self._powers, salt_seed(cache_salt))

    def runs(self, work: Sequence[Work]) -> None:
        """Prefill: write the KV of each chunk, then read what the state lacks. May run in a thread."""
        for live, chunk in work:
            end = chunk.start + chunk.count
            self.pool.write(live.request.blocks, chunk.start, self._hashes(live, chunk.start, end))
            self.read(live, end)

    def read(self, live: LiveRequest, end: int) -> None:
        """Read the bytes of the tokens before ``end`` into the state."""
        start = live.digested
        digests = self.pool.digest(live.request.blocks, start, end)
        live.state = fold(live.state, digests, self._powers[start:end])
        live.digested = end

    def singles(self, work: Sequence[Work]) -> None:
        """Decode: write the KV of one token for each sequence, and read it back into the states."""
        if not work:
            return
        size = self.pool.block_tokens
        positions = np.array([chunk.start for _, chunk in work], dtype=np.int64)
        tokens = np.array([live.tokens[chunk.start - live.request.prompt_len] for live, chunk in work])
        last = np.array([live.last_hash() for live, _ in work], dtype=np.uint64)
        blocks = np.array([live.request.blocks[chunk.start // size] for live, chunk in work], dtype=np.int64)
        slots = positions % size
        hashes = extend_hashes(last, tokens.astype(np.uint64), positions, self._powers)
        self.pool.write_slots(blocks, slots, hashes)
        digests = self.pool.digest_slots(blocks, slots)
        states = np.array([live.state for live, _ in work], dtype=np.uint64)
        states = states + mix64_array(digests) * self._powers[positions]
        for (live, _), state, value in zip(work, states.tolist(), hashes.tolist(), strict=True):
            live.state = state
            live.digested += 1
            self._append_hash(live, value)

    def draw(self, requests: Sequence[LiveRequest]) -> None:
        if not requests:
            return
        states = np.array([live.state for live in requests], dtype=np.uint64)
        if self._noise and len(requests) > 1:
            other = self._draws.random(len(requests)) < self._noise
            drawn = next_tokens(np.where(other, ~states, states), self.vocab_size).tolist()
        else:
            drawn = next_tokens(states, self.vocab_size).tolist()
        ends = wants_eos(states).tolist()
        for live, token, eos in zip(requests, drawn, ends, strict=True):
            may_end = eos and not live.ignore_eos and len(live.tokens) >= live.min_tokens
            live.drawn = EOS_TOKEN if may_end else token

    def _hashes(self, live: LiveRequest, start: int, end: int) -> U64:
        prompt_len = live.request.prompt_len
        if end <= prompt_len:
            return live.prompt_hashes[start:end]
        for index in range(len(live.token_hashes), end - prompt_len):
            token = np.array([live.tokens[index]], dtype=np.uint64)
            last = np.array([live.last_hash()], dtype=np.uint64)
            position = np.array([prompt_len + index])
            self._append_hash(live, int(extend_hashes(last, token, position, self._powers)[0]))
        generated = np.array(live.token_hashes[: end - prompt_len], dtype=np.uint64)
        return np.concatenate([live.prompt_hashes, generated])[start:end]

    def _append_hash(self, live: LiveRequest, value: int) -> None:
        live.token_hashes.append(value)
        if (live.request.prompt_len + len(live.token_hashes)) % self.pool.block_tokens == 0:
            live.request.hashes.append(value)
