"""Direct mode against real, partly hostile servers: P and D get what the connector wants."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hostile import (
    DONE,
    GOOD,
    HEAD,
    HOST,
    STREAM,
    TOKEN,
    USAGE,
    Step,
    chunk,
    hostile,
    on_loop,
    plain,
    run_trial,
    spec_for,
)

from kvbench.core.load.dispatch import AroundPrompt, engine_ids_in
from kvbench.core.load.prompts import PromptShape, token_prompts
from kvbench.core.records import RequestRecord
from kvbench.errors import KvbenchError
from kvbench.processes.http1 import ReceivedRequest, Response, serve
from kvbench.processes.loadgen.direct import DirectDispatch
from kvbench.processes.loadgen.sockets.loop import SocketLoop

PARAMS = {
    "remote_engine_id": "p-0", "remote_block_ids": [[1, 2]], "remote_host": "127.0.0.1", "remote_port": 1,
    "do_remote_prefill": True, "do_remote_decode": False,
}  # fmt: skip
ANSWER = {"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}
PREFILLED: list[Step] = [plain("200 OK", json.dumps(ANSWER).encode())]


@asynccontextmanager
async def noting(
    answer: bytes | None, delay_s: float = 0.0
) -> AsyncIterator[tuple[str, list[ReceivedRequest]]]:
    """A server that answers with that JSON, or with a stream of three tokens, and notes what it was asked."""
    requests: list[ReceivedRequest] = []

    async def handler(request: ReceivedRequest, response: Response) -> None:
        requests.append(request)
        await asyncio.sleep(delay_s)
        if answer is not None:
            response.send(200, answer)
            return
        response.start_stream()
        for _ in range(3):
            response.write(TOKEN)
            await asyncio.sleep(0.002)
        response.write(USAGE + DONE)
        response.end()

    server = await serve(handler, HOST, 0)
    try:
        yield f"http://{HOST}:{server.port}", requests
    finally:
        await server.close()


def index_of(request: ReceivedRequest) -> int:
    """A request's place in the plan."""
    return int(request.headers["x-request-id"].rpartition("-")[2])


def direct(connector: str, prefill: list[str], decode: list[str], **more: str) -> dict[str, Any]:
    return {
        "connector": connector,
        "version": "",
        "options": {},
        "prefill": [{"url": url, **more} for url in prefill],
        "decode": [{"url": url, "side_address": "d:2"} for url in decode],
    }


def failing(
    prefill: list[Step], decode: list[Step], connector: str = "tcp", **more: str
) -> list[RequestRecord]:
    """A trial against one P and one D that do such steps."""

    async def main() -> list[RequestRecord]:
        (p, p_url), (d, d_url) = await hostile(prefill), await hostile(decode)
        spec = direct(connector, [p_url], [d_url])
        records, end, progress = await run_trial("http://unused", timeout_s=0.4, direct=spec)
        p.close()
        d.close()
        assert end["reason"] == "complete"
        assert progress[-1]["sent"] == progress[-1]["done"] == len(records) == 4
        return records

    records: list[RequestRecord] = on_loop(main)
    return records


async def test_p_and_d_are_asked_one_after_the_other_and_in_turn() -> None:
    answer = json.dumps(ANSWER).encode()
    async with noting(answer, 0.02) as (p0, at_p0), noting(answer) as (p1, at_p1), noting(None) as (d, at_d):
        spec = direct("tcp", [p0, p1], [d])
        headers = {"authorization": "Bearer x"}
        records, _, _ = await run_trial("http://unused", timeout_s=10.0, direct=spec, headers=headers)
    assert (len(at_p0), len(at_p1), len(at_d)) == (2, 2, 4)
    assert [record.error_detail for record in records] == [""] * 4
    prompts = token_prompts(4, PromptShape(8, 1000), 7).tolist()
    by_index = {int(request.headers["x-request-id"].rpartition("-")[2]): request for request in at_p0 + at_p1}
    assert {index % 2 for index in by_index if by_index[index] in at_p0} == {0}
    for request in at_d:
        index = index_of(request)
        body, before = json.loads(request.body), json.loads(by_index[index].body)
        assert body["prompt"] == before["prompt"] == prompts[index]
        assert (body["max_tokens"], body["stream"]) == (3, True)
        assert body["kv_transfer_params"] == PARAMS
        assert (before["max_tokens"], before["stream"]) == (1, False)
        assert before["kv_transfer_params"]["do_remote_decode"] is True
        assert request.headers["authorization"] == "Bearer x"
    for record in records:
        assert record.router_received_s is None
        times = (record.prefill_sent_s, record.prefill_answered_s, record.decode_sent_s, record.first_token_s)
        assert None not in times
        assert sorted(times) == list(times)
        assert record.sent_s == record.prefill_sent_s
        assert record.decode_first_byte_s <= record.first_token_s
        slow = int(record.request_id.rpartition("-")[2]) % 2 == 0
        assert not slow or record.prefill_answered_s - record.prefill_sent_s >= 0.019


