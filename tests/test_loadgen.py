"""The load generator against real, mostly hostile servers: each trouble is a class, and none is lost."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.records import RequestRecord
from kvbench.http1 import Pool, Request, Response, serve
from kvbench.loadgen.spec import LoadSpec, planned_requests
from kvbench.loadgen.stream import StreamReader
from kvbench.loadgen.trial import Trial

HOST = "127.0.0.1"
OUTPUT_LEN = 3
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"text":""}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def plain(status: str, body: bytes, headers: str = "content-type: application/json\r\n") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


Step = bytes | float | str
"""What a hostile server does: send bytes, wait seconds, "close", "reset", or "hang"."""

GOOD: list[Step] = [
    HEAD,
    chunk(TOKEN),
    0.01,
    chunk(TOKEN),
    0.01,
    chunk(TOKEN),
    chunk(USAGE),
    chunk(DONE),
    LAST,
]


async def follow(steps: list[Step], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Does the steps; returns whether the connection may serve again."""
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        elif isinstance(step, float):
            await asyncio.sleep(step)
        elif step == "hang":
            await reader.read()
            return False
        elif step == "reset":
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            return False
        elif step == "close":
            return False
    return True


async def hostile(steps: list[Step]) -> tuple[asyncio.AbstractServer, str]:
    """A server that answers every request by the same steps, and its URL."""

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if not await follow(steps, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve_one, HOST, 0)
    return server, f"http://{HOST}:{server.sockets[0].getsockname()[1]}"


def spec_for(url: str, **changes: Any) -> LoadSpec:
    values: dict[str, Any] = {
        "base_url": url,
        "model": "tiny",
        "request_rate": 200.0,
        "num_requests": 4,
        "seed": 7,
        "input_len": 8,
        "output_len": OUTPUT_LEN,
        "vocab_size": 1000,
        "records_path": "unused",
        "timeout_s": 1.0,
        **changes,
    }
    return LoadSpec(**values)


async def run_trial(
    url: str, stop_after_s: float = math.inf, warm: bool = True, **changes: Any
) -> tuple[list[RequestRecord], dict[str, Any], list[dict[str, Any]]]:
    """A trial inside this process: records, end event, progress events."""
    spec = spec_for(url, **changes)
    pool = Pool(url)
    plan = planned_requests(spec, pool)
    if warm:
        await pool.warm(2)
    stop = asyncio.Event()
    if stop_after_s < math.inf:
        asyncio.get_running_loop().call_later(stop_after_s, stop.set)
    progress: list[dict[str, Any]] = []
    trial = Trial(spec, plan, pool, progress.append)
    end = await asyncio.wait_for(trial.run(stop), 20)
    await pool.close()
    return trial.records, end, progress


def on_loop(main: Callable[[], Awaitable[Any]]) -> Any:
    async def closing() -> Any:
        result = await main()
        await asyncio.sleep(0.02)  # the server's side notices the closed connections
        return result

    return uvloop.run(closing())


def against(steps: list[Step], **changes: Any) -> list[RequestRecord]:
    async def main() -> list[RequestRecord]:
        server, url = await hostile(steps)
        records, end, progress = await run_trial(url, **changes)
        server.close()
        assert end["reason"] == "complete"
        last = progress[-1]
        assert last["sent"] == last["done"] == len(records)
        assert last["met"] == sum(record.ok for record in records)
        assert last["missed"] == sum(not record.ok for record in records)
        return records

    records: list[RequestRecord] = on_loop(main)
    return records


def sse(*events: bytes, newline: bytes = b"\n") -> bytes:
    return b"".join(events).replace(b"\n", newline)


