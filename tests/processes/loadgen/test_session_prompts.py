"""Prompts of sessions: equal blocks are equal tokens and nothing else is, answers are the server's own."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from turns import SIZE, VOCAB, prompts_of, tokens_of, turn

from kvbench.core.load.prompts import lowest_id
from kvbench.core.sessions.corpus import Session
from kvbench.core.sessions.session_load import SessionLoad, load_arrays, load_of_arrays, session_load
from kvbench.errors import InputError
from kvbench.planning.load_files import write_session_load
from kvbench.processes.loadgen.session_schedule import BlockTokens, SessionPrompts, read_session_load

_FRESH = count(100, 100)
"""Blocks that no other session has: what two have in common is not answered differently."""


@st.composite
def conversations(draw: st.DrawFn) -> Session:
    """A session whose prompts go on from the one before, or begin anew in it; some with sub-agents."""
    turns, known = [], [1, 2]
    for _ in range(draw(st.integers(1, 4))):
        kept = draw(st.one_of(st.just(len(known)), st.integers(0, len(known))))
        fresh, added = next(_FRESH), draw(st.integers(0, 3))
        known = known[:kept] + list(range(fresh, fresh + added))
        below: tuple[Session, ...] = ()
        if draw(st.booleans()):
            blocks = [*known[: draw(st.integers(0, len(known)))], fresh + 50]
            below = (Session("below", 0.0, (turn(blocks), turn([*blocks, fresh + 51]))),)
        out, more = draw(st.integers(1, 40)), draw(st.integers(1, SIZE - 1))
        turns.append(turn(known, out=out, below=below, more=more))
    return Session("s", 0.0, tuple(turns), shared_len=SIZE)


def prompts_in_order(load: SessionLoad, seed: int = 1) -> tuple[list[list[int]], dict[int, list[int]]]:
    """Each prompt's tokens, made in the load's order, and the answers that were given."""
    made, answers, prompts = [], {}, prompts_of(load, seed)
    for place in range(load.requests):
        made.append(tokens_of(prompts, place))
        answers[place] = [
            7 + (place * 31 + step * 1999) % (2 * VOCAB - 7) for step in range(load.output_len[place])
        ]
        prompts.answered(place, answers[place])
    return made, answers


def alike(one: list[int], other: list[int]) -> int:
    """How many leading items are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(conversations(), min_size=1, max_size=3), st.booleans(), st.sampled_from(["corpus", "session"])
)
def test_prompts_have_in_common_what_their_blocks_say(
    sessions: list[Session], own_answers: bool, scope: str
) -> None:
    load = session_load(
        sessions,
        [float(number) for number in range(len(sessions))],
        scope,
        SIZE,
        own_answers=own_answers,  # type: ignore[arg-type]
    )
    made, answers = prompts_in_order(load)
    blocks = [nodes[: n // SIZE].tolist() for nodes, n in zip(load.prompts, load.input_len, strict=True)]
    for place, tokens in enumerate(made):
        assert len(tokens) == load.input_len[place]
        assert all(7 <= token < 2 * VOCAB for token in tokens)
        for other in range(place):
            assert alike(tokens, made[other]) // SIZE == alike(blocks[place], blocks[other]), (place, other)
        earlier = load.goes_on[place] if load.goes_on else -1
        if earlier >= 0:
            whole = [*made[earlier], *answers[earlier]]
            assert tokens[: len(whole)] == whole[: len(tokens)]


def test_another_trial_and_another_copy_share_nothing() -> None:
    session = Session("s", 0.0, (turn([1, 2]), turn([1, 2, 3, 4])))
    load = session_load([session, session], [0.0, 1.0], "session", SIZE, own_answers=True)
    here, there = (prompts_in_order(load, seed)[0] for seed in (1, 2))
    assert alike(here[0], here[2]) == 0
    blocks = [
        {tuple(p[at : at + SIZE]) for p in made for at in range(0, len(p), SIZE)} for made in (here, there)
    ]
    assert not blocks[0] & blocks[1]
    assert prompts_in_order(load, 1)[0] == here


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 200_000), st.integers(1, 70), st.integers(0, 2**63), st.integers(1, 400))
def test_blocks_differ_by_their_first_tokens(vocab: int, size: int, seed: int, blocks: int) -> None:
    if (vocab - lowest_id(vocab)) ** size < 2 * blocks:
        return
    made = BlockTokens(vocab, size, blocks, seed).of(np.arange(blocks), size)
    assert made.shape == (blocks, size)
    assert made.min() >= lowest_id(vocab)
    assert made.max() < vocab
    assert len({tuple(row) for row in made.tolist()}) == blocks
    assert (BlockTokens(vocab, size, blocks, seed).of(np.arange(blocks), size) == made).all()


def test_what_cannot_be_told_apart_is_refused() -> None:
    with pytest.raises(InputError, match="cannot differ"):
        BlockTokens(64, 1, 1000, 1)
    with pytest.raises(InputError, match="vocab_size"):
        BlockTokens(1, 16, 10, 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=3))
def test_a_load_is_the_same_from_its_arrays(sessions: list[Session]) -> None:
    load = session_load(sessions, [0.5] * len(sessions), "session", SIZE, own_answers=True)
    again = load_of_arrays(load_arrays(load))
    assert (again.input_len, again.output_len) == (load.input_len, load.output_len)
    assert (again.following, again.goes_on) == (load.following, load.goes_on)
    assert prompts_in_order(again) == prompts_in_order(load)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    load = session_load([Session("s", 0.0, (turn([1]),))], [0.0], "session", SIZE, own_answers=False)
    path = tmp_path / "load.npz"
    write_session_load(path, load)
    assert read_session_load(str(path)).requests == 1
    for data in (b"", b"nothing", path.read_bytes()[:200]):
        path.write_bytes(data)
        with pytest.raises(InputError, match="sessions_path"):
            read_session_load(str(path))
    with pytest.raises(InputError, match="cannot read"):
        read_session_load(str(tmp_path / "nowhere"))


def test_answers_fill_the_blocks_that_later_prompts_have() -> None:
    """What was prepared before the run never takes the place of an answer."""
    first = turn([1, 2], out=40, more=3)
    second = turn([1, 2, 10, 11, 12, 13], more=2)
    back = turn([1, 2, 10, 11, 30], more=2)  # goes back into the second's, behind an answer
    load = session_load([Session("s", 0.0, (first, second, back))], [0.0], "session", SIZE, own_answers=True)
    prompts = SessionPrompts(
        load, VOCAB, 1, lambda tokens: b"".join(b"%d," % token for token in tokens.tolist())
    )
    prompts.prepare()
    given_ids = list(range(500, 540))
    one = tokens_of(prompts, 0)
    prompts.answered(0, given_ids)
    two = tokens_of(prompts, 1)
    prompts.answered(1, [9] * 6)
    three = tokens_of(prompts, 2)
    assert two[: len(one) + 40] == one + given_ids
    assert three[: 4 * SIZE] == two[: 4 * SIZE]
    assert three[4 * SIZE : 5 * SIZE] != two[4 * SIZE : 5 * SIZE]
