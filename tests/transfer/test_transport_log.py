"""The transport that a log proves: real UCX logs, the recorded case of vLLM issue 52607, Mooncake's lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench import connectors
from kvbench.core.gates.evidence import EMULATED, LoggedTransport
from kvbench.deployment.diagnose import LogSource, LogWatch
from kvbench.transfer.parts.transport_log import TransportReader, gpu_transport

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
    ("said", "names"),
    [
        (["inter-node cfg#2 rma_am(tcp/eth1)  amo_am(tcp/eth1)  am(tcp/eth1)  ka(tcp/eth1)"], ["tcp/eth1"]),
        (["intra-node cfg#2 rma_am(tcp/a)  am(tcp/a cuda_ipc/cuda)  ka(tcp/a)"], []),
        (["self cfg#0 rma_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"], []),
        (["inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)"], ["rc_mlx5/mlx5_0:1"]),
        (["intra-node cfg#1 rma(rc_mlx5/a:1)  am(rc_mlx5/a:1 cma/memory)", "inter-node cfg#2 am(tcp/b)"], []),
    ],
)
def test_lanes_prove_a_transport_only_where_they_leave_no_choice(said: list[str], names: list[str]) -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(lanes(each) for each in said)
    assert [name for each in reader.found() for name in each.transports] == names


TABLE = """
[1.0] [n:9:0]   | ucp_context_0 intra-node cfg#1 | remote memory {what}    |
[1.0] [n:9:0] | 0..220 | short        | tcp/x                                  |
[1.0] [n:9:0] | 221..3371787874 | copy-in | rc_mlx5/mlx5_2:1 50% on path0 and 50% on path1 |
[1.0] [n:9:0] | 3371787875..inf | zero-copy | 72% on rc_mlx5/mlx5_2:1 and 28% on dc_mlx5/m3:1 |
""".splitlines()


def test_the_row_of_a_kv_block_s_size_counts() -> None:
    """As ai-dynamo/nixl issue 1240 shows it: the last row is for transfers of gigabytes."""
    reader = TransportReader("prefill-0", "write")
    reader.feed(each.format(what="write by ucp_put* from host memory to cuda/dev[1]") for each in TABLE)
    (found,) = reader.found()
    assert (found.transports, found.how, found.gpu) == (("rc_mlx5/mlx5_2:1",), "copy-in", False)
    reader.feed(each.format(what="write by ucp_put* from cuda/GPU0 to cuda/dev[1]") for each in TABLE)
    (found,) = reader.found()
    assert found.gpu


def test_a_later_table_of_the_same_operation_replaces_the_first() -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(lines("written/ucx-52607.log"))
    reader.feed(
        each.replace("software emulation", "zero-copy").replace("tcp/eth1", "cuda_ipc/cuda")
        for each in lines("written/ucx-52607.log")
    )
    assert [each.transports for each in reader.found()] == [("cuda_ipc/cuda",)]


def test_processes_of_one_log_do_not_mix_up_their_tables() -> None:
    one = lines("written/ucx-52607.log")
    other = [each.replace(":1570878:", ":99:").replace("read by ucp_get", "am by ucp_am") for each in one]
    reader = TransportReader("decode-0", "read")
    reader.feed(line for pair in zip(one, other, strict=True) for line in pair)
    assert [each.how for each in reader.found()] == [EMULATED]


MOONCAKE_TCP = "I1023 22:08:09.675581 67953 tcp_transport.cpp:306] TcpTransport: listen on port 15535"
MOONCAKE_RDMA = (
    "I0401 19:40:09.461735 59598 rdma_context.cpp:140] RDMA device: mlx5_bond_1, LID: 0, GID: (GID"
)


def test_mooncake_s_engine_names_what_it_started() -> None:
    reader = TransportReader("prefill-0")
    reader.feed(["Topology discovery complete. Found 0 HCAs.", MOONCAKE_TCP])
    assert [each.transports for each in reader.found()] == [("tcp",)]
    reader.feed([MOONCAKE_RDMA])
    assert [each.transports for each in reader.found()] == [("rdma/mlx5_bond_1",)]


@given(st.lists(st.text(max_size=80)))
def test_any_line_may_come(said: list[str]) -> None:
    reader = TransportReader("decode-0", "read")
    reader.feed(said)
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
    said = {
        "prefill-0": [lanes("inter-node cfg#1 rma_am(tcp/eth0)  am(tcp/eth0)  ka(tcp/eth0)")],
        "decode-0": [lanes("inter-node cfg#1 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)")],
    }
    for name in said:
        role = name.partition("-")[0]
        source = LogSource(name, "vllm", "NixlConnector", role, kv_operation="read")
        watch.follow(tmp_path / name, source)
    for name, text in said.items():
        (tmp_path / name).write_text("\n".join([*text, ""]), "utf-8")
    watch.poll()
    assert [each.transports for each in watch.transports()] == [("rc_mlx5/mlx5_0:1",)]
    (tmp_path / "decode-0").write_text(
        "\n".join([*said["decode-0"], *lines("ucx/read-over-cma.log"), ""]), "utf-8"
    )
    watch.poll()
    assert [each.transports for each in watch.transports()] == [("cma/memory",)]


def test_connectors_over_ucx_have_it_tell_its_way() -> None:
    for name, operation in (("nixl", "read"), ("nixl_push", "write"), ("multi", "read"), ("mooncake", "")):
        connector = connectors.get(name)
        assert connector.kv_operation == operation
        told = connector.env("decode", connector.options_model(), 5600)
        assert (told.get("UCX_LOG_LEVEL"), told.get("UCX_PROTO_INFO")) == (
            ("info", "y") if operation else (None, None)
        )