STREAM = sse(TOKEN, TOKEN, TOKEN, USAGE, DONE)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("plain", GOOD),
        (
            "crlf",
            [HEAD, chunk(sse(TOKEN, newline=b"\r\n")), chunk(sse(TOKEN, USAGE, DONE, newline=b"\r\n")), LAST],
        ),
        ("cr", [HEAD, chunk(sse(TOKEN, USAGE, DONE, newline=b"\r")), LAST]),
        (
            "comments",
            [HEAD, chunk(b": keep-alive\n\n"), chunk(b"event: x\nid: 1\nretry: 5\n" + STREAM), LAST],
        ),
        ("merged", [HEAD + chunk(STREAM) + LAST]),
        ("split", [HEAD, *(chunk(bytes([byte])) for byte in STREAM), LAST]),
        ("split framing", [HEAD + b"5", b"\r\ndata:", b"\r\n" + chunk(STREAM[5:]) + b"0\r\n", 0.01, b"\r\n"]),
        ("until close", [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n", STREAM, "close"]),
        ("no line break at the end", [HEAD, chunk(STREAM.rstrip(b"\n")), LAST]),
        (
            "usage in each event",
            [HEAD, chunk(TOKEN.replace(b"null", b'{"completion_tokens":1}') + STREAM), LAST],
        ),
    ],
)
def test_every_way_to_stream_is_understood(name: str, steps: list[Step]) -> None:
    for record in against(steps):
        assert record.ok, record
        assert record.output_len == OUTPUT_LEN
        assert record.status == 200
        assert record.sent_s is not None
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        assert record.scheduled_s <= record.sent_s <= record.first_token_s <= record.last_token_s
        assert sum(record.itl_s) == pytest.approx(record.last_token_s - record.first_token_s, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "steps", "error", "status", "detail"),
    [
        ("closes before the head", ["close"], "early_close", 0, ""),
        ("closes in the stream", [HEAD, chunk(TOKEN), "close"], "early_close", 200, ""),
        (
            "half an event, then closes",
            [HEAD, chunk(TOKEN + b'data: {"cho'), "close"],
            "early_close",
            200,
            "",
        ),
        (
            "half an event, well framed",
            [HEAD, chunk(TOKEN + b'data: {"cho'), LAST],
            "early_close",
            200,
            "DONE",
        ),
        ("no end mark", [HEAD, chunk(TOKEN * 3 + USAGE), LAST], "early_close", 200, "DONE"),
        ("resets in the middle", [HEAD, chunk(TOKEN), 0.02, "reset"], "early_close", 200, ""),
        ("resets at once", ["reset"], "early_close", 0, ""),
        ("end mark, but cut short", [HEAD, chunk(STREAM), "close"], "early_close", 200, ""),
        ("empty", [plain("200 OK", b"", "content-type: text/event-stream\r\n")], "early_close", 200, "DONE"),
        (
            "error body",
            [plain("200 OK", b'{"error":{"message":"out of KV"}}')],
            "error_body",
            200,
            "out of KV",
        ),
        (
            "old error body",
            [plain("200 OK", b'{"object":"error","message":"old"}')],
            "error_body",
            200,
            "old",
        ),
        (
            "error event",
            [HEAD, chunk(TOKEN + b'data: {"error":{"message":"died"}}\n\n' + DONE), LAST],
            "error_body",
            200,
            "died",
        ),
        ("garbage for HTTP", [b"\x00\x01 no http\r\n\r\n", "close"], "bad_stream", 0, "HTTP"),
        ("garbage body", [HEAD, chunk(b"\xff\xfe\x00garbage\n\n"), LAST], "bad_stream", 200, "garbage"),
        ("garbage event", [HEAD, chunk(TOKEN + b"data: {nope\n\n" + DONE), LAST], "bad_stream", 200, "nope"),
        (
            "a list for an event",
            [HEAD, chunk(TOKEN + b"data: [1]\n\n" + DONE), LAST],
            "bad_stream",
            200,
            "[1]",
        ),
        ("not streamed", [plain("200 OK", b'{"choices":[{"text":"x"}]}')], "bad_stream", 200, "choices"),
        ("no usage", [HEAD, chunk(TOKEN * 3 + DONE), LAST], "bad_stream", 200, "usage"),
        ("no tokens", [HEAD, chunk(USAGE + DONE), LAST], "bad_stream", 200, "token"),
        (
            "one token short",
            [HEAD, chunk(TOKEN * 2 + USAGE.replace(b"3", b"2") + DONE), LAST],
            "wrong_length",
            200,
            "2 tokens",
        ),
        ("500", [plain("500 Internal Server Error", b'{"detail":"boom"}')], "http_error", 500, "boom"),
        ("404", [plain("404 Not Found", b"nothing")], "http_error", 404, "nothing"),
        (
            "redirect",
            [plain("307 Temporary Redirect", b"", "location: http://other/\r\n")],
            "http_error",
            307,
            "http://other/",
        ),
        ("never answers", ["hang"], "timeout", 0, "0.3 s"),
        ("stops in the middle", [HEAD, chunk(TOKEN), "hang"], "timeout", 200, "0.3 s"),
        (
            "500 that never ends",
            [b"HTTP/1.1 500 No\r\ncontent-length: 9\r\n\r\n", "hang"],
            "http_error",
            500,
            "",
        ),
        ("slower than the deadline", [HEAD, *([chunk(TOKEN), 0.15] * 6), LAST], "timeout", 200, "0.3 s"),
    ],
)
def test_every_trouble_has_its_class(
    name: str, steps: list[Step], error: str, status: int, detail: str
) -> None:
    records = against(steps, timeout_s=0.3)
    assert len(records) == 4
    for record in records:
        assert (record.error, record.status) == (error, status), record
        assert detail in record.error_detail
        if TOKEN in b"".join(step for step in steps if isinstance(step, bytes)) and status == 200:
            assert record.first_token_s is not None  # what was seen before the failure is kept


