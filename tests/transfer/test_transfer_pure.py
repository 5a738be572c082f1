"""The pure parts of the transfer backends: runs, spans, packing, what logs say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.transfer import mooncake, nixl
from kvbench.transfer.base import Layout
from kvbench.transfer.parts.blocks import (
    BlockSpan,
    merge_runs,
    pack_ids,
    paired_spans,
    spans,
    split_spans,
    unpack_ids,
)

IDS = st.lists(st.integers(0, 200), unique=True, max_size=60)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    local = draw(IDS)
    remote = draw(st.lists(st.integers(0, 200), unique=True, min_size=len(local), max_size=len(local)))
    return local, remote


@given(pairs())
def test_runs_cover_each_pair_once(ids: tuple[list[int], list[int]]) -> None:
    runs = merge_runs(*ids)
    covered = [(run.local + k, run.remote + k) for run in runs for k in range(run.blocks)]
    assert sorted(covered) == sorted(zip(*ids, strict=True))
    assert len(set(covered)) == len(covered)


@given(pairs())
def test_runs_are_the_fewest(ids: tuple[list[int], list[int]]) -> None:
    wanted = set(zip(*ids, strict=True))
    assert len(merge_runs(*ids)) == len({(a, b) for a, b in wanted if (a - 1, b - 1) not in wanted})


def test_blocks_handed_out_backwards_are_one_run() -> None:
    assert merge_runs([5, 4, 3], [15, 14, 13]) == [(3, 13, 3)]


@given(pairs(), st.integers(1, 5), st.integers(1, 4096))
def test_spans_cover_every_region(ids: tuple[list[int], list[int]], regions: int, size: int) -> None:
    local, remote = Layout(regions, 201, size), Layout(regions, 301, size)
    wanted = spans(merge_runs(*ids), local, remote)
    assert sum(span.nbytes for span in wanted) == len(ids[0]) * regions * size
    for span in wanted:
        assert 0 <= span.local <= local.nbytes - span.nbytes
        assert 0 <= span.remote <= remote.nbytes - span.nbytes
    firsts = {(span.local, span.remote) for span in wanted}
    for region in range(regions):
        for run in merge_runs(*ids):
            assert (local.offset(region, run.local), remote.offset(region, run.remote)) in firsts


@given(st.lists(st.integers(0, 1000), max_size=80))
def test_packing_keeps_ids_and_their_order(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


def test_packing_is_short_for_runs() -> None:
    assert pack_ids(range(100, 2148)) == {"runs": [100, 2048]}
    assert pack_ids([3, 1, 7]) == {"ids": [3, 1, 7]}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_streams_share_all_bytes_about_equally(sizes: list[int], parts: int) -> None:
    wanted, at = [], 0
    for size in sizes:
        wanted.append(BlockSpan(at, 10_000 + at, size))
        at += size + 1
    dealt = split_spans(wanted, parts)
    assert 1 <= len(dealt) <= parts
    moved = [n for part in dealt for span in part for n in range(span.local, span.local + span.nbytes)]
    assert moved == [n for span in wanted for n in range(span.local, span.local + span.nbytes)]
    assert all(span.remote - span.local == 10_000 for part in dealt for span in part)
    assert max(sum(s.nbytes for s in part) for part in dealt) <= -(-sum(sizes) // parts)


def test_mooncake_names_its_transport_in_its_log() -> None:
    tcp = ["I1121 13:45:15.71 1 tcp_transport.cpp:391] TcpTransport: listen on port 16382"]
    rdma = ["I0814 10:00:00.0 1 multi_transport.cpp:90] installTransport, type=rdma"]
    assert (mooncake.transport_in_log(tcp), mooncake.transport_in_log(rdma)) == ("tcp", "rdma")
    assert mooncake.transport_in_log(["nothing of that kind"]) == ""


def test_ucx_names_the_lane_of_a_peer_in_its_log() -> None:
    own = "UCX  INFO    agent self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"
    peer = "UCX  INFO    agent intra-node cfg#1 rma(cma/memory)  amo_am(tcp/lo)  am(tcp/lo)"
    assert (nixl.transport_in_log([own]), nixl.transport_in_log([own, peer])) == ("", "cma/memory")
    assert nixl.transport_in_log([own.replace("self cfg#0", "inter-node cfg#2")]) == "tcp/lo"
    beside = "UCX  INFO    agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
    assert nixl.transport_in_log([own, beside]) == "cma/memory"
    several = "UCX  INFO    agent inter-node cfg#1 rma_am(tcp/a)  am(tcp/a tcp/b)  ka(tcp/a)"
    assert nixl.transport_in_log([several]) == "tcp/a tcp/b"
    rails = "UCX  INFO    agent inter-node cfg#1 rma(tcp/a tcp/b)  am(tcp/a)"
    assert nixl.transport_in_log([rails]) == "tcp/a tcp/b"


def pci_device(root: Path, address: str, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_nvidia_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    assert nixl.nvidia_gpus(tmp_path) == 0
    pci_device(tmp_path, "0000:00:06.0", "0x10de", "0x030200")
    pci_device(tmp_path, "0000:00:07.0", "0x10de", "0x030000")
    pci_device(tmp_path, "0000:00:08.0", "0x10de", "0x068000")  # an NVSwitch
    pci_device(tmp_path, "0000:00:09.0", "0x1002", "0x030000")
    assert nixl.nvidia_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("tls", "gpus", "set_to"),
    [
        ("tcp", 0, "tcp"),
        ("tcp", 1, "tcp,cuda_copy"),
        ("cma,tcp", 8, "cma,tcp,cuda_copy"),
        ("tcp,cuda", 1, "tcp,cuda"),
        ("all", 1, "all"),
        ("^rc", 1, "^rc"),
    ],
)
def test_host_memory_beside_a_gpu_needs_cuda_copy(tls: str, gpus: int, set_to: str) -> None:
    """NIXL 1.5 refused UCX_TLS=tcp on an H200 even for host memory: `tests/recorded/gpu/h200.jsonl`."""
    assert nixl.with_cuda_copy(tls, gpus) == set_to


def test_a_named_protocol_never_lets_cuda_ipc_take_over() -> None:
    tls = {
        name: nixl.ucx_env({"memory": "cuda", "protocol": name}, name)["UCX_TLS"].split(",")
        for name in nixl.TLS
    }
    assert [name for name, transports in tls.items() if "cuda_ipc" in transports] == ["cuda_ipc"]
    assert all("cuda_copy" in transports for transports in tls.values())


@given(pairs(), st.integers(1, 5))
def test_without_merging_each_block_of_each_region_is_a_span(
    ids: tuple[list[int], list[int]], regions: int
) -> None:
    local, remote = Layout(regions, 201, 512), Layout(regions, 301, 512)
    wanted = paired_spans(*ids, local, remote, merge=False)
    assert len(wanted) == len(ids[0]) * regions
    assert {span.nbytes for span in wanted} <= {512}
    merged = paired_spans(*ids, local, remote)

    def moved(some: list[BlockSpan]) -> set[tuple[int, int]]:
        return {(s.local + n, s.remote + n) for s in some for n in range(0, s.nbytes, 512)}

    assert moved(wanted) == moved(merged)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 200))
def test_small_parts_stay_whole(sizes: list[int], parts: int, least: int) -> None:
    wanted = [BlockSpan(1000 * n, 1000 * n, size) for n, size in enumerate(sizes)]
    dealt = split_spans(wanted, parts, least)
    assert len(dealt) <= max(parts, 1)
    if parts > 1:
        assert all(sum(s.nbytes for s in part) >= least for part in dealt[:-1])
    assert sum(s.nbytes for part in dealt for s in part) == sum(sizes)
