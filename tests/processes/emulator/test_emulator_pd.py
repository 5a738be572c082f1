"""P/D pairs of emulated engines over every transfer backend that works here."""

import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulated import EngineProcess, Pair, pair_specs, running, running_pair, spec

from kvbench import transfer

SOURCES = "vllm:prompt_tokens_by_source_total"
PREFIX = {"tcp": "kvbench:kv_xfer_", "nixl": "vllm:nixl_xfer_", "mooncake": "vllm:mooncake_xfer_"}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(1, 8192) for _ in range(length)]


@pytest.fixture(scope="module", params=["tcp", "nixl", "mooncake"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    problem = transfer.check(request.param)
    if problem is not None:
        pytest.skip(f"{request.param}: {problem.reason}")
    with running_pair(tmp_path_factory.mktemp(request.param), request.param) as started:
        yield started


@pytest.fixture
def mooncake() -> None:
    if problem := transfer.check("mooncake"):
        pytest.skip(f"mooncake: {problem.reason}")


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running(tmp_path_factory.mktemp("aggregated"), spec()) as started:
        yield started


def test_pair_says_what_one_server_says(pair: Pair, aggregated: EngineProcess) -> None:
    lengths = (1, 15, 16, 17, 100, 1025)
    before = {
        source: pair.decode.metric(SOURCES, source=source)
        for source in ("local_compute", "external_kv_transfer")
    }
    for length in lengths:
        prompt = prompt_of(length)
        assert pair.tokens(prompt, 12) == aggregated.tokens(prompt, 12)
    assert pair.decode.metric(SOURCES, source="local_compute") == before["local_compute"]
    moved = pair.decode.metric(SOURCES, source="external_kv_transfer") - before["external_kv_transfer"]
    assert moved == sum(lengths)
    pair.prefill.wait_metric("vllm:kv_cache_usage_perc", 0)
    pair.decode.wait_metric("vllm:kv_cache_usage_perc", 0)


def test_transfers_are_counted_on_the_side_that_moves(pair: Pair) -> None:
    name = pair.connector.name
    mover, other = (pair.prefill, pair.decode) if name == "mooncake" else (pair.decode, pair.prefill)
    family = PREFIX[name]
    counted = family.removesuffix("xfer_") if name != "tcp" else family
    before = mover.metric(f"{counted}bytes_transferred_sum"), mover.metric(f"{family}time_seconds_count")
    pair.tokens(prompt_of(40, seed=1))
    # Three blocks of 16 tokens with 2 KiB each: the last one moves whole.
    assert mover.metric(f"{counted}bytes_transferred_sum") == before[0] + 3 * 16 * 2048
    assert mover.metric(f"{family}time_seconds_count") == before[1] + 1
    assert mover.metric("kvbench:kv_transfer_seconds_count") == before[1] + 1
    assert mover.metric("kvbench:kv_transfer_descriptors_sum") > 0
    assert other.metric("kvbench:kv_transfer_seconds_count") == 0
    assert f'library="{mover_library(name)}' in httpx.get(f"{mover.url}/metrics").text
    for engine in (mover, other):
        assert engine.metric("kvbench:kv_transfer_failures_total") == 0
        assert engine.metric(f"{counted}num_kv_expired_reqs_total") == 0


def mover_library(name: str) -> str:
    """How the library's name begins: NIXL and Mooncake come in wheels for several CUDA versions and none."""
    return {"tcp": "kvbench", "nixl": "nixl", "mooncake": "mooncake-transfer-engine"}[name]


def test_only_missing_blocks_move(pair: Pair) -> None:
    prompt = prompt_of(80, seed=2)
    first = pair.tokens(prompt)
    moved = pair.decode.metric("kvbench:kv_blocks_moved_total") + pair.prefill.metric(
        "kvbench:kv_blocks_moved_total"
    )
    assert pair.tokens(prompt) == first
    now = pair.decode.metric("kvbench:kv_blocks_moved_total") + pair.prefill.metric(
        "kvbench:kv_blocks_moved_total"
    )
    assert now == moved + 1  # four of five blocks were there, and one token at least must come from P
    assert pair.decode.metric("kvbench:kv_blocks_held_locally_total") >= 4
    pair.decode.post("/reset_prefix_cache", {})
    pair.prefill.post("/reset_prefix_cache", {})
    assert pair.tokens(prompt) == first


def test_many_requests_at_once(pair: Pair, aggregated: EngineProcess) -> None:
    prompts = [prompt_of(50 + 37 * index, seed=3) for index in range(12)]
    with ThreadPoolExecutor(12) as threads:
        got = list(threads.map(lambda prompt: pair.tokens(prompt, 16), prompts))
        assert got == list(threads.map(lambda prompt: aggregated.tokens(prompt, 16), prompts))
    pair.prefill.wait_metric("vllm:kv_cache_usage_perc", 0)
    pair.decode.wait_metric("vllm:kv_cache_usage_perc", 0)


def test_wrong_roles_and_missing_fields_are_refused(pair: Pair) -> None:
    base = {"prompt": prompt_of(20), "max_tokens": 1}
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
    to_decode = {"do_remote_decode": False, "do_remote_prefill": True}
    cases: list[tuple[EngineProcess, dict[str, Any], str]] = [
        (pair.prefill, {**base, "kv_transfer_params": to_decode}, "roles the wrong way round"),
        (pair.decode, {**base, "kv_transfer_params": to_prefill}, "roles the wrong way round"),
        (pair.prefill, {**base, "kv_transfer_params": {}}, "do_remote_decode"),
        (pair.prefill, {**base, "max_tokens": 2, "kv_transfer_params": to_prefill}, "needs max_tokens 1"),
        (pair.prefill, {**base, "stream": True, "kv_transfer_params": to_prefill}, "cannot be streamed"),
        (pair.decode, {**base, "kv_transfer_params": None}, "do_remote_prefill: true"),
        (pair.decode, {**base, "kv_transfer_params": to_decode}, "lacks"),
    ]
    for engine, body, message in cases:
        engine.refused(body, 400, message)


def test_dead_peer_is_an_error_in_time(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", transfer_timeout_s=2.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = Pair("tcp", p, d)
        pair.tokens(prompt_of(30))
        body = {"prompt": prompt_of(30, seed=4), "max_tokens": 4}
        answer = p.post("/v1/completions", pair.connector.prefill_request(body, "x", pair.peer())).json()
        p.process.kill()
        p.process.wait()
        begin = time.monotonic()
        pair.refused(body, answer, "x", "KV transfer from engine engine-p failed")
        assert time.monotonic() - begin < 20
        assert d.metric("kvbench:kv_transfer_failures_total") == 1
        assert d.metric("vllm:request_success_total", finished_reason="error") == 1
        d.wait_metric("vllm:kv_cache_usage_perc", 0)


@pytest.mark.usefixtures("mooncake")
def test_push_from_a_dead_or_ignorant_peer_is_an_error(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("mooncake", transfer_timeout_s=1.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = Pair("mooncake", p, d)
        body = {"prompt": prompt_of(30), "max_tokens": 4}
        # P never gets the request.
        peer = pair.peer()
        to_decode = pair.connector.decode_request(body, None, "lonely", peer)
        d.refused(to_decode, 500, "P got no request with transfer_id 'lonely'")
        d.wait_metric("vllm:kv_cache_usage_perc", 0)
        # P is there but does not answer any more.
        p.process.send_signal(signal.SIGSTOP)
        d.refused(pair.connector.decode_request(body, None, "frozen", peer), 500, "within 1 s")
        assert d.metric("vllm:kv_cache_usage_perc") > 0  # P may yet write: these blocks are not given away
        d.wait_metric("vllm:kv_cache_usage_perc", 0)
        p.process.kill()
        p.process.wait()
        reply = d.post("/v1/completions", pair.connector.decode_request(body, None, "dead", peer))
        assert reply.status_code == 500


@pytest.mark.usefixtures("mooncake")
def test_d_may_ask_before_p_has_the_request(tmp_path: Path, aggregated: EngineProcess) -> None:
    with running_pair(tmp_path, "mooncake") as pair, ThreadPoolExecutor(1) as threads:
        prompt, peer = prompt_of(100), pair.peer()
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        to_decode = pair.connector.decode_request(body, None, "early", peer)
        early = threads.submit(pair.decode.post, "/v1/completions", to_decode)
        pair.decode.wait_metric("vllm:num_requests_waiting", 1)
        time.sleep(0.2)
        assert not early.done()
        first = pair.prefill.post("/v1/completions", pair.connector.prefill_request(body, "early", peer))
        assert first.status_code == 200
        assert early.result().json()["choices"][0]["token_ids"] == aggregated.tokens(prompt)


def test_preemption_on_d_computes_again_and_says_the_same(tmp_path: Path, aggregated: EngineProcess) -> None:
    prefill, decode, env = pair_specs("tcp", enable_prefix_caching=False)
    decode["num_blocks"] = 20
    decode["time_scale"] = 2.0  # half a second a request, so that the six meet on any machine
    prompts = [prompt_of(60, seed=seed) for seed in range(6)]
    with running(tmp_path, prefill, decode, env=env) as (p, d), ThreadPoolExecutor(6) as threads:
        pair = Pair("tcp", p, d)
        got = list(threads.map(lambda prompt: pair.tokens(prompt, 60), prompts))
        assert got == [aggregated.tokens(prompt, 60) for prompt in prompts]
        assert d.metric("vllm:num_preemptions_total") > 0
        d.wait_metric("vllm:kv_cache_usage_perc", 0)


def test_lease_ends_and_a_late_reader_is_told(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", extra={"kv_lease_duration": 0.3})
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = Pair("tcp", p, d)
        body = {"prompt": prompt_of(30), "max_tokens": 4}
        answer = p.post("/v1/completions", pair.connector.prefill_request(body, "x", pair.peer())).json()
        p.wait_metric("kvbench:kv_xfer_num_kv_expired_reqs_total", 1)
        assert p.metric("vllm:kv_cache_usage_perc") == 0
        pair.refused(body, answer, "x", "the lease had ended")


def test_a_request_waiting_on_d_keeps_its_lease(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", extra={"kv_lease_duration": 0.6}, max_num_seqs=1, time_scale=1.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = Pair("tcp", p, d)
        with ThreadPoolExecutor(2) as threads:
            long = threads.submit(pair.tokens, prompt_of(30), 400)  # 1.6 s at least, and the only slot
            d.wait_metric("vllm:num_requests_running", 1)
            short = threads.submit(pair.tokens, prompt_of(40), 2)
            assert (len(short.result()), len(long.result())) == (2, 400)
        assert p.metric("kvbench:kv_xfer_num_kv_expired_reqs_total") == 0


def test_wrong_bytes_give_other_tokens(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", enable_prefix_caching=False)
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        pair = Pair("tcp", p, d)
        prompt = prompt_of(100)
        right = pair.tokens(prompt)
        body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answer = p.post("/v1/completions", pair.connector.prefill_request(body, "x", pair.peer())).json()
        flip_one_bit(p, answer["kv_transfer_params"]["remote_block_ids"][0][3])
        reply = d.post("/v1/completions", pair.connector.decode_request(body, answer, "x", pair.peer()))
        assert reply.status_code == 200
        assert reply.json()["choices"][0]["token_ids"] != right
        # Blocks in the wrong order are noticed too.
        answer = p.post("/v1/completions", pair.connector.prefill_request(body, "y", pair.peer())).json()
        answer["kv_transfer_params"]["remote_block_ids"][0].reverse()
        reply = d.post("/v1/completions", pair.connector.decode_request(body, answer, "y", pair.peer()))
        assert reply.json()["choices"][0]["token_ids"] != right
        assert pair.tokens(prompt) == right


def flip_one_bit(engine: EngineProcess, block: int) -> None:
    """Damages one byte of an engine's KV pool from outside, in the last region."""
    folder = Path(f"/proc/{engine.process.pid}/fd")
    pool = next(path for path in folder.iterdir() if "kvbench-kv" in str(path.readlink()))
    offset = (7 * engine.spec["num_blocks"] + block) * 16 * 256 + 777
    with pool.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def test_engines_that_do_not_match_are_refused(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp")
    decode["block_tokens"] = 32
    decode["num_blocks"] = 100
    with running(tmp_path, prefill, decode, env=env) as (p, d):
        reply = Pair("tcp", p, d).post({"prompt": prompt_of(10), "max_tokens": 2})
        assert reply.status_code == 500
        assert "block_tokens is 32 here, 16 at the peer" in reply.json()["error"]["message"]


def test_a_client_that_leaves_while_waiting_frees_both_sides(tmp_path: Path) -> None:
    prefill, decode, env = pair_specs("tcp", max_num_seqs=1, time_scale=1.0)
    with running(tmp_path, prefill, decode, env=env) as (p, d), ThreadPoolExecutor(1) as threads:
        pair = Pair("tcp", p, d)
        long = threads.submit(pair.tokens, prompt_of(30), 300)
        d.wait_metric("vllm:num_requests_running", 1)
        body = {"prompt": prompt_of(40), "max_tokens": 4}
        answer = p.post("/v1/completions", pair.connector.prefill_request(body, "x", pair.peer())).json()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                d.url + "/v1/completions",
                json=pair.connector.decode_request(body, answer, "x", pair.peer()),
                timeout=0.2,
            )
        p.wait_metric("vllm:kv_cache_usage_perc", 0)  # told by D at once, long before the lease ends
        assert p.metric("kvbench:kv_xfer_num_kv_expired_reqs_total") == 0
        assert len(long.result()) == 300
        d.wait_metric("vllm:kv_cache_usage_perc", 0)


@pytest.mark.usefixtures("mooncake")
def test_a_client_that_leaves_while_d_asks_for_kv_frees_d_at_once(tmp_path: Path) -> None:
    """P never gets the request; without a word from D, both would wait for the transfer's own deadline."""
    with running_pair(tmp_path, "mooncake", transfer_timeout_s=120.0) as pair:
        body = {"prompt": prompt_of(40), "max_tokens": 4}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                pair.decode.url + "/v1/completions",
                json=pair.connector.decode_request(body, None, "left", pair.peer()),
                timeout=0.5,
            )
        pair.decode.wait_metric("vllm:num_requests_waiting", 0)
        pair.decode.wait_metric("vllm:kv_cache_usage_perc", 0)
