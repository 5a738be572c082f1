"""Sessions that a scenario asks for: the same for a seed, as long as asked, filled when they say so."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.core.scenario.checks import session_problems
from kvbench.core.scenario.sections import Sessions, SessionShape
from kvbench.core.sessions.corpus import Session, Turn
from kvbench.core.sessions.session_source import due_times, source_of
from kvbench.errors import InputError

SHAPE = SessionShape(
    turns=4, shared_prefix_len=64, first_len=200, added_len=50, output_len=20, think_time_s=1.0, spread=0.3
)


def test_a_load_is_a_function_of_its_seed_and_begins_open_loop() -> None:
    source = source_of(Sessions(shape=SHAPE), None)
    first, again, other = (source.load(2.0, 300, 1.0, seed) for seed in (1, 1, 2))
    assert list(first.input_len) == list(again.input_len) != list(other.input_len)
    assert np.array_equal(first.session_offsets_s, again.session_offsets_s)
    assert len(first.session_offsets_s) == 300
    assert 300 / first.session_offsets_s[-1] == pytest.approx(2.0, rel=0.25)
    assert first.requests / 300 == pytest.approx(source.requests_each, rel=0.1)
    assert max(first.input_len) <= source.longest_input


def test_limits_cut_sessions_and_refuse_what_leaves_none() -> None:
    short = source_of(Sessions(shape=SHAPE, max_turns=2), None)
    assert max(len(session.turns) for session in short.sample) <= 2
    small = source_of(Sessions(shape=SHAPE, max_input_len=400), None)
    assert small.longest_input <= 400
    with pytest.raises(InputError, match="max_input_len"):
        source_of(Sessions(shape=SHAPE, max_input_len=1), None)


def test_turns_are_due_after_answers_and_sub_agents() -> None:
    blocks = np.array([1], np.int64)
    agent = Session("a", 0.0, (Turn(20, 4, 0.5, 0.0, blocks), Turn(20, 4, 2.0, 0.0, blocks)))
    session = Session("s", 0.0, (Turn(20, 4, 9.0, 0.0, blocks, (agent,)), Turn(20, 4, 1.0, 0.0, blocks)))
    # Sent at 0, answered at 0.1; the agent at 0.6 and 2.7, answered at 2.8; the next turn a second later.
    assert list(due_times(session, 0.1)) == pytest.approx([0.0, 0.6, 2.7, 3.8])


@pytest.mark.parametrize(("data", "place"), [
    ({"workload": {"sessions": {"source": "recorded"}}}, ("workload", "sessions", "source")),
    ({"workload": {"sessions": {"path": "x"}}}, ("workload", "sessions", "path")),
    ({"workload": {"sessions": {}, "trace": {"path": "x"}}}, ("workload", "sessions")),
    ({"workload": {"sessions": {}}, "search": {"method": "burst"}}, ("search", "method")),
    ({"workload": {"sessions": {}}, "search": {"compare_burst": True}}, ("search", "compare_burst")),
    ({"slo": {"limits": ["session_ms p90 <= 9"]}}, ("slo", "limits")),
])  # fmt: skip
def test_what_contradicts_is_named(data: dict[str, object], place: tuple[str, ...]) -> None:
    assert [where for where, _ in session_problems(data)] == [place]


def test_what_agrees_is_no_problem() -> None:
    data = {"workload": {"sessions": {}}, "slo": {"limits": ["later_ttft_ms p95 <= 800"]}}
    assert list(session_problems(data)) == []
