"""The pure parts of the transfer backends: runs, spans, packing, what logs say."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench import connectors
from kvbench.core.gates.evidence import EMULATED, LoggedTransport
from kvbench.deployment.diagnose import LogSource, LogWatch
from kvbench.transfer import mooncake, nccl, nixl
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
from kvbench.transfer.parts.transport_log import TransportReader, gpu_transport

SIDES = ("initiator", "target")
GPU = Path(__file__).parents[1] / "recorded" / "gpu"
IDS = st.lists(st.integers(0, 200), unique=True, max_size=60)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    local = draw(IDS)
    remote = draw(st.lists(st.integers(0, 200), unique=True, min_size=len(local), max_size=len(local)))
    return local, remote


@given(pairs())
def test_runs_cover_each_pair_once(ids: tuple[list[int], list[int]]) -> None:
    covered = [(run.local + k, run.remote + k) for run in merge_runs(*ids) for k in range(run.blocks)]
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
    agent = "UCX  INFO    agent self cfg#0 rma_am(tcp/lo)  amo_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"
    peer = "UCX  INFO    agent intra-node cfg#1 rma(cma/memory)  amo_am(tcp/lo)  am(tcp/lo)"
    assert (nixl.transport_in_log([agent]), nixl.transport_in_log([agent, peer])) == ("", "cma/memory")
    assert nixl.transport_in_log([agent.replace("self cfg#0", "inter-node cfg#2")]) == "tcp/lo"
    beside = "UCX  INFO    agent intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)"
    assert nixl.transport_in_log([agent, beside]) == "cma/memory"
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
        ("tcp", 0, "tcp"), ("tcp", 1, "tcp,cuda_copy"), ("cma,tcp", 8, "cma,tcp,cuda_copy"),
        ("tcp,cuda", 1, "tcp,cuda"), ("all", 1, "all"), ("^rc", 1, "^rc"),
    ],
)  # fmt: skip
def test_host_memory_beside_a_gpu_needs_cuda_copy(tls: str, gpus: int, set_to: str) -> None:
    """NIXL 1.5 refused UCX_TLS=tcp on an H200 even for host memory: `tests/recorded/gpu/h200.jsonl`."""
    assert nixl.with_cuda_copy(tls, gpus) == set_to


@pytest.mark.parametrize("transport", ["p2p", "tcp"])
def test_the_transport_is_read_from_nccls_log(transport: str) -> None:
    assert nccl.transport_in_log((GPU / f"nccl-{transport}.log").read_text().splitlines()) == transport


@pytest.mark.parametrize(
    ("protocol", "apart"), [("tcp", True), ("rdma", True), ("shm", False), ("p2p", False)]
)
def test_two_ranks_on_one_gpu_are_hosts_of_their_own_for_a_network(protocol: str, apart: bool) -> None:
    """NCCL_P2P_DISABLE did not keep NCCL 2.31.2 from P2P within an H200: `nccl-p2p.log`."""
    hosts = [nccl.env({"protocol": protocol, "role": role}).get("NCCL_HOSTID") for role in SIDES]
    assert hosts == (list(SIDES) if apart else [None, None])


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


RECORDED = Path(__file__).parents[1] / "recorded"


def lines(name: str) -> list[str]:
    return (RECORDED / name).read_text("utf-8").splitlines()


def read(name: str, operation: str) -> list[LoggedTransport]:
    reader = TransportReader("decode-0", operation)
    reader.feed(lines(name))
    return reader.found()


def test_a_real_read_over_tcp_is_emulated_though_writes_are_not() -> None:
    (found,) = read("ucx/read-over-tcp.log", "read")
    assert (found.transports, found.how, found.between) == (("tcp/lo",), EMULATED, "intra-node")
    assert (found.local, found.remote, found.gpu) == ("host", "host", False)
    (written,) = read("ucx/read-over-tcp.log", "write")
    assert (written.transports, written.how) == (("tcp/lo", "tcp/eth0"), "zero-copy")


def test_a_real_read_by_ucx_s_own_choice_is_a_memory_copy() -> None:
    (found,) = read("ucx/read-over-cma.log", "read")
    assert (found.transports, found.how) == (("cma/memory",), "zero-copy")
    assert found.text() == "cma/memory by zero-copy (read from host into host memory, intra-node)"


def test_a_pull_of_gpu_memory_without_nvlink_is_seen() -> None:
    (found,) = read("written/ucx-52607.log", "read")
    assert found.gpu
    assert (found.transports, found.how) == (("tcp/eth1",), EMULATED)
    assert "cuda_ipc" not in found.line
    (pushed,) = read("written/ucx-52607-push.log", "write")
    assert pushed.gpu
    assert (pushed.transports, pushed.how) == (("cuda_ipc/cuda",), "zero-copy")


def test_on_a_real_gpu_writes_took_cuda_ipc_and_reads_tcp() -> None:
    """An H200, one process to another: both operations of one connection, with cuda_ipc among its lanes."""
    (written,) = read("ucx/gpu-write-and-read.log", "write")
    assert (written.transports, written.how, written.gpu) == (("cuda_ipc/cuda",), "zero-copy", True)
    (found,) = read("ucx/gpu-write-and-read.log", "read")
    assert (found.transports, found.how, found.gpu) == (("tcp/lo",), EMULATED, True)


@pytest.mark.parametrize(("op", "transport"), [("write", "ucx:cuda_ipc/cuda"), ("read", "ucx:tcp/lo")])
def test_a_transfer_between_gpus_names_its_own_transport(op: str, transport: str) -> None:
    assert gpu_transport(lines("ucx/gpu-write-and-read.log"), op) == transport
    assert gpu_transport(lines("ucx/read-over-tcp.log"), op) == ""


def lanes(text: str) -> str:
    return f"[1795390662.0] [host:7:0] ucp_worker.c:1997 UCX  INFO    agent {text}"


@pytest.mark.parametrize(
    ("texts", "names"),
    [
        (["inter-node cfg#2 rma_am(tcp/eth1)  amo_am(tcp/eth1)  am(tcp/eth1)  ka(tcp/eth1)"], ["tcp/eth1"]),
        (["intra-node cfg#2 rma_am(tcp/a)  am(tcp/a cuda_ipc/cuda)  ka(tcp/a)"], []),
        (["self cfg#0 rma_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"], []),
        (["inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)"], ["rc_mlx5/mlx5_0:1"]),
        (["intra-node cfg#1 rma(rc_mlx5/a:1)  am(rc_mlx5/a:1 cma/memory)", "inter-node cfg#2 am(tcp/b)"], []),
    ],
)
def test_lanes_prove_a_transport_only_where_they_leave_no_choice(texts: list[str], names: list[str]) -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(lanes(text) for text in texts)
    assert [name for transport in reader.found() for name in transport.transports] == names


TABLE = """
[1.0] [n:9:0]   | ucp_context_0 intra-node cfg#1 | remote memory {what}    |
[1.0] [n:9:0] | 0..220 | short        | tcp/x                                  |
[1.0] [n:9:0] | 221..3371787874 | copy-in | rc_mlx5/mlx5_2:1 50% on path0 and 50% on path1 |
[1.0] [n:9:0] | 3371787875..inf | zero-copy | 72% on rc_mlx5/mlx5_2:1 and 28% on dc_mlx5/m3:1 |
""".splitlines()


def test_the_row_of_a_kv_block_s_size_counts() -> None:
    """As ai-dynamo/nixl issue 1240 shows it: the last row is for transfers of gigabytes."""
    reader = TransportReader("prefill-0", "write")
    reader.feed(line.format(what="write by ucp_put* from host memory to cuda/dev[1]") for line in TABLE)
    (found,) = reader.found()
    assert (found.transports, found.how, found.gpu) == (("rc_mlx5/mlx5_2:1",), "copy-in", False)
    reader.feed(line.format(what="write by ucp_put* from cuda/GPU0 to cuda/dev[1]") for line in TABLE)
    (found,) = reader.found()
    assert found.gpu


def test_a_later_table_of_the_same_operation_replaces_the_first() -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(lines("written/ucx-52607.log"))
    reader.feed(
        line.replace("software emulation", "zero-copy").replace("tcp/eth1", "cuda_ipc/cuda")
        for line in lines("written/ucx-52607.log")
    )
    assert [transport.transports for transport in reader.found()] == [("cuda_ipc/cuda",)]


def test_processes_of_one_log_do_not_mix_up_their_tables() -> None:
    one = lines("written/ucx-52607.log")
    other = [line.replace(":1570878:", ":99:").replace("read by ucp_get", "am by ucp_am") for line in one]
    reader = TransportReader("decode-0", "read")
    reader.feed(line for pair in zip(one, other, strict=True) for line in pair)
    assert [transport.how for transport in reader.found()] == [EMULATED]


MOONCAKE_TCP = "I1023 22:08:09.675581 67953 tcp_transport.cpp:306] TcpTransport: listen on port 15535"
MOONCAKE_RDMA = (
    "I0401 19:40:09.461735 59598 rdma_context.cpp:140] RDMA device: mlx5_bond_1, LID: 0, GID: (GID"
)


def test_mooncake_s_engine_names_what_it_started() -> None:
    reader = TransportReader("prefill-0")
    reader.feed(["Topology discovery complete. Found 0 HCAs.", MOONCAKE_TCP])
    assert [transport.transports for transport in reader.found()] == [("tcp",)]
    reader.feed([MOONCAKE_RDMA])
    assert [transport.transports for transport in reader.found()] == [("rdma/mlx5_bond_1",)]


@given(st.lists(st.text(max_size=80)))
def test_any_line_may_come(texts: list[str]) -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(texts)
    assert reader.found() == []


def test_logs_are_followed_from_the_start_of_their_process(tmp_path: Path) -> None:
    log, watch = tmp_path / "decode-0.log", LogWatch()
    watch.follow(log, LogSource("decode-0", "vllm", "NixlConnector", "decode", kv_operation="read"))
    log.write_text("\n".join(lines("written/ucx-52607.log")) + "\n", "utf-8")
    assert watch.poll() is None
    (found,) = watch.transports()
    assert (found.process, found.how) == ("decode-0", EMULATED)
    assert watch.take() == []


def test_lanes_of_the_passive_side_say_nothing_of_the_kv(tmp_path: Path) -> None:
    """P's own connection is for messages, and may go over TCP where D reads over RDMA."""
    watch = LogWatch()
    logs = {
        "prefill-0": [lanes("inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)  ka(tcp/eth0)")],
        "decode-0": [lanes("inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)")],
    }
    for name in logs:
        source = LogSource(name, "vllm", "NixlConnector", name.partition("-")[0], kv_operation="read")
        watch.follow(tmp_path / name, source)
    for name, text in logs.items():
        (tmp_path / name).write_text("\n".join([*text, ""]), "utf-8")
    watch.poll()
    assert [transport.transports for transport in watch.transports()] == [("rc_mlx5/mlx5_0:1",)]
    (tmp_path / "decode-0").write_text(
        "\n".join([*logs["decode-0"], *lines("ucx/read-over-cma.log"), ""]), "utf-8"
    )
    watch.poll()
    assert [transport.transports for transport in watch.transports()] == [("cma/memory",)]


def test_connectors_over_ucx_have_it_tell_its_way() -> None:
    for name, operation in (("nixl", "read"), ("nixl_push", "write"), ("multi", "read"), ("mooncake", "")):
        connector = connectors.get(name)
        assert connector.kv_operation == operation
        env = connector.env("decode", connector.options_model(), 5600)
        assert (env.get("UCX_LOG_LEVEL"), env.get("UCX_PROTO_INFO")) == (
            ("info", "y") if operation else (None, None)
        )