def test_a_refused_connection_is_a_class_of_its_own() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound, not listening: connections are refused
        url = f"http://{HOST}:{taken.getsockname()[1]}"
        records, end, _ = on_loop(lambda: run_trial(url, warm=False))
    assert [record.error for record in records] == ["connect"] * 4
    assert all(record.sent_s is None for record in records)
    assert end["reason"] == "complete"


def test_connections_refused_from_some_stream_on_do_not_spoil_the_others() -> None:
    async def main() -> list[RequestRecord]:
        server, url = await hostile(["hang"])
        asyncio.get_running_loop().call_later(0.1, server.close)  # what is open stays open
        records, _, _ = await run_trial(url, request_rate=200.0, num_requests=60, timeout_s=0.8)
        return records

    errors = [record.error for record in on_loop(main)]
    assert set(errors) == {"timeout", "connect"}
    assert len(errors) == 60


def test_one_token_needs_no_second_event() -> None:
    steps: list[Step] = [HEAD, chunk(TOKEN + USAGE.replace(b"3", b"1") + DONE), LAST]
    for record in against(steps, output_len=1):
        assert record.ok
        assert record.itl_s == []
        assert record.tpot_s is None


def test_the_plan_is_a_function_of_the_spec() -> None:
    async def main() -> None:
        pool = Pool("http://example.test")
        spec = spec_for(
            "http://example.test", headers={"authorization": "Bearer x"}, extra_body={"top_p": 0.5}
        )
        first, second = planned_requests(spec, pool), planned_requests(spec, pool)
        assert [item.offset_s for item in first] == [item.offset_s for item in second]
        bodies = [json.loads(item.data.partition(b"\r\n\r\n")[2]) for item in first]
        assert bodies == [json.loads(item.data.partition(b"\r\n\r\n")[2]) for item in second]
        assert not {item.request_id for item in first} & {item.request_id for item in second}
        for item, body in zip(first, bodies, strict=True):
            assert len(body.pop("prompt")) == 8
            assert body == {
                "model": "tiny",
                "max_tokens": 3,
                "min_tokens": 3,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "top_p": 0.5,
            }
            assert f"x-request-id: {item.request_id}\r\n".encode() in item.data
            assert b"authorization: Bearer x\r\n" in item.data

    asyncio.run(main())


