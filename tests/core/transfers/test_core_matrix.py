"""The matrix: what users write is read right, sensible combinations are there once, others say why not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_transfers import MOVERS

from kvbench.core.transfers import cases as matrices
from kvbench.core.transfers.cases import (
    DEFAULT_SIZES,
    Axes,
    BackendCapabilities,
    build,
    estimate_s,
    memory_needed,
)
from kvbench.core.units import duration_text, estimate_text, parse_counts, parse_size, parse_sizes, size_text
from kvbench.errors import InputError


@pytest.mark.parametrize(("text", "size"), [
    ("4096", 4096), ("4K", 4096), ("4k", 4096), ("64KiB", 65536), ("1M", 1 << 20), ("2 GiB", 2 << 30),
    ("1.5K", 1536),
])  # fmt: skip
def test_sizes_are_read_as_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-4K", "4KB", "0", "0.3", "4 apples", "1e6", "nan"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InputError, match=r"not a (size|whole number)"):
        parse_size(text)


def test_lists_and_ranges() -> None:
    assert parse_sizes("4K,64K,1M") == (4096, 65536, 1 << 20)
    assert parse_sizes("4K..32K") == (4096, 8192, 16384, 32768)
    assert parse_sizes("4K..20K,8K") == (4096, 8192, 16384, 20480)
    assert parse_counts("1,2,4,8") == parse_counts("1..8") == (1, 2, 4, 8)
    with pytest.raises(InputError, match="descending"):
        parse_sizes("1M..4K")
    with pytest.raises(InputError, match="too many"):
        parse_counts(",".join(str(n) for n in range(1, 100)))


@given(st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_range_starts_and_ends_where_it_was_told(one: int, other: int) -> None:
    low, high = sorted((one, other))
    values = parse_sizes(f"{low}..{high}")
    assert (values[0], values[-1]) == (low, high)
    assert list(values) == sorted(set(values))
    assert all(later <= 2 * earlier for earlier, later in pairwise(values))


@given(st.integers(1, 1023), st.sampled_from((1, 1 << 10, 1 << 20, 1 << 30)))
def test_a_round_size_is_read_back_from_its_words(count: int, unit: int) -> None:
    assert parse_size(size_text(count * unit)) == count * unit


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (99, "99 s"), (200, "3 min 20 s"), (3900, "1 h 5 min")]
)
def test_durations_are_rounded_up(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(("times", "text"), [
    ((7186.0, 7186.0), "about 2 h"), ((1906.0, 7186.0), "32 min to 2 h"), ((194.0, 216.0), "3 to 4 min"),
    ((0.0, 7.2), "0 to 7 s"), ((6000.0, 20000.0), "1.7 to 5.6 h"),
])  # fmt: skip
def test_an_estimate_has_two_digits(times: tuple[float, float], text: str) -> None:
    assert estimate_text(*times) == text


def test_the_default_matrix_is_small_and_ends_in_time() -> None:
    found = build(Axes(), MOVERS)
    usable = [mover.name for mover in MOVERS if not mover.problem]
    assert len(found.cases) == len(usable) * 2 * len(DEFAULT_SIZES)
    assert found.estimate_s(matrices.DEFAULT_SECONDS) < 90
    absent = {left.what: left.reason for left in found.left if left.absent}
    assert (absent["nccl"], absent["nixl over rdma"]) == ("no GPU", "no RDMA device")


def test_yardsticks_come_first_and_groups_stay_together() -> None:
    found = build(Axes(nics=(1, 2)), MOVERS)
    backends = list(dict.fromkeys(case.backend for case in found.cases))
    assert backends[:4] == ["null", "memcpy", "shm", "tcp"]
    ways = [(case.backend, case.protocol, case.nics) for case in found.cases]
    changes = sum(one != other for one, other in pairwise(ways))
    assert changes == len(set(ways)) - 1


def test_a_backend_without_nics_is_measured_once_and_without() -> None:
    found = build(Axes(nics=(1, 2, 4, 8)), MOVERS)
    for name in ("null", "memcpy", "shm"):
        assert [case.nics for case in found.cases if case.backend == name] == [0] * 8
    assert {case.nics for case in found.cases if case.backend == "nixl"} == {1, 2, 4, 8}


def test_rdma_is_usual_where_it_is() -> None:
    mover = BackendCapabilities("nixl", ("tcp", "rdma"))
    assert {case.protocol for case in build(Axes(), [mover]).cases} == {"rdma"}


def test_a_protocol_that_is_lacking_is_told_and_yardsticks_stay() -> None:
    found = build(Axes(backends=("tcp", "nixl", "memcpy"), protocols=("cma",)), MOVERS)
    assert {(case.backend, case.protocol) for case in found.cases} == {("nixl", "cma"), ("memcpy", "memory")}
    (left,) = found.left
    assert (left.what, left.reason) == ("tcp over cma", "tcp does not support it, only tcp")
    assert not left.absent


def test_cuda_ipc_is_for_gpu_memory_only() -> None:
    mover = BackendCapabilities("nixl", ("tcp", "cuda_ipc"), memories=("host", "cuda"))
    axes = Axes(backends=("nixl",), protocols=("tcp", "cuda_ipc"))
    found = build(axes, [mover])
    assert {case.protocol for case in found.cases} == {"tcp"}
    assert [left.reason for left in found.left] == ["it copies between GPUs: use --memory cuda"]
    on_gpu = build(replace(axes, memory="cuda"), [mover])
    assert {case.protocol for case in on_gpu.cases} == {"tcp", "cuda_ipc"}


def test_a_protocol_that_nothing_here_has_is_refused_by_name() -> None:
    """Yardsticks alone would be a table that answers another question."""
    none = tuple(
        replace(mover, lacking={"rdma": "no RDMA device"}) if "rdma" in mover.protocols else mover
        for mover in MOVERS
    )
    with pytest.raises(InputError, match="no backend on this host moves bytes over rdma") as caught:
        build(Axes(protocols=("rdma",)), none)
    assert "over rdma: no RDMA device" in caught.value.message
    assert build(Axes(protocols=("rdma", "tcp")), none).cases
    assert build(Axes(protocols=("tcp",)), none).cases


def test_sizes_beyond_memory_are_left_out_with_the_reason() -> None:
    found = build(Axes(backends=("tcp",), sizes=((4096, 1), (1 << 30, 8))), MOVERS, memory_bytes=4 << 30)
    assert {case.block_bytes for case in found.cases} == {4096}
    (left,) = found.left
    assert left.cases == 2
    assert "its buffers need 17.2 GB of 4.29 GB free memory" in left.reason


def test_fan_in_and_fan_out_but_not_both() -> None:
    found = build(Axes(backends=("tcp",), initiators=(1, 4), targets=(1, 2)), MOVERS)
    assert {(case.initiators, case.targets) for case in found.cases} == {(1, 1), (4, 1), (1, 2)}
    assert "fan-in or fan-out" in found.left[0].reason


def test_a_store_gets_one_object_for_a_block_of_all_layers() -> None:
    axes = Axes(
        backends=("tcp",), ops=("write",), sizes=((2048, 16),), regions=96, block_pieces=96, merged=True
    )
    (pieces,) = build(axes, MOVERS).cases
    (whole,) = build(replace(axes, whole_blocks=frozenset({"tcp"})), MOVERS).cases
    assert (pieces.block_bytes, pieces.batch_size, pieces.regions) == (2048, 16, 96)
    assert (whole.block_bytes, whole.batch_size, whole.regions) == (2048 * 96, 16, 1)
    assert (whole.merged, pieces.merged) == (False, True)
    assert whole.nbytes == pieces.nbytes
    # Halves of a block: twice as many pieces in each of half as many regions.
    halves = replace(axes, sizes=((2048, 32),), regions=48, whole_blocks=frozenset({"tcp"}))
    assert build(halves, MOVERS).cases[0].key == whole.key


def test_memory_counts_every_side() -> None:
    (case,) = build(
        Axes(backends=("tcp",), initiators=(4,), ops=("write",), sizes=((1024, 2),)), MOVERS
    ).cases
    assert memory_needed(case) == 4 * 2048 + 4 * 2048


@pytest.mark.parametrize(("axes", "words"), [
    (Axes(backends=("carrier_pigeon",)), "unknown transfer backend 'carrier_pigeon'"),
    (Axes(backends=("tcp",), protocols=("cma",)), "tcp does not support it"),
    (Axes(backends=("memcpy",), remote=True), "within one host"),
    (Axes(backends=("tcp",), memory="cuda"), "host memory"),
])  # fmt: skip
def test_nothing_left_is_an_error_with_the_reason(axes: Axes, words: str) -> None:
    with pytest.raises(InputError, match=words):
        build(axes, MOVERS)


def test_the_full_matrix_is_large_and_bounded() -> None:
    found = build(Axes.full(), MOVERS)
    assert len(found.cases) > 500
    assert max(case.nbytes for case in found.cases) <= matrices.FULL_LIMIT_BYTES
    assert {case.protocol for case in found.cases if case.backend == "nixl"} == {"tcp", "cma"}
    assert found.estimate_s(1.0) > len(found.cases)


@given(
    nics=st.sets(st.sampled_from((1, 2, 4, 8)), min_size=1),
    threads=st.sets(st.integers(1, 8), min_size=1, max_size=3),
    sizes=st.sets(st.tuples(st.integers(1, 1 << 24), st.integers(1, 64)), min_size=1, max_size=5),
    scattered=st.booleans(),
)
def test_every_combination_is_there_once(
    nics: set[int], threads: set[int], sizes: set[tuple[int, int]], scattered: bool
) -> None:
    axes = Axes(
        backends=("tcp",), nics=tuple(nics), threads=tuple(threads), sizes=tuple(sizes), scattered=scattered
    )
    found = build(axes, MOVERS)
    wanted = set(product(nics, threads, sizes, ("read", "write")))
    listed = [(case.nics, case.threads, (case.block_bytes, case.batch_size), case.op) for case in found.cases]
    assert (len(listed), set(listed)) == (len(wanted), wanted)
    assert len({case.key for case in found.cases}) == len(listed)
    assert found.estimate_s(1.0) >= len(listed)


def test_the_estimate_is_the_sum_of_its_parts() -> None:
    cases = build(Axes(backends=("tcp",), nics=(1,)), MOVERS).cases
    fills = sum(memory_needed(case) for case in cases) / 0.5e9
    largest = max(memory_needed(case) for case in cases) / 0.5e9
    parts = 0.8 + largest + fills + len(cases) * 0.35  # a worker's start, buffers, what each case takes
    assert estimate_s(cases, 2.0) == pytest.approx(parts + len(cases) * 2.0 * 1.2)
    assert estimate_s([], 2.0) == 0.0
    # 20 calls at the line rate, but no more than 5 s of them.
    windows = sum(max(2.0, min(5.0, 20 * case.nbytes / 0.05e9)) for case in cases) * 1.2
    assert estimate_s(cases, 2.0, nic_gb_per_s=0.05) == pytest.approx(parts + windows)
    assert windows > len(cases) * 2.4


def test_a_slow_nic_makes_the_estimate_longer() -> None:
    found = build(Axes(backends=("tcp",), nics=(1,)), MOVERS)
    assert found.estimate_s(0.5, nic_gb_per_s=0.0125) > found.estimate_s(0.5, nic_gb_per_s=12.5)