async def test_concurrent_dispatch_asks_both_at_once_after_the_bootstrap() -> None:
    ranks = json.dumps({"1": {"engine_id": "other"}, "0": {"engine_id": "p-rank-0"}}).encode()
    async with noting(ranks) as (boot, _), noting(b"{}", 0.1) as (p, at_p), noting(None) as (d, at_d):
        spec = direct("mooncake", [p], [d], bootstrap_url=boot)
        records, _, _ = await run_trial("http://unused", timeout_s=10.0, direct=spec)
    assert [record.error_detail for record in records] == [""] * 4
    ids = {json.loads(request.body)["kv_transfer_params"]["transfer_id"] for request in at_p}
    assert ids == {record.request_id for record in records}
    # P's rank, and the engine id that D asks for, are those of one and the same in turn.
    turns = {
        json.loads(request.body)["kv_transfer_params"]["transfer_id"]: request.headers["x-data-parallel-rank"]
        for request in at_p
    }
    assert sorted(turns.values()) == ["0", "0", "1", "1"]
    for request in at_d:
        params = json.loads(request.body)["kv_transfer_params"]
        assert params["remote_engine_id"] == {"0": "p-rank-0", "1": "other"}[turns[params["transfer_id"]]]
        assert "x-data-parallel-rank" not in request.headers
    for record in records:
        assert record.decode_sent_s < record.prefill_answered_s
        assert record.prefill_answered_s - record.prefill_sent_s >= 0.099


async def test_addresses_travel_in_the_request_id() -> None:
    async with noting(b"{}") as (p, at_p), noting(None) as (d, at_d):
        spec = direct("nccl", [p], [d], side_address="p:1")
        records, _, _ = await run_trial("http://unused", timeout_s=10.0, direct=spec)
    assert all(record.ok for record in records)
    names = sorted(request.headers["x-request-id"] for request in at_p)
    assert names == sorted(request.headers["x-request-id"] for request in at_d)
    assert all(name.startswith("___prefill_addr_p:1___decode_addr_d:2_kvb") for name in names)


async def test_one_server_needs_no_prefill() -> None:
    async with noting(None) as (d, at_d):
        records, _, _ = await run_trial("http://unused", timeout_s=10.0, direct=direct("aggregated", [], [d]))
    assert len(at_d) == len(records) == 4
    assert all(record.ok and record.prefill_sent_s is None for record in records)


@pytest.mark.parametrize(
    ("name", "steps", "error", "status", "detail"),
    [
        ("an error", [plain("500 No", b'{"detail":"boom"}')], "http_error", 500, "boom"),
        ("a redirect", [plain("302 Found", b"", "location: /x\r\n")], "redirect", 302, "/x"),
        ("an error with 200", [plain("200 OK", b'{"error":"full"}')], "error_body", 200, "full"),
        (
            "aborted",
            [
                plain(
                    "200 OK",
                    b'{"choices":[{"text":"","finish_reason":"abort"}],"kv_transfer_params":{"a":1}}',
                )
            ],
            "aborted",
            200,
            "abort",
        ),
        ("no parameters", [plain("200 OK", b'{"choices":[]}')], "bad_stream", 200, "kv_transfer_params"),
        ("no object", [plain("200 OK", b"[]")], "bad_stream", 200, "not a JSON object"),
        ("no JSON", [plain("200 OK", b"{")], "bad_stream", 200, "not a JSON object"),
        ("no HTTP", [b"nothing\r\n\r\n", "close"], "bad_stream", 0, "HTTP/1.1"),
        ("closes", ["close"], "early_close", 0, "closed"),
        ("closes in the answer", [plain("200 OK", b"{}")[:-1], "close"], "early_close", 200, "closed"),
        ("resets", ["reset"], "reset", 0, ""),
        ("never answers", ["hang"], "no_answer", 0, "0.4 s"),
        ("never ends", [plain("200 OK", b"{}")[:-1], "hang"], "timeout", 200, "0.4 s"),
    ],
)
@pytest.mark.parametrize("connector", ["tcp", "nixl"])
def test_a_failure_of_p_is_never_an_answer_of_d_alone(
    connector: str, name: str, steps: list[Step], error: str, status: int, detail: str
) -> None:
    for record in failing(steps, GOOD, connector):
        assert (record.error, record.status) == (error, status), record
        assert record.error_detail.startswith("prefill http://")
        assert detail in record.error_detail
        assert record.decode_sent_s is record.first_token_s is None
        assert record.prefill_sent_s is not None


