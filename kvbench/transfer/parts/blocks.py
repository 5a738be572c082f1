"""Block ids: packed for the wire, merged into contiguous runs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvbench.transfer.base import Layout

MIN_PART_BYTES = 16 * 1024
"""Minimum bytes per NIC or stream; smaller transfers use fewer of them."""


class BlockRun(NamedTuple):
    """``blocks`` blocks that are contiguous on both sides."""

    local: int
    remote: int
    blocks: int


class BlockSpan(NamedTuple):
    """``nbytes`` contiguous bytes at byte offsets of the local and the remote buffer."""

    local: int
    remote: int
    nbytes: int


def in_order(local: Sequence[int], remote: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the pairs (local block, remote block) sorted by local block, as two sequences."""
    pairs = sorted(zip(local, remote, strict=True))
    return [block for block, _ in pairs], [block for _, block in pairs]


def merge_runs(local: Sequence[int], remote: Sequence[int]) -> list[BlockRun]:
    """Merge pairs (local block, remote block) into the fewest runs, ordered by local block. The pairs are
    sorted first, since a transfer's order is irrelevant: a pool that allocates backwards still gives one run.
    The two sequences have equal lengths and no repetitions."""
    runs: list[BlockRun] = []
    first_local = first_remote = count = 0
    for block, peer_block in zip(*in_order(local, remote), strict=True):
        if count and block == first_local + count and peer_block == first_remote + count:
            count += 1
            continue
        if count:
            runs.append(BlockRun(first_local, first_remote, count))
        first_local, first_remote, count = block, peer_block, 1
    if count:
        runs.append(BlockRun(first_local, first_remote, count))
    return runs


def spans(runs: Iterable[BlockRun], local: Layout, remote: Layout) -> list[BlockSpan]:
    """Return runs of blocks as byte spans, once for every region of the two buffers."""
    size = local.block_bytes
    wanted = list(runs)
    return [
        BlockSpan(local.offset(region, run.local), remote.offset(region, run.remote), run.blocks * size)
        for region in range(local.regions)
        for run in wanted
    ]


def paired_spans(
    local: Sequence[int], remote: Sequence[int], layout: Layout, peer_layout: Layout, merge: bool = True
) -> list[BlockSpan]:
    """Return pairs of blocks as byte spans of two buffers; without ``merge`` one per block and region."""
    if merge:
        return spans(merge_runs(local, remote), layout, peer_layout)
    return spans([BlockRun(a, b, 1) for a, b in zip(local, remote, strict=True)], layout, peer_layout)


def split_spans(wanted: Sequence[BlockSpan], parts: int, least: int = 1) -> list[list[BlockSpan]]:
    """Distribute spans over at most ``parts`` lists of about equal bytes; a span may be cut. Each list except
    the last gets at least ``least`` bytes, so that small transfers stay whole."""
    if parts == 1:
        return [list(wanted)]
    total = sum(span.nbytes for span in wanted)
    share = max(-(-total // parts), least, 1)
    dealt: list[list[BlockSpan]] = [[]]
    room = share
    for span in wanted:
        local, remote, left = span
        while left:
            if room == 0:
                dealt.append([])
                room = share
            take = min(left, room)
            dealt[-1].append(BlockSpan(local, remote, take))
            local, remote, left, room = local + take, remote + take, left - take, room - take
    return dealt


def pack_ids(ids: Sequence[int]) -> dict[str, list[int]]:
    """Return block ids for a JSON line: ``{"ids": […]}``, or ``{"runs": [start, count, …]}`` if shorter."""
    runs: list[int] = []
    for block in ids:
        if runs and block == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (block, 1)
    return {"runs": runs} if len(runs) < len(ids) else {"ids": list(ids)}


def unpack_ids(packed: dict[str, list[int]]) -> list[int]:
    if "ids" in packed:
        return packed["ids"]
    runs = packed["runs"]
    return [
        block
        for start, count in zip(runs[::2], runs[1::2], strict=True)
        for block in range(start, start + count)
    ]
