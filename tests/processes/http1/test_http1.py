"""The HTTP layer against raw sockets: framing, order, limits, disconnects, the pool."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from loops import close_at_end

from kvbench.errors import InputError, PortInUseError
from kvbench.processes.http1 import (
    ClientConnection,
    Pool,
    ReceivedRequest,
    ReplyCollector,
    Response,
    Server,
    fetch,
    request_bytes,
    serve,
)
from kvbench.processes.http1.connection import MAX_BODY_BYTES, MAX_HEADER_BYTES

HOST = "127.0.0.1"
DEADLINE_S = 10.0


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[Any]]], Any]:
    """Runs a coroutine function on either event loop, within a deadline."""

    def runner(main: Callable[[], Awaitable[Any]]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(main(), DEADLINE_S)

        return uvloop.run(bounded()) if request.param == "uvloop" else asyncio.run(bounded())

    return runner


def echo(request: ReceivedRequest, response: Response) -> None:
    answer = {"method": request.method, "path": request.path, "query": request.query, "n": len(request.body)}
    response.send(200, json.dumps(answer).encode(), headers={"x-seen": request.headers.get("x-name", "")})


def three_chunks(request: ReceivedRequest, response: Response) -> None:
    response.start_stream()
    for word in (b"one", b"two", b"three"):
        response.write(word)
    response.end()


async def served(handler: Any) -> tuple[Server, Pool]:
    """A server, and a pool of connections to it; both are closed at the end of the test."""
    server = await serve(handler, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.port}")
    close_at_end(server.close)
    close_at_end(pool.close)
    return server, pool


async def talk(port: int, data: bytes, *, eof: bool = True) -> bytes:
    """Everything a raw socket gets for these bytes until the server closes or falls silent."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    received = b""
    try:
        while piece := await asyncio.wait_for(reader.read(65536), 0.3):
            received += piece
    except asyncio.TimeoutError:
        pass
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return received


async def test_a_body_is_echoed_over_a_connection_that_is_kept(run: Any) -> None:
    _, pool = await served(echo)
    for size in (0, 10, 1_000_000):
        reply = await fetch(pool, pool.request("POST", "/a/b?c=1", {"X-Name": "me"}, b"x" * size))
        assert reply.json() == {"method": "POST", "path": "/a/b", "query": "c=1", "n": size}
        assert reply.headers["x-seen"] == "me"
    assert pool.size == pool.idle == 1


async def test_a_stream_arrives_whole_and_the_connection_serves_again(run: Any) -> None:
    _, pool = await served(three_chunks)
    for _ in range(3):
        assert (await fetch(pool, pool.request("GET", "/"))).body == b"onetwothree"
    assert pool.size == 1


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(run: Any) -> None:
    active, most = 0, 0

    async def handler(request: ReceivedRequest, response: Response) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.01 if request.path == "/0" else 0)
        active -= 1
        response.send(200, request.path.encode())

    server, _ = await served(handler)
    requests = b"".join(request_bytes("POST", f"/{i}", "x", body=b"b" * i) for i in range(40))
    received = await talk(server.port, requests)
    positions = [received.index(b"\r\n\r\n/%d" % i) for i in range(40)]
    assert positions == sorted(positions)
    assert most == 1


async def test_a_request_split_into_single_bytes_is_understood(run: Any) -> None:
    server, _ = await served(echo)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    for byte in request_bytes("POST", "/split", "x", body=b"abc"):
        writer.write(bytes([byte]))
        await writer.drain()
        await asyncio.sleep(0)
    assert b"200 OK" in (await reader.readuntil(b"\r\n\r\n"))
    writer.close()


async def test_expect_100_continue_is_answered_before_the_body(run: Any) -> None:
    server, _ = await served(echo)
    reader, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1), b"431"),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * (MAX_HEADER_BYTES + 1) + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * (MAX_HEADER_BYTES + 1) + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\nxxx" % (MAX_BODY_BYTES + 1), b"413"),
        (b"\x16\x03\x01 no http\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n", b"200"),
    ],
)
async def test_what_cannot_be_served_is_refused_and_closed(run: Any, data: bytes, status: bytes) -> None:
    server, _ = await served(echo)
    received = await talk(server.port, data)
    assert received.startswith(b"HTTP/1.1 " + status), received[:80]
    assert b"connection: close" in received


