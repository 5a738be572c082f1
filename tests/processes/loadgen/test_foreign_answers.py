"""What servers of others do to a stream, each done by a real one, and what is said of it without /metrics."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hostile import DONE, HEAD, LAST, TOKEN, against, chunk, spec_for
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.gates.evidence import ClientFigures, Evidence
from kvbench.core.gates.gates import judge
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.records import Finding, RequestRecord
from kvbench.processes.common.record_file import read_records
from kvbench.processes.loadgen.sockets.clock import READS
from kvbench.processes.loadgen.stream import MAX_TOKENS, StreamReader
from tests.processes.exact_server.test_exact import exact, trouble

FIRST_S, GAP_S, TOKENS, RATE = 0.06, 0.002, 12, 60.0
SLO = Slo(ttft_ms=2000, tpot_ms=500, attainment=0.5)


def load(folder: Path, port: int, *, python: bool = False, disturb: bool = False, **changes: Any) -> Evidence:
    """What a load generator's process finds of a server, as evidence.

    ``python``: its hot path is not the compiled one. ``disturb``: it is stopped for 30 ms again and again.
    """
    changes = {"num_requests": 30, "output_len": TOKENS, "request_rate": RATE, "timeout_s": 20.0, **changes}
    spec = spec_for(f"http://127.0.0.1:{port}", records_path=str(folder / "records"), **changes)
    path = folder / "load.json"
    path.write_text(json.dumps(vars(spec)))
    over = threading.Event()
    with subprocess.Popen(
        [sys.executable, "-m", "kvbench.processes.loadgen", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**os.environ, "KVBENCH_PURE_PYTHON": "1" if python else "0"},
        text=True,
    ) as process:
        disturber = threading.Thread(target=_disturb, args=(process, over))
        try:
            assert json.loads(process.stdout.readline()) == {"event": "ready"}
            if disturb:
                disturber.start()
            *_, end = [json.loads(line) for line in process.stdout]
        finally:
            over.set()
            if disturber.ident:
                disturber.join()
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 0
    assert end["client"]["reads_by"] == ("python" if python else "compiled")
    records = read_records(folder / "records")
    summary = summarise(records, SLO, RATE, end["duration_s"])
    return Evidence(records, summary, SLO, client=ClientFigures.from_json(end["client"]))


def _disturb(process: subprocess.Popen[str], over: threading.Event) -> None:
    while not over.wait(0.02):
        process.send_signal(signal.SIGSTOP)
        over.wait(0.03)
        process.send_signal(signal.SIGCONT)


def found(evidence: Evidence, gate: str) -> Finding | None:
    return next((finding for finding in judge(evidence)[2] if finding.gate == gate), None)


@pytest.fixture(params=["compiled", "python", "direct"])
def way(request: pytest.FixtureRequest) -> str:
    if request.param != "python" and READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    return str(request.param)


def loaded(folder: Path, way: str, *, spec: dict[str, Any], **changes: Any) -> Evidence:
    """The same against an exact server, in one of the ways to read, or without a router in the path."""
    with exact(folder, **{"first_token_s": FIRST_S, "gap_s": GAP_S, **spec}) as server:
        if way == "direct":
            url = f"http://127.0.0.1:{server.port}"
            changes["direct"] = {"connector": "aggregated", "decode": [{"url": url}]}
        return load(folder, server.port, python=way == "python", **changes)


def test_an_event_without_text_does_not_end_ttft(tmp_path: Path, way: str) -> None:
    evidence = loaded(tmp_path, way, spec=trouble("empty_first"))
    assert all(record.ok for record in evidence.records)
    for record in evidence.records:
        assert record.ttft_s > FIRST_S - 1e-4  # the empty event came within a millisecond
        assert len(record.itl_s) == TOKENS - 1
    assert evidence.client.chunks == TOKENS * len(evidence.records)


def test_the_last_event_without_text_is_no_token(tmp_path: Path) -> None:
    """The finish reason in an event of its own, as SGLang and llama.cpp send it, and the usage beside it."""
    last = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":3}}\n\n'
    steps: list[Any] = [HEAD, chunk(TOKEN), chunk(TOKEN), chunk(TOKEN), 0.1, chunk(last), chunk(usage)]
    for record in against([*steps, chunk(DONE), LAST]):
        assert record.ok, record
        assert (len(record.itl_s), record.prompt_tokens) == (2, 8)
        assert record.e2el_s is not None
        assert record.last_token_s - record.first_token_s < 0.05
        assert record.tpot_s is None or record.tpot_s < 0.05  # none if the three came in one instant


EMPTY = b'data: {"choices":[{"index":0,"text":""}]}\n\n'


def usage_of(tokens: int) -> bytes:
    return b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\n' % tokens


def test_tokens_without_text_at_the_end_are_part_of_the_answer() -> None:
    """As of ignored end-of-sequence tokens; the finish reason may have an event of its own."""
    steps: list[Any] = [HEAD, chunk(TOKEN), chunk(TOKEN), 0.1, chunk(EMPTY), 0.05, chunk(EMPTY)]
    for marks in ([], [0.1, chunk(EMPTY)]):
        for record in against([*steps, *marks, chunk(usage_of(4)), chunk(DONE), LAST], output_len=4):
            assert record.ok, record
            assert record.last_token_s - record.first_token_s >= 0.15 - 1e-3
            assert (len(record.itl_s), record.untimed_tokens) == (3, 2.0 if record.itl_s[0] <= 1e-4 else 1.0)


def test_an_answer_without_any_text_is_refused_by_name() -> None:
    for record in against([HEAD, *[chunk(EMPTY)] * 3, chunk(usage_of(3)), chunk(DONE), LAST]):
        assert record.error == "bad_stream"
        assert "has no text" in record.error_detail
        assert record.first_token_s is None


def test_one_token_without_text_came_no_later_than_the_end() -> None:
    steps: list[Any] = [HEAD, chunk(EMPTY), 0.05, chunk(usage_of(1)), chunk(DONE), LAST]
    for record in against(steps, output_len=1):
        assert record.ok, record
        assert record.ttft_s >= 0.05 - 1e-3


def test_a_usage_beyond_all_numbers_is_told_in_words(tmp_path: Path, way: str) -> None:
    evidence = loaded(tmp_path, way, spec=trouble("wrong_usage", usage_off=10**400))
    for record in evidence.records:
        assert record.error == "bad_stream"
        assert "completion_tokens is a number of 401 digits, which no answer can have" in record.error_detail
    verdict, reason, _ = judge(evidence)
    assert (verdict, "bad_stream" in reason) == ("invalid", True)


@given(st.integers(-(10**500), 10**500), st.sampled_from(["completion_tokens", "prompt_tokens"]))
def test_a_usage_is_a_number_of_tokens_or_an_error(count: int, name: str) -> None:
    reader = StreamReader()
    reader.event(json.dumps({"choices": [], "usage": {name: count}}).encode())
    assert (reader.error == "bad_stream") == (count > MAX_TOKENS)
    assert getattr(reader, name) == (count if count <= MAX_TOKENS else None)


@pytest.mark.parametrize(
    ("spec", "gate", "level", "words"),
    [
        (
            trouble("wrong_prompt", prompt_off=-4), "wrong_prompt_length", "invalid",
            "mostly 4 prompt tokens where 8 were sent",
        ),
        (trouble("wrong_prompt", prompt_off=1), "wrong_prompt_length", "note", "mostly 9 prompt tokens"),
        (
            {"text": " a" * 4, **trouble("merged", per_event=4)}, "tokens_per_event", "warning",
            "4.0 tokens an event",
        ),
        (
            trouble("inflated", per_event=8), "inflated_usage", "invalid",
            "more tokens than were sent: 30 of 30",
        ),
        (trouble("at_once"), "answer_at_once", "invalid", "arrived whole at their end"),
        (trouble("canned"), "same_answers", "invalid", "30 of 30 answers have the same text"),
        (trouble("empty", spared=10), "empty_answers", "invalid", "20 of 30 answers have no text"),
        (trouble("empty_first"), "empty_first_event", "warning", "TTFT to the first event would be"),
        (trouble("blank_first"), "early_first_token", "invalid", "the first text is sent early: in 30 of 30"),
        ({"first_token_s": 0.0, "gap_s": 0.0}, "impossible_answers", "invalid", "faster than any model"),
    ],
)  # fmt: skip
def test_each_oddity_is_named(
    tmp_path: Path, way: str, spec: dict[str, Any], gate: str, level: str, words: str
) -> None:
    finding = found(loaded(tmp_path, way, spec=spec), gate)
    assert (finding.level, words in finding.message) == (level, True), finding.message
    assert finding.advice


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_bundles_have_the_time_of_their_tokens(tmp_path: Path, way: str) -> None:
    """16 tokens each 80 ms are 5 ms each, and not the 3.8 of (last - first) / 63."""
    if way == "compiled" and READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    spec = {"text": " word" * 16, "gap_s": 0.08, **trouble("merged", per_event=16)}
    evidence = loaded(tmp_path, way, spec=spec, output_len=64)
    assert evidence.summary.tpot_ms.p50 == pytest.approx(5.0, rel=0.08)  # the last text is a shorter one
    assert evidence.summary.itl_ms.p50 == pytest.approx(80.0, rel=0.1)


def test_an_exact_server_is_odd_in_nothing(tmp_path: Path, way: str) -> None:
    evidence = loaded(tmp_path, way, spec={})
    names = {finding.gate for finding in judge(evidence)[2]}
    assert not names & {"wrong_prompt_length", "tokens_per_event", "answer_at_once", "same_answers"}
    assert len({record.text_crc for record in evidence.records}) == len(evidence.records)
    assert {record.prompt_tokens for record in evidence.records} == {8}


def test_the_two_ways_find_the_same_texts(tmp_path: Path) -> None:
    if READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    crcs = [[r.text_crc for r in loaded(tmp_path, way, spec={}).records] for way in ("compiled", "python")]
    assert crcs[0] == crcs[1]


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_a_late_reader_is_a_late_client(tmp_path: Path, way: str) -> None:
    if way == "compiled" and READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    evidence = loaded(tmp_path, way, spec={"gap_s": 0.004}, output_len=50, disturb=True)
    if evidence.client.stamps != "kernel":
        pytest.skip("this kernel takes no stamps")
    client = evidence.client
    assert client.token_error_p99_ms > 20  # of the 30 ms that it was stopped at a time
    only_reads = ClientFigures(
        token_error_p99_ms=client.token_error_p99_ms,
        token_error_max_ms=client.token_error_max_ms,
        chunk_lag_p99_ms=client.chunk_lag_p99_ms,
        stamps="kernel",
    )
    for case in (client, only_reads):
        strict = Slo(ttft_ms=200, tpot_ms=500, attainment=0.5)
        finding = found(Evidence(evidence.records, evidence.summary, strict, client=case), "client_limited")
        assert "reads by up to" in finding.message


@pytest.mark.parametrize("way", ["compiled", "python"])
def test_who_reads_in_time_is_not_late_whatever_the_server_sends_together(tmp_path: Path, way: str) -> None:
    """Every answer comes in one piece, some 80 ms after anything else on its connection."""
    if way == "compiled" and READS is None:
        pytest.skip("kvbench.processes.loadgen.sockets._reads was not compiled, or is refused")
    looks = []
    for _ in range(5):  # other processes may take the CPU
        client = loaded(tmp_path, way, spec=trouble("at_once")).client
        looks.append((client.look_ms, client.loop_lag_max_ms or 0.0))
        if client.look_ms < max(5.0, 3.0 + looks[-1][1]):  # it may be late, but not for the server's sake
            return
    pytest.fail(str(looks))


def at(i: int, first_s: float, last_s: float, tokens: int, itl_s: Sequence[float] = ()) -> RequestRecord:
    return RequestRecord(
        f"r-{i}", i / 10, 8, tokens, i / 10, i / 10 + first_s, i / 10 + last_s, tokens, itl_s=itl_s,
        stamps="kernel",
    )  # fmt: skip


@given(first_s=st.floats(0.001, 5.0), gap_s=st.floats(2e-4, 0.2), tokens=st.integers(1, 200))
def test_a_stream_that_a_model_may_have_made_is_not_at_once(
    first_s: float, gap_s: float, tokens: int
) -> None:
    last_s = first_s + gap_s * (tokens - 1)
    records = [at(i, first_s, last_s, tokens, [gap_s] * (tokens - 1)) for i in range(30)]
    evidence = Evidence(records, summarise(records, SLO, 10, 10), SLO)
    names = {finding.gate for finding in judge(evidence)[2]}
    assert not names & {"answer_at_once", "tokens_per_event"}


def test_at_once_is_refused_only_where_it_is_judged_and_the_client_could_see_it() -> None:
    records = [at(i, 0.5, 0.5, 20) for i in range(30)]
    evidence = Evidence(records, summarise(records, SLO, 10, 10), SLO)
    assert found(evidence, "answer_at_once").level == "invalid"
    late = ClientFigures(token_error_p50_ms=30.0, stamps="kernel")
    assert found(Evidence(records, evidence.summary, SLO, client=late), "answer_at_once") is None
