"""``memory: cuda``: KV goes from GPU to GPU. The GPU is a fake, whose memory is none that the engines see."""

import random
from pathlib import Path

import pytest
from emulated import Pair, pair_specs, running, spec
from fake_cuda import copied, fake_cuda

from kvbench import connectors, engines, transfer
from kvbench.engines.base import OptionsContext
from kvbench.engines.emulated import ON_GPU, EmulatedOptions

GPU = EmulatedOptions(memory="cuda")
BLOCK_BYTES = 16 * 2048


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(1, 8192) for _ in range(length)]


def test_a_pair_with_its_kv_on_the_gpu_says_what_one_server_says(tmp_path: Path) -> None:
    env = fake_cuda(tmp_path)
    prefill, decode, _ = pair_specs("tcp", memory="cuda")
    with running(tmp_path, prefill, decode, env=env) as (p, d), running(tmp_path, spec()) as aggregated:
        pair = Pair("tcp", p, d)
        for length in (1, 16, 40, 100):
            assert pair.tokens(prompt_of(length), 12) == aggregated.tokens(prompt_of(length), 12)
        blocks = 1 + 1 + 3 + 7
        assert d.metric("kvbench:kv_blocks_moved_total") == blocks
    # Each block once to P's GPU and once from D's: neither engine had them from host memory.
    assert copied(tmp_path) == {"HtoD": blocks * BLOCK_BYTES, "DtoH": blocks * BLOCK_BYTES}


def test_what_the_gpu_holds_is_what_arrives(tmp_path: Path) -> None:
    """Without the copy to the GPU the answers are others: the mirror alone moves nothing."""
    env = fake_cuda(tmp_path)
    prefill, decode, _ = pair_specs("tcp", memory="cuda")
    decode["memory"] = "host"  # so that D never asks P to copy
    with running(tmp_path, prefill, decode, env=env) as (p, d), running(tmp_path, spec()) as aggregated:
        assert Pair("tcp", p, d).tokens(prompt_of(40), 12) != aggregated.tokens(prompt_of(40), 12)


@pytest.mark.real
def test_without_a_driver_the_engine_says_so_and_ends(tmp_path: Path) -> None:
    from emulated import launch

    prefill, _, _ = pair_specs("tcp", memory="cuda")
    engine = launch(tmp_path, prefill)
    assert engine.process.wait(30) != 0
    assert "GPU memory needs NVIDIA's driver: libcuda.so.1 does not load" in engine.log.read_text()


def test_only_what_moves_gpu_memory_is_taken() -> None:
    emulated = engines.get("emulated")
    assert emulated.labels_of(GPU) == ("emulated", ON_GPU)
    for name, there in (("tcp", False), ("mooncake", False), ("nixl", True)):
        assert ("cuda" in transfer.get(connectors.get(name).transfer_backend).memories) == there
        problem = emulated.check(connectors.get(name), GPU)
        assert there or (problem is not None and "moves no cuda memory" in problem.reason)


def test_a_ucx_without_cuda_is_warned_of() -> None:
    connector = connectors.get("nixl")
    for tls, warned in (("", True), ("tcp", True), ("cuda,tcp", False)):
        chosen = connector.options_model(ucx_tls=tls).settled()
        notes = engines.get("emulated").warnings(GPU, OptionsContext({"nixl": (connector, chosen)}))
        assert any("leaves CUDA out" in note for note in notes) == warned
