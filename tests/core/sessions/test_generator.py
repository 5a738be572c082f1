"""Sessions that are made: like the recorded ones, sound in themselves, the same for the same seed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.sessions.corpus import Corpus, CorpusFigures, Session, Turn
from kvbench.core.sessions.corpus_formats import grown_blocks
from kvbench.core.sessions.generator import SessionPlan, fitted_model
from kvbench.errors import InputError
from kvbench.planning.corpus_files import load_corpus
from tools.perf_sessions import session_reuse

RECORDED = Path(__file__).parents[2] / "recorded/agentic/excerpt.jsonl.gz"
SIZE = 16


def session_of(lengths: list[tuple[int, int, float]], shared_len: int) -> Session:
    blocks = grown_blocks([length[:2] for length in lengths], SIZE)
    turns = [
        Turn(input_len, output_len, think_s, float(place), held)
        for place, ((input_len, output_len, think_s), held) in enumerate(zip(lengths, blocks, strict=True))
    ]
    return Session("a", 0.0, tuple(turns), shared_len)


lengths = st.tuples(st.integers(1, 900), st.integers(0, 60), st.floats(0, 100))
corpora = st.lists(
    st.builds(session_of, st.lists(lengths, min_size=2, max_size=7), st.integers(0, 90)),
    min_size=1,
    max_size=4,
).map(lambda sessions: Corpus(tuple(sessions), SIZE, "session"))


def arrays(plan: SessionPlan) -> list[list[float]]:
    columns = (plan.first, plan.shared_len, plan.input_len, plan.kept_len, plan.output_len, plan.think_time_s)
    return [column.tolist() for column in columns]


@settings(deadline=None)
@given(corpora, st.integers(1, 60), st.integers(0, 2**32))
def test_a_plan_is_sound(corpus: Corpus, sessions: int, seed: int) -> None:
    model = fitted_model(corpus)
    plan = model.generate(sessions, seed)
    assert arrays(plan) == arrays(model.generate(sessions, seed))
    assert plan.sessions == sessions
    assert plan.turns == plan.first[-1] == len(plan.think_time_s)
    assert plan.input_len.min() >= 1
    assert plan.output_len.min() >= 1
    assert plan.input_len.max() <= model.longest
    assert (plan.kept_len < plan.input_len).all()
    assert not (plan.kept_len % SIZE).any()
    for begin, end in pairwise(plan.first.tolist()):
        assert end > begin
        assert (plan.kept_len[begin], plan.think_time_s[begin]) == (0, 0)
        longest = np.maximum.accumulate(plan.input_len[begin:end])
        assert (plan.kept_len[begin + 1 : end] <= longest[:-1]).all()


@settings(deadline=None, max_examples=50)
@given(corpora, st.integers(1, 20), st.integers(0, 2**32))
def test_its_blocks_say_what_its_lengths_say(corpus: Corpus, sessions: int, seed: int) -> None:
    plan = fitted_model(corpus).generate(sessions, seed)
    figures = CorpusFigures(plan.corpus())
    assert figures.together.blocks == sum(length // SIZE for length in plan.input_len.tolist())
    shares = [reuse.share() for reuse in figures.alone]
    assert shares == pytest.approx(session_reuse(plan).tolist())
    assert figures.together.found() >= sum(reuse.found() for reuse in figures.alone)


def test_sessions_share_what_the_recording_says_they_share() -> None:
    one = session_of([(320, 5, 0.0), (400, 5, 1.0)], 160)
    made = fitted_model(Corpus((one,), SIZE, "session")).generate(9, 0).corpus()
    assert [(session.name, session.shared_len) for session in made.sessions] == [
        (str(n), 160) for n in range(9)
    ]
    alone = [{*session.turns[-1].blocks.tolist()[10:]} for session in made.sessions]
    assert len(set().union(*alone)) == sum(map(len, alone))
    firsts = [session.turns[0].blocks.tolist() for session in made.sessions]
    assert (len({tuple(first[:10]) for first in firsts}), len({first[10] for first in firsts})) == (1, 9)


def test_a_model_is_of_each_turn_s_new_tokens_and_kept_share() -> None:
    one = session_of([(320, 5, 0.0), (400, 5, 1.0), (160, 5, 1.0)], 500)
    other = session_of([(64, 5, 0.0), (400, 5, 1.0), (500, 5, 1.0)], 32)
    model = fitted_model(Corpus((one, other), SIZE, "session"))
    assert model.unseen_len.tolist() == [320, 80, 160, 64, 336, 100]
    assert model.kept_share.tolist() == [0, 1, 0, 0, 1, 1]
    assert model.shared_len.tolist() == [320, 32]  # no more than the first prompt


def test_quartiles_are_the_recorded_ones() -> None:
    """Of the three sessions of the excerpt, whose quartiles lie between few values: within a tenth."""
    corpus = load_corpus(RECORDED)
    made = CorpusFigures(fitted_model(corpus).generate(300, 1).corpus()).spreads()
    for name, spread in CorpusFigures(corpus).spreads().items():
        if name != "session_s":  # what is made has no times of answers
            assert made[name].median == pytest.approx(spread.median, rel=0.1), name


def test_single_requests_are_no_sessions() -> None:
    alone = Corpus((session_of([(320, 5, 0.0)], 0),), SIZE, "session")
    with pytest.raises(InputError, match="no session has a second turn"):
        fitted_model(alone)
    pair = fitted_model(Corpus((session_of([(320, 5, 0.0), (400, 5, 1.0)], 0),), SIZE, "session"))
    with pytest.raises(InputError, match="request at least 1"):
        pair.generate(0, 1)
