"""The descriptors of a KV cache, against numbers worked out by hand and published ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.gates.evidence import EngineFigures
from kvbench.core.physics import MODELS
from kvbench.core.plan.plan import scenario_footprint
from kvbench.core.scenario.scenario import parse_scenario
from kvbench.core.transfers.kv_shape import MODEL_NAMES, check_memory, kv_work
from kvbench.errors import InputError
from kvbench.planning.scenario_files import registry
from kvbench.sweep.trial.readings import kv_bytes_per_request


@pytest.mark.parametrize(("version", "regions", "region_pieces", "piece_bytes", "descriptors"), [
    # 48 layers × K and V; 32,768 / 16 tokens; 16 tokens × 1 head × 128 × 1 byte (fp8).
    ("0.13.0", 96, 2048, 2048, 96),
    ("0.22.0", 96, 2048, 2048, 96),
    # K and V are halves of a block: their neighbours are V and K.
    ("0.23", 48, 4096, 2048, 196_608),
    ("0.24.0", 48, 4096, 2048, 196_608),
    ("0.25.1", 48, 4096, 2048, 196_608),
    ("0.26", 48, 2048, 4096, 48),
    ("0.33.0", 48, 2048, 4096, 48),
    ("", 48, 2048, 4096, 48),
])  # fmt: skip
def test_qwen3_30b_a3b_at_32k_over_8_ranks(
    version: str, regions: int, region_pieces: int, piece_bytes: int, descriptors: int
) -> None:
    work = kv_work("qwen3-30b-a3b", 32768, 8, 16, version=version)
    assert (work.regions, work.region_pieces, work.piece_bytes) == (regions, region_pieces, piece_bytes)
    assert (work.descriptors, work.rank_bytes) == (descriptors, 402_653_184)
    # 4 KV heads on 8 ranks: each is kept twice.
    assert work.wire_bytes == 32768 * 98_304 == 8 * work.rank_bytes
    assert work.request_bytes == 32768 * 49_152 == work.wire_bytes // 2
    assert work.logical_bytes == work.request_bytes // 8
    assert work.shape() == f"qwen3-30b-a3b 32768 tokens, rank 1 of 8, vLLM {(version or '0.33')[:4]}"
    assert any(f"into {descriptors} " in word or f"so {descriptors} " in word for word in work.words())
    assert any("each KV head is on 2 ranks" in word for word in work.words())
    assert any("--all-ranks" in word for word in work.words())


def test_a_logged_transfer_of_nixl() -> None:
    """vllm#34054 logs 40,064 descriptors of 8 KiB, one for each piece (blocks that were not neighbours):
    64 layers, 8 KV heads on 4 ranks, 313 blocks."""
    work = kv_work("qwen3-32b", 313 * 16, 4, 16, version="0.15.0")
    assert (work.pieces, work.piece_bytes, work.rank_bytes / 2**20) == (40_064, 8192, 313)


@pytest.mark.parametrize(
    ("tokens", "mib"),
    [(128, 20.25), (256, 38.25), (512, 74.25), (1024, 146.25), (2048, 290.25), (4096, 578.25)],
)
def test_the_sizes_that_mooncake_publishes_for_qwen3_8b(tokens: int, mib: float) -> None:
    # Its page counts the chat template's 9 tokens in.
    assert kv_work("qwen3-8b", tokens + 9).wire_bytes / 2**20 == mib


def test_mla_has_one_tensor_a_layer_and_is_on_every_rank() -> None:
    work = kv_work("deepseek-v3", 1000, 8, 64)
    assert (work.regions, work.region_pieces, work.piece_bytes) == (61, 16, 64 * 576 * 2)
    assert kv_work("deepseek-v3", 1000, 8, 64, version="0.24.0").descriptors == work.descriptors == 61
    assert (work.wire_bytes, work.request_bytes) == (8 * work.rank_bytes, 1000 * 70_272)
    assert any("each rank keeps all of it" in word for word in work.words())


@given(
    st.sampled_from(MODEL_NAMES), st.integers(1, 200_000), st.sampled_from((1, 2, 4, 8, 16)),
    st.sampled_from((1, 16, 64)), st.sampled_from(("0.13", "0.24", "0.33")),
)  # fmt: skip
def test_ranks_together_move_the_models_kv(name: str, tokens: int, tp: int, block: int, version: str) -> None:
    model = MODELS[name]
    if not model.mla_dim and max(model.kv_heads, tp) % min(model.kv_heads, tp):
        with pytest.raises(InputError, match="cannot be divided evenly"):
            kv_work(name, tokens, tp, block)
        return
    work = kv_work(name, tokens, tp, block, version=version)
    model = model.whole if version == "0.13" else model
    assert work.wire_bytes == model.wire_bytes(tokens, block, tp)
    assert work.descriptors <= work.pieces <= model.regions() * work.blocks
    assert work.logical_bytes <= work.rank_bytes


def test_a_sliding_window_moves_its_last_blocks_only() -> None:
    """gpt-oss-120b: 36 layers, every other one with a window of 128 tokens; 2 KiB per token and layer."""
    for tokens, gb in ((1024, 0.043), (4096, 0.156), (8192, 0.307), (32_768, 1.213)):
        work = kv_work("gpt-oss-120b", tokens)
        assert work.request_bytes / 1e9 == pytest.approx(gb, abs=0.0006)
        window = 128 // 16 + 1
        assert work.wire_bytes == (18 * tokens + 18 * window * 16) * 2048
        assert (work.regions, work.region_pieces) == (18, tokens // 16 + window)
        assert kv_work("gpt-oss-120b", tokens, version="0.23").wire_bytes == work.wire_bytes
        for whole in (kv_work("gpt-oss-120b", tokens, version="0.19.0"), kv_work("gpt-oss-120b", 100)):
            assert whole.request_bytes == whole.input_len * 73_728


@pytest.mark.parametrize(("options", "bytes_"), [
    ({"version": "0.33.0"}, (18 * 4096 + 18 * 128) * 2048),
    ({"version": "0.19.0"}, 36 * 4096 * 2048),
    ({"version": "0.33.0", "engine_args": {"disable_hybrid_kv_cache_manager": True}}, 36 * 4096 * 2048),
])  # fmt: skip
def test_a_plan_counts_windows_as_the_engine_does(options: dict[str, Any], bytes_: int) -> None:
    text = {
        "version": 1, "model": "gpt-oss-120b",
        "deployment": {"engine": "vllm", "engine_options": {"model": "m", **options}}, "connectors": ["nixl"],
        "workload": {"input_len": [4096], "output_len": 4}, "slo": {"ttft_ms": 200},
    }  # fmt: skip
    scenario = parse_scenario(json.dumps(text), "x.yaml", registry())
    assert scenario_footprint(scenario, 4096, 1).logical_bytes == bytes_
    engines = {role: EngineFigures(block_tokens=16) for role in ("prefill", "decode")}
    moved, _ = kv_bytes_per_request(scenario, 4096, engines)
    assert moved == scenario_footprint(scenario, 4096, 1).wire_bytes


def test_all_ranks_are_so_many_initiators() -> None:
    work = kv_work("qwen3-30b-a3b", 1024, 8, all_ranks=True)
    assert work.ranks == 8
    # Nine buffers, each with one free piece in each region.
    assert work.memory_bytes() == 16 * work.rank_bytes + 9 * work.regions * work.piece_bytes
    assert work.memory_bytes(scattered=True) == work.memory_bytes() + 16 * work.rank_bytes
    assert "8 ranks of 8" in work.shape()
    with pytest.raises(InputError) as caught:
        check_memory(work, 1 << 20)
    assert caught.value.hint == "not even one block fits; one rank needs less (omit --all-ranks)"


def test_beyond_memory_the_longest_that_fits_is_told_and_does_fit() -> None:
    work = kv_work("llama-3.1-70b", 131_072, 8)
    words = "needs 10.7 GB of buffers, and 6.87 GB of 8.59 GB free memory may be used"
    with pytest.raises(InputError, match=words) as caught:
        check_memory(work, 8 << 30)
    longest = int(caught.value.hint.removeprefix("the largest --input-len that fits is "))
    assert longest % 16 == 0
    check_memory(kv_work("llama-3.1-70b", longest, 8), 8 << 30)
    with pytest.raises(InputError):
        check_memory(kv_work("llama-3.1-70b", longest + 16, 8), 8 << 30)


@pytest.mark.parametrize(("arguments", "words"), [
    (("no-such-model", 10), "unknown model"),
    (("qwen3-8b", 0), "--input-len must be at least 1"),
    (("qwen3-8b", 10, 3), "cannot be divided evenly"),
    (("qwen3-8b", 10, 1, 0), "--block-tokens must be"),
])  # fmt: skip
def test_bad_input(arguments: tuple[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        kv_work(*arguments)
