"""Turns of sessions on real servers: sent think time after their answers, given up where one fails."""

from pathlib import Path
from typing import Any

import pytest
from emulated import running, running_pair, spec
from hostile import spec_for
from turns import SIZE, prompts_of, sent, turn

from kvbench.core.load.dispatch import SESSION_HEADER, server_of_session
from kvbench.core.records import RequestRecord
from kvbench.core.sessions.corpus import Session
from kvbench.core.sessions.session_load import SessionLoad, session_load
from kvbench.launchers.local import LocalLauncher
from kvbench.processes.loadgen.direct import DirectDispatch
from kvbench.processes.loadgen.plan import PlannedRequest, request_headers
from kvbench.processes.loadgen.session_schedule import SessionSchedule
from kvbench.processes.loadgen.sockets.loop import SocketLoop
from kvbench.sweep.selftest_server import exact_server

DECIMALS = 3e-7
"""Times in records are rounded to 0.1 µs."""


def load_of(*sessions: Session, own_answers: bool = False, apart_s: float = 0.02) -> SessionLoad:
    offsets = [0.05 + apart_s * place for place in range(len(sessions))]
    return session_load(sessions, offsets, "session", SIZE, own_answers=own_answers)


@pytest.fixture
def launcher(tmp_path: Path) -> LocalLauncher:
    return LocalLauncher("turns", tmp_path / "logs", tmp_path / "specs")


def by_place(records: list[RequestRecord]) -> dict[int, RequestRecord]:
    return {int(record.request_id.rpartition("-")[2]): record for record in records}


def require_due(load: SessionLoad, records: list[RequestRecord]) -> None:
    """Each was due at its planned time, or think time after the last answer that it waited for."""
    placed, following = by_place(records), load.following
    for place, record in placed.items():
        assert (record.session, record.turn) == (following.session[place], following.turn[place])
        assert record.sent_s >= record.scheduled_s
        if not following.after[place]:
            assert record.scheduled_s == pytest.approx(load.offsets_s[place], abs=DECIMALS)
            continue
        answered_s = max(placed[number].last_token_s or 0.0 for number in following.after[place])
        due_s = answered_s + following.think_time_s[place]
        assert record.scheduled_s == pytest.approx(due_s, abs=DECIMALS)


def test_turns_are_due_think_time_after_answers(launcher: LocalLauncher, tmp_path: Path) -> None:
    session = Session("s", 0.0, (turn([1]), turn([1, 2], 0.02), turn([1, 2, 3], 0.11), turn([1, 2, 3], 0.0)))
    load = load_of(*[session] * 30)
    with exact_server(launcher, {"first_token_s": 0.02, "gap_s": 0.003}) as server:
        records, end, progress = sent(tmp_path, load, server.url)
        arrived = server.log("?summary")["lateness"]["first"]["n"]
    assert end["reason"] == "complete"
    assert len(records) == arrived == 120
    assert {record.error for record in records} == {""}
    require_due(load, records)
    for number in range(30):
        turns = sorted(
            (record for record in records if record.session == number), key=lambda record: record.turn or 0
        )
        assert [record.turn for record in turns] == [0, 1, 2, 3]
        assert [record.session_s is not None for record in turns] == [False, False, False, True]
        last = turns[-1].last_token_s
        assert turns[-1].session_s == pytest.approx(last - load.offsets_s[4 * number], abs=DECIMALS)
    require_reported(records, progress)


def test_every_turn_names_its_session_and_no_other_trial_has_that_name() -> None:
    load = load_of(Session("a", 0.0, (turn([1]), turn([1, 2]))), Session("b", 0.0, (turn([3]),)))
    names = []
    for _ in range(2):
        schedule = SessionSchedule(load, prompts_of(load))
        first = schedule.upcoming(())
        assert first is not None
        schedule.take(first)
        names.append((first.session_id, schedule.upcoming(()).session_id))
        head = request_headers(spec_for("http://127.0.0.1:9"), first.request_id, first.session_id)
        assert head[SESSION_HEADER] == first.session_id
    assert len({name for trial in names for name in trial}) == 4
    assert SESSION_HEADER not in request_headers(spec_for("http://127.0.0.1:9"), "r", "")


def test_direct_mode_takes_the_servers_that_the_router_takes() -> None:
    servers = [{"url": f"http://127.0.0.1:{port}"} for port in (1, 2, 3)]
    for routing, distinct in (("session", 1), ("round_robin", 3)):
        direct = {"connector": "nixl", "prefill": servers, "decode": servers, "routing": routing}
        dispatch = DirectDispatch(spec_for("http://127.0.0.1:9", direct=direct), SocketLoop())
        taken = []
        for index in range(3):
            request = PlannedRequest(index, f"r{index}", 0.0, 4, 1, b"[1]", session=7, session_id="kvb-7")
            dispatch.prepare([request])
            taken.append(request.parts[0].partition(b"host: ")[2].split()[0])
        assert len(set(taken)) == distinct
        if routing == "session":
            assert taken[0] == b"127.0.0.1:%d" % (1 + server_of_session("kvb-7", 3))


def require_reported(records: list[RequestRecord], progress: list[dict[str, Any]]) -> None:
    """Progress tells when each turn was due, in the order of sending, before it tells of its end."""
    offsets: list[float] = []
    settled: dict[int, list[Any]] = {}
    for line in progress:
        offsets += line["offsets_s"]
        for row in line["settled"]:
            assert row[0] < len(offsets)
            settled[row[0]] = row
        assert line["sent"] >= len(offsets)
    assert offsets == [record.scheduled_s for record in records]
    assert sorted(settled) == list(range(len(records)))
    for place, record in enumerate(records):
        assert settled[place][4:] == [
            record.error,
            record.turn,
            record.session_s and round(record.session_s, 7),
        ]


