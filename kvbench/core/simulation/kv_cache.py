"""Book-keeping of a paged KV cache: token hashes, blocks, reference counts, prefix cache.

Hashes are 64-bit and chained: the hash at position t depends on every token up to t and on the cache salt, so
a full block's hash is that of its last token. H_t = seed + Σ mix(token_i) · M^i mod 2⁶⁴, which numpy computes
for a whole prompt at once. They do not resist deliberate collisions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_MASK: Final = (1 << 64) - 1
# Odd constants: the finaliser of splitmix64 (Steele et al. 2014), and one odd multiplier for powers.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_POWER_BASE: Final = 0xD1342543DE82EF95


def mix64(value: int) -> int:
    """Scramble one 64-bit number (splitmix64): every input bit moves about half the output bits."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def mix64_array(values: U64) -> U64:
    out = values + np.uint64(_GOLDEN)
    out = (out ^ (out >> np.uint64(30))) * np.uint64(_MIX_1)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(_MIX_2)
    return out ^ (out >> np.uint64(31))


def powers(count: int) -> U64:
    """M⁰ … M^(count−1) mod 2⁶⁴: the weights of positions in hashes and digests."""
    steps = np.full(max(count, 1), _POWER_BASE, dtype=np.uint64)
    steps[0] = 1
    return np.multiply.accumulate(steps, dtype=np.uint64)[:count]


def salt_seed(salt: str) -> int:
    """Return the start value of a chain of hashes."""
    seed = 0
    for byte in salt.encode():
        seed = mix64(seed ^ byte)
    return mix64(seed)


def prefix_hashes(tokens: U64, position_powers: U64, seed: int) -> U64:
    """Return the chained hash after each token of a prompt, shape [n]."""
    weighted = mix64_array(tokens) * position_powers[: len(tokens)]
    return np.cumsum(weighted, dtype=np.uint64) + np.uint64(seed)


def extend_hashes(last: U64, tokens: U64, positions: NDArray[np.int64], position_powers: U64) -> U64:
    """Return the hashes after one more token of several sequences, shape [sequences]."""
    return last + mix64_array(tokens) * position_powers[positions]


def block_hashes(hashes: U64, block_tokens: int) -> list[int]:
    """Return the hash of each full block: the chained hash at its last token."""
    ends: list[int] = hashes[block_tokens - 1 :: block_tokens].tolist()
    return ends


class BlockPool:
    """Fixed number of KV blocks with reference counts and a cache of full blocks by hash. A block with no
    reference stays findable by its hash until it is handed out again; blocks are handed out in the order in
    which they became free (least recently used first), as vLLM does."""

    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_hash: dict[int, int] = {}
        self._hash_of: list[int | None] = [None] * num_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks without references, cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - len(self._free) / self.num_blocks

    def references(self, block: int) -> int:
        return self._refs[block]

    def lookup(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Return cached blocks of the longest known prefix, at most ``limit``; takes no reference."""
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        for block_hash in hashes[:limit]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, cached: Sequence[int], fresh: int) -> bool:
        """Return whether ``cached`` blocks can be referenced and ``fresh`` more be allocated."""
        revived = sum(1 for block in cached if self._refs[block] == 0)
        return len(self._free) - revived >= fresh

    def take(self, cached: Sequence[int], fresh: int) -> list[int]:
        """Reference ``cached`` blocks and hand out ``fresh`` new ones; returns all, in order."""
        if not self.can_take(cached, fresh):
            raise ValueError(f"{fresh} blocks wanted, {len(self._free)} free")
        for block in cached:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1
        return [*cached, *(self._hand_out() for _ in range(fresh))]

    def _hand_out(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._refs[block] = 1
        return block

    def _forget(self, block: int) -> None:
        if (block_hash := self._hash_of[block]) is not None:
            del self._by_hash[block_hash]
            self._hash_of[block] = None

    def register(self, block: int, block_hash: int) -> None:
        """Make a full, computed block findable. A second block of the same content stays unknown."""
        if self.enable_prefix_caching and self._hash_of[block] is None and block_hash not in self._by_hash:
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each; the tail is freed first, so that prefixes live longest."""
        for block in reversed(list(blocks)):
            if self._refs[block] <= 0:
                raise ValueError(f"block {block} is not in use")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def reset_cache(self) -> None:
        """Forget every hash, also of blocks in use: nothing computed before can be hit after."""
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
