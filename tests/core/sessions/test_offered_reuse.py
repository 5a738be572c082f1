"""Offered reuse equals what a cache finds that is really run, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.sessions.corpus import (
    Corpus,
    CorpusFigures,
    Session,
    Turn,
    chained,
    offered_reuse,
    prompts_by_time,
)

prompts = st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=25)


def arrays(lists: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(prompt, np.int64) for prompt in lists]


def found_by_a_cache(lists: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """A cache of prefixes by their contents: asked block by block, the least recently used one goes."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    found = []
    for prompt in lists:
        hits = 0
        while hits < len(prompt) and tuple(prompt[: hits + 1]) in cache:
            hits += 1
        found.append(hits)
        for end in range(len(prompt), 0, -1):
            cache[tuple(prompt[:end])] = None
            cache.move_to_end(tuple(prompt[:end]))
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found


@settings(max_examples=60)
@given(prompts, st.integers(0, 40))
def test_every_capacity_finds_what_a_cache_of_it_finds(lists: list[list[int]], capacity: int) -> None:
    counted = offered_reuse(chained(arrays(lists))[0])
    assert counted.of_prompts(len(lists), capacity).tolist() == found_by_a_cache(lists, capacity)


@given(prompts)
def test_unlimited_is_every_beginning_that_came_before(lists: list[list[int]]) -> None:
    counted = offered_reuse(chained(arrays(lists))[0])
    seen: set[tuple[int, ...]] = set()
    known = 0
    for prompt in lists:
        known += sum(tuple(prompt[:end]) in seen for end in range(1, len(prompt) + 1))
        seen |= {tuple(prompt[:end]) for end in range(1, len(prompt) + 1)}
    assert (counted.found(), counted.distinct) == (known, len(seen))
    assert counted.found(counted.distinct) == counted.found()
    assert counted.blocks == sum(map(len, lists))


@given(prompts)
def test_a_larger_cache_finds_no_less(lists: list[list[int]]) -> None:
    counted = offered_reuse(chained(arrays(lists))[0])
    found = [counted.found(capacity) for capacity in range(45)]
    assert found == sorted(found)


@given(prompts)
def test_chained_ids_are_one_a_beginning(lists: list[list[int]]) -> None:
    renamed, nodes = chained(arrays(lists))
    meant: dict[int, tuple[int, ...]] = {}
    for prompt, ids in zip(lists, renamed, strict=True):
        for end, node in enumerate(ids.tolist(), start=1):
            assert meant.setdefault(node, tuple(prompt[:end])) == tuple(prompt[:end])
    assert len(set(meant.values())) == len(meant) == nodes


def turn(sent_s: float, *blocks: int) -> Turn:
    return Turn(len(blocks) * 64 + 3, 10, 1.0, sent_s, np.array(blocks, np.int64))


@pytest.mark.parametrize(("scope", "together"), [("session", 1), ("corpus", 3)])
def test_whether_sessions_share_is_the_scope_s(scope: str, together: int) -> None:
    sessions = (Session("a", 0.0, (turn(0, 1), turn(5, 1, 2))), Session("b", 1.0, (turn(0, 1, 2),)))
    corpus = Corpus(sessions, 64, "session" if scope == "session" else "corpus")
    figures = CorpusFigures(corpus)
    assert (figures.together.found(), sum(reuse.found() for reuse in figures.alone)) == (together, 1)
    assert (figures.share_alone(), prompts_by_time(corpus).session) == (1 / 5, [0, 1, 0])


def test_what_is_unseen_counts_a_session_s_own_prompts_alone() -> None:
    below = Session("helper", 2.0, (turn(0, 1, 7),))
    first = Turn(67, 10, 0.0, 0.0, np.array([1], np.int64), (below,))
    figures = CorpusFigures(Corpus((Session("a", 0.0, (first, turn(9, 1, 7, 8))),), 64, "session"))
    assert figures.unseen() == [67, 131 - 64, 195 - 128]
    assert figures.corpus.sessions[0].subagent_count() == 1


def test_capacities_end_where_everything_fits() -> None:
    session = Session("a", 0.0, tuple(turn(at, *range(at + 40)) for at in range(30)))
    figures = CorpusFigures(Corpus((session,), 64, "session"))
    usual = figures.usual_capacities()
    assert usual[-2] < figures.together.distinct * 64 <= usual[-1]
    assert figures.capacities(usual)[-2].together == figures.together.share() > 0.9