def test_sub_agents_run_beside_and_join(launcher: LocalLauncher, tmp_path: Path) -> None:
    short = Session("a", 0.0, (turn([50]),))
    long = Session("b", 0.0, (turn([60]), turn([60, 61], 0.2)))
    session = Session("s", 0.0, (turn([1], below=(short, long)), turn([1, 2], 0.05), turn([1, 2, 3])))
    load = load_of(*[session] * 5)
    with exact_server(launcher, {"first_token_s": 0.01, "gap_s": 0.002}) as server:
        records, end, _ = sent(tmp_path, load, server.url)
    assert end["reason"] == "complete"
    assert len(records) == 5 * 6
    require_due(load, records)
    placed = by_place(records)
    for first in range(0, 30, 6):
        joined = next(place for place in range(first, first + 6) if len(load.following.after[place]) == 3)
        assert placed[joined].turn == 1


def test_a_session_is_given_up_where_a_turn_fails(launcher: LocalLauncher, tmp_path: Path) -> None:
    session = Session("s", 0.0, (turn([1]), turn([1, 2]), turn([1, 2, 3])))
    load = load_of(*[session] * 6)
    # The first six to come are the sessions' first turns: two of them have no answer.
    spec_ = {"first_token_s": 0.2, "gap_s": 0.002, "trouble": {"kind": "status", "at": [1, 4]}}
    with exact_server(launcher, spec_) as server:
        records, end, progress = sent(tmp_path, load, server.url)
    assert end["reason"] == "complete"
    failed = {record.session for record in records if not record.ok}
    assert len(failed) == 2
    for number in range(6):
        turns = [record.turn for record in records if record.session == number]
        assert turns == ([0] if number in failed else [0, 1, 2])
    require_reported(records, progress)


def test_stopped_in_the_middle_no_turn_follows(launcher: LocalLauncher, tmp_path: Path) -> None:
    session = Session("s", 0.0, tuple(turn([1], 0.3) for _ in range(50)))
    with exact_server(launcher, {"first_token_s": 0.02, "gap_s": 0.002}) as server:
        records, end, _ = sent(tmp_path, load_of(session, session), server.url, stop_after_s=0.6)
    assert end["reason"] == "stopped"
    assert 2 <= len(records) < 20


def test_a_server_without_token_ids_is_said(launcher: LocalLauncher, tmp_path: Path) -> None:
    session = Session("s", 0.0, (turn([1]), turn([1, 2])))
    with exact_server(launcher, {"first_token_s": 0.01, "gap_s": 0.002}) as server:
        records, _, _ = sent(tmp_path, load_of(session, own_answers=True), server.url)
    assert [record.error for record in records] == ["bad_stream"]
    assert "answers: recorded" in records[0].error_detail


def growing(turns: int) -> Session:
    """Each prompt is the one before, its answer of 22 tokens, and new ones."""
    return Session("s", 0.0, tuple(turn(list(range(2 + 3 * place)), 0.03, out=22) for place in range(turns)))


def offered_of(load: SessionLoad, records: list[RequestRecord]) -> int:
    return load.offered_tokens([*by_place(records)], (None,))[0]


def test_a_session_finds_its_own_earlier_turns(tmp_path: Path) -> None:
    load = load_of(*[growing(4) for _ in range(4)], own_answers=True)
    with running(tmp_path, spec()) as engine:
        records, _, _ = sent(tmp_path, load, engine.url, vocab_size=8192)
        hits = engine.metric("vllm:prefix_cache_hits_total")
        lengths = engine.metric("vllm:prompt_tokens_total")
    assert {record.error for record in records} == {""}
    require_due(load, records)
    assert lengths == sum(load.input_len)
    # Whole blocks of the answers, too: their KV was computed while they were written.
    assert 0 < hits == offered_of(load, records)
    others = load_of(*[growing(4) for _ in range(4)])
    assert hits > others.offered_tokens(range(others.requests), (None,))[0]


def test_made_up_answers_are_found_by_nobody(tmp_path: Path) -> None:
    load = load_of(*[growing(4) for _ in range(4)])
    with running(tmp_path, spec()) as engine:
        records, _, _ = sent(tmp_path, load, engine.url, vocab_size=8192)
        hits = engine.metric("vllm:prefix_cache_hits_total")
        again, _, _ = sent(tmp_path, load, engine.url, vocab_size=8192, seed=8)
        assert engine.metric("vllm:prefix_cache_hits_total") == 2 * hits, "nothing of an earlier trial helps"
    assert {record.error for record in (*records, *again)} == {""}
    assert hits == offered_of(load, records)


@pytest.mark.parametrize("connector", ["tcp", "nixl"])
def test_p_and_d_find_no_more_than_is_offered(connector: str, tmp_path: Path) -> None:
    load = load_of(*[growing(4) for _ in range(3)], own_answers=True)
    with running_pair(tmp_path, connector) as pair:
        direct = {
            "connector": connector,
            "prefill": [{"url": pair.prefill.url}],
            "decode": [{"url": pair.decode.url}],
        }
        records, _, _ = sent(tmp_path, load, pair.decode.url, direct=direct, vocab_size=8192)
        hits = [engine.metric("vllm:prefix_cache_hits_total") for engine in (pair.prefill, pair.decode)]
    assert {(record.error, record.error_detail) for record in records} == {("", "")}
    require_due(load, records)
    offered = offered_of(load, records)
    assert all(0 < hit <= offered for hit in hits)
    assert hits[0] < hits[1], "answers' KV is D's"
