"""The exact server: its schedule is what it says, each trouble is on a real socket, and it tells no lies."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.launchers.local import LocalLauncher
from kvbench.processes.exact_server import wire
from kvbench.processes.exact_server.ledger import HISTOGRAM_MS
from kvbench.sweep.trial.loadgen_driver import LoadGenerator

HOST = "127.0.0.1"
DEADLINE_S = 20.0
FAST = {"first_token_s": 0.02, "gap_s": 0.005}
DIGIT_S = 1e-8
"""The last digit of a monotonic clock after a year is 4e-9 s: no difference of two readings is exacter."""
CLOCK_S = 2e-4
"""What a due time may differ by from its parts: the two clocks are read one after the other."""


@dataclass
class Running:
    """A server process; ``log`` is what it says of itself."""

    process: subprocess.Popen[bytes]
    port: int
    kernel_stamps: bool

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=DEADLINE_S)

    def get(self, path: str) -> bytes:
        with self.connect() as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            head, _, body = read_all(sock).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK"), head
        return body

    def log(self, query: str = "") -> dict[str, Any]:
        log: dict[str, Any] = json.loads(self.get("/log" + query))
        return log

    def wait_log(self, outcome: str) -> dict[str, Any]:
        """The log once its last request has that outcome."""
        end = time.monotonic() + DEADLINE_S
        while (log := self.log())["requests"][-1]["outcome"] != outcome:
            assert time.monotonic() < end, log["requests"][-1]
            time.sleep(0.02)
        return log

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").decode().splitlines():
            if line.startswith(name + "{"):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)


@contextlib.contextmanager
def exact(folder: Path, **spec: Any) -> Iterator[Running]:
    path = folder / "exact.json"
    path.write_text(json.dumps({**FAST, **spec}))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbench.processes.exact_server", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    try:
        ready = json.loads(process.stdout.readline())
        assert ready["event"] == "ready"
        yield Running(process, ready["port"], ready["kernel_stamps"])
    finally:
        process.terminate()
        try:
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while got := sock.recv(65_536):
        data += got
    return data


def completion(request_id: str = "r", close: bool = False, **body: Any) -> bytes:
    payload = {"stream": True, "stream_options": {"include_usage": True}, "prompt": [1, 2, 3], **body}
    data = json.dumps(payload).encode()
    closing = "connection: close\r\n" if close else ""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{closing}X-Request-Id: {request_id}\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def ask(server: Running, *requests: bytes) -> bytes:
    """What comes back until the server closes."""
    with server.connect() as sock:
        for request in requests:
            sock.sendall(request)
        return read_all(sock)


def chunks(answer: bytes) -> list[bytes]:
    """The chunks of a streamed answer, which has to be whole."""
    at = answer.index(b"\r\n\r\n") + 4
    found = []
    while True:
        line = answer.index(b"\r\n", at)
        begin, end = line + 2, line + 2 + int(answer[at:line], 16)
        assert answer[end : end + 2] == b"\r\n"
        at = end + 2
        if begin == end:
            assert at == len(answer)
            return found
        found.append(answer[begin:end])


def events(answer: bytes) -> list[Any]:
    found = []
    for data in chunks(answer):
        assert data.startswith(b"data: ")
        assert data.endswith(b"\n\n")
        text = data[6:].decode().strip()
        found.append(text if text == "[DONE]" else json.loads(text))
    return found


def test_a_stream_has_its_tokens_and_its_usage(tmp_path: Path) -> None:
    with exact(tmp_path, text=" word") as server:
        items = events(ask(server, completion(close=True, max_tokens=4)))
        *texts, last = [item["choices"][0]["text"] for item in items[:4]]
        assert texts == [" word"] * 3
        assert re.fullmatch(" [0-9a-f]{8}", last)  # by the prompt
        assert [item["choices"][0]["finish_reason"] for item in items[:4]] == [None, None, None, "length"]
        assert items[4]["usage"] == {"prompt_tokens": 3, "total_tokens": 7, "completion_tokens": 4}
        assert items[5:] == ["[DONE]"]
        without = events(ask(server, completion(close=True, max_tokens=1, stream_options=None)))
        assert len(without) == 2
        assert "usage" not in without[0]


def test_each_token_is_due_exactly_and_written_not_before(tmp_path: Path) -> None:
    with exact(tmp_path) as server:
        sent = time.monotonic()
        ask(server, completion("one", close=True, max_tokens=6))
        ended = time.monotonic()
        log = server.log()
    (row,) = log["requests"]
    assert (row["request_id"], row["output_len"], row["outcome"]) == ("one", 6, "complete")
    assert sent - CLOCK_S <= row["arrival_s"] <= ended
    assert row["first_due_s"] == pytest.approx(row["arrival_s"] + FAST["first_token_s"], abs=DIGIT_S)
    assert len(row["token_write_s"]) == 6
    assert row["first_write_s"] == row["token_write_s"][0]
    for index, written in enumerate(row["token_write_s"]):
        assert written >= row["first_due_s"] + index * FAST["gap_s"] - DIGIT_S
        assert written <= ended
    late = log["lateness"]
    assert (late["first"]["n"], late["further"]["n"]) == (1, 5)
    assert late["further"]["max_ms"] >= late["further"]["p50_ms"] >= 0
    assert [bound for bound, _ in late["first"]["histogram_ms"]][:-1] == list(HISTOGRAM_MS[:-1])
    assert sum(count for _, count in late["further"]["histogram_ms"]) == 5


def test_arrivals_are_stamped_by_the_kernel_if_it_can(tmp_path: Path) -> None:
    # Linux switches stamping on in the background when the first socket asks for it: early packets lack it.
    with exact(tmp_path) as server:
        until = time.monotonic() + DEADLINE_S
        stamped = False
        while server.kernel_stamps and not stamped and time.monotonic() < until:
            ask(server, completion(close=True, max_tokens=1))
            stamped = server.log()["requests"][-1]["kernel_stamp"]
    assert stamped == server.kernel_stamps


def test_an_answer_that_is_not_streamed_comes_when_its_last_token_is_due(tmp_path: Path) -> None:
    with exact(tmp_path) as server:
        fields = {"stream": False, "max_tokens": 5, "kv_transfer_params": {"do_remote_decode": True}}
        answer = ask(server, completion(close=True, **fields)).partition(b"\r\n\r\n")[2]
        row = server.log()["requests"][0]
    body = json.loads(answer)
    assert body["usage"]["completion_tokens"] == 5
    assert re.fullmatch(" a a a a [0-9a-f]{8}", body["choices"][0]["text"])
    assert body["kv_transfer_params"]["do_remote_prefill"] is True
    due = row["arrival_s"] + FAST["first_token_s"] + 4 * FAST["gap_s"]
    assert row["first_due_s"] == pytest.approx(due, abs=DIGIT_S)
    assert row["first_write_s"] >= due - DIGIT_S


def test_a_connection_serves_again_and_again_also_what_comes_at_once(tmp_path: Path) -> None:
    with exact(tmp_path) as server:
        both = completion("a", max_tokens=2) + completion("b", close=True, max_tokens=3)
        answer = ask(server, both)
        log = server.log("?tokens=0")
        assert (answer.count(b"HTTP/1.1 200 OK"), answer.count(b"[DONE]")) == (2, 2)
        assert [row["request_id"] for row in log["requests"]] == ["a", "b"]
        assert "token_write_s" not in log["requests"][0]
        assert server.log("?summary=1")["requests"] == []


def test_a_request_may_come_in_pieces(tmp_path: Path) -> None:
    with exact(tmp_path) as server, server.connect() as sock:
        data = completion(close=True, max_tokens=1, prompt=list(range(500)))
        for place in range(0, len(data), 200):
            sock.sendall(data[place : place + 200])
            time.sleep(0.001)
        assert events(read_all(sock))[1]["usage"]["prompt_tokens"] == 500


def test_an_md1_queue_serves_one_at_a_time_in_order_of_arrival(tmp_path: Path) -> None:
    service_s = 0.1  # long enough for the question how many wait
    with exact(tmp_path, queue="md1", service_s=service_s) as server:
        socks = [server.connect() for _ in range(6)]
        for number, sock in enumerate(socks):
            sock.sendall(completion(str(number), close=True, max_tokens=3))
        waiting = server.metric("vllm:num_requests_waiting")
        for sock in socks:
            assert len(events(read_all(sock))) == 5
            sock.close()
        rows = server.log()["requests"]
    assert 0 < waiting <= 5
    assert [row["request_id"] for row in rows] == [str(number) for number in range(6)]
    free_at = 0.0
    for row in rows:
        free_at = max(free_at, row["arrival_s"]) + service_s
        assert row["first_due_s"] == pytest.approx(free_at, abs=DIGIT_S)
        assert row["token_write_s"][2] >= free_at + 2 * FAST["gap_s"] - DIGIT_S


# Troubles
def trouble(kind: str, **more: Any) -> dict[str, Any]:
    return {"trouble": {"kind": kind, **more}}


def test_early_close(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("early_close", after_tokens=2)) as server:
        answer = ask(server, completion(max_tokens=5))
        assert answer.count(b"data: ") == 2
        assert not answer.endswith(wire.LAST_CHUNK)
        row = server.log()["requests"][0]
        assert (row["outcome"], len(row["token_write_s"])) == ("early_close", 2)


def test_early_close_before_any_token(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("early_close", after_tokens=0)) as server:
        assert ask(server, completion(max_tokens=5)) == wire.STREAM_HEAD


def test_reset(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("reset", after_tokens=1)) as server, server.connect() as sock:
        sock.sendall(completion(max_tokens=5))
        with pytest.raises(ConnectionResetError):
            read_all(sock)


def test_half_event(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("half_event", after_tokens=1)) as server, server.connect() as sock:
        sock.sendall(completion(max_tokens=5))
        answer = b""
        while not answer.endswith(wire.LAST_CHUNK):
            answer += sock.recv(65_536)
        first, half = chunks(answer)
        assert first.endswith(b"\n\n")
        assert first.startswith(half)
        assert not half.endswith(b"\n\n")


def test_error_event(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("error_event")) as server, server.connect() as sock:
        sock.sendall(completion(max_tokens=5))
        answer = b""
        while not answer.endswith(wire.LAST_CHUNK):
            answer += sock.recv(65_536)
        assert events(answer)[1]["error"]["code"] == 500


def test_wrong_usage(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("wrong_usage", usage_off=3)) as server:
        items = events(ask(server, completion(close=True, max_tokens=5)))
        assert len(items) == 7
        assert items[5]["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("error_body_200", b"HTTP/1.1 200 OK\r\ncontent-type: application/json"),
        ("status", b"HTTP/1.1 429 Too Many Requests\r\n"),
        ("redirect", b"HTTP/1.1 307 Temporary Redirect\r\n"),
    ],
)
def test_something_else_in_place_of_the_stream(tmp_path: Path, kind: str, start: bytes) -> None:
    with exact(tmp_path, **trouble(kind, status=429)) as server:
        answer = ask(server, completion(close=True, max_tokens=5))
        assert answer.startswith(start)
        assert (b'"error"' in answer) == (kind != "redirect")
        assert (b"location: /elsewhere" in answer) == (kind == "redirect")
        row = server.log()["requests"][0]
        assert (row["outcome"], row["token_write_s"]) == (kind, [])


def test_never_answer_only_where_asked(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("never_answer", at=[0])) as server, server.connect() as sock:
        sock.sendall(completion("silent", max_tokens=2))
        while not server.log()["requests"]:
            time.sleep(0.01)
        assert len(events(ask(server, completion("served", close=True, max_tokens=2)))) == 4
        sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        assert [row["outcome"] for row in server.log()["requests"]] == ["open", "complete"]
        assert server.metric("vllm:num_requests_running") == 1


def test_late_every_third(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("late", every=3, late_s=0.1)) as server:
        for _ in range(4):
            assert len(events(ask(server, completion(close=True, max_tokens=2)))) == 4
        rows = server.log()["requests"]
    assert [row["outcome"] for row in rows] == ["late", "complete", "complete", "late"]
    for row in rows:
        late_s = 0.1 if row["outcome"] == "late" else 0.0
        assert row["first_write_s"] - row["first_due_s"] >= late_s - DIGIT_S


def test_refuse_after_some_connections(tmp_path: Path) -> None:
    with exact(tmp_path, **trouble("refuse", connections=2)) as server:
        first, second = server.connect(), server.connect()
        # Both are accepted when an answer comes; the listener is closed by then.
        second.sendall(completion(close=True, max_tokens=1))
        assert len(events(read_all(second))) == 3
        with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
            server.connect()
        first.sendall(completion(close=True, max_tokens=1))
        assert len(events(read_all(first))) == 3
        first.close()
        second.close()


# Clients that misbehave
def test_a_client_that_goes_is_let_go(tmp_path: Path) -> None:
    with exact(tmp_path, gap_s=0.01) as server:
        with server.connect() as sock:
            sock.sendall(completion("gone", max_tokens=100_000))
            assert sock.recv(10)
        row = server.wait_log("client closed")["requests"][0]
        assert 0 < len(row["token_write_s"]) < 100_000
        assert server.metric("vllm:num_requests_running") == 0


def test_a_client_that_reads_late_gets_everything_and_stops_nobody(tmp_path: Path) -> None:
    with exact(tmp_path, first_token_s=0.0, gap_s=0.0, text="x" * 4000) as server, socket.socket() as slow:
        slow.settimeout(DEADLINE_S)
        slow.connect((HOST, server.port))
        slow.sendall(completion("slow", close=True, max_tokens=2000))
        assert len(events(ask(server, completion("quick", close=True, max_tokens=3)))) == 5
        assert len(events(read_all(slow))) == 2002
        assert {row["outcome"] for row in server.log("?tokens=0")["requests"]} == {"complete"}


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n", 400),
        (b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411),
        (completion(max_tokens=0), 400),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\n\r\n{", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431),
    ],
)
def test_what_is_no_request_is_refused(tmp_path: Path, request_: bytes, status: int) -> None:
    with exact(tmp_path) as server:
        answer = ask(server, request_)
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert b'"error"' in answer
        assert len(events(ask(server, completion(close=True, max_tokens=1)))) == 3


def test_what_it_tells(tmp_path: Path) -> None:
    with exact(tmp_path, model="tiny") as server:
        ask(server, completion(close=True, max_tokens=4))
        ask(server, completion(close=True, max_tokens=3, stream=False))
        assert json.loads(server.get("/v1/models"))["data"][0]["id"] == "tiny"
        assert json.loads(server.get("/health"))["status"] == "ok"
        assert server.metric("vllm:generation_tokens_total") == 7
        assert server.metric("vllm:prompt_tokens_total") == 6
        assert server.metric("vllm:request_success_total") == 2
        assert server.metric("vllm:num_requests_running") == 0
        assert (server.metric("exact_requests_total"), server.log()["chunks"]) == (2, 5)
        with server.connect() as sock:
            sock.sendall(b"GET /nowhere HTTP/1.1\r\nconnection: close\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 404 ")


# The process
def test_the_log_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with exact(tmp_path, log_path=str(path), log_tokens=False) as server:
        ask(server, completion("one", close=True, max_tokens=4))
        sock = server.connect()
        sock.sendall(completion("cut", max_tokens=100_000))
        assert sock.recv(10)
    sock.close()
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["summary"]["lateness"]["first"]["n"] == 2
    assert [(row["request_id"], row["outcome"]) for row in rows] == [("one", "complete"), ("cut", "open")]
    assert rows[0]["first_write_s"] >= rows[0]["first_due_s"] - DIGIT_S


def test_the_load_generator_and_the_server_say_the_same(tmp_path: Path) -> None:
    launcher = LocalLauncher("exact-test", tmp_path / "logs", tmp_path / "specs")
    with exact(tmp_path) as server:
        load = {
            "base_url": server.url, "model": "exact", "request_rate": 100.0, "num_requests": 30, "seed": 1,
            "input_len": 16, "output_len": 4, "vocab_size": 1000, "records_path": str(tmp_path / "records"),
        }  # fmt: skip
        result = LoadGenerator(launcher, load).run(lambda progress: False, lambda: None, DEADLINE_S)
        log = server.log()
    rows = {row["request_id"]: row for row in log["requests"]}
    assert len(result.records) == len(rows) == 30
    started = result.client["started_monotonic_s"]
    for record in result.records:
        row = rows[record.request_id]
        assert (record.error, record.output_len, row["prompt_tokens"]) == ("", 4, 16)
        # Nothing is received before it was written, nor does it arrive before it was to be sent.
        assert started + record.first_token_s >= row["first_write_s"] - CLOCK_S
        assert started + record.last_token_s >= row["token_write_s"][-1] - CLOCK_S
        assert row["arrival_s"] >= started + record.scheduled_s - CLOCK_S


# Pure parts
@given(
    data=st.lists(st.integers(0, 200_000), min_size=1, max_size=50),
    max_tokens=st.one_of(st.none(), st.integers(1, 5000)),
    spaced=st.booleans(),
    last=st.booleans(),
)
def test_token_ids_are_counted_without_decoding(
    data: list[int], max_tokens: int | None, spaced: bool, last: bool
) -> None:
    body: dict[str, Any] = {} if last else {"prompt": data}
    body |= {"stream": True, "max_tokens": max_tokens, "model": "x", "prompt_logprobs": None}
    body |= {"prompt": data}
    separators = (", ", ": ") if spaced else (",", ":")
    wanted = wire.parse_body(json.dumps(body, separators=separators).encode())
    assert wanted == wire.WantedAnswer(max_tokens, len(data), True, False, False)


@given(words=st.lists(st.text("abc", min_size=1), max_size=20))
def test_a_text_prompt_is_its_words(words: list[str]) -> None:
    body = json.dumps({"prompt": " ".join(words)}).encode()
    assert wire.parse_body(body).prompt_tokens == len(words)


@given(cut=st.integers(0, 10_000))
def test_a_head_is_whole_or_not_there(cut: int) -> None:
    data = completion("some-id", close=True, max_tokens=3)
    head = wire.parse_head(data[: cut % len(data)])
    whole = wire.parse_head(data)
    assert head is None or head == whole
    assert (whole.request_id, whole.close, whole.method) == ("some-id", True, b"POST")
    assert whole.size + whole.length == len(data)