async def test_http_1_0_gets_no_chunks_and_a_closed_connection(run: Any) -> None:
    server, _ = await served(three_chunks)
    received = await talk(server.port, b"GET / HTTP/1.0\r\n\r\n")
    assert received.endswith(b"\r\n\r\nonetwothree")
    assert b"chunked" not in received


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failing_handler_is_a_500_and_a_log_line(
    run: Any, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def plain(request: ReceivedRequest, response: Response) -> None:
        raise ValueError("broken inside")

    async def coroutine(request: ReceivedRequest, response: Response) -> None:
        raise ValueError("broken inside")

    _, pool = await served(coroutine if asynchronous else plain)
    reply = await fetch(pool, pool.request("GET", "/x"))
    assert reply.status == 500
    assert "broken" not in reply.body.decode()
    assert "broken inside" in caplog.text


async def test_a_handler_that_fails_in_its_stream_cuts_it_short(run: Any) -> None:
    async def handler(request: ReceivedRequest, response: Response) -> None:
        response.start_stream()
        response.write(b"half")
        raise ValueError("broken")

    _, pool = await served(handler)
    with pytest.raises(ConnectionError):
        await fetch(pool, pool.request("GET", "/"))


async def test_a_busy_port_has_its_own_error(run: Any) -> None:
    server, _ = await served(echo)
    with pytest.raises(PortInUseError, match=f"port {HOST}:{server.port} is in use"):
        await serve(echo, HOST, server.port)


async def test_a_client_that_leaves_is_told_to_the_handler(run: Any) -> None:
    gone: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def handler(request: ReceivedRequest, response: Response) -> None:
        response.on_disconnect(lambda: gone.set_result(response.closed))
        response.start_stream()

    server, _ = await served(handler)
    _, writer = await asyncio.open_connection(HOST, server.port)
    writer.write(request_bytes("GET", "/", "x"))
    await asyncio.sleep(0.05)
    writer.close()
    assert await gone is True


async def test_a_client_that_never_reads_is_dropped(run: Any) -> None:
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    congestion: list[str] = []

    async def handler(request: ReceivedRequest, response: Response) -> None:
        response.on_disconnect(lambda: gone.set_result(None))
        response.on_congestion(lambda: congestion.append("pause"), lambda: congestion.append("resume"))
        response.start_stream()
        while not response.closed:
            response.write(b"x" * 65536)
            await asyncio.sleep(0)

    server, _ = await served(handler)
    reader, writer = await asyncio.open_connection(HOST, server.port, limit=1024)
    writer.write(request_bytes("GET", "/", "x"))
    await gone
    assert congestion[0] == "pause"
    writer.transport.abort()
    del reader


async def test_a_response_is_begun_once_and_its_headers_hold_no_line_break(run: Any) -> None:
    seen: list[type[Exception]] = []

    def handler(request: ReceivedRequest, response: Response) -> None:
        if request.path == "/break":
            response.send(200, headers={"x": "a\r\nset-cookie: b"})
        response.send(200)
        try:
            response.send(200)
        except RuntimeError as error:
            seen.append(type(error))

    _, pool = await served(handler)
    assert (await fetch(pool, pool.request("GET", "/"))).status == 200
    assert seen == [RuntimeError]
    with pytest.raises(ConnectionError):  # it was begun, so a broken connection is all that is left
        await fetch(pool, pool.request("GET", "/break"))


async def test_closing_the_server_lets_a_short_answer_finish(run: Any) -> None:
    async def handler(request: ReceivedRequest, response: Response) -> None:
        await asyncio.sleep(0.05)
        response.send(200, b"done")

    server = await serve(handler, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.port}")
    reply = asyncio.ensure_future(fetch(pool, pool.request("GET", "/")))
    await asyncio.sleep(0.02)
    await server.close()
    assert (await reply).body == b"done"
    with pytest.raises(OSError, match=r".*"):
        await pool.connect()
    await pool.close()


class Events:
    """A sink that writes down what it is told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
        self.seen.append(("head", status))

    def on_body(self, data: bytes, stamp: float) -> None:
        self.seen.append(("body", data))

    def on_end(self) -> None:
        self.seen.append("end")
        self.over.set()

    def on_failure(self, cause: str, malformed: bool) -> None:
        self.seen.append(("malformed" if malformed else "closed", bool(cause)))
        self.over.set()


async def answer_with(pieces: list[bytes], close: bool = True) -> tuple[Events, Pool]:
    """What a client makes of a server that sends exactly these pieces."""

    over = asyncio.Event()

    async def server_side(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The client may drop the connection before it has been told everything.
        with contextlib.suppress(OSError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            if not close:
                await reader.read()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        over.set()

    server = await asyncio.start_server(server_side, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
    connection = await pool.acquire()
    events = Events()
    connection.send(pool.request("GET", "/"), events)
    await events.over.wait()
    server.close()
    await over.wait()
    await pool.close()
    return events, pool


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([CHUNKED, b"3\r\nabc\r\n", b"0\r\n\r\n"], [("head", 200), ("body", b"abc"), "end"]),
        (
            [b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + b"3\r\nabc\r\n0\r\n\r\n"],
            [("head", 200), ("body", b"abc"), "end"],
        ),
        ([CHUNKED[:-3], CHUNKED[-3:] + b"0\r\n\r\n"], [("head", 200), "end"]),
        (
            [CHUNKED + b"3\r\na", b"bc\r\n0\r", b"\n\r\n"],
            [("head", 200), ("body", b"a"), ("body", b"bc"), "end"],
        ),
        ([CHUNKED + b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"], [("head", 200), ("body", b"ab"), "end"]),
        ([CHUNKED + b"3\r\nabc\r\n"], [("head", 200), ("body", b"abc"), ("closed", True)]),
        ([b"HTTP/1.1 200 OK\r\n\r\nto the end"], [("head", 200), ("body", b"to the end"), "end"]),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED, b"0\r\n\r\n"], [("head", 200), "end"]),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], [("head", 204), "end"]),
        ([b"SSH-2.0-OpenSSH\r\n"], [("malformed", True)]),
        ([CHUNKED + b"zz\r\n"], [("head", 200), ("malformed", True)]),
        ([], [("closed", True)]),
    ],
)
async def test_the_client_tells_what_came(run: Any, pieces: list[bytes], expected: list[Any]) -> None:
    events, pool = await answer_with(pieces)
    assert events.seen == expected
    assert pool.size == 0


async def test_a_connection_with_bytes_nobody_asked_for_is_not_used_again(run: Any) -> None:
    _, pool = await answer_with(
        [b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 500 Late\r\n\r\n"], close=False
    )
    assert pool.idle == 0


async def test_the_pool_opens_keeps_and_drops(run: Any) -> None:
    server, _ = await served(echo)
    pool = Pool(f"http://{HOST}:{server.port}", max_idle_s=0.05)
    await pool.warm(5)
    assert pool.idle == 5
    await asyncio.sleep(0.1)
    connection = pool.take()
    assert isinstance(connection, ClientConnection)  # never used, so not stale
    pool.release(connection)
    await fetch(pool, pool.request("GET", "/"))
    await asyncio.sleep(0.1)
    assert pool.take() is not None  # the used one was stale: this is another
    assert pool.idle == 3
    await pool.close()
    assert pool.size == 0


async def test_idle_connections_that_the_server_closes_leave_the_pool(run: Any) -> None:
    server = await serve(echo, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.port}")
    await pool.warm(3)
    await server.close()
    while pool.size:
        await asyncio.sleep(0.01)
    assert pool.idle == 0
    assert pool.take() is None


async def test_a_connection_that_is_dropped_at_once_is_an_error_and_is_not_kept(run: Any) -> None:
    def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    server = await asyncio.start_server(drop, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
    for _ in range(20):
        with pytest.raises(OSError, match=r".*"):
            await fetch(pool, pool.request("GET", "/"))
    await pool.close()
    assert pool.size == 0
    server.close()
    await server.wait_closed()


async def test_a_lost_connection_refuses_a_request(run: Any) -> None:
    _, pool = await served(echo)
    connection = await pool.acquire()
    connection.abort()
    with pytest.raises(ConnectionResetError, match="before the request was sent"):
        connection.send(pool.request("GET", "/"), Events())


async def test_bytes_that_carry_their_framing_keep_their_place_among_the_others(run: Any) -> None:
    big = b"y" * 400_000  # more than the socket takes at once

    def handler(request: ReceivedRequest, response: Response) -> None:
        response.start_stream(first=b"1\r\na\r\n")
        for data in (b"b", big, b"c"):
            response.pass_on(b"%x\r\n%b\r\n" % (len(data), data))
        response.write(b"d")
        response.pass_on(b"1\r\ne\r\n")
        response.end()

    _, pool = await served(handler)
    for _ in range(3):
        assert (await fetch(pool, pool.request("GET", "/"))).body == b"ab" + big + b"cde"
    assert pool.size == 1


async def test_a_connection_that_was_paused_by_the_last_bytes_of_an_answer_serves_again(run: Any) -> None:
    """They may be too many for whoever they are passed on to."""

    class PassingOn(ReplyCollector):
        def on_head(self, status: int, headers: dict[str, str], stamp: float) -> None:
            super().on_head(status, headers, stamp)
            connection.pass_on(lambda data: connection.pause_reading())

    _, pool = await served(three_chunks)
    connection = await pool.connect()
    sink = PassingOn()
    whole = request_bytes("GET", "/", HOST)
    connection.send(whole, sink)
    await asyncio.wait({sink.result}, timeout=0.1)
    while not sink.result.done():  # it came in several reads
        connection.resume_reading()
        await asyncio.sleep(0.01)
    assert (await fetch(pool, whole)).body == b"onetwothree"
    assert pool.size == 1


async def test_cancelling_a_fetch_drops_the_connection(run: Any) -> None:
    gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    _, pool = await served(lambda _, r: r.on_disconnect(lambda: gone.set_result(None)))
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(fetch(pool, pool.request("GET", "/")), 0.05)
    await gone


async def test_nobody_listening_is_an_oserror(run: Any) -> None:
    server, pool = await served(echo)
    await server.close()
    with pytest.raises(OSError, match=r".*"):
        await fetch(pool, pool.request("GET", "/"))


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x/", "http://"])
async def test_a_url_that_is_none_is_refused(run: Any, url: str) -> None:
    with pytest.raises(InputError):
        Pool(url)


async def test_a_base_path_and_the_host_header_are_kept() -> None:
    pool = Pool("http://user@example.test:8080/openai/")
    data = pool.request("GET", "/v1/models", {"A": "b"})
    assert data == b"GET /openai/v1/models HTTP/1.1\r\nhost: example.test:8080\r\nA: b\r\n\r\n"
    with pytest.raises(InputError, match="line break"):
        pool.request("GET", "/", {"A": "b\r\nc: d"})
