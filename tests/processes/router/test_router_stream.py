"""What the router does with a stream, byte by byte: a scripted D, a raw client, real sockets."""

import asyncio
import contextlib
import json
import re
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import psutil
import pytest
import uvloop

from kvbench.processes.http1 import Pool, Server, fetch, serve
from kvbench.processes.http1.splicing import SPLICE
from kvbench.processes.router.app import Router
from kvbench.processes.router.spec import RouterSpec

HOST = "127.0.0.1"
DEADLINE_S = 30.0
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = b'{"model":"m","prompt":[1,2],"max_tokens":3,"stream":true}'
EVENTS = [b"data: %d\n\n" % number for number in range(5)]

COMPILED = ContextVar("compiled", default=True)
"""Whether the router of this test may use compiled code."""

Script = Callable[["Peer"], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Peer:
    """One connection of a scripted D."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.gone = asyncio.Event()

    async def request(self) -> bytes:
        """The next request; raises IncompleteReadError if none comes."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        return head + (await self.reader.readexactly(int(length[1])) if length else b"")

    async def send(self, *pieces: bytes) -> None:
        """Each piece arrives alone."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.005)

    async def until_gone(self) -> None:
        with contextlib.suppress(OSError):
            while await self.reader.read(65536):
                pass
        self.gone.set()


class RawEngine:
    """A D that does exactly what a script says, on every connection."""

    def __init__(self, script: Script) -> None:
        self.peers: list[Peer] = []
        self._script = script
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, HOST, 0, backlog=2048)
        return f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        self.peers.append(peer)
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            # Cancelled when the test ends; start_server would make an error of it.
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._script(peer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Bench:
    """A router in front of a scripted D, and raw clients."""

    def __init__(self, engine: RawEngine, router: Router, server: Server) -> None:
        self.engine = engine
        self.router = router
        self.port = server.port
        self.pool = Pool(f"http://{HOST}:{server.port}")

    def request(self, headers: dict[str, str] | None = None, version: bytes = b"1.1") -> bytes:
        data = self.pool.request("POST", "/v1/completions", headers, BODY)
        return data.replace(b"HTTP/1.1", b"HTTP/" + version, 1)

    async def raw(self, request: bytes) -> bytes:
        """Everything that a client gets until the router closes; a reset is told as b"<reset>"."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(request)
        received = b""
        try:
            while piece := await reader.read(65536):
                received += piece
        except ConnectionResetError:
            received += b"<reset>"
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return received

    async def metric(self, name: str) -> float:
        page = (await fetch(self.pool, self.pool.request("GET", "/metrics"))).body.decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    async def settled(self, name: str, value: float) -> None:
        while await self.metric(name) != value:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def bench(script: Script) -> AsyncIterator[Bench]:
    engine = RawEngine(script)
    decode = [{"url": await engine.start()}]
    router = Router(RouterSpec(port=0, connector="aggregated", decode=decode, compiled=COMPILED.get()))
    await router.bootstrap()
    server = await serve(router.handle, HOST, 0)
    made = Bench(engine, router, server)
    try:
        yield made
    finally:
        await made.pool.close()
        await server.close()
        await router.close()
        await engine.close()


@pytest.fixture(params=["asyncio", "uvloop", "uvloop, compiled"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Each way through the router, on each loop."""
    compiled = request.param.endswith("compiled")
    if compiled and SPLICE is None:
        pytest.skip("kvbench.processes.http1._splice was not compiled, or is refused")

    def runner(main: Callable[[], Awaitable[None]]) -> None:
        async def bounded() -> None:
            COMPILED.set(compiled)
            await asyncio.wait_for(main(), DEADLINE_S)
            await asyncio.sleep(0)

        (uvloop.run if request.param.startswith("uvloop") else asyncio.run)(bounded())

    return runner


def after_the_request(*pieces: bytes, then: Script | None = None) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if then is not None:
            await then(peer)

    return script


STREAM = b"".join(chunk(event) for event in EVENTS)
FRAMED = STREAM.replace(b"a\r\n", b"A;x=y\r\n", 1) + chunk(b"x" * 300)


@pytest.mark.parametrize(
    "pieces",
    [
        [CHUNKED + FRAMED + b"0\r\n\r\n"],
        [CHUNKED, FRAMED, b"0\r\n\r\n"],
        [CHUNKED[:-2], CHUNKED[-2:] + FRAMED[:1], FRAMED[1:30], FRAMED[30:] + b"0", b"\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + FRAMED, b"0\r\nServer-Timing: x\r\n", b"\r\n"],
    ],
)
async def test_the_bytes_of_a_stream_and_their_framing_reach_the_client_as_they_are(
    run: Any, pieces: list[bytes]
) -> None:
    async with bench(after_the_request(*pieces, then=Peer.until_gone)) as x:
        received = await x.raw(x.request({"connection": "close"}))
        assert received.endswith(b"\r\n\r\n" + FRAMED + b"0\r\n\r\n")
        assert await x.metric("kvbench:router_errors_total") == 0
        assert await x.metric("kvbench:router_streams_total") == 1
        assert await x.metric("kvbench:router_stream_bytes_total") == len(FRAMED)
        assert await x.metric("kvbench:router_stream_reads_total") >= 1


@pytest.mark.parametrize("timed", [False, True])
async def test_each_chunk_is_passed_on_when_it_comes(run: Any, timed: bool) -> None:
    seen = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        for event in EVENTS:  # the next one only when the client has this one
            seen.clear()
            await peer.send(chunk(event))
            await seen.wait()
        await peer.send(b"0\r\n\r\n")
        await peer.until_gone()

    async with bench(script) as x:
        reader, writer = await asyncio.open_connection(HOST, x.port)
        writer.write(x.request({"x-kvbench-timing": "1"} if timed else None))
        assert (b"x-kvbench-decode-first-byte" in (await reader.readuntil(b"\r\n\r\n"))) == timed
        for event in EVENTS:
            assert await reader.readexactly(len(chunk(event))) == chunk(event)
            seen.set()
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()


async def test_connections_are_kept_on_both_sides_and_pipelined_requests_answered_in_turn(run: Any) -> None:
    async def script(peer: Peer) -> None:
        for turn in range(50):
            await peer.request()
            await peer.send(CHUNKED, chunk(b"turn %d" % turn) + b"0\r\n\r\n")

    async with bench(script) as x:
        requests = [x.request() for _ in range(5)]
        received = await x.raw(b"".join(requests) + x.request({"connection": "close"}))
        assert re.findall(rb"turn (\d)", received) == [b"0", b"1", b"2", b"3", b"4", b"5"]
        assert received.count(b"HTTP/1.1 200 OK") == received.count(b"\r\n0\r\n\r\n") == 6
        assert len(x.engine.peers) == 1


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([CHUNKED, chunk(b"one")], "decode_early_close"),
        ([CHUNKED, chunk(b"one"), b"5\r\nab"], "decode_early_close"),
        ([CHUNKED, chunk(b"one") + b"0"], "decode_early_close"),
        ([CHUNKED, chunk(b"one"), b"0\r\n"], "decode_early_close"),
        ([CHUNKED, chunk(b"one"), b"zz\r\nabc\r\n0\r\n\r\n"], "decode_malformed"),
        ([CHUNKED, chunk(b"one"), b"2\r\nabc\r\n0\r\n\r\n"], "decode_malformed"),
        ([CHUNKED, chunk(b"one"), b"data: plain\n\n"], "decode_malformed"),
        ([CHUNKED, chunk(b"one"), b"0\r\n\r\nHTTP/1.1 200 OK\r\n"], "decode_malformed"),
    ],
)
async def test_a_stream_that_is_cut_or_garbled_never_ends_well(
    run: Any, pieces: list[bytes], error: str
) -> None:
    async with bench(after_the_request(*pieces)) as x:
        received = await x.raw(x.request())
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert chunk(b"one") in received
        assert not received.endswith(b"0\r\n\r\n")
        await x.settled(f'kvbench:router_errors_total{{error="{error}"}}', 1)
        assert await x.metric("kvbench:router_errors_total") == 1


async def test_garbage_for_a_head_is_a_502(run: Any) -> None:
    async with bench(after_the_request(b"SSH-2.0-OpenSSH\r\n")) as x:
        received = await x.raw(x.request({"connection": "close"}))
        assert received.startswith(b"HTTP/1.1 502")
        assert b"decode_malformed" in received


UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


async def test_a_stream_that_ends_with_its_connection_ends_so_for_the_client(run: Any) -> None:
    async with bench(after_the_request(UNTIL_CLOSE, *EVENTS)) as x:
        head, _, body = (await x.raw(x.request())).partition(b"\r\n\r\n")
        assert b"connection: close" in head
        assert b"chunked" not in head
        assert body == b"".join(EVENTS)
        assert await x.metric("kvbench:router_errors_total") == 0


async def test_a_stream_that_ends_with_a_reset_ends_so_for_the_client(run: Any) -> None:
    async def reset(peer: Peer) -> None:
        linger = struct.pack("ii", 1, 0)
        peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    async with bench(after_the_request(UNTIL_CLOSE, *EVENTS, then=reset)) as x:
        assert (await x.raw(x.request())).endswith(b"<reset>")
        await x.settled('kvbench:router_errors_total{error="decode_early_close"}', 1)


async def test_a_client_of_http_1_0_gets_the_stream_without_chunks(run: Any) -> None:
    async with bench(after_the_request(CHUNKED, STREAM, b"0\r\n\r\n", then=Peer.until_gone)) as x:
        assert (await x.raw(x.request(version=b"1.0"))).endswith(b"\r\n\r\n" + b"".join(EVENTS))


async def test_a_cut_stream_is_a_reset_for_a_client_of_http_1_0(run: Any) -> None:
    async with bench(after_the_request(CHUNKED, STREAM)) as x:
        assert (await x.raw(x.request(version=b"1.0"))).endswith(b"<reset>")


async def test_a_client_that_leaves_in_the_stream_takes_d_s_request_with_it(run: Any) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        watching = asyncio.ensure_future(peer.until_gone())
        with contextlib.suppress(OSError):
            while not peer.gone.is_set():
                await peer.send(chunk(EVENTS[0]))
        await watching

    async with bench(endless) as x:
        reader, writer = await asyncio.open_connection(HOST, x.port)
        writer.write(x.request())
        await reader.readuntil(b"data: 0")
        writer.close()
        await writer.wait_closed()
        await x.engine.peers[0].gone.wait()
        await x.settled('kvbench:router_errors_total{error="client_disconnect"}', 1)
        assert await x.metric("kvbench:router_requests_in_flight") == 0


async def test_a_client_that_does_not_read_holds_d_back_and_costs_little_memory(run: Any) -> None:
    size, total = 100_000, 400

    sent = 0

    async def flood(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(CHUNKED)
        for _ in range(total):
            peer.writer.write(chunk(b"x" * size))
            await peer.writer.drain()
            sent += size
        await peer.send(b"0\r\n\r\n")
        await peer.until_gone()

    async with bench(flood) as x:
        reader, writer = await asyncio.open_connection(HOST, x.port, limit=4096)
        before = psutil.Process().memory_info().rss
        writer.write(x.request({"connection": "close"}))
        known = -1
        while known != sent or not sent:  # until D is stuck
            known = sent
            await asyncio.sleep(0.2)
        assert sent < total * size
        assert psutil.Process().memory_info().rss - before < 16e6  # of 40 MB
        await reader.readuntil(b"\r\n\r\n")
        received = 0
        while piece := await reader.read(1 << 20):
            received += piece.count(b"x")
        assert received == total * size
        writer.close()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_descriptors")
async def test_a_thousand_streams_at_once_arrive_whole_and_apart() -> None:
    count, rounds = 1000, 5

    arrived = 0
    all_here = asyncio.Event()

    async def script(peer: Peer) -> None:
        nonlocal arrived
        who = re.search(rb"x-request-id: (\S+)", await peer.request())
        arrived += 1
        if arrived == count:
            all_here.set()
        await all_here.wait()
        peer.writer.write(CHUNKED)
        for turn in range(rounds):
            peer.writer.write(chunk(b"%b %d\n" % (who[1], turn)))
            await asyncio.sleep(0.001)
        peer.writer.write(b"0\r\n\r\n")
        await peer.until_gone()

    async with bench(script) as x:

        async def client(number: int) -> None:
            name = f"client-{number}"
            received = await x.raw(x.request({"x-request-id": name, "connection": "close"}))
            assert re.findall(rb"client-\d+ \d", received) == [
                f"{name} {turn}".encode() for turn in range(rounds)
            ]
            assert received.endswith(b"0\r\n\r\n")

        await asyncio.gather(*(client(number) for number in range(count)))
        assert await x.metric("kvbench:router_streams_total") == count
        assert await x.metric("kvbench:router_errors_total") == 0
        assert await x.metric("kvbench:router_requests_in_flight") == 0


async def test_events_of_64_kb_and_odd_reads_among_usual_ones_arrive_as_they_are(run: Any) -> None:
    usual = [chunk(b"data: %d\n\n" % number) for number in range(40)]
    big = [chunk(bytes([65 + number]) * 65536) for number in range(6)]
    one, two = chunk(b"in pieces"), chunk(b"more of them")
    pieces = [*usual[:20], *big[:3], one[:1], one[1:2], one[2:4], one[4:-1], one[-1:] + two[:2], two[2:-2]]
    pieces += [two[-2:], b"A;x=y\r\n0123456789\r\n", *usual[20:], *big[3:], big[0] + usual[0] + big[1][:30]]
    pieces += [big[1][30:]]

    async with bench(after_the_request(CHUNKED, *pieces, b"0\r\n\r\n", then=Peer.until_gone)) as x:
        received = await x.raw(x.request({"connection": "close"}))
        assert received.partition(b"\r\n\r\n")[2] == b"".join(pieces) + b"0\r\n\r\n"
        assert await x.metric("kvbench:router_stream_bytes_total") == len(b"".join(pieces))
        compiled = await x.metric("kvbench:router_stream_compiled_reads_total")
        assert compiled >= 38 if COMPILED.get() else compiled == 0
        assert await x.metric("kvbench:router_errors_total") == 0


async def test_a_stream_of_odd_reads_only_stays_with_python(run: Any) -> None:
    pieces = [b"3;odd\r\n%03d\r\n" % number for number in range(40)]

    async with bench(after_the_request(CHUNKED, *pieces, b"0\r\n\r\n", then=Peer.until_gone)) as x:
        received = await x.raw(x.request({"connection": "close"}))
        assert received.partition(b"\r\n\r\n")[2] == b"".join(pieces) + b"0\r\n\r\n"
        assert await x.metric("kvbench:router_stream_compiled_reads_total") == 0


async def test_a_reset_of_d_in_mid_stream_cuts_the_client_s_and_the_next_request_is_served(run: Any) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED, *(chunk(event) for event in EVENTS))
        if len(x.engine.peers) == 1:
            linger = struct.pack("ii", 1, 0)
            peer.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            await peer.send(b"0\r\n\r\n")
            await peer.until_gone()

    async with bench(script) as x:
        received = await x.raw(x.request())
        assert chunk(EVENTS[0]) in received
        assert not received.endswith(b"0\r\n\r\n")
        await x.settled('kvbench:router_errors_total{error="decode_early_close"}', 1)
        assert (await x.raw(x.request({"connection": "close"}))).endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_never_gets_its_stream_into_another_s_connection(run: Any) -> None:
    """Descriptors are used again at once: what still comes for the one who left must not go there."""
    rounds = 30

    async def endless(peer: Peer) -> None:
        who = re.search(rb"x-request-id: (\S+)", await peer.request())
        await peer.send(CHUNKED)
        watching = asyncio.ensure_future(peer.until_gone())
        with contextlib.suppress(OSError):
            while not peer.gone.is_set() and not peer.writer.is_closing():
                peer.writer.write(chunk(b"<%b>" % who[1]) * 3)
                await peer.writer.drain()
                await asyncio.sleep(0.001)
        await watching

    async with bench(endless) as x:

        async def client(name: str) -> None:
            reader, writer = await asyncio.open_connection(HOST, x.port)
            writer.write(x.request({"x-request-id": name}))
            received = await reader.readuntil(b"\r\n\r\n")
            for _ in range(4):
                received += await reader.readuntil(b">\r\n")
            assert set(re.findall(rb"<(.*?)>", received)) == {name.encode()}
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        async def clients(number: int) -> None:
            for turn in range(rounds):
                await client(f"{number}-{turn}")

        await asyncio.gather(*(clients(number) for number in range(4)))
        await x.settled('kvbench:router_errors_total{error="client_disconnect"}', 4 * rounds)
        assert await x.metric("kvbench:router_requests_in_flight") == 0


async def test_a_server_may_stream_before_it_has_read_the_whole_request(run: Any) -> None:
    size = 6_000_000  # more than the sockets take

    async def script(peer: Peer) -> None:
        assert b"content-length: %d" % size in (await peer.reader.readuntil(b"\r\n\r\n"))
        await peer.send(CHUNKED, *(chunk(event) for event in EVENTS))
        await peer.reader.readexactly(size)
        await peer.send(*(chunk(event) for event in EVENTS), b"0\r\n\r\n")
        await peer.until_gone()

    async with bench(script) as x:
        request = x.pool.request("POST", "/v1/completions", {"connection": "close"}, b" " * size)
        assert (await x.raw(request)).partition(b"\r\n\r\n")[2] == 2 * STREAM + b"0\r\n\r\n"
        assert bool(await x.metric("kvbench:router_stream_compiled_reads_total")) == COMPILED.get()


async def test_json_bodies_of_d_are_not_touched_by_the_fast_lane(run: Any) -> None:
    answer = json.dumps({"choices": []}).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)

    async with bench(after_the_request(head + answer[:3], answer[3:], then=Peer.until_gone)) as x:
        assert (await x.raw(x.request({"connection": "close"}))).endswith(b"\r\n\r\n" + answer)
        assert await x.metric("kvbench:router_streams_total") == 0
