"""Which blocks a case moves: the tables of both sides, and the block ids of each transfer under way."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvbench.core.transfers.records import Case, Layout


@dataclass(frozen=True)
class Pairing:
    """One transfer: block ``local[i]`` of initiator ``initiator`` and ``remote[i]`` of target ``target``."""

    initiator: int
    target: int
    local: tuple[int, ...]
    remote: tuple[int, ...]


def initiator_layout(case: Case) -> Layout:
    """Every transfer under way has blocks of its own: ``threads`` transfers to each target."""
    return _layout(case, case.targets)


def target_layout(case: Case) -> Layout:
    """Room for ``threads`` transfers from each initiator."""
    return _layout(case, case.initiators)


def _layout(case: Case, peers: int) -> Layout:
    blocks = peers * case.threads * case.batch_size * (2 if case.scattered else 1)
    return Layout(case.regions, _reserved(case) + blocks, case.block_bytes)


def _reserved(case: Case) -> int:
    """Return the number of blocks at the start of each region that no transfer moves.

    vLLM never hands out block 0. So the blocks of one region do not touch those of the next one, and no
    library can merge them.
    """
    return 1 if case.regions > 1 else 0


def pairings(case: Case, seed: int = 0) -> list[Pairing]:
    """All transfers of a case, by initiator, then thread, then target.

    Contiguous blocks lie side by side in the same order on both sides. If they are to be merged, the order is
    ascending. If not, odd positions come before even ones, so that no library finds a neighbour to merge.
    Scattered blocks are every other block of their part, in an order of its own on each side, so that no two
    of them touch, on either side.
    """
    found = []
    for initiator in range(case.initiators):
        for thread in range(case.threads):
            for target in range(case.targets):
                local = _ids(
                    case, target * case.threads + thread, f"{seed} {initiator} {thread} {target} local"
                )
                remote = _ids(
                    case, initiator * case.threads + thread, f"{seed} {initiator} {thread} {target} remote"
                )
                found.append(Pairing(initiator, target, local, remote))
    return found


def _ids(case: Case, slot: int, seed: str) -> tuple[int, ...]:
    first = _reserved(case) + slot * case.batch_size * (2 if case.scattered else 1)
    if case.scattered:
        ids = list(range(first, first + 2 * case.batch_size, 2))
        random.Random(seed).shuffle(ids)
        return tuple(ids)
    ascending = range(first, first + case.batch_size)
    return tuple(ascending) if case.merged else (*ascending[1::2], *ascending[::2])