@pytest.mark.parametrize(
    ("steps", "error", "status"),
    [
        ([plain("500 No", b"boom")], "http_error", 500),
        ([HEAD, chunk(TOKEN), 0.02, "reset"], "reset", 200),
        ([HEAD, chunk(TOKEN + b"data: {"), "close"], "half_event", 200),
        (["hang"], "no_answer", 0),
    ],
)
def test_a_failure_of_d_is_told_as_without_p(steps: list[Step], error: str, status: int) -> None:
    for record in failing(PREFILLED, steps):
        assert (record.error, record.status) == (error, status), record
        assert record.prefill_answered_s is not None
        assert record.decode_sent_s is not None


async def test_with_concurrent_dispatch_d_is_dropped_when_p_fails() -> None:
    async with noting(b'{"0":{"engine_id":"e"}}') as (boot, _):
        p, p_url = await hostile([0.05, plain("500 No", b"boom")])
        d, d_url = await hostile([HEAD, chunk(STREAM[: len(TOKEN)]), "hang"])
        spec = direct("mooncake", [p_url], [d_url], bootstrap_url=boot)
        records, end, _ = await run_trial("http://unused", timeout_s=15.0, direct=spec)
        p.close()
        d.close()
        assert end["duration_s"] < 10
    for record in records:
        assert (record.error, record.status) == ("http_error", 500)
        assert record.error_detail.startswith("prefill ")


async def test_with_concurrent_dispatch_an_early_answer_of_d_waits_for_p() -> None:
    async with noting(b'{"0":{"engine_id":"e"}}') as (boot, _):
        p, p_url = await hostile([0.15, "close"])
        d, d_url = await hostile(GOOD)
        spec = direct("mooncake", [p_url], [d_url], bootstrap_url=boot)
        records, _, _ = await run_trial("http://unused", timeout_s=15.0, direct=spec)
        p.close()
        d.close()
    for record in records:
        assert record.error == "early_close"
        assert record.error_detail.startswith("prefill ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"connector": "nonsense"}, "nonsense"),
        ({"decode": []}, "at least one decode server"),
        ({"prefill": []}, "at least one prefill server"),
        ({"decode": [{"link": 1}]}, "unknown key 'link'"),
        ({"options": {"nope": 1}}, "direct.options"),
        ({"connector": "mooncake"}, "needs a bootstrap_url"),
        ({"version": "0.1"}, "NixlConnector"),
    ],
)
def test_a_wrong_direct_spec_is_refused(changes: dict[str, Any], words: str) -> None:

    loop = SocketLoop()
    try:
        with pytest.raises(KvbenchError, match=words):
            DirectDispatch(
                spec_for("http://x", direct={**direct("nixl", ["http://p"], ["http://d"]), **changes}), loop
            )
    finally:
        loop.close()


def test_a_prompt_is_put_in_its_place_unchanged() -> None:
    around = AroundPrompt({"model": "m", "max_tokens": 3})
    before, after = around.encode({**around.fields, "kv_transfer_params": {"a": [1]}})
    assert json.loads(before + b"[1,2]" + after) == {
        "model": "m", "max_tokens": 3, "prompt": [1, 2], "kv_transfer_params": {"a": [1]},
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"a":{}}', b'{"0":{}}', b'{"0":1}', b"\xff"])
def test_a_bootstrap_answer_may_be_anything(body: bytes) -> None:
    assert engine_ids_in(body) == ()
