"""The timeline: spans written by real processes, and a trace that Perfetto's rules allow."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import emulated
import httpx
import pytest
from commands import EASY, invoke, kvbench, the_run
from hypothesis import given
from hypothesis import strategies as st

from kvbench import transfer
from kvbench.core.records import RequestRecord
from kvbench.errors import InputError
from kvbench.processes.common.spans import SUFFIX, TRACED_REQUESTS, Clock, Span, SpanLog, read_spans
from kvbench.report.timeline import TimelineProcess, client_spans, flows, process_events, zero_on

PROMPT = list(range(300))


def check_rules(events: list[dict[str, Any]]) -> None:
    """What the trace-event format asks for: fields by phase, whole µs, spans of one thread that nest."""
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys() | ({"tid"} if event["ph"] == "M" else set())
        assert event["pid"] in named
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
        elif event["ph"] in "stf":
            assert {"id", "ts", "cat"} <= event.keys()
        else:
            assert event["ph"] in "MC"
            assert event["args"]
    for spans in threads.values():
        ends: list[int] = []
        for event in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            while ends and ends[-1] <= event["ts"]:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1], event
            ends.append(event["ts"] + event["dur"])
    arrows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event)
    for path in arrows.values():
        phases = "".join(event["ph"] for event in path)
        assert phases == "s" + "t" * (len(path) - 2) + "f"
        assert [event["ts"] for event in path] == sorted(event["ts"] for event in path)


# Pure parts


moments = st.floats(0, 10, allow_nan=False)
spans = st.builds(lambda begin, length: Span("x", begin, begin + length), moments, moments)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), st.lists(spans, max_size=5), max_size=5))
def test_any_spans_become_lanes_that_nest(by_request: dict[str, list[Span]]) -> None:
    events = list(process_events(TimelineProcess("decode-0", by_request), 4))
    check_rules(events)
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, by_request.values()))


def test_a_request_alone_keeps_one_lane() -> None:
    record = RequestRecord("kvb-0", 1.0, 10, 3, sent_s=1.1, first_token_s=1.5, last_token_s=2.0, output_len=3)
    events = list(process_events(TimelineProcess("client", {"kvb-0": list(client_spans(record))}), 1))
    assert {event["tid"] for event in events if event["ph"] == "X"} == {1}
    assert [event["name"] for event in events if event["ph"] == "X"] == [
        *("request", "waits to be sent", "sent to first token", "further tokens")
    ]


def test_what_was_never_sent_has_no_span() -> None:
    assert not list(client_spans(RequestRecord("kvb-0", 1.0, 10, 3, error="connect")))


def test_arrows_join_processes_and_only_what_is_in_two() -> None:
    both = {"a-0": [Span("prefill step", 1, 2)], "b-1": [Span("prefill step", 3, 4)]}
    events = [
        *process_events(TimelineProcess("prefill-0", both), 1),
        *process_events(TimelineProcess("decode-0", {"a-0": [Span("first step", 2, 3)]}), 2),
    ]
    arrows = list(flows(events))
    assert ([event["ph"] for event in arrows], [event["pid"] for event in arrows]) == (["s", "f"], [1, 2])


def test_one_machine_has_one_clock_and_another_goes_by_the_wall() -> None:
    ours = Clock("here", 100.0, 5000.0)
    assert zero_on(Clock("here", 107.0, 5008.0), ours) == 100.0
    assert zero_on(Clock("there", 9.0, 5008.0), ours) == 1.0


# Files of spans


def test_a_span_log_is_read_back_and_a_torn_line_left_out(tmp_path: Path) -> None:
    path = tmp_path / f"router{SUFFIX}"
    log = SpanLog(str(path))
    log.write("kvb-1-0", [Span("prefill call", 1.0, 2.5, {"bytes": 7})])
    log.close()
    log.write("kvb-1-1", [Span("late", 1.0, 2.0)])
    with path.open("ab") as file:
        file.write(b'{"request": "kvb-1-2", "na')
    clock, found = read_spans(path)
    assert clock.host == socket.gethostname()
    assert found == {"kvb-1-0": [Span("prefill call", 1.0, 2.5, {"bytes": 7})]}


@pytest.mark.parametrize(("request_id", "wanted"), [
    ("kvb-0f-0", True), (f"kvb-0f-{TRACED_REQUESTS - 1}", True), (f"kvb-0f-{TRACED_REQUESTS}", False),
    ("0123456789abcdef", False), ("", False),
])  # fmt: skip
def test_every_process_picks_the_same_requests(request_id: str, wanted: bool) -> None:
    assert SpanLog.wants(request_id) is wanted


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trace_path"):
        SpanLog(str(tmp_path / "absent" / "x"))


# Real processes


@pytest.mark.parametrize("connector", ["tcp", "nixl", "mooncake"])
def test_a_pair_tells_what_each_side_did(connector: str, tmp_path: Path) -> None:
    problem = transfer.check(connector)
    if problem is not None:
        pytest.skip(problem.reason)
    prefill, decode, env = emulated.pair_specs(connector)
    paths = {}
    for name, spec in (("p", prefill), ("d", decode)):
        spec["trace_path"] = str(tmp_path / f"{name}{SUFFIX}")
        paths[name] = Path(spec["trace_path"])
    with emulated.running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = emulated.Pair(connector, p, d)  # names its requests request-1, request-2, …
        pair.tokens(PROMPT)
        pair.tokens([7, *PROMPT])
        p.wait_metric("vllm:num_requests_running", 0)
    (_, at_p), (_, at_d) = read_spans(paths["p"]), read_spans(paths["d"])
    assert set(at_p) == set(at_d) == {"request-1", "request-2"}
    for request in at_d:
        both = {span.name: span for span in [*at_p[request], *at_d[request]]}
        assert {span.name for span in at_p[request]} >= {
            "request", "queue", "prefill step", "blocks held for D",
        }  # fmt: skip
        assert {span.name for span in at_d[request]} >= {
            "request", "queue", "wait for KV", "first step", "decode",
        }  # fmt: skip
        mover = at_d if connector != "mooncake" else at_p
        assert "KV transfer" in {span.name for span in mover[request]}
        assert both["KV transfer"].args["bytes"] > 0
        assert both["prefill step"].end_s <= both["KV transfer"].begin_s + 1e-3
        assert both["KV transfer"].end_s <= both["first step"].end_s
        assert all(span.begin_s <= span.end_s for span in both.values())


def test_an_engine_that_is_not_asked_writes_nothing(tmp_path: Path) -> None:
    with emulated.running(tmp_path, emulated.spec()) as engine:
        engine.complete(PROMPT)
        assert not list(tmp_path.glob(f"*{SUFFIX}"))


def test_an_aborted_request_is_traced_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / f"a{SUFFIX}"
    with emulated.running(tmp_path, emulated.spec(trace_path=str(path), time_scale=20)) as engine:
        body = {"prompt": PROMPT, "max_tokens": 64, "ignore_eos": True}
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                engine.url + "/v1/completions", json=body, headers={"X-Request-Id": "a-1"}, timeout=0.5
            )
        engine.wait_metric("vllm:num_requests_running", 0)
    _, found = read_spans(path)
    assert found["a-1"][0].args["end"] == "abort"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of one traced trial over tcp, and one of the aggregated server."""
    results = tmp_path_factory.mktemp("results")
    words = ("bench", "quickstart", "--rate", "20", "--connector", "aggregated", "--connector", "tcp")
    done = kvbench(*words, "--output", str(results), sets=(*EASY, "deployment.trace=true"))
    run = the_run(results)
    assert [trial.cell.connector for trial in run.trials] == ["aggregated", "tcp"], done.text
    return run.path


