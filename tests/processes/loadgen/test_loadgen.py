"""The load generator against real, mostly hostile servers: each trouble is a class, and none is lost."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from hostile import (
    DONE,
    GOOD,
    HEAD,
    HOST,
    LAST,
    OUTPUT_LEN,
    STREAM,
    TOKEN,
    USAGE,
    Step,
    against,
    chunk,
    hostile,
    plain,
    run_trial,
    sse,
)

from kvbench.processes.http1 import ReceivedRequest, Response, serve
from kvbench.processes.loadgen.control import PREPARED_EACH, Preparation

ABORTED = b'data: {"choices":[{"index":0,"text":" a","finish_reason":"abort"}],"usage":null}\n\n'
ABORTED_CHAT = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}\n\n'
"""How vLLM (its issue 57082) and SGLang end an answer that they give up."""


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
        ("trailers", [HEAD, chunk(STREAM), b"0\r\nx-took: 3\r\n\r\n"]),
        ("a chunk extension", [HEAD, chunk(STREAM), b"0;last=1\r\n\r\n"]),
        ("the end in pieces", [HEAD, chunk(STREAM), b"0", 0.01, b"\r\n", 0.01, b"\r", 0.01, b"\n"]),
        ("an interim answer", [b"HTTP/1.1 100 Continue\r\n\r\n", *GOOD]),
        ("a known length", [plain("200 OK", STREAM, "content-type: text/event-stream\r\n")]),
        (
            "a known length that ends like a chunk",
            [plain("200 OK", STREAM + b"\n\n\r\n", "content-type: text/event-stream\r\n")],
        ),
        (
            "not kept alive",
            [HEAD.replace(b"\r\n", b"\r\nconnection: close\r\n", 1), chunk(STREAM), LAST, "close"],
        ),
        (
            "usage in each event",
            [HEAD, chunk(TOKEN.replace(b"null", b'{"completion_tokens":1}') + STREAM), LAST],
        ),
    ],
)
def test_every_way_to_stream_is_understood(name: str, steps: list[Step]) -> None:
    for record in against(steps):
        assert record.ok, record
        assert (record.output_len, record.status) == (OUTPUT_LEN, 200)
        assert record.scheduled_s <= record.sent_s <= record.first_token_s <= record.last_token_s
        assert sum(record.itl_s) == pytest.approx(record.last_token_s - record.first_token_s, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "steps", "error", "status", "detail"),
    [
        ("closes before the head", ["close"], "early_close", 0, ""),
        ("closes in the stream", [HEAD, chunk(TOKEN), "close"], "early_close", 200, ""),
        ("half an event, then closes", [HEAD, chunk(TOKEN + b'data: {"cho'), "close"], "half_event", 200, ""),
        (
            "half an event, well framed", [HEAD, chunk(TOKEN + b'data: {"cho'), LAST], "half_event", 200,
            "DONE",
        ),
        ("no end mark", [HEAD, chunk(TOKEN * 3 + USAGE), LAST], "early_close", 200, "DONE"),
        ("resets in the middle", [HEAD, chunk(TOKEN), 0.02, "reset"], "reset", 200, ""),
        ("resets at once", ["reset"], "reset", 0, ""),
        ("end mark, but cut short", [HEAD, chunk(STREAM), "close"], "early_close", 200, ""),
        ("empty", [plain("200 OK", b"", "content-type: text/event-stream\r\n")], "early_close", 200, "DONE"),
        (
            "error body", [plain("200 OK", b'{"error":{"message":"out of KV"}}')], "error_body", 200,
            "out of KV",
        ),
        (
            "old error body", [plain("200 OK", b'{"object":"error","message":"old"}')], "error_body", 200,
            "old",
        ),
        (
            "error event", [HEAD, chunk(TOKEN + b'data: {"error":{"message":"died"}}\n\n' + DONE), LAST],
            "error_body", 200, "died",
        ),
        ("aborted", [HEAD, chunk(TOKEN + ABORTED + USAGE + DONE), LAST], "aborted", 200, '"abort"'),
        (
            "aborted at its last token", [HEAD, chunk(TOKEN * 2 + ABORTED + USAGE + DONE), LAST], "aborted",
            200, "",
        ),
        ("aborted at once", [HEAD, chunk(ABORTED_CHAT), chunk(DONE), LAST], "aborted", 200, '"error"'),
        ("aborted, then closes", [HEAD, chunk(TOKEN), chunk(ABORTED), "close"], "aborted", 200, ""),
        ("garbage for HTTP", [b"\x00\x01 no http\r\n\r\n", "close"], "bad_stream", 0, "HTTP"),
        ("garbage body", [HEAD, chunk(b"\xff\xfe\x00garbage\n\n"), LAST], "bad_stream", 200, "garbage"),
        ("garbage event", [HEAD, chunk(TOKEN + b"data: {nope\n\n" + DONE), LAST], "bad_stream", 200, "nope"),
        (
            "a list for an event", [HEAD, chunk(TOKEN + b"data: [1]\n\n" + DONE), LAST], "bad_stream", 200,
            "[1]",
        ),
        ("not streamed", [plain("200 OK", b'{"choices":[{"text":"x"}]}')], "bad_stream", 200, "choices"),
        ("no usage", [HEAD, chunk(TOKEN * 3 + DONE), LAST], "bad_stream", 200, "usage"),
        ("no tokens", [HEAD, chunk(USAGE + DONE), LAST], "bad_stream", 200, "token"),
        (
            "one token short", [HEAD, chunk(TOKEN * 2 + USAGE.replace(b"3", b"2") + DONE), LAST],
            "wrong_length", 200, "2 tokens",
        ),
        ("500", [plain("500 Internal Server Error", b'{"detail":"boom"}')], "http_error", 500, "boom"),
        ("404", [plain("404 Not Found", b"nothing")], "http_error", 404, "nothing"),
        (
            "redirect", [plain("307 Temporary Redirect", b"", "location: http://other/\r\n")], "redirect",
            307, "http://other/",
        ),
        ("never answers", ["hang"], "no_answer", 0, "0.3 s"),
        ("stops in the middle", [HEAD, chunk(TOKEN), "hang"], "timeout", 200, "0.3 s"),
        (
            "500 that never ends", [b"HTTP/1.1 500 No\r\ncontent-length: 9\r\n\r\n", "hang"], "http_error",
            500, "",
        ),
        ("slower than the deadline", [HEAD, *([chunk(TOKEN), 0.15] * 6), LAST], "timeout", 200, "0.3 s"),
    ],
)  # fmt: skip
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


def test_what_comes_after_the_answer_does_not_spoil_the_next_request() -> None:
    for record in against([*GOOD[:-1], LAST + b"and more"], request_rate=20.0, num_requests=6):
        assert record.ok, record


async def test_no_trial_waits_for_a_deadline_when_the_server_has_ended_its_answer() -> None:
    server, url = await hostile([HEAD + chunk(STREAM), 0.01, b"0\r\n", 0.01, b"\r\n"])
    records, end, _ = await run_trial(url, timeout_s=15.0)
    server.close()
    assert all(record.ok for record in records)
    assert end["duration_s"] < 5


async def test_a_refused_connection_is_a_class_of_its_own() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))  # bound, not listening: connections are refused
        records, end, _ = await run_trial(f"http://{HOST}:{taken.getsockname()[1]}", warm=0)
    assert [record.error for record in records] == ["connect"] * 4
    assert all(record.sent_s is None for record in records)
    assert end["reason"] == "complete"


async def test_connections_refused_from_some_stream_on_do_not_spoil_the_others() -> None:
    server, url = await hostile(["hang"])
    asyncio.get_running_loop().call_later(0.1, server.close)  # what is open stays open
    records, _, _ = await run_trial(url, request_rate=200.0, num_requests=60, timeout_s=0.8)
    errors = [record.error for record in records]
    # What the closed listener had not accepted yet is reset, on a busy machine.
    assert {"no_answer", "connect"} <= set(errors) <= {"no_answer", "connect", "reset"}
    assert len(errors) == 60


def test_one_token_needs_no_second_event() -> None:
    steps: list[Step] = [HEAD, chunk(TOKEN + USAGE.replace(b"3", b"1") + DONE), LAST]
    for record in against(steps, output_len=1):
        assert record.ok
        assert list(record.itl_s) == []
        assert record.tpot_s is None


async def test_waiting_past_the_ttft_limit_counts_as_missed_while_it_goes_on() -> None:
    server, url = await hostile(["hang"])
    _, end, progress = await run_trial(
        url, stop_after_s=0.4, timeout_s=5.0, slo={"ttft_ms": 50, "tpot_ms": None}, progress_interval_s=0.02
    )
    server.close()
    assert end["reason"] == "stopped"
    assert any(line["missed"] == line["waiting_first"] == 4 for line in progress)
    assert progress[-1]["missed"] == 0  # they were cancelled: neither met nor missed
    assert all(line["met"] == 0 for line in progress)


@pytest.mark.parametrize(("grace_s", "ended"), [(0.0, "cancelled"), (10.0, "")])
async def test_a_stopped_trial_may_let_its_requests_end(grace_s: float, ended: str) -> None:
    server, url = await hostile([2.0, *GOOD])
    records, end, _ = await run_trial(url, stop_after_s=0.3, timeout_s=15.0, stop_grace_s=grace_s)
    server.close()
    assert end["reason"] == "stopped"
    assert {record.error for record in records} == {ended}


async def test_limits_are_applied_to_finished_requests() -> None:
    server, url = await hostile([0.05, *GOOD])
    met = []
    for slo in ({"ttft_ms": 5000, "tpot_ms": 5000}, {"ttft_ms": 20}, {"tpot_ms": 0.01}, {}):
        _, _, progress = await run_trial(url, slo=slo)
        met.append(progress[-1]["met"])
        assert progress[-1]["missed"] == 4 - met[-1]
    server.close()
    assert met == [4, 0, 0, 4]


async def test_an_exact_schedule_is_seen_as_it_is() -> None:
    delay, gap = 0.03, 0.01

    async def handler(request: ReceivedRequest, response: Response) -> None:
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
    for record in records:
        assert record.ok
        assert record.ttft_s >= delay - 0.002  # uvloop's timers are rounded to milliseconds
        assert len(record.itl_s) == OUTPUT_LEN - 1


def made_certificate(folder: Path) -> tuple[str, str]:
    """A key and a certificate of 127.0.0.1's own."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with the openssl command, which is not installed")
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", key, "-out", cert, "-subj", "/CN=test", "-days", "2"]
    command += ["-addext", f"subjectAltName=IP:{HOST}"]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return key, cert


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return made_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize(
    ("steps", "error"),
    [
        (GOOD, ""),
        ([HEAD, *(chunk(TOKEN), 0.001) * 3, chunk(b": " + b"x" * 300_000 + b"\n\n"), *GOOD[-3:]], ""),
        ([b"HTTP/1.1 200 OK\r\n\r\n" + STREAM, "close"], ""),
        ([HEAD, chunk(TOKEN), "close"], "early_close"),
        (["hang"], "no_answer"),
    ],
)
@pytest.mark.parametrize("input_len", [8, 40_000])
async def test_tls_is_read_at_the_read(
    monkeypatch: pytest.MonkeyPatch,
    certificate: tuple[str, str],
    steps: list[Step],
    error: str,
    input_len: int,
) -> None:
    key, cert = certificate
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    server, url = await hostile(steps, context)
    records, end, _ = await run_trial(url, timeout_s=1.0, input_len=input_len, request_rate=50.0)
    server.close()
    assert [record.error for record in records] == [error] * 4, records
    assert end["client"]["stamps"] == ("read" if error != "no_answer" else "kernel")
    for record in records:
        assert record.stamps == ("read" if error != "no_answer" else "")
        assert record.sent_kernel_s is None


async def test_a_certificate_that_is_not_trusted_fails_to_connect(certificate: tuple[str, str]) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])

    server, url = await hostile(GOOD, context)
    records, _, _ = await run_trial(url, timeout_s=5.0)
    server.close()
    for record in records:
        assert record.error == "connect"
        assert "certificate" in record.error_detail


def test_the_kernel_tells_when_the_last_byte_of_a_long_request_left() -> None:
    steps: list[Step] = [0.02, *GOOD]
    for record in against(steps, input_len=60_000, request_rate=20.0, timeout_s=15.0):
        assert record.ok
        assert record.stamps in ("kernel", "read")
        if record.sent_kernel_s is not None:
            assert record.sent_s <= record.sent_kernel_s <= record.first_token_s


def test_a_preparation_reports_each_request_once_though_it_takes_it_up_twice(
    capfd: pytest.CaptureFixture[str],
) -> None:
    watched = Preparation(every_s=0.0).watched
    assert (
        list(watched(range(PREPARED_EACH))) + list(watched(range(PREPARED_EACH)))
        == [*range(PREPARED_EACH)] * 2
    )
    events = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [event["done"] for event in events] == [PREPARED_EACH // 2, PREPARED_EACH]
