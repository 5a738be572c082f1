"""The router with older engines and with SGLang: what P and D really get over HTTP."""

import asyncio
import json
from typing import Any

import pytest

from kvbench import connectors
from kvbench.connectors.base import PrefillPeer
from kvbench.errors import InputError
from kvbench.processes.http1 import Pool, ReceivedRequest, Reply, Response, Server, fetch, serve
from kvbench.processes.router.app import Router
from kvbench.processes.router.spec import RouterSpec

HOST = "127.0.0.1"


class Engine:
    """Notes headers and bodies; answers with ``kv_transfer_params`` if it has some."""

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        self.params = params
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.server: Server | None = None

    async def start(self) -> str:
        self.server = await serve(self.handle, HOST, 0)
        return f"http://{HOST}:{self.server.port}"

    def handle(self, request: ReceivedRequest, response: Response) -> None:
        self.seen.append((request.headers["x-request-id"], json.loads(request.body)))
        response.send(200, json.dumps({"choices": [], "kv_transfer_params": self.params}).encode())


async def one_request(p: Engine, d: Engine, known: dict[str, Any] | None = None, **spec: Any) -> Reply:
    """``known``: what the router is told of P besides."""
    prefill, decode = await p.start(), await d.start()
    connector = connectors.get(spec["connector"]).profile(spec.get("version", ""))
    bootstrap = prefill if connector.needs_bootstrap else ""
    router = Router(
        RouterSpec(
            port=0,
            prefill=[
                {"url": prefill, "side_address": "10.0.0.1:8998", "bootstrap_url": bootstrap, **(known or {})}
            ],
            decode=[{"url": decode, "side_address": "10.0.0.2:22001"}],
            **spec,
        )
    )
    await router.bootstrap()
    server = await serve(router.handle, HOST, 0)
    pool = Pool(f"http://{HOST}:{server.port}")
    body = json.dumps({"model": "m", "prompt": [1, 2], "max_tokens": 4}).encode()
    try:
        return await fetch(pool, pool.request("POST", "/v1/completions", {"X-Request-Id": "mine"}, body))
    finally:
        await pool.close()
        await server.close()
        await router.close()
        for engine in (p, d):
            await engine.server.close()


def ask(p: Engine, d: Engine, **spec: Any) -> Reply:
    return asyncio.run(asyncio.wait_for(one_request(p, d, **spec), 20))


def test_mooncake_0_13_gets_p_s_side_channel_and_the_same_id() -> None:
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 8998}
    p, d = Engine(params), Engine()
    assert ask(p, d, connector="mooncake", version="0.13.0").status == 200
    assert p.seen[0][0] == d.seen[0][0] == "mine"
    assert p.seen[0][1]["max_tokens"] == 1
    assert d.seen[0][1]["kv_transfer_params"] == params


def test_mooncake_0_13_without_an_answer_of_p_is_an_error_and_d_is_not_asked() -> None:
    p, d = Engine(None), Engine()
    reply = ask(p, d, connector="mooncake", version="0.13.0")
    assert reply.status == 502
    assert b"kv_transfer_params" in reply.body
    assert not d.seen


def test_nccl_has_both_addresses_in_the_id_of_both_and_the_client_its_own() -> None:
    p, d = Engine(), Engine()
    reply = ask(p, d, connector="nccl", version="0.13.0")
    wanted = "___prefill_addr_10.0.0.1:8998___decode_addr_10.0.0.2:22001_mine"
    assert [p.seen[0][0], d.seen[0][0]] == [wanted, wanted]
    assert reply.headers["x-request-id"] == "mine"
    assert "kv_transfer_params" not in d.seen[0][1]


def test_v0_is_plain() -> None:
    p, d = Engine(), Engine()
    ask(p, d, connector="mooncake", version="0.8.5")
    assert p.seen[0][1]["max_tokens"] == 1
    assert d.seen[0][1] == {"model": "m", "prompt": [1, 2], "max_tokens": 4}


def test_sglang_meets_in_a_room() -> None:
    p, d = Engine(), Engine()
    ask(p, d, connector="mooncake", version="sglang")
    room = {key: value for key, value in p.seen[0][1].items() if key.startswith("bootstrap_")}
    assert room["bootstrap_port"] == 8998
    assert room.items() <= d.seen[0][1].items()


