"""The KV pool's bytes: what is written is what is read, and every bit counts."""

import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.simulation.kv_cache import powers, prefix_hashes, salt_seed
from kvbench.errors import InputError
from kvbench.processes.emulator import protocol
from kvbench.processes.emulator.kvbytes import KvPool, fold, next_tokens, wants_eos
from kvbench.processes.emulator.protocol import ApiError, parse
from kvbench.processes.emulator.spec import parse_spec
from kvbench.transfer.base import Layout

BLOCK_TOKENS = 4
LAYOUT = Layout(regions=3, blocks=12, block_bytes=BLOCK_TOKENS * 16)
POWERS = powers(64)
TOKENS = np.arange(100, 118, dtype=np.uint64)  # four blocks and a half


@pytest.fixture
def pool() -> Iterator[KvPool]:
    made = KvPool(LAYOUT, BLOCK_TOKENS)
    yield made
    made.close()


def state_of(pool: KvPool, blocks: list[int], count: int) -> int:
    return fold(0, pool.digest(blocks, 0, count), POWERS[:count])


def hashes_of(tokens: np.ndarray) -> np.ndarray:
    return prefix_hashes(tokens, POWERS, salt_seed(""))


BLOCKS = [7, 2, 3, 4, 11]


@given(
    cuts=st.lists(st.integers(1, len(TOKENS) - 1), unique=True, max_size=4), order=st.permutations(range(12))
)
def test_neither_cuts_nor_block_ids_matter(cuts: list[int], order: list[int]) -> None:
    pool = KvPool(LAYOUT, BLOCK_TOKENS)
    try:
        hashes = hashes_of(TOKENS)
        pool.write(BLOCKS, 0, hashes)
        whole = state_of(pool, BLOCKS, len(TOKENS))
        pool.words[:] = 0xDEAD
        edges = [0, *sorted(cuts), len(TOKENS)]
        state = 0
        for start, end in itertools.pairwise(edges):
            pool.write(order[:5], start, hashes[start:end])
            state = fold(state, pool.digest(order[:5], start, end), POWERS[start:end])
        assert state == whole == state_of(pool, order[:5], len(TOKENS))
    finally:
        pool.close()


def test_single_slots_are_the_same_as_runs(pool: KvPool) -> None:
    hashes = hashes_of(TOKENS)
    pool.write(BLOCKS, 0, hashes)
    expected = pool.digest(BLOCKS, 0, len(TOKENS))
    kept = pool.words.copy()
    pool.words[:] = 0
    positions = np.arange(len(TOKENS))
    blocks, slots = np.array(BLOCKS)[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
    pool.write_slots(blocks, slots, hashes)
    assert (pool.words == kept).all()
    assert (pool.digest_slots(blocks, slots) == expected).all()
    assert (pool.digest(BLOCKS, 0, len(TOKENS)) == expected).all()


def test_every_byte_of_a_prompt_counts(pool: KvPool) -> None:
    pool.write(BLOCKS, 0, hashes_of(TOKENS))
    state = state_of(pool, BLOCKS, len(TOKENS))
    raw = pool.words.view(np.uint8).reshape(LAYOUT.regions, LAYOUT.blocks, LAYOUT.block_bytes)
    for region in range(LAYOUT.regions):
        for index, block in enumerate(BLOCKS):
            tokens_here = min(BLOCK_TOKENS, len(TOKENS) - index * BLOCK_TOKENS)
            for byte in range(tokens_here * 16):
                raw[region, block, byte] ^= 1 << (byte % 8)
                assert state_of(pool, BLOCKS, len(TOKENS)) != state
                raw[region, block, byte] ^= 1 << (byte % 8)
    assert state_of(pool, BLOCKS, len(TOKENS)) == state


def test_swapped_blocks_regions_and_stale_blocks_are_noticed(pool: KvPool) -> None:
    pool.write(BLOCKS, 0, hashes_of(TOKENS))
    state = state_of(pool, BLOCKS, len(TOKENS))
    assert state_of(pool, [BLOCKS[1], BLOCKS[0], *BLOCKS[2:]], len(TOKENS)) != state
    pool.words[[0, 1]] = pool.words[[1, 0]]
    assert state_of(pool, BLOCKS, len(TOKENS)) != state
    pool.words[[0, 1]] = pool.words[[1, 0]]
    pool.words[:, BLOCKS[2]] = 0
    assert state_of(pool, BLOCKS, len(TOKENS)) != state
    assert state_of(pool, BLOCKS, BLOCK_TOKENS * 2) != state


def test_the_whole_prefix_is_in_each_token_and_regions_differ(pool: KvPool) -> None:
    pool.write(BLOCKS, 0, hashes_of(TOKENS))
    first = pool.words[:, BLOCKS[4]].copy()
    changed = TOKENS.copy()
    changed[0] += 1
    pool.write(BLOCKS, 0, hashes_of(changed))
    assert (pool.words[:, BLOCKS[4], :2] != first[:, :2]).all()
    assert (
        len({pool.words[region, BLOCKS[0]].tobytes() for region in range(LAYOUT.regions)}) == LAYOUT.regions
    )


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50), st.integers(16, 200_000))
def test_tokens_are_in_the_vocabulary_and_not_eos(states: list[int], vocab_size: int) -> None:
    drawn = next_tokens(np.array(states, dtype=np.uint64), vocab_size)
    assert ((drawn >= 1) & (drawn < vocab_size)).all()