def test_the_command_joins_all_processes_of_a_trial(traced: Path) -> None:
    assert "through client, router, prefill-0, decode-0" in invoke("timeline", str(traced)).succeeded().out
    (path,) = (traced / "figures").glob("timeline-tcp-*.json")
    document = json.loads(path.read_text())
    events = document["traceEvents"]
    check_rules(events)
    assert (document["otherData"]["connector"], document["otherData"]["labels"]) == ("tcp", ["emulated"])
    pids = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(pids) == ["client", "router", "prefill-0", "decode-0"]
    assert any(event["ph"] == "s" for event in events)
    request = next(event["args"]["request"] for event in events if event["ph"] == "X")
    slices = {(e["pid"], e["name"]): e for e in events if e["ph"] == "X" and e["args"]["request"] == request}
    sent = slices[pids["client"], "sent to first token"]
    # One clock: what the router and the engines did for a request lies inside what its client saw.
    for pid, name in ((pids["router"], "prefill call"), (pids["prefill-0"], "prefill step")):
        assert sent["ts"] <= slices[pid, name]["ts"] <= sent["ts"] + sent["dur"]
    assert slices[pids["decode-0"], "decode"]["ts"] <= slices[pids["client"], "request"]["ts"] + 60_000_000


def test_another_trial_can_be_named_and_a_wrong_name_is_told(traced: Path) -> None:
    done = invoke("timeline", str(traced), "aggregated-in64-out4-01").succeeded()
    assert "client, router, aggregated-0" in done.out
    assert "aggregated-in64-out4-01" in invoke("timeline", str(traced), "nonsense").failed(2).err


def test_without_traces_the_client_is_still_drawn(traced: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "run"
    shutil.copytree(traced, copy, ignore=shutil.ignore_patterns(f"*{SUFFIX}"))
    assert "deployment.trace=true" in invoke("timeline", str(copy)).succeeded().out
    (path,) = (copy / "figures").glob("timeline-tcp-*.json")
    check_rules(json.loads(path.read_text())["traceEvents"])
