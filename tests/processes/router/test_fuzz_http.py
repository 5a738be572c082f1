"""Bytes from anywhere on the wire: to our server, the router and the load generator (also ``make fuzz``)."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvloop
from hostile import DONE, HEAD, HOST, LAST, TOKEN, USAGE, against, chunk, plain
from hypothesis import given
from hypothesis import strategies as st
from mutations import damaged, fuzz, stored

from kvbench.core.records import RequestError
from kvbench.processes import http1
from kvbench.processes.http1 import Pool, ReceivedRequest, Response, fetch
from kvbench.processes.loadgen.answer import MAX_HEAD_BYTES, ServerAnswer
from kvbench.processes.loadgen.stream import MAX_EVENT_BYTES, StreamReader
from kvbench.processes.router.app import Router
from kvbench.processes.router.metrics import RouterMetrics
from kvbench.processes.router.spec import RouterSpec

DEADLINE_S = 10.0
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n",
    b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 31\r\n\r\n{"prompt": [1, 2], "stream": 1}',
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    b'e\r\n{"prompt": []}\r\n0\r\n\r\n',
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\nhost: x\ncontent-length: 2\n\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\n\r\n" + b"[" * 4000,
]
STREAM = HEAD + b"".join(chunk(event) for event in (TOKEN, TOKEN, TOKEN, USAGE, DONE)) + LAST
ANSWERS = [
    STREAM, plain("200 OK", b'{"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}'),
    plain("500 Oops", b"not \xff JSON"), plain("302 Found", b"", "location: http://elsewhere/\r\n"),
    plain("200 OK", b"[" * 4000), b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM,
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}", b"\x16\x03\x01\x02\x00",
]  # fmt: skip


@contextlib.contextmanager
def on_a_thread(main: Callable[[Callable[[Any], None], asyncio.Event], Any]) -> Iterator[Any]:
    """Runs ``main(tell, over)`` on a loop of its own; yields what it tells."""
    started, found = threading.Event(), []
    loop_of: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def body() -> None:
        over = asyncio.Event()
        loop_of.append((asyncio.get_running_loop(), over))

        def tell(what: Any) -> None:
            found.append(what)
            started.set()

        await main(tell, over)

    thread = threading.Thread(target=lambda: uvloop.run(body()))
    thread.start()
    assert started.wait(DEADLINE_S)
    try:
        yield found[0]
    finally:
        loop, over = loop_of[0]
        loop.call_soon_threadsafe(over.set)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def sent(port: int, data: bytes, cuts: list[int], *, shut: bool = False) -> bytes:
    """What a server answers to these bytes, sent in pieces, until it closes; ``shut``: that is all."""
    with socket.create_connection((HOST, port), timeout=DEADLINE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            for size in cuts:
                sock.sendall(data[:size])
                data = data[size:]
            sock.sendall(data)
            if shut:
                sock.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := sock.recv(65_536):
                answer += more
        return answer


CUTS = st.lists(st.integers(1, 200), max_size=4)
GOOD = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


# Our server
@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[int, list[str]]]:
    """A server on a thread: its port, and the handler's own failures."""
    failures: list[str] = []

    def handle(request: ReceivedRequest, response: Response) -> None:
        response.send(200, request.body, "text/plain")

    async def main(tell: Callable[[Any], None], over: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context)))
        server = await http1.serve(handle, HOST, 0)
        tell(server.port)
        await over.wait()
        await server.close()

    with on_a_thread(main) as port:
        yield port, failures


@given(data=damaged(REQUESTS), cuts=CUTS)
@stored("request", "data", cuts=[])
@fuzz(150)
def test_any_request_is_answered_or_refused(
    echo: tuple[int, list[str]], data: bytes, cuts: list[int]
) -> None:
    port, failures = echo
    answer = sent(port, data, cuts, shut=True)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert sent(port, GOOD, []).startswith(b"HTTP/1.1 200 OK\r\n")
    assert not failures


# The router
class Backends:
    """P and D that answer every request by the bytes that are told, and then close."""

    def __init__(self) -> None:
        self.answer = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            await reader.readexactly(int(length or 0))
            writer.write(self.answer)
            await writer.drain()
        writer.close()


@pytest.fixture(scope="module")
def router() -> Iterator[tuple[int, Backends, RouterMetrics, list[str]]]:
    """A router of connector ``tcp`` (P first, then D) in front of backends that answer anything."""
    backends, failures = Backends(), []
    metrics = RouterMetrics()

    async def main(tell: Callable[[Any], None], over: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context)))
        behind = await asyncio.start_server(backends.serve, HOST, 0)
        url = f"http://{HOST}:{behind.sockets[0].getsockname()[1]}"
        spec = RouterSpec(port=0, connector="tcp", prefill=[{"url": url}], decode=[{"url": url}])
        app = Router(spec, metrics)
        await app.bootstrap()
        server = await http1.serve(app.handle, HOST, 0)
        tell(server.port)
        await over.wait()
        await server.close()
        await app.close()
        behind.close()

    with on_a_thread(main) as port:
        yield port, backends, metrics, failures


def ask(body: bytes) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