@given(st.lists(st.integers(1, 40), max_size=60), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_stream_reader_does_not_care_where_reads_end(sizes: list[int], newline: bytes) -> None:
    data = sse(b": hello\n\n", TOKEN, b"event: a\n", TOKEN, TOKEN, USAGE, DONE, newline=newline)
    reader, position, stamp = StreamReader(), 0, 0.0
    for size in [*sizes, len(data)]:
        reader.feed(data[position : position + size], stamp)
        position, stamp = position + size, stamp + 1
    reader.finish()
    assert (len(reader.token_stamps), reader.completion_tokens, reader.done) == (3, 3, True)
    assert reader.error == ""
    assert reader.token_stamps == sorted(reader.token_stamps)


@given(st.binary(max_size=300), st.integers(1, 20))
def test_the_stream_reader_survives_anything(data: bytes, size: int) -> None:
    reader = StreamReader()
    for start in range(0, len(data), size):
        reader.feed(data[start : start + size], 0.0)
    reader.finish()


def test_waiting_past_the_ttft_limit_counts_as_missed_while_it_goes_on() -> None:
    async def main() -> list[dict[str, Any]]:
        server, url = await hostile(["hang"])
        _, end, progress = await run_trial(
            url,
            stop_after_s=0.4,
            timeout_s=5.0,
            slo={"ttft_ms": 50, "tpot_ms": None},
            progress_interval_s=0.02,
        )
        server.close()
        assert end["reason"] == "stopped"
        return progress

    progress = on_loop(main)
    assert any(line["missed"] == line["waiting_first"] == 4 for line in progress)
    assert progress[-1]["missed"] == 0  # they were cancelled: neither met nor missed
    assert all(line["met"] == 0 for line in progress)


@pytest.mark.parametrize(("grace_s", "ended"), [(0.0, "cancelled"), (10.0, "")])
def test_a_stopped_trial_may_let_its_requests_end(grace_s: float, ended: str) -> None:
    async def main() -> list[str]:
        server, url = await hostile([0.8, *GOOD])
        records, end, _ = await run_trial(url, stop_after_s=0.3, timeout_s=15.0, stop_grace_s=grace_s)
        server.close()
        assert end["reason"] == "stopped"
        return [record.error for record in records]

    errors = on_loop(main)
    assert errors
    assert set(errors) == {ended}


def test_limits_are_applied_to_finished_requests() -> None:
    async def main() -> list[int]:
        server, url = await hostile([0.05, *GOOD])
        met = []
        for slo in ({"ttft_ms": 5000, "tpot_ms": 5000}, {"ttft_ms": 20}, {"tpot_ms": 0.01}, {}):
            _, _, progress = await run_trial(url, slo=slo)
            met.append(progress[-1]["met"])
            assert progress[-1]["missed"] == 4 - met[-1]
        server.close()
        return met

    assert on_loop(main) == [4, 0, 0, 4]


# The process


@contextmanager
def in_background(steps: list[Step]) -> Iterator[str]:
    """A hostile server on a thread of its own; its URL."""
    started, over = threading.Event(), threading.Event()
    found: list[str] = []

    async def main() -> None:
        server, url = await hostile(steps)
        found.append(url)
        started.set()
        while not over.is_set():
            await asyncio.sleep(0.01)
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=5) if others else None

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait(5)
    try:
        yield found[0]
    finally:
        over.set()
        thread.join()