def test_eos_is_rare_but_comes() -> None:
    assert 0.003 < wants_eos(np.arange(100_000, dtype=np.uint64)).mean() < 0.005


# Text
@given(st.lists(st.integers(1, 8191), max_size=30))
def test_what_the_engine_writes_can_be_read_back(tokens: list[int]) -> None:
    assert protocol.encode(protocol.decode(tokens), 8192) == tokens


@given(st.text(max_size=200))
def test_any_text_has_tokens_in_the_vocabulary(prompt: str) -> None:
    tokens = protocol.encode(prompt, 100)
    assert tokens == protocol.encode(prompt, 100)
    assert all(1 <= token < 100 for token in tokens)
    assert bool(tokens) == bool(prompt)


# Requests
def body(**fields: object) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "prompt must be"),
        ({"prompt": 5}, "prompt must be"),
        ({"prompt": []}, "must not be empty"),
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": ["a", "b"]}, "one prompt per request"),
        ({"prompt": [1, 1.5]}, "must hold token ids"),
        ({"prompt": [1, True]}, "must hold token ids"),
        ({"prompt": [1, 8192]}, "out of vocabulary"),
        ({"prompt": [1, -1]}, "out of vocabulary"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens must be an integer of at least 1"),
        ({"prompt": "a", "max_tokens": "9"}, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": 2, "min_tokens": 3}, "must not exceed max_tokens"),
        ({"prompt": "a", "stream": "yes"}, "stream must be true or false"),
        ({"prompt": "a", "n": 2}, "has no n"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options needs stream"),
        ({"prompt": "a", "temperature": "hot"}, "temperature must be a number"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt must be a string"),
        ({"prompt": "a", "kv_transfer_params": 3}, "kv_transfer_params must be an object"),
        ({"prompt": "a", "model": "other"}, "does not exist"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        parse(body(**fields), False, "tiny", 8192)
    assert caught.value.status == (404 if "model" in fields else 400)


def test_prompts_come_in_four_shapes() -> None:
    for prompt in (" t1 t2", [" t1 t2"], [1, 2], [[1, 2]]):
        assert parse(body(prompt=prompt, unknown_key=1), False, "tiny", 8192).prompt.tolist() == [1, 2]


def test_chat_content_may_be_parts() -> None:
    plain = parse(body(messages=[{"role": "user", "content": "a b"}]), True, "tiny", 8192)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse(body(messages=[{"role": "user", "content": parts}]), True, "tiny", 8192).prompt.tolist() == (
        plain.prompt.tolist()
    )
    for messages in (None, [], [{"content": "x"}], [{"role": "user", "content": [1]}]):
        with pytest.raises(ApiError):
            parse(body(messages=messages), True, "tiny", 8192)


# Spec
SPEC = {
    "served_model_name": "tiny",
    "port": 1,
    "model": {"name": "tiny", "layers": 4, "kv_heads": 2, "head_dim": 64},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ports": 1}, "ports: Extra inputs are not permitted"),
        ({"port": "x"}, "port: Input should be a valid integer"),
        ({"model": {**SPEC["model"], "heads": 2}}, "model.heads: Extra inputs"),  # type: ignore[dict-item]
        ({"model": {**SPEC["model"], "head_dim": 1, "kv_heads": 1}}, "2 bytes per token and region"),  # type: ignore[dict-item]
        ({"timing": "fast"}, "unknown timing profile 'fast'"),
        ({"time_scale": 0}, "time_scale"),
        (
            {"kv_transfer_config": {"kv_connector": "X", "kv_role": "kv_producer", "engine_id": "e"}},
            "kv_connector",
        ),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_consumer",
                    "engine_id": "e",
                }
            },
            "side_channel_port",
        ),
    ],
)
def test_mistakes_in_a_spec_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_spec(json.dumps({**SPEC, **changes}))


def test_all_mistakes_of_a_spec_are_told_at_once() -> None:
    with pytest.raises(InputError) as caught:
        parse_spec(json.dumps({**SPEC, "ports": 1, "num_blocks": 0}))
    assert "ports" in str(caught.value)
    assert "num_blocks" in str(caught.value)


@pytest.mark.parametrize("regions", [2, 5])
def test_the_digest_of_intact_kv_is_that_of_any_layout(regions: int) -> None:
    """Heads that are stored more than once change no answer; each bit of a vector still counts."""
    hashes = np.arange(1, 9, dtype=np.uint64)
    digests = []
    for words in (2, 4, 16):
        pool = KvPool(Layout(regions, 4, 4 * 8 * words), 4)
        pool.write([0, 1], 0, hashes)
        digests.append(pool.digest([0, 1], 0, 8).tolist())
        for bit in (0, 63):
            pool.words[regions - 1, 0, 0, words - 1] ^= np.uint64(1 << bit)
            assert pool.digest([0, 1], 0, 1).tolist() != digests[-1][:1]
            pool.words[regions - 1, 0, 0, words - 1] ^= np.uint64(1 << bit)
        pool.close()
    assert digests[0] == digests[1] == digests[2]