@given(answer=damaged(ANSWERS))
@stored("answer", "answer")
@fuzz(120)
def test_any_answer_of_a_server_passes_the_router_or_is_an_error(
    router: tuple[int, Backends, RouterMetrics, list[str]], answer: bytes
) -> None:
    port, backends, metrics, failures = router
    backends.answer = answer
    got = sent(port, ask(b'{"model": "tiny", "prompt": [1, 2, 3], "stream": true}'), [])
    assert got == b"" or got.startswith(b"HTTP/1.1 ")
    assert b'error="internal"' not in metrics.page()
    assert not failures


@given(
    body=damaged(
        [b'{"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "stream_options": {"include_usage": true}}']
    )
)
@fuzz(120)
def test_any_body_of_a_client_is_routed_or_refused(
    router: tuple[int, Backends, RouterMetrics, list[str]], body: bytes
) -> None:
    port, backends, metrics, failures = router
    backends.answer = plain("200 OK", b'{"kv_transfer_params": {"remote_engine_id": "e"}}')
    got = sent(port, ask(body), [])
    assert got.startswith(b"HTTP/1.1 ")
    assert b"HTTP/1.1 500" not in got
    assert b'error="internal"' not in metrics.page()
    assert not failures


# The load generator
KNOWN = set(RequestError.__args__)  # type: ignore[attr-defined]


@given(answer=damaged(ANSWERS))
@stored("answer", "answer")
@fuzz(8)
def test_any_answer_becomes_a_record_of_the_load_generator(answer: bytes) -> None:
    records = against([answer, "close"], num_requests=2, timeout_s=2.0)
    assert len(records) == 2
    assert {record.error for record in records} <= KNOWN
    assert all(len(record.error_detail) < 2_000 for record in records)


@given(data=damaged(ANSWERS), sizes=st.lists(st.integers(1, 400), max_size=20))
@stored("answer", "data", sizes=[])
@fuzz(200)
def test_reads_of_any_answer_are_taken(data: bytes, sizes: list[int]) -> None:
    import numpy as np

    reads = []
    for size in sizes:
        reads.append(data[:size])
        data = data[size:]
    reads = [read for read in [*reads, data] if read]
    answer = ServerAnswer()
    answer.take(reads, np.arange(len(reads), dtype=np.int64))
    answer.closed()
    answer.stream.finish()
    assert answer.status == 0 or 100 <= answer.status <= 999
    answer.release()


# Bounded, however long it goes on
def endless(piece: bytes, first: bytes, most: int) -> tuple[int, str]:
    """Bytes that a client takes of an answer that never ends, of at most ``most``, and what it says then."""

    async def main() -> tuple[int, str]:
        taken = [0]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(first)
            with contextlib.suppress(ConnectionError):
                while taken[0] < most:
                    writer.write(piece)
                    await writer.drain()
                    taken[0] += len(piece)
            writer.close()

        server = await asyncio.start_server(serve, HOST, 0)
        pool = Pool(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
        message = ""
        try:
            await asyncio.wait_for(fetch(pool, pool.request("GET", "/")), DEADLINE_S)
        except ConnectionError as error:
            message = str(error)
        await pool.close()
        server.close()
        return taken[0], message

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x: " + b"y" * 60_000 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\nx: ", b"y" * 60_000),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 2000),
    ],
    ids=["headers", "one-header", "interim-answers"],
)
def test_an_endless_head_is_given_up_early(first: bytes, piece: bytes) -> None:
    taken, message = endless(piece, first, most=200 << 20)
    assert "head exceeds" in message
    assert taken < 16 << 20


HEAD_OF_STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def test_the_load_generator_gives_up_endless_heads_and_events() -> None:
    import numpy as np

    for first, piece in (
        (b"HTTP/1.1 200 OK\r\n", b"x: yyyyyyyy\r\n" * 5000),
        (b"", b"HTTP/1.1 100 C\r\n\r\n" * 3000),
    ):
        answer = ServerAnswer()
        answer.take([first] if first else [piece], np.zeros(1, np.int64))
        for _ in range(2 * MAX_HEAD_BYTES // len(piece)):
            answer.take([piece], np.zeros(1, np.int64))
        assert "head exceeds" in answer.malformed
        answer.release()
    reader = StreamReader()
    for _ in range(3 * MAX_EVENT_BYTES // 1_000_000):
        reader.feed(b"x" * 1_000_000, 1)
        assert len(reader._pending) + sum(map(len, reader._more)) <= MAX_EVENT_BYTES + 1_000_000
    assert reader.error == "bad_stream"
    assert reader.endless
    assert "MiB" in reader.detail
    answer, size = ServerAnswer(), 1 << 19
    answer.take([HEAD_OF_STREAM], np.zeros(1, np.int64))
    for _ in range(MAX_EVENT_BYTES // size + 1):
        assert not answer.malformed
        answer.take([b"%x\r\n" % size + b"x" * size + b"\r\n"], np.zeros(1, np.int64))
    assert "an event of more than 1 MiB" in answer.malformed
    answer.release()


def test_a_client_that_sends_headers_for_ever_is_refused(echo: tuple[int, list[str]]) -> None:
    port, failures = echo
    began = time.monotonic()
    answer = sent(port, b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000, [], shut=True)
    assert b" 431 " in answer or answer == b""  # a reset may overtake the answer
    assert time.monotonic() - began < DEADLINE_S
    assert not failures