def write_spec(folder: Path, url: str, **changes: Any) -> Path:
    spec = vars(spec_for(url, records_path=str(folder / "records.jsonl"), **changes))
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def start(path: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "kvbench.loadgen", str(path)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def records_in(folder: Path) -> list[RequestRecord]:
    lines = (folder / "records.jsonl").read_text().splitlines()
    return [RequestRecord.from_json(json.loads(line)) for line in lines]


def test_a_process_runs_its_spec_and_writes_records_in_order(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        path = write_spec(tmp_path, url, num_requests=20, slo={"ttft_ms": 900, "tpot_ms": 900})
        command = [sys.executable, "-m", "kvbench.loadgen", str(path)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0] == {"event": "ready"}
    assert {event["event"] for event in events[1:-1]} == {"progress"}
    assert events[-2]["met"] == 20
    assert events[-1]["event"] == "end"
    assert events[-1]["reason"] == "complete"
    wanted = {"send_lag_p50_ms", "send_lag_p99_ms", "send_lag_max_ms", "loop_lag_p99_ms", "cpu_share"}
    assert wanted <= set(events[-1]["client"])
    records = records_in(tmp_path)
    assert [record.ok for record in records] == [True] * 20
    assert [record.scheduled_s for record in records] == sorted(record.scheduled_s for record in records)


@pytest.mark.parametrize("how", ["stop", signal.SIGTERM, signal.SIGINT])
def test_stopping_in_the_middle_still_writes_what_was_sent(tmp_path: Path, how: Any) -> None:
    with in_background([HEAD, chunk(TOKEN), "hang"]) as url:
        path = write_spec(
            tmp_path, url, num_requests=1000, request_rate=100.0, timeout_s=60.0, wait_for_go=True
        )
        process = start(path)
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"event": "ready"}
        process.stdin.write("go\n")
        process.stdin.flush()
        while json.loads(process.stdout.readline()).get("sent", 0) < 3:
            pass
        if how == "stop":
            process.stdin.write("stop\n")
            process.stdin.flush()
        else:
            process.send_signal(how)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    end = json.loads(out.splitlines()[-1])
    assert (end["event"], end["reason"]) == ("end", "stopped")
    records = records_in(tmp_path)
    assert 3 <= len(records) < 1000
    assert {record.error for record in records} == {"cancelled"}


def test_nobody_left_to_say_go_ends_it(tmp_path: Path) -> None:
    with in_background(GOOD) as url:
        process = start(write_spec(tmp_path, url, wait_for_go=True))
        out, _ = process.communicate(timeout=10)  # closes its stdin
    assert json.loads(out.splitlines()[-1])["reason"] == "stopped"
    assert process.returncode == 0
    assert records_in(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_rat": 1}, "did you mean 'request_rate'"),
        ({"request_rate": "fast"}, "'request_rate' has an unusable value"),
        ({"request_rate": -1}, "request_rate must be above 0"),
        ({"output_len": 0}, "output_len"),
        ({"slo": {"ttft": 1}}, "slo.ttft"),
        ({"path": "/v1/chat/completions"}, "takes no token ids"),
        ({"base_url": "nowhere"}, "no http"),
        ({"headers": {"a": "b\nc"}}, "line break"),
    ],
)
def test_a_wrong_spec_is_exit_code_2(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = write_spec(tmp_path, f"http://{HOST}:1")
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    command = [sys.executable, "-m", "kvbench.loadgen", str(path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_an_exact_schedule_is_seen_as_it_is(tmp_path: Path) -> None:
    delay, gap = 0.03, 0.01

    async def main() -> list[RequestRecord]:
        async def handler(request: Request, response: Response) -> None:
            response.start_stream()
            await asyncio.sleep(delay)
            for index in range(OUTPUT_LEN):
                response.write(TOKEN)
                if index < OUTPUT_LEN - 1:
                    await asyncio.sleep(gap)
            response.write(USAGE + DONE)
            response.end()

        server = await serve(handler, HOST, 0)
        records, _, _ = await run_trial(f"http://{HOST}:{server.port}", num_requests=20, timeout_s=10.0)
        await server.close()
        return records

    for record in on_loop(main):
        assert record.ok
        assert record.ttft_s is not None
        assert record.ttft_s >= delay - 0.002  # uvloop's timers are rounded to milliseconds
        assert len(record.itl_s) == OUTPUT_LEN - 1
