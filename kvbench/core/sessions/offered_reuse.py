"""How much of prompts a prefix cache could have found, counted from the prompts themselves.

The cache is asked when a prompt comes, holds whole blocks, and lets go of the least recently used ones; of a
prompt the last block first, so that what it holds of a prompt is always its beginning (vLLM frees a request's
blocks in that order). Then one walk over the prompts counts for every capacity at once (Mattson's stack
distances, IBM Systems Journal 9(2), 1970): a block that is the n-th on the stack of recent use is found by
every cache of n blocks or more.

The blocks whose last user was one and the same prompt are always its end, and lie on the stack in a row. So
a prompt's blocks are a few runs, and each takes one look into a tree of sums over the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvbench.core.sessions.corpus import Blocks


@dataclass(frozen=True, eq=False)
class OfferedReuse:
    """What was offered for reuse: runs of found blocks, one entry a run in each of the four arrays."""

    blocks: int
    """All blocks of all prompts."""
    distinct: int
    """Blocks that differ: what an unlimited cache holds at the end."""
    prompt: NDArray[np.int64]
    """In which prompt the run stands."""
    depth: NDArray[np.int64]
    """Stack distance of its first block, from 1; each further one is one deeper."""
    length: NDArray[np.int64]
    """Its blocks."""

    def found(self, capacity: int | None = None) -> int:
        """Blocks that a cache of ``capacity`` blocks would have found; None is unlimited."""
        return int(self._found(capacity).sum())

    def share(self, capacity: int | None = None) -> float:
        """The same as a share of all blocks; 0 of none."""
        return self.found(capacity) / self.blocks if self.blocks else 0.0

    def of_prompts(self, prompts: int, capacity: int | None = None) -> NDArray[np.int64]:
        """The same for each of the ``prompts`` by itself."""
        sums = np.zeros(prompts, np.int64)
        np.add.at(sums, self.prompt, self._found(capacity))
        return sums

    def _found(self, capacity: int | None) -> NDArray[np.int64]:
        if capacity is None:
            return self.length
        return np.clip(capacity - self.depth + 1, 0, self.length)


def offered_reuse(prompts: Sequence[Blocks]) -> OfferedReuse:
    """Count for prompts in the order in which they come; their ids as ``chained`` gives them."""
    nodes = 1 + max((int(each.max()) for each in prompts if len(each)), default=-1)
    user = np.full(nodes, -1, np.int64)  # the last prompt that had this block
    live = _Sums(len(prompts))  # blocks by their last user
    runs: list[tuple[int, int, int]] = []
    for place, prompt in enumerate(prompts):
        users = user[prompt]
        known = users[: int(np.count_nonzero(users >= 0))]
        starts = np.flatnonzero(np.diff(known, prepend=-1)).tolist()
        lengths = np.diff([*starts, len(known)]).tolist()
        owners = [int(known[start]) for start in starts]
        runs += [
            (place, live.after(owner) + 1, length) for owner, length in zip(owners, lengths, strict=True)
        ]
        for owner, length in zip(owners, lengths, strict=True):
            live.add(owner, -length)
        live.add(place, len(prompt))
        user[prompt] = place
    table = np.array(runs, np.int64).reshape(-1, 3)
    return OfferedReuse(
        blocks=sum(len(each) for each in prompts),
        distinct=int(np.count_nonzero(user >= 0)),
        prompt=table[:, 0],
        depth=table[:, 1],
        length=table[:, 2],
    )


class _Sums:
    """Sums over a list that changes, in O(log n) (Fenwick, Software: Practice and Experience 24, 1994)."""

    def __init__(self, places: int) -> None:
        self._tree = [0] * (places + 1)
        self._total = 0

    def add(self, place: int, amount: int) -> None:
        self._total += amount
        place += 1
        while place < len(self._tree):
            self._tree[place] += amount
            place += place & -place

    def after(self, place: int) -> int:
        """The sum over all places beyond this one."""
        place += 1
        until = 0
        while place:
            until += self._tree[place]
            place &= place - 1
        return self._total - until
