"""What a trial of sessions shows beside its requests, beside a count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvbench.core.records import RequestRecord
from kvbench.core.sessions.corpus import Session, Turn
from kvbench.core.sessions.session_load import BY_TURN, SessionLoad, session_figures, session_load

SIZE = 16
POOL = 4096 * SIZE


def turn(blocks: list[int]) -> Turn:
    """A prompt of these blocks and five more tokens."""
    return Turn(SIZE * len(blocks) + 5, 4, 1.0, 0.0, np.array(blocks, np.int64))


def load_of(sessions: int, turns: int = 3) -> SessionLoad:
    session = Session("s", 0.0, tuple(turn(list(range(1, number + 2))) for number in range(turns)))
    return session_load(
        [session] * sessions, [10.0 * place for place in range(sessions)], "session", SIZE, own_answers=True
    )


def answered(load: SessionLoad, gap_s: float = 2.0, ttft_s: float = 0.1) -> list[RequestRecord]:
    """Each turn is sent ``gap_s`` after the one before it, and takes a second; the first's TTFT is twice."""
    following, turns = load.following, max(load.following.turn) + 1
    records = []
    for place in range(load.requests):
        number, at_turn = following.session[place], following.turn[place]
        begun_s = float(load.session_offsets_s[number])
        at_s = begun_s + gap_s * at_turn
        ttft = ttft_s * (1 if at_turn else 2)
        end_s = at_s + 1.0
        records.append(RequestRecord(
            f"sim-{place}", at_s, load.input_len[place], 4, sent_s=at_s, first_token_s=at_s + ttft,
            last_token_s=end_s, output_len=4, session=number, turn=at_turn,
            session_s=end_s - begun_s if at_turn == turns - 1 else None, cached_tokens=SIZE * at_turn,
        ))  # fmt: skip
    return sorted(records, key=lambda record: record.scheduled_s)


def test_figures_of_a_whole_trial() -> None:
    load = load_of(4)
    found = session_figures(answered(load), load, (0.0, 40.0), POOL)
    assert (found["begun"], found["ended"]) == (4, 4)
    assert found["session_s"] == pytest.approx({"p50": 5.0, "p90": 5.0, "p95": 5.0})
    assert found["first_ttft_ms"] == pytest.approx({"p50": 200.0, "p90": 200.0, "p95": 200.0})
    assert found["later_ttft_ms"]["p50"] == pytest.approx(100.0)
    assert [(number, n) for number, n, _ in found["ttft_ms_by_turn"]] == [(0, 4), (1, 4), (2, 4)]
    assert [ms for _, _, ms in found["ttft_ms_by_turn"]] == pytest.approx([200.0, 100.0, 100.0])
    # Each of four sessions is under way for 5 s of 40.
    assert found["at_once"] == pytest.approx(4 * 5 / 40)
    # Prompts have 1, 2 and 3 whole blocks, of which 0, 1 and 2 were there before.
    assert found["offered_reuse"] == pytest.approx(3 / 6)
    assert (found["achieved_reuse"], found["pool_tokens"]) == (pytest.approx(3 / 6), POOL)


def test_only_what_is_sent_in_the_window_counts_for_times() -> None:
    load = load_of(4)
    found = session_figures(answered(load), load, (9.0, 21.0), POOL)
    # Two sessions whole, and the first turn of none but these and the third's at 20 s.
    assert (found["ended"], [n for _, n, _ in found["ttft_ms_by_turn"]]) == (1, [2, 1, 1])
    # The second from 10 to 15, the third from 20 to 21, of 12 s.
    assert (found["at_once"], found["begun"]) == (pytest.approx(6 / 12), 4)


def test_a_session_that_failed_is_over_and_one_that_was_cut_is_under_way() -> None:
    load = load_of(1)
    first, second, _ = answered(load)
    failed = replace(second, error="timeout", last_token_s=2.5)
    assert session_figures([first, failed], load, (0.0, 10.0), POOL)["at_once"] == pytest.approx(0.25)
    assert session_figures([first, second], load, (0.0, 10.0), POOL)["at_once"] == pytest.approx(1.0)


def test_a_pool_that_is_too_small_offers_less() -> None:
    load = load_of(6)
    records = answered(load, gap_s=20.0)  # sessions lie in each other's way
    small = session_figures(records, load, (0.0, 200.0), 4 * SIZE)
    assert small["offered_reuse"] == pytest.approx(0.5)
    assert 0.0 <= small["offered_reuse_in_pool"] < 0.25


def test_nothing_sent_and_no_time_give_no_figures() -> None:
    load = load_of(1)
    found = session_figures([], load, (0.0, 0.0), POOL)
    assert (found["begun"], found["ended"], found["at_once"]) == (0, 0, None)
    assert found["first_ttft_ms"] is found["later_ttft_ms"] is found["session_s"] is None
    assert "achieved_reuse" not in found


def test_long_conversations_are_told_by_their_first_turns() -> None:
    load = load_of(1, BY_TURN + 5)
    found = session_figures(answered(load), load, (0.0, 1e4), POOL)
    assert [number for number, _, _ in found["ttft_ms_by_turn"]] == list(range(BY_TURN))
