"""One emulated engine as a real process: its HTTP API, its metrics, its prefix cache, its limits."""

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from emulated import EngineProcess, running, spec


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 8192) for _ in range(length)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running(tmp_path_factory.mktemp("engine"), spec()) as started:
        yield started


def events(engine: EngineProcess, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; checks its frame."""
    seen: list[dict[str, Any]] = []
    with httpx.stream("POST", engine.url + path, json={**body, "stream": True}, timeout=30) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        assert line.startswith("data: ")
        seen.append(json.loads(line[6:]))
    return seen


def test_plain_pages(engine: EngineProcess) -> None:
    assert httpx.get(engine.url + "/health").status_code == 200
    model = httpx.get(engine.url + "/v1/models").json()["data"][0]
    assert (model["id"], model["max_model_len"]) == ("tiny", 4096)
    assert httpx.get(engine.url + "/version").json()["version"].endswith("+emulated")
    assert httpx.get(engine.url + "/nowhere").status_code == 404
    assert httpx.get(engine.url + "/v1/completions").status_code == 405
    assert engine.post("/health", {}).status_code == 405


def test_completion_answers_as_openai_does(engine: EngineProcess) -> None:
    body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 5, "ignore_eos": True}
    reply = engine.post("/v1/completions", body, {"X-Request-Id": "abc"}).json()
    assert (reply["id"], reply["object"]) == ("cmpl-abc", "text_completion")
    choice = reply["choices"][0]
    assert (choice["finish_reason"], choice["text"].count(" t")) == ("length", 5)
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (4, 5)
    assert reply["usage"]["total_tokens"] == 9


def test_a_planted_lie_reaches_the_api(tmp_path: Path) -> None:
    with running(tmp_path, spec(lie="shedding")) as engine:
        body = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 1}
        assert 503 in [engine.post("/v1/completions", body).status_code for _ in range(8)]


def test_stream_has_one_event_per_token_and_the_same_tokens(engine: EngineProcess) -> None:
    prompt = prompt_of(50)
    whole = engine.complete(prompt, 6)["choices"][0]
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True}
    plain = events(engine, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in plain) == whole["text"]
    assert [event["choices"][0]["finish_reason"] for event in plain] == [None] * 5 + ["length"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    full = events(engine, "/v1/completions", {**body, "return_token_ids": True, "stream_options": options})
    assert [event["choices"][0]["token_ids"] for event in full[:-1]] == [
        [token] for token in whole["token_ids"]
    ]
    assert full[0]["choices"][0]["prompt_token_ids"] == prompt
    assert [event["usage"]["completion_tokens"] for event in full] == [1, 2, 3, 4, 5, 6, 6]
    assert full[-1]["choices"] == []


def test_chat(engine: EngineProcess) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    whole = engine.post("/v1/chat/completions", {**body, "max_completion_tokens": 4}).json()
    assert whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant"
    streamed = events(engine, "/v1/chat/completions", {**body, "max_tokens": 4})
    assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"]["content"] for event in streamed) == message["content"]


def test_eos_ends_a_request_unless_it_must_go_on(engine: EngineProcess) -> None:
    body = {"prompt": "please end", "max_tokens": 3000, "return_token_ids": True}
    choice = engine.post("/v1/completions", body).json()["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"][-1]) == ("stop", 0)
    assert 0 not in choice["token_ids"][:-1]
    length = len(choice["token_ids"])
    forced = engine.post("/v1/completions", {**body, "min_tokens": length, "max_tokens": length + 1})
    assert forced.json()["choices"][0]["token_ids"][:-2] == choice["token_ids"][:-1]
    ignored = engine.post("/v1/completions", {**body, "max_tokens": length, "ignore_eos": True})
    assert ignored.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": prompt_of(4000), "max_tokens": 200}, 400, "maximum context length is 4096"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "model": "other"}, 404, "does not exist"),
        ({"prompt": "a", "n": 2}, 400, "has no n,"),
        ({"prompt": "a", "logprobs": 0}, 400, "has no logprobs"),
        ({"prompt": "a", "echo": True}, 400, "has no echo"),
        ({"prompt": "a", "stop": ["."]}, 400, "has no stop,"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, 400, "has no tools"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "has no response_format"),
        (
            {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}},
            400,
            "without a kv_transfer_config",
        ),
    ],
)
def test_mistakes_are_answered_in_openai_form(
    engine: EngineProcess, body: dict[str, Any], status: int, message: str
) -> None:
    reply = engine.post("/v1/completions", body)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == status


def test_broken_json_is_refused(engine: EngineProcess) -> None:
    reply = httpx.post(engine.url + "/v1/completions", content=b"{")
    assert reply.status_code == 400
    assert "not JSON" in reply.json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_taken(engine: EngineProcess) -> None:
    """What clients send as their defaults; sampling changes nothing: there is nothing to sample from."""
    none = {"n": 1, "best_of": 1, "logprobs": None, "echo": False, "stop": [], "tools": None}
    none |= {"response_format": {"type": "text"}, "logit_bias": {}, "top_p": 0.9, "seed": 7, "top_k": 3}
    assert engine.post("/v1/completions", {"prompt": "a", "max_tokens": 2, **none}).status_code == 200
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "logprobs": False}
    assert engine.post("/v1/chat/completions", {**chat, "top_logprobs": 0}).status_code == 200
    assert engine.post("/v1/chat/completions", {**chat, "logprobs": True}).status_code == 400


def test_every_metric_of_the_engine_names_it_as_vllm_does(engine: EngineProcess) -> None:
    page = httpx.get(engine.url + "/metrics").text
    rows = [line for line in page.splitlines() if line.startswith(("vllm:", "kvbench:"))]
    assert len(rows) > 100
    assert [line for line in rows if 'model_name="tiny"' not in line or 'engine="0"' not in line] == []


def test_prefix_cache_counts_hits_and_can_be_reset(engine: EngineProcess) -> None:
    prompt = prompt_of(100, seed=7)
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")

    def gained(**more: Any) -> tuple[float, float]:
        before = [engine.metric(name) for name in names]
        tokens.append(engine.tokens(prompt, **more))
        queries, hits = (engine.metric(name) - old for name, old in zip(names, before, strict=True))
        return queries, hits

    tokens: list[list[int]] = []
    assert gained() == (100, 0)
    assert gained() == (100, 96)  # six full blocks of 16
    assert gained(cache_salt="mine") == (100, 0)
    assert gained(cache_salt="mine") == (100, 96)
    assert engine.post("/reset_prefix_cache", {}).json() == {"success": True}
    assert gained() == (100, 0)
    # The salt is part of every hash, so it changes what the emulated model says; a hit does not.
    assert tokens[0] == tokens[1] == tokens[4]
    assert tokens[2] == tokens[3]


def test_metrics_are_vllms(engine: EngineProcess) -> None:
    before = engine.metric("vllm:generation_tokens_total")
    computed = engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute")
    engine.tokens(prompt_of(40, seed=9), 7)
    assert engine.metric("vllm:generation_tokens_total") == before + 7
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == computed + 40
    assert engine.metric("vllm:request_success_total", finished_reason="length") > 0
    ended = engine.metric("vllm:e2e_request_latency_seconds_count")
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert engine.metric(f"vllm:{name}_seconds_count") == ended
    assert engine.metric("vllm:num_requests_running") == 0
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    assert engine.metric("kvbench:engine_info", emulated="1", timing="quick", time_scale="0.1") == 1
    steps = engine.metric("kvbench:emulator_steps_total")
    assert engine.metric("kvbench:emulator_step_lag_seconds_count") == steps
    assert engine.metric("kvbench:emulator_busy_seconds_total") > 0


def test_tokens_never_come_before_their_time(engine: EngineProcess) -> None:
    # 9 + 2 ms of prefill at least, then 19 decode steps of at least 4 ms, all at a tenth.
    begin = time.monotonic()
    engine.tokens(prompt_of(16, seed=3), 20)
    assert time.monotonic() - begin >= 0.1 * (0.011 + 19 * 0.004)


def test_disconnect_frees_the_blocks(engine: EngineProcess) -> None:
    aborted = engine.metric("vllm:request_success_total", finished_reason="abort")
    body = json.dumps(
        {"prompt": prompt_of(600, seed=5), "max_tokens": 3000, "ignore_eos": True, "stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", engine.spec["port"])) as client:
        client.sendall(head.encode() + body.encode())
        assert b"200 OK" in client.recv(4096)
        assert engine.metric("vllm:kv_cache_usage_perc") > 0
    engine.wait_metric("vllm:kv_cache_usage_perc", 0)
    assert engine.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_concurrent_requests_get_the_tokens_they_get_alone(engine: EngineProcess) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 16, 33, 200, 511, 512, 513, 900)]
    alone = [engine.tokens(prompt, 20, cache_salt="alone") for prompt in prompts]
    engine.post("/reset_prefix_cache", {})
    assert engine.tokens_together(prompts, 20, cache_salt="alone") == alone


def test_a_tiny_pool_preempts_and_says_the_same(engine: EngineProcess, tmp_path: Any) -> None:
    prompts = [prompt_of(60, seed=seed) for seed in range(8)]
    expected = [engine.tokens(prompt, 60) for prompt in prompts]
    # Slow, too: they are together if they are read before the first of them would be answered, here 0.25 s.
    with running(tmp_path, spec(num_blocks=20, enable_prefix_caching=False, time_scale=1.0)) as tiny:
        assert tiny.tokens_together(prompts, 60) == expected
        assert tiny.metric("vllm:num_preemptions_total") > 0
        assert tiny.metric("vllm:kv_cache_usage_perc") == 0
        tiny.refused(
            {"prompt": prompt_of(400), "max_tokens": 10}, 400, "needs 26 KV blocks and this engine has 20"
        )
