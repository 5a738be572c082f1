"""The router between a real client and two fake backends: dispatch, honesty, cancellation, bytes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from emulated import free_port
from hypothesis import given
from hypothesis import strategies as st
from loops import close_at_end

from kvbench.core.load.dispatch import engine_ids_in
from kvbench.errors import InputError
from kvbench.processes.http1 import Pool, ReceivedRequest, Reply, Response, Server, fetch, serve
from kvbench.processes.router.app import Router
from kvbench.processes.router.dispatch import ClientBody
from kvbench.processes.router.spec import RouterSpec

HOST = "127.0.0.1"
PARAMS = {
    "do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "engine",
    "remote_host": HOST, "remote_port": 1, "tp_size": 1, "a_field_of_the_future": {"x": None},
}  # fmt: skip
STREAM = [
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b"data: half",
    b" an event\r\n\r\n\xff\x00",
    b"data: [DONE]\n\n",
]


class Backend:
    """A fake engine that notes what it is asked; ``answer`` is replaceable."""

    def __init__(self, answer: Callable[[ReceivedRequest, Response], Awaitable[None] | None]) -> None:
        self.answer = answer
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.arrived = asyncio.Event()
        self.left = asyncio.Event()
        self.healthy = True
        self.bootstrapped = True
        self.server: Server | None = None

    async def start(self) -> Backend:
        self.server = await serve(self._handle, HOST, 0)
        return self

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.port}"

    def _handle(self, request: ReceivedRequest, response: Response) -> Awaitable[None] | None:
        if request.path == "/health":
            response.send(200 if self.healthy else 503)
            return None
        if request.path == "/query":
            ranks = {"1": {"engine_id": "second"}, "0": {"engine_id": f"id-of-{self.url}", "worker_addr": {}}}
            response.send(200, json.dumps(ranks).encode() if self.bootstrapped else b"{}")
            return None
        if request.path == "/v1/models":
            response.send(200, b'{"data":[{"id":"tiny"}]}')
            return None
        body = json.loads(request.body) if request.body else None
        self.requests.append((request.path, dict(request.headers), body))
        response.on_disconnect(self.left.set)
        self.arrived.set()
        return self.answer(request, response)

    @property
    def body(self) -> Any:
        return self.requests[-1][2]


def as_json(answer: Any, status: int = 200) -> Callable[[ReceivedRequest, Response], None]:
    return lambda _, response: response.send(status, json.dumps(answer).encode())


def prefilled(request: ReceivedRequest, response: Response) -> None:
    response.send(200, json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}).encode())


async def streamed(request: ReceivedRequest, response: Response) -> None:
    response.start_stream("text/event-stream; charset=utf-8")
    for piece in STREAM:
        response.write(piece)
        await asyncio.sleep(0.005)
    response.end()


def silent(request: ReceivedRequest, response: Response) -> None:
    """Never answers."""


class Lab:
    """Backends, a router in front of them, and a client."""

    def __init__(self, router: Router, server: Server, p: list[Backend], d: list[Backend]) -> None:
        self.router = router
        self.server = server
        self.prefills = p
        self.decodes = d
        self.pool = Pool(f"http://{HOST}:{server.port}")

    @property
    def p(self) -> Backend:
        return self.prefills[0]

    @property
    def d(self) -> Backend:
        return self.decodes[0]

    async def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Reply:
        fields = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "stream": True, **body}
        data = self.pool.request("POST", "/v1/completions", headers, json.dumps(fields).encode())
        return await fetch(self.pool, data)

    async def get(self, path: str, method: str = "GET") -> Reply:
        return await fetch(self.pool, self.pool.request(method, path))

    async def metric(self, name: str) -> float:
        page = (await self.get("/metrics")).body.decode()
        return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))

    async def close(self) -> None:
        await self.pool.close()
        await self.server.close()
        await self.router.close()
        for backend in (*self.prefills, *self.decodes):
            await backend.server.close()


Answer = Callable[[ReceivedRequest, Response], Awaitable[None] | None]


async def lab(
    connector: str,
    p: Answer | None = prefilled,
    d: Answer = streamed,
    n: tuple[int, int] = (1, 1),
    **spec: Any,
) -> Lab:
    prefills = [await Backend(p).start() for _ in range(n[0])] if p is not None else []
    decodes = [await Backend(d).start() for _ in range(n[1])]
    router = Router(
        RouterSpec(
            port=0,
            connector=connector,
            prefill=[
                {"url": b.url, "bootstrap_url": b.url if connector == "mooncake" else ""} for b in prefills
            ],
            decode=[{"url": b.url} for b in decodes],
            **spec,
        )
    )
    await router.bootstrap()
    made = Lab(router, await serve(router.handle, HOST, 0), prefills, decodes)
    close_at_end(made.close)
    return made


def on_loop(main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        result = await asyncio.wait_for(main(), 20)
        await asyncio.sleep(0.01)
        return result

    return uvloop.run(bounded())


async def test_sequential_passes_p_s_params_to_d_untouched_and_streams_bytes_as_they_are() -> None:
    x = await lab("nixl")
    reply = await x.complete({"X-Request-Id": "mine", "Authorization": "Bearer t"}, stream_options={"a": 1})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert (reply.headers["x-request-id"], reply.body) == ("mine", b"".join(STREAM))
    assert x.p.body["stream"] is False
    assert x.p.body["max_tokens"] == x.p.body["min_tokens"] == 1
    assert "stream_options" not in x.p.body
    assert x.p.body["kv_transfer_params"]["do_remote_decode"] is True
    assert (x.d.body["kv_transfer_params"], x.d.body["stream_options"]) == (PARAMS, {"a": 1})
    assert x.d.body["max_tokens"] == 4
    assert x.p.body["prompt"] == x.d.body["prompt"] == [1, 2, 3]
    for backend in (x.p, x.d):
        path, headers, _ = backend.requests[-1]
        assert path == "/v1/completions"
        assert (headers["x-request-id"], headers["authorization"]) == ("mine", "Bearer t")
    assert await x.metric("kvbench:router_requests_total") == 1
    assert await x.metric("kvbench:router_prefill_seconds_count") == 1
    assert await x.metric("kvbench:router_handoff_seconds_count") == 1
    assert await x.metric("kvbench:router_decode_first_byte_seconds_count") == 1
    assert await x.metric("kvbench:router_errors_total") == 0


async def test_concurrent_sends_to_both_before_either_has_answered() -> None:
    order: list[str] = []
    both = asyncio.Event()

    def meeting(name: str, then: Answer) -> Answer:
        async def answer(request: ReceivedRequest, response: Response) -> None:
            order.append(name)
            if len(order) == 2:
                both.set()
            await both.wait()  # a router that waits for one of them would wait for ever
            result = then(request, response)
            if result is not None:
                await result

        return answer

    x = await lab("mooncake", meeting("p", as_json({"choices": []})), meeting("d", streamed))
    reply = await x.complete()
    assert reply.body == b"".join(STREAM)
    assert sorted(order) == ["d", "p"]
    ids = {backend.requests[-1][1]["x-request-id"] for backend in (x.p, x.d)}
    assert ids == {reply.headers["x-request-id"]}
    params = x.d.body["kv_transfer_params"]
    assert params["transfer_id"] == x.p.body["kv_transfer_params"]["transfer_id"]
    assert params["remote_bootstrap_addr"] == x.p.url
    assert params["remote_engine_id"] == f"id-of-{x.p.url}"
    # P has two data-parallel ranks: the next request is for the other one, by header and id alike.
    for rank, engine_id in ((1, "second"), (0, f"id-of-{x.p.url}")):
        order.clear()
        await x.complete()
        assert x.p.requests[-1][1]["x-data-parallel-rank"] == str(rank)
        assert "x-data-parallel-rank" not in x.d.requests[-1][1]
        assert x.d.body["kv_transfer_params"]["remote_engine_id"] == engine_id


async def test_an_answer_that_is_no_stream_keeps_its_body_and_type() -> None:
    x = await lab("nixl", d=as_json({"choices": [{"text": "hi"}]}))
    reply = await x.complete(stream=False)
    assert reply.json() == {"choices": [{"text": "hi"}]}
    assert reply.headers["content-type"] == "application/json"


TIMES = ("router-received", "prefill-sent", "prefill-answered", "decode-sent", "decode-first-byte")


def timings(reply: Reply) -> dict[str, float]:
    """The router's times in an answer's headers."""
    prefix = "x-kvbench-"
    found = {name: value for name, value in reply.headers.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): float(value) for name, value in found.items()}


@pytest.mark.parametrize("stream", [True, False])
async def test_who_asks_for_it_is_told_when_what_happened(stream: bool) -> None:
    async def slow(request: ReceivedRequest, response: Response) -> None:
        response.start_stream("text/event-stream; charset=utf-8")  # the head long before any token
        await asyncio.sleep(0.03)
        response.write(STREAM[0])
        response.end()

    x = await lab("nixl", d=slow if stream else as_json({"choices": []}))
    before = time.monotonic()
    reply = await x.complete({"x-kvbench-timing": "1"}, stream=stream)
    after = time.monotonic()
    times = timings(reply)
    assert tuple(times) == TIMES
    assert sorted(times.values()) == list(times.values())
    assert before - 1e-3 <= times["router-received"] <= times["decode-first-byte"] <= after + 1e-3
    if stream:
        assert reply.body == STREAM[0]
        assert times["decode-first-byte"] - times["decode-sent"] >= 0.029
    assert timings(await x.complete(stream=stream)) == {}


async def test_times_of_an_aggregated_answer_and_of_one_without_a_body() -> None:
    def empty(request: ReceivedRequest, response: Response) -> None:
        response.start_stream()
        response.end()

    x = await lab("aggregated", p=None)
    assert set(timings(await x.complete({"x-kvbench-timing": "1"}))) == {TIMES[0], *TIMES[3:]}
    y = await lab("aggregated", p=None, d=empty)
    reply = await y.complete({"x-kvbench-timing": "1"})
    assert (reply.status, reply.body) == (200, b"")
    assert set(timings(reply)) == {TIMES[0], TIMES[3]}


async def test_round_robin_over_p_and_over_d_each_for_itself() -> None:
    x = await lab("nixl", n=(3, 2))
    for _ in range(12):
        await x.complete()
    assert [len(backend.requests) for backend in x.prefills] == [4, 4, 4]
    assert [len(backend.requests) for backend in x.decodes] == [6, 6]


async def test_aggregated_goes_to_the_decode_servers_as_it_came() -> None:
    x = await lab("aggregated", p=None)
    assert (await x.complete()).body == b"".join(STREAM)
    assert "kv_transfer_params" not in x.d.body


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_an_error_of_p_is_passed_on_and_never_becomes_an_answer(connector: str) -> None:
    d = silent if connector == "mooncake" else streamed
    x = await lab(connector, as_json({"error": {"message": "no memory"}}, 507), d)
    reply = await x.complete()
    assert (reply.status, reply.json()) == (507, {"error": {"message": "no memory"}})
    if connector == "mooncake":
        await x.d.left.wait()  # D's request is cancelled
    else:
        assert x.d.requests == []
    assert await x.metric('kvbench:router_errors_total{error="prefill_http"}') == 1


async def test_p_failing_after_d_has_begun_breaks_the_stream() -> None:
    begun = asyncio.Event()

    async def late_failure(request: ReceivedRequest, response: Response) -> None:
        await begun.wait()
        response.send(500, b"{}")

    async def stream_and_end(request: ReceivedRequest, response: Response) -> None:
        await streamed(request, response)
        begun.set()

    x = await lab("mooncake", late_failure, stream_and_end)
    with pytest.raises(ConnectionError):
        await x.complete()
    assert await x.metric('kvbench:router_errors_total{error="prefill_http"}') == 1


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (as_json({"choices": []}), "kv_transfer_params"),
        (as_json({"kv_transfer_params": {**PARAMS, "remote_port": None}}), "remote_port"),
        (as_json({"choices": [{"finish_reason": "abort"}]}), "aborted the answer"),
        (as_json({"error": {"message": "out of blocks"}}), "out of blocks"),
        (as_json({"object": "error", "message": "too long", "code": 400}), "too long"),
        (as_json([1]), "did not answer a JSON object"),
        (lambda _, response: response.send(200, b"<html>", "text/html"), "did not answer a JSON object"),
        (lambda _, response: response.abort(), "no complete answer"),
    ],
)
async def test_an_unusable_answer_of_p_is_a_502_that_says_why(answer: Answer, words: str) -> None:
    x = await lab("nixl", answer)
    reply = await x.complete()
    assert reply.status == 502
    message = reply.json()["error"]["message"]
    assert words in message
    assert x.p.url in message
    assert x.d.requests == []
    assert len(x.p.requests) == 1  # not tried again


@pytest.mark.parametrize("connector", ["nixl", "mooncake", "aggregated"])
async def test_an_error_of_d_is_passed_on(connector: str) -> None:
    p = None if connector == "aggregated" else (silent if connector == "mooncake" else prefilled)
    x = await lab(connector, p, as_json({"error": {"message": "too long"}}, 400))
    reply = await x.complete()
    assert (reply.status, reply.json()) == (400, {"error": {"message": "too long"}})
    if connector == "mooncake":
        await x.p.left.wait()


async def test_d_closing_in_its_stream_breaks_the_client_s() -> None:
    def half(request: ReceivedRequest, response: Response) -> None:
        response.start_stream()
        response.write(b"data: 1\n\n")
        asyncio.get_running_loop().call_later(0.05, response.abort)

    x = await lab("nixl", d=half)
    with pytest.raises(ConnectionError):
        await x.complete()
    assert await x.metric('kvbench:router_errors_total{error="decode_early_close"}') == 1


@pytest.mark.parametrize("which", ["prefill", "decode"])
async def test_a_backend_that_is_not_there_is_a_502(which: str) -> None:
    x = await lab("nixl")
    gone = x.p if which == "prefill" else x.d
    url = gone.url
    await gone.server.close()
    reply = await x.complete()
    assert reply.status == 502
    assert f"{which} {url}" in reply.json()["error"]["message"]


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_client_that_leaves_cancels_the_requests_on_p_and_d(connector: str) -> None:
    x = await lab(connector, silent, silent)
    request = asyncio.ensure_future(x.complete())
    waiting = [x.p] if connector == "nixl" else [x.p, x.d]
    for backend in waiting:
        await backend.arrived.wait()
    request.cancel()
    for backend in waiting:
        await backend.left.wait()
    assert await x.metric('kvbench:router_errors_total{error="client_disconnect"}') == 1
    assert await x.metric("kvbench:router_requests_in_flight") == 0


async def test_a_client_that_leaves_the_stream_cancels_d() -> None:
    def endless(request: ReceivedRequest, response: Response) -> None:
        response.start_stream()
        response.write(b"data: 1\n\n")

    x = await lab("nixl", d=endless)
    request = asyncio.ensure_future(x.complete())
    await x.d.arrived.wait()
    await asyncio.sleep(0.02)
    request.cancel()
    await x.d.left.wait()


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
async def test_a_deadline_ends_with_504_and_cancels(connector: str) -> None:
    x = await lab(connector, silent, silent, request_timeout_s=0.1)
    reply = await x.complete()
    assert (reply.status, reply.json()["error"]["type"]) == (504, "timeout")
    await x.p.left.wait()


async def test_a_slow_client_holds_d_back_and_loses_nothing() -> None:
    size = 3_000_000

    async def flood(request: ReceivedRequest, response: Response) -> None:
        free = asyncio.Event()
        free.set()
        response.on_congestion(free.clear, free.set)
        response.start_stream()
        for _ in range(size // 10_000):
            await free.wait()
            response.write(b"x" * 10_000)
            await asyncio.sleep(0)
        response.end()

    x = await lab("aggregated", None, flood)
    reader, writer = await asyncio.open_connection(HOST, x.server.port, limit=4096)
    writer.write(x.pool.request("POST", "/v1/completions", {"connection": "close"}, b"{}"))
    received = b""
    while piece := await reader.read(50_000):
        received += piece
        await asyncio.sleep(0.0005)
    assert received.count(b"x") >= size
    assert received.endswith(b"0\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt":[1,2'])
async def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    x = await lab("nixl")
    assert (await fetch(x.pool, x.pool.request("POST", "/v1/completions", None, body))).status == 400
    assert x.p.requests == []


async def test_a_body_that_nobody_changes_is_d_s_to_judge() -> None:
    bodies = [b"{", b"[]", b'{"prompt":[1,2']

    seen: list[bytes] = []

    def judge(request: ReceivedRequest, response: Response) -> None:
        seen.append(request.body)
        response.send(422, b"not for me", "text/plain")

    d = await serve(judge, HOST, 0)
    spec = RouterSpec(port=0, connector="aggregated", decode=[{"url": f"http://{HOST}:{d.port}"}])
    router = Router(spec)
    await router.bootstrap()
    x = Lab(router, await serve(router.handle, HOST, 0), [], [])
    for body in bodies:
        reply = await fetch(x.pool, x.pool.request("POST", "/v1/completions", None, body))
        assert (reply.status, reply.body) == (422, b"not for me")
    assert seen == bodies
    assert await x.metric('kvbench:router_errors_total{error="decode_http"}') == 3
    await x.close()
    await d.close()


async def test_requests_are_late_in_the_order_of_their_arrival_and_no_other_is() -> None:
    ended: list[str] = []

    async def some(request: ReceivedRequest, response: Response) -> None:
        if request.headers["x-request-id"].startswith("slow"):
            return
        await asyncio.sleep(1.0)  # past the first one's time, within its own
        response.send(200, b"{}")

    x = await lab("aggregated", None, some, request_timeout_s=1.2)

    async def ask(name: str) -> None:
        reply = await x.complete({"x-request-id": name})
        ended.append(f"{name} {reply.status}")

    asking = []
    for name in ("slow-1", "fine", "slow-2"):
        asking.append(asyncio.ensure_future(ask(name)))
        await asyncio.sleep(0.4)
    await asyncio.gather(*asking)
    assert ended == ["slow-1 504", "fine 200", "slow-2 504"]
    assert await x.metric('kvbench:router_errors_total{error="timeout"}') == 2
    assert await x.metric("kvbench:router_requests_in_flight") == 0


async def test_the_end_of_d_s_stream_waits_for_p_but_its_tokens_do_not() -> None:
    """What comes in one read with the last chunk goes on at once."""
    data = b"data: 1\n\n"
    framed = b"%x\r\n%b\r\n" % (len(data), data)

    release = asyncio.Event()

    async def late(request: ReceivedRequest, response: Response) -> None:
        await release.wait()
        response.send(200, b"{}")

    async def at_once(request: ReceivedRequest, response: Response) -> None:
        response.start_stream(first=framed)
        for _ in range(3):
            await asyncio.sleep(0.01)
            response.pass_on(framed)
        await asyncio.sleep(0.01)
        response.end(framed)

    x = await lab("mooncake", late, at_once)
    reader, writer = await asyncio.open_connection(HOST, x.server.port)
    writer.write(x.pool.request("POST", "/v1/completions", None, b"{}"))
    await reader.readuntil(b"\r\n\r\n")
    assert await reader.readexactly(5 * len(framed)) == 5 * framed
    release.set()
    assert await reader.readexactly(5) == b"0\r\n\r\n"
    assert await x.metric("kvbench:router_errors_total") == 0
    writer.close()


async def test_a_client_that_leaves_while_a_backend_is_being_reached_is_counted_and_forgotten() -> None:
    with socket.socket() as full:  # never accepts; its queue is full after some connections
        full.bind((HOST, 0))
        full.listen(0)
        full.setblocking(False)
        url = f"http://{HOST}:{full.getsockname()[1]}"
        others = []
        for _ in range(4):
            other = socket.socket()
            other.setblocking(False)
            other.connect_ex(full.getsockname())
            others.append(other)
        router = Router(RouterSpec(port=0, connector="aggregated", decode=[{"url": url}]))
        await router.bootstrap()
        x = Lab(router, await serve(router.handle, HOST, 0), [], [])
        asking = asyncio.ensure_future(x.complete())
        while not await x.metric("kvbench:router_requests_in_flight"):
            await asyncio.sleep(0.01)
        asking.cancel()
        while not await x.metric('kvbench:router_errors_total{error="client_disconnect"}'):
            await asyncio.sleep(0.01)
        assert await x.metric("kvbench:router_requests_in_flight") == 0
        for other in others:
            other.close()
        await x.close()


async def test_health_models_reset_and_what_is_not_there() -> None:
    x = await lab("nixl", as_json({}), as_json({}))
    assert (await x.get("/health")).status == 200
    assert (await x.get("/v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await x.get("/reset_prefix_cache", "POST")).status == 200
    assert [b.requests[-1][0] for b in (x.p, x.d)] == ["/reset_prefix_cache"] * 2
    assert (await x.get("/nothing")).status == 404
    x.d.healthy = False
    reply = await x.get("/health")
    assert reply.status == 503
    assert x.d.url in reply.body.decode()
    assert x.p.url not in reply.body.decode()
    x.p.answer = as_json({}, 500)
    reply = await x.get("/reset_prefix_cache", "POST")
    assert reply.status == 502
    assert x.p.url in reply.body.decode()


async def test_requests_before_the_engine_ids_are_known_are_refused() -> None:
    p, d = await Backend(prefilled).start(), await Backend(streamed).start()
    p.bootstrapped = False
    spec = RouterSpec(
        port=0,
        connector="mooncake",
        prefill=[{"url": p.url, "bootstrap_url": p.url}],
        decode=[{"url": d.url}],
    )
    router = Router(spec)
    x = Lab(router, await serve(router.handle, HOST, 0), [p], [d])
    asking = asyncio.ensure_future(router.bootstrap())
    await asyncio.sleep(0.05)
    assert (await x.complete()).status == 503
    assert "engine ids" in (await x.get("/health")).body.decode()
    p.bootstrapped = True
    await asking
    assert (await x.get("/health")).status == 200
    await x.close()


@pytest.mark.parametrize(
    ("body", "engine_ids"),
    [
        (b'{"0":{"engine_id":"a"}}', ("a",)),
        (b'{"1":{"engine_id":"b"},"0":{"engine_id":"a"}}', ("a", "b")),
        (b'{"1":{"engine_id":"b"}}', ()),
        (b"{}", ()),
        (b"[]", ()),
        (b"no", ()),
        (b'{"0":{}}', ()),
        (b'{"0":null}', ()),
    ],
)
def test_the_engine_ids_in_a_bootstrap_answer(body: bytes, engine_ids: tuple[str, ...]) -> None:
    assert engine_ids_in(body) == engine_ids
    assert engine_ids_in(body, least=3) == ()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just('"prompt":[1,2]'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.just("prompt"), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(st.text() | st.just("extra"), values, max_size=4),
    st.lists(st.integers(0, 200_000), max_size=40) | st.text() | st.lists(st.text(), max_size=3) | values,
)
def test_cutting_the_prompt_out_changes_nothing(other: dict[str, Any], prompt: Any) -> None:
    fields = {**other, "prompt": prompt}
    body = ClientBody(json.dumps(fields).encode())
    assert json.loads(body.encode({**body.fields, "added": 1})) == {**fields, "added": 1}


def test_a_long_prompt_of_token_ids_is_not_decoded() -> None:
    raw = json.dumps({"model": "m", "prompt": list(range(5000))}).encode()
    body = ClientBody(raw)
    assert isinstance(body.fields["prompt"], str)
    assert json.loads(body.encode(body.fields)) == json.loads(raw)
    with pytest.raises(InputError):
        ClientBody(b'{"prompt": [1, 2}')


# The process
def start(folder: Path, spec: dict[str, Any]) -> subprocess.Popen[str]:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", "kvbench.processes.router", str(path)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


async def test_a_process_serves_until_sigterm(tmp_path: Path) -> None:
    p, d = await Backend(prefilled).start(), await Backend(streamed).start()
    port = free_port()
    spec = {"port": port, "connector": "tcp", "prefill": [{"url": p.url}], "decode": [{"url": d.url}]}
    process = start(tmp_path, spec)
    pool = Pool(f"http://{HOST}:{port}")
    for _ in range(200):
        try:
            reply = await fetch(pool, pool.request("GET", "/health"))
            break
        except OSError:
            await asyncio.sleep(0.05)
    assert reply.status == 200
    assert (await fetch(pool, pool.request("POST", "/v1/completions", None, b"{}"))).status == 200
    process.send_signal(signal.SIGTERM)
    code = await asyncio.to_thread(process.wait, 5)
    assert code == 0, process.stderr.read() if process.stderr else ""
    process.stderr.close()
    await pool.close()
    for backend in (p, d):
        await backend.server.close()