def test_options_choose_a_handshake_where_the_connector_has_several() -> None:
    params = {"anything": 1}
    p, d = Engine(params), Engine()
    ask(p, d, connector="custom", version="0.32.0", options={"handshake": "answer"})
    assert d.seen[0][1]["kv_transfer_params"] == params
    p, d = Engine(params), Engine()
    ask(p, d, connector="custom", version="0.32.0")
    assert "kv_transfer_params" not in d.seen[0][1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"connector": "nccl", "version": "0.32.0"}, "has no P2pNcclConnector"),
        ({"connector": "nixl", "version": "latest"}, "is not a version"),
        ({"connector": "nixl", "options": {"threads": 1}}, "the spec's options"),
    ],
)
def test_what_a_router_cannot_speak(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Router(RouterSpec(port=0, decode=[{"url": "http://127.0.0.1:1"}], **spec))


PARAMS = {
    "do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "engine",
    "remote_request_id": "theirs", "remote_host": HOST, "remote_port": 1, "tp_size": 1,
}  # fmt: skip
MODES = {
    "aggregated": "none", "custom": "sequential", "decode_bench": "none", "example": "sequential",
    "lmcache": "sequential", "mooncake": "concurrent", "mooncake_store": "sequential",
    "multi": "sequential", "nccl": "sequential", "nixl": "sequential", "nixl_push": "sequential",
    "offloading": "none", "tcp": "sequential",
}  # fmt: skip
"""How each connector's newest profile is dispatched, as vLLM's own proxies do it."""


class Answering(Engine):
    """Tells its bootstrap's engine id too."""

    def handle(self, request: ReceivedRequest, response: Response) -> None:
        if request.path == "/query":
            response.send(200, b'{"0":{"engine_id":"id-of-p"}}')
        else:
            super().handle(request, response)


def test_no_connector_is_forgotten_here() -> None:
    assert {name: connectors.get(name).dispatch for name in connectors.names()} == MODES


@pytest.mark.parametrize("name", sorted(MODES))
def test_p_and_d_get_over_the_wire_what_the_connector_s_functions_say(name: str) -> None:
    version = "0.13.0" if name == "nccl" else ""
    connector = connectors.get(name).profile(version)
    p, d = Answering(PARAMS), Engine()
    assert ask(p, d, connector=name, version=version).status == 200
    url = f"http://{HOST}:{p.server.port}"
    engine_id = "id-of-p" if connector.needs_bootstrap else ""
    peer = PrefillPeer(url, url if connector.needs_bootstrap else "", engine_id, "10.0.0.1:8998")
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 4}
    peer_id = connector.backend_request_id("mine", peer, "10.0.0.2:22001")
    if MODES[name] == "none":
        assert p.seen == []
        assert d.seen == [("mine", body)]
        return
    answer = {"choices": [], "kv_transfer_params": PARAMS} if MODES[name] == "sequential" else None
    assert p.seen == [(peer_id, connector.prefill_request(body, "mine", peer))]
    assert d.seen == [(peer_id, connector.decode_request(body, answer, "mine", peer))]


def test_nixl_push_sends_to_both_at_once_if_asked() -> None:
    p, d = Engine(), Engine()
    known = {"engine_ids": ["push-prefill-0"], "tensor_parallel_size": 2}
    given = {"connector": "nixl_push", "version": "0.32.0", "options": {"dispatch": "concurrent"}}
    assert asyncio.run(asyncio.wait_for(one_request(p, d, known, **given), 30)).status == 200
    [(p_id, first)], [(d_id, second)] = p.seen, d.seen
    assert p_id == d_id == "mine"
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert first["max_tokens"] == 1
    assert second["prompt"] == [1, 2]
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "push-prefill-0",
        "remote_request_id": "mine", "remote_host": "10.0.0.1", "remote_port": 8998, "tp_size": 2,
        "pp_size": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("connector", "options"),
    [
        ("nixl_push", {"dispatch": "concurrent"}),
        ("multi", {"first": "nixl_push", "first_options": {"dispatch": "concurrent"}}),
    ],
)
def test_to_send_at_once_p_s_engine_id_must_be_known(connector: str, options: dict[str, Any]) -> None:
    spec = RouterSpec(
        port=0, connector=connector, prefill=[{"url": "http://a"}], decode=[{"url": "http://b"}],
        options=options,
    )  # fmt: skip
    assert spec.profile().dispatch == "concurrent"
    with pytest.raises(InputError, match="needs engine_ids for each prefill"):
        Router(spec)
