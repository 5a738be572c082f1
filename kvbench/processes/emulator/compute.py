"""What a step computes: KV bytes of its tokens, the sequences' states from these bytes, the next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvbench.core.simulation.kv_cache import U64, extend_hashes, powers, prefix_hashes, salt_seed
from kvbench.core.simulation.scheduler import Chunk
from kvbench.processes.emulator.kvbytes import EOS_TOKEN, KvPool, fold, fold_each, next_tokens, wants_eos
from kvbench.processes.emulator.running_request import LiveRequest

Work = tuple[LiveRequest, Chunk]


class KvCompute:
    """The emulated model over one KV pool. It holds no state of its own: that is in each ``LiveRequest``."""

    def __init__(self, pool: KvPool, vocab_size: int, max_model_len: int, output_noise: float = 0.0) -> None:
        """``output_noise``: share of tokens that differ in a batch; by what, is another run's other draw."""
        self.pool = pool
        self.vocab_size = vocab_size
        self._powers = powers(max_model_len + 1)
        self._noise = output_noise
        self._draws = np.random.default_rng()

    def hash_prompt(self, tokens: U64, cache_salt: str) -> U64:
        """The chained hashes of a prompt; different salts share no prefix."""
        return prefix_hashes(tokens, self._powers, salt_seed(cache_salt))

    def runs(self, work: Sequence[Work]) -> None:
        """Prefill: write the KV of each chunk, then read what the state lacks. May run in a thread."""
        for live, chunk in work:
            end = chunk.start + chunk.count
            self.pool.write(live.request.blocks, chunk.start, self._hashes(live, chunk.start, end))
            self.read(live, end)

    def read(self, live: LiveRequest, end: int) -> None:
        """Take the bytes of the tokens before ``end`` into the state."""
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
        states = fold_each(states, digests, self._powers[positions])
        for (live, _), state, value in zip(work, states.tolist(), hashes.tolist(), strict=True):
            live.state = state
            live.digested += 1
            self._append_hash(live, value)

    def draw(self, lives: Sequence[LiveRequest]) -> None:
        """The next token of each sequence, from its state alone."""
        if not lives:
            return
        states = np.array([live.state for live in lives], dtype=np.uint64)
        if self._noise and len(lives) > 1:
            other = self._draws.random(len(lives)) < self._noise
            drawn = next_tokens(np.where(other, ~states, states), self.vocab_size).tolist()
        else:
            drawn = next_tokens(states, self.vocab_size).tolist()
        ends = wants_eos(states).tolist()
        for live, token, eos in zip(lives, drawn, ends, strict=True):
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
