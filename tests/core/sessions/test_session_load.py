"""Turns are sent when they are due, sub-agents run beside and join, caches find no more than is offered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.sessions.corpus import Session, Turn
from kvbench.core.sessions.session_load import PromptHashes, SessionLoad, session_load
from kvbench.core.simulation.data import Outcome, SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import timing_profile

SIZE = 16


def turn(blocks: list[int], think_s: float = 1.0, out: int = 4, below: tuple[Session, ...] = ()) -> Turn:
    """A prompt of these blocks and five more tokens."""
    return Turn(SIZE * len(blocks) + 5, out, think_s, 0.0, np.array(blocks, np.int64), below)


def run(load: SessionLoad, *, pair: bool = False, blocks: int = 4096, timeout_s: float = 1e9) -> Outcome:
    system = System(
        timing=timing_profile("quick"),
        config=EngineConfig(block_tokens=SIZE, num_blocks=blocks),
        prefill=int(pair),
    )
    return simulate(
        system,
        SimulatedLoad(load.offsets_s, load.input_len, load.output_len, timeout_s, PromptHashes(load, SIZE),
                      load.following),
    )  # fmt: skip


@pytest.mark.parametrize("pair", [False, True])
def test_a_turn_is_sent_think_time_after_the_answer_before_it(pair: bool) -> None:
    session = Session("s", 0.0, (turn([1]), turn([1, 2], 0.25), turn([1, 2, 3], 3.0)))
    load = session_load([session] * 3, [0.5, 0.51, 7.0], "session", SIZE, own_answers=True)
    records = run(load, pair=pair).records
    assert len(records) == 9
    assert [record.scheduled_s for record in records] == sorted(record.scheduled_s for record in records)
    for number, begun_s in enumerate([0.5, 0.51, 7.0]):
        turns = [record for record in records if record.session == number]
        assert ([record.turn for record in turns], turns[0].scheduled_s) == ([0, 1, 2], begun_s)
        for before, after, think_s in zip(turns, turns[1:], [0.25, 3.0], strict=False):
            assert after.scheduled_s == pytest.approx(before.last_token_s + think_s, abs=1e-9)
        assert turns[-1].session_s == pytest.approx(turns[-1].last_token_s - begun_s)
        assert [record.session_s for record in turns[:-1]] == [None, None]


def test_sub_agents_run_beside_each_other_and_the_next_turn_waits_for_the_last() -> None:
    quick = Session("quick", 0.0, (turn([7], 0.0),))
    slow = Session("slow", 0.0, (turn([8], 0.5), turn([8, 9], 9.0)))
    session = Session("s", 0.0, (turn([1], below=(quick, slow)), turn([1, 2], 2.0)))
    load = session_load([session], [0.0], "corpus", SIZE, own_answers=True)
    records = run(load).records
    by_place = {int(record.request_id.removeprefix("sim-")): record for record in records}
    main, fast, begun, ended, joined = (by_place[place] for place in range(5))
    assert fast.scheduled_s == pytest.approx(main.last_token_s)
    assert begun.scheduled_s == pytest.approx((main.last_token_s or 0.0) + 0.5)
    assert ended.scheduled_s == pytest.approx((begun.last_token_s or 0.0) + 9.0)
    assert joined.scheduled_s == pytest.approx((ended.last_token_s or 0.0) + 2.0)
    assert [record.turn for record in (main, fast, begun, ended, joined)] == [0, 0, 0, 1, 1]
    assert (len(records), {record.session for record in records}) == (5, {0})


def test_a_session_is_given_up_when_a_turn_has_no_answer() -> None:
    session = Session("s", 0.0, (turn([1]), turn([1, 2], 0.0, out=4000), turn([1, 2, 3], 0.0)))
    load = session_load([session, session], [0.0, 0.1], "session", SIZE, own_answers=True)
    outcome = run(load, timeout_s=0.2)
    assert sorted((record.turn, record.error) for record in outcome.records) == [
        (0, ""), (0, ""), (1, "timeout"), (1, "timeout"),
    ]  # fmt: skip


def test_own_answers_are_found_and_recorded_ones_are_not() -> None:
    answer = turn([1, 2], out=3 * SIZE)
    session = Session("s", 0.0, (answer, turn([1, 2, 3, 4, 5], 1.0)))
    found = {}
    for own_answers in (True, False):
        load = session_load([session], [0.0], "session", SIZE, own_answers=own_answers)
        found[own_answers] = run(load).records[-1].cached_tokens
        assert load.offered_tokens([0, 1], [None]) == [found[own_answers]]
    # 37 tokens of prompt and 48 of answer, whose last one has no KV: five whole blocks.
    assert found == {True: 5 * SIZE, False: 2 * SIZE}
    # P computes prompts alone: what D made of the answer, P has not.
    load = session_load([session], [0.0], "session", SIZE, own_answers=True)
    assert run(load, pair=True).records[-1].cached_tokens == 2 * SIZE


def test_copies_of_a_session_share_what_sessions_share_and_nothing_else() -> None:
    session = Session("s", 0.0, (turn([1, 2, 3]),), shared_len=2 * SIZE)
    apart = session_load([session, session], [0.0, 50.0], "session", SIZE, own_answers=True)
    assert [record.cached_tokens for record in run(apart).records] == [0, 0]
    shared = session_load([session, session], [0.0, 50.0], "corpus", SIZE, own_answers=True)
    assert [record.cached_tokens for record in run(shared).records] == [0, 2 * SIZE]


plans = st.lists(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 40),
                       st.sampled_from([0.0, 0.01, 5.0])), min_size=1, max_size=5),
    min_size=1,
    max_size=5,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(plans, st.booleans(), st.booleans(), st.sampled_from([8, 16, 32, 48]), st.booleans())
def test_no_cache_finds_more_than_is_offered(
    shapes: list[list[tuple[list[int], int, float]]], pair: bool, reused: bool, engine_block: int, apart: bool
) -> None:
    sessions = [
        Session(str(place), 0.0, tuple(turn(blocks, think_s, out) for blocks, out, think_s in shape))
        for place, shape in enumerate(shapes)
    ]
    offsets = [place * (1e4 if apart else 0.001) for place in range(len(sessions))]
    load = session_load(sessions, offsets, "corpus", SIZE, own_answers=reused)
    records = run(load, pair=pair).records
    places = [int(record.request_id.removeprefix("sim-")) for record in records]
    achieved = sum(record.cached_tokens or 0 for record in records)
    assert achieved <= load.offered_tokens(places, [None])[0]
    small = run(load, pair=pair, blocks=12).records
    if apart and all(shape[0][2] == 5.0 or len(shape) == 1 for shape in shapes):
        assert sum(record.cached_tokens or 0 for record in small) <= achieved


def test_blocks_of_another_size_are_found_where_their_tokens_are_known() -> None:
    session = Session("s", 0.0, (turn([1, 2, 3]), turn([1, 2, 4])))
    load = session_load([session], [0.0], "session", SIZE, own_answers=False)
    for size, shared in ((8, 4), (16, 2), (32, 1), (64, 0), (12, 2)):
        first, second = PromptHashes(load, size)[:]
        assert sum(a == b for a, b in zip(first, second, strict=True)) == shared
        assert first[:shared] == second[:shared]
