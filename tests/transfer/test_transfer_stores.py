"""Stores, two-sided libraries and foreign connectors behind the transfer contract, where installed."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from emulated import free_port
from faults import Seen
from loops import on_asyncio
from processes import below, lives

from kvbench import transfer
from kvbench.core.transfers.records import Case
from kvbench.errors import TransferError
from kvbench.microbench.cases import run_cases
from kvbench.microbench.options import Settings
from kvbench.transfer import mooncake_store, nccl, omni, yuanrong
from kvbench.transfer.base import Layout
from kvbench.transfer.parts.control import ControlChannel, Door, Threads, dial
from kvbench.transfer.parts.stores.omniexample import ExampleConnector
from tests.transfer.test_transfer import DEADLINE_S, Side, _problem, freeze, move_and_verify, side

LAYOUT = Layout(regions=2, blocks=48, block_bytes=4096)
SLOW_S = 20.0
OPT_IN = os.environ.get("KVBENCH_OPT_IN") == "1"
OPTIONAL = {"gloo", "yuanrong"}
on_loop = on_asyncio


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.native) for name in ("mooncake_store", "omni")])
def store(request: pytest.FixtureRequest) -> str:
    return _needed(str(request.param))


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.native) for name in sorted(OPTIONAL)])
def optional(request: pytest.FixtureRequest) -> str:
    if not OPT_IN:
        pytest.skip("runs with KVBENCH_OPT_IN=1 only")
    return _needed(str(request.param))


@pytest.fixture
def mooncake() -> str:
    return _needed("mooncake_store")


def _needed(name: str) -> str:
    if (problem := _problem(name)) is not None:
        pytest.skip(f"{name}: {problem.reason} ({problem.fix})")
    return name


def until(what: Any, message: str) -> None:
    """Wait for a condition, with a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end, message
        time.sleep(0.01)


def masters_of(pid: int) -> list[psutil.Process]:
    return below("mooncake_master", of=pid)


class Two:
    """An initiator and a target in their processes, connected."""

    def __init__(self, name: str, options: dict[str, Any] | None = None, layout: Layout = LAYOUT) -> None:
        given = options or {}
        self._here = side(name, layout, {**given, "role": "initiator"})
        self._there = side(name, layout, {**given, "role": "target"})

    async def __aenter__(self) -> tuple[Side, Side, str]:
        there = await self._there.__aenter__()
        try:
            here = await self._here.__aenter__()
            there.pool[:] = os.urandom(there.layout.nbytes)
            return here, there, await here.process.connect(there.process.agent, DEADLINE_S)
        except BaseException:
            await self._there.__aexit__(None, None, None)
            raise

    async def __aexit__(self, *error: Any) -> None:
        await self._here.__aexit__(*error)
        await self._there.__aexit__(*error)


# Through a store
async def test_writes_are_collected_and_offers_are_read(store: str) -> None:
    async with Two(store) as (here, there, peer):
        for seed in (1, 2):
            await move_and_verify(here, there, peer, "write", 20, seed=seed)
            await move_and_verify(here, there, peer, "read", 20, seed=seed)
        await the_newest_write_counts(here, there, peer)
        await a_new_offer_replaces_the_old_one(here, there, peer)
        await an_initiator_is_no_target(here, there)


async def the_newest_write_counts(here: Side, there: Side, peer: str) -> None:
    blocks = list(range(LAYOUT.blocks))
    for fill in range(1, 4):
        here.pool[:] = bytes([fill]) * LAYOUT.nbytes
        await here.process.transfer(peer, "write", blocks, blocks, DEADLINE_S)
    await there.process.collect(blocks, DEADLINE_S)
    assert there.pool[:] == here.pool[:]


async def a_new_offer_replaces_the_old_one(here: Side, there: Side, peer: str) -> None:
    for fill in (7, 8):
        there.pool[:] = bytes([fill]) * LAYOUT.nbytes
        await there.process.offer([3, 4], DEADLINE_S)
        await here.process.transfer(peer, "read", [0, 1], [3, 4], DEADLINE_S)
        assert here.block(1, 0) == there.block(1, 3) == bytes([fill]) * LAYOUT.block_bytes


async def an_initiator_is_no_target(here: Side, there: Side) -> None:
    with pytest.raises(TransferError, match="opened as an initiator"):
        await there.process.connect(here.process.agent, DEADLINE_S)
    with pytest.raises(TransferError, match="no store to offer"):
        await here.process.offer([0], DEADLINE_S)


async def test_what_was_not_offered_cannot_be_read(store: str) -> None:
    async with Two(store) as (here, there, peer):
        await there.process.offer([1], DEADLINE_S)
        before = here.pool[:]
        with pytest.raises(TransferError, match="block 2 of region 0 cannot be read"):
            await here.process.transfer(peer, "read", [0, 1], [1, 2], DEADLINE_S)
        assert here.pool[:] == before


async def test_several_initiators_write_to_one_target(store: str) -> None:
    async with Two(store) as (here, there, peer), side(store, LAYOUT, {"role": "initiator"}) as other:
        also = await other.process.connect(there.process.agent, DEADLINE_S)
        other.pool[:] = os.urandom(LAYOUT.nbytes)
        first_blocks, theirs = list(range(24)), list(range(24, 48))
        await asyncio.gather(
            here.process.transfer(peer, "write", first_blocks, first_blocks, DEADLINE_S),
            other.process.transfer(also, "write", theirs, theirs, DEADLINE_S),
        )
        await there.process.collect(range(LAYOUT.blocks), DEADLINE_S)
        for region in range(LAYOUT.regions):
            assert all(there.block(region, b) == here.block(region, b) for b in first_blocks)
            assert all(there.block(region, b) == other.block(region, b) for b in theirs)


async def test_killed_target_is_an_error(store: str) -> None:
    async with Two(store) as (here, there, peer):
        await there.process.offer([0], DEADLINE_S)
        os.kill(there.process.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(TransferError):
            await here.process.transfer(peer, "read", [0], [0], 2.0)
        assert time.monotonic() - began < 2.0 + DEADLINE_S
        with pytest.raises(TransferError, match="cannot reach"):
            await here.process.connect(there.process.agent, DEADLINE_S)


async def test_frozen_target_ends_at_our_deadline(store: str) -> None:
    async with Two(store) as (here, there, peer):
        blocks = list(range(LAYOUT.blocks))
        await there.process.offer(blocks, DEADLINE_S)
        freeze(there.process.pid)
        with pytest.raises(TransferError, match=r"did not end within 0\.4 s"):
            await here.process.transfer(peer, "read", blocks, blocks, 0.4)
        with pytest.raises(TransferError, match=r"within 0\.4 s"):
            await here.process.connect(there.process.agent, 0.4)


def test_measured_end_to_end(store: str) -> None:
    cases = [
        Case(store, transfer.get(store).protocols[0], op, 65536, 4, threads=threads)  # type: ignore[arg-type]
        for op, threads in (("write", 2), ("read", 1))
    ]
    records = list(run_cases(cases, settings=Settings(seconds=0.1, min_calls=8)))
    assert [(record.status, record.error) for record in records] == [("ok", "")] * len(cases)
    for record in records:
        assert record.verified is True
        assert (record.transport, record.descriptors) == ("tcp", 4)
        assert record.calls >= 8


# Mooncake Store
async def test_thousands_of_objects_at_once(mooncake: str) -> None:
    layout = Layout(regions=16, blocks=256, block_bytes=512)

    async with Two(mooncake, layout=layout) as (here, there, peer):
        orders = [list(range(first, 256, 4)) for first in range(4)]
        await asyncio.gather(
            *(here.process.transfer(peer, "write", order, order, SLOW_S) for order in orders)
        )
        await there.process.collect(range(256), SLOW_S)
        assert there.pool[:] == here.pool[:]


async def test_replaced_objects_make_room(mooncake: str) -> None:
    """Many times the segment is written through it."""
    layout = Layout(regions=1, blocks=8, block_bytes=1 << 20)

    async with Two(mooncake, {"segment_bytes": 32 << 20}, layout) as (here, there, peer):
        blocks = list(range(8))
        for fill in range(16):
            here.pool[:] = bytes([fill]) * layout.nbytes
            await here.process.transfer(peer, "write", blocks, blocks, DEADLINE_S)
        await there.process.collect(blocks, DEADLINE_S)
        assert there.pool[:] == here.pool[:]


async def test_a_segment_that_is_too_small_is_said_before(mooncake: str) -> None:
    layout = Layout(regions=1, blocks=8, block_bytes=4 << 20)

    async with Two(mooncake, {"segment_bytes": 32 << 20}, layout) as (here, _, peer):
        blocks = list(range(8))
        with pytest.raises(TransferError, match=r"segment of 33554432 bytes is too small: 67108864"):
            await here.process.transfer(peer, "write", blocks, blocks, DEADLINE_S)


async def test_a_segment_beyond_memory_is_refused(mooncake: str) -> None:
    with pytest.raises(TransferError, match="does not fit into"):
        async with side(mooncake, LAYOUT, {"role": "target", "segment_bytes": 1 << 50}):
            pass


async def test_redis_is_refused_before_the_library_sees_it(mooncake: str) -> None:
    server = {"mooncake_store_metadata_server": "redis://127.0.0.1:6379"}
    with pytest.raises(TransferError, match="redis"):
        async with side(mooncake, LAYOUT, server):
            pass


async def test_master_ends_with_its_owner_however_that_ends(mooncake: str) -> None:
    async with side(mooncake, LAYOUT, {"role": "target"}) as there:
        (master,) = masters_of(there.process.pid)
        os.kill(there.process.pid, signal.SIGKILL)
        until(lambda: not lives(master), "the master outlived its owner")


@pytest.mark.fault("master_killed")
async def test_killed_master_is_an_error_within_our_deadline(mooncake: str, fault: Seen) -> None:
    async with Two(mooncake) as (here, there, peer):
        (master,) = masters_of(there.process.pid)
        master.kill()
        fault.struck()
        began = time.monotonic()
        for op in ("write", "write"):
            with pytest.raises(TransferError, match=r"RPC_FAIL|did not end within 1 s|connect again") as info:
                await here.process.transfer(peer, op, [0], [0], 1.0)  # type: ignore[arg-type]
            fault.check(info.value.message)
        assert time.monotonic() - began < DEADLINE_S


@pytest.mark.fault("master_absent")
async def test_absent_master_is_known_at_once(mooncake: str, fault: Seen) -> None:
    async with Two(mooncake) as (here, there, _):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        agent = there.process.agent
        lie = {**agent, "id": "lie", "store": {**agent["store"], "master": f"127.0.0.1:{port}"}}
        fault.struck()
        with pytest.raises(TransferError, match=f"no mooncake_master answers at 127.0.0.1:{port}") as info:
            await here.process.connect(lie, 1.0)
        fault.check(info.value.message)


def metadata_at(port: int) -> dict[str, str]:
    return {"mooncake_store_metadata_server": f"http://127.0.0.1:{port}/metadata"}


@pytest.fixture
def metadata_server(mooncake: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The wheel's own, and its port."""
    port = free_port()
    code = "from mooncake.http_metadata_server import main; main()"
    words = [sys.executable, "-c", code, "--host", "127.0.0.1", "--port", str(port), "--log-level", "ERROR"]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(port), "the metadata server does not come up")
        yield process, port
    finally:
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


@pytest.mark.fault("metadata_absent")
async def test_absent_metadata_server_is_known_at_once(mooncake: str, fault: Seen) -> None:
    fault.struck()
    with pytest.raises(TransferError, match="mooncake_http_metadata_server --host") as info:
        async with side(mooncake, LAYOUT, {"role": "target", **metadata_at(free_port())}):
            pass
    fault.check(info.value.message)


async def test_a_metadata_server_is_asked_without_the_proxy_of_the_environment(
    mooncake: str, metadata_server: tuple[subprocess.Popen[bytes], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libcurl, by which Mooncake asks, would take one. Nobody listens at this."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    async with Two(mooncake, metadata_at(metadata_server[1])) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 8, seed=1)


@pytest.mark.fault("metadata_killed")
async def test_killed_metadata_server_is_told_who_comes_later(
    mooncake: str, metadata_server: tuple[subprocess.Popen[bytes], int], fault: Seen
) -> None:
    process, port = metadata_server

    async with Two(mooncake, metadata_at(port)) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 8, seed=1)
        process.kill()
        process.wait()
        fault.struck()
        async with side(mooncake, LAYOUT, {"role": "initiator", **metadata_at(port)}) as late:
            with pytest.raises(TransferError) as info:
                await late.process.connect(there.process.agent, DEADLINE_S)
        fault.check(info.value.message)
        # Those who know each other need it no more.
        await move_and_verify(here, there, peer, "write", 8, seed=2)
        await move_and_verify(here, there, peer, "read", 8, seed=3)


def test_over_tcp_there_is_one_nic() -> None:
    nics = [{"name": "a", "address": "127.0.0.1"}, {"name": "b", "address": "127.0.0.2"}]
    with pytest.raises(TransferError, match="one address"):
        mooncake_store.env({"nics": nics})
    assert mooncake_store.env({"nics": nics[1:]})["MC_TCP_BIND_ADDRESS"] == "127.0.0.2"
    assert "MC_FORCE_HCA" in mooncake_store.env({"nics": nics, "protocol": "rdma"})


def test_codes_have_names() -> None:
    assert mooncake_store.describe_code(-704).startswith("OBJECT_NOT_FOUND (-704): it was never put")
    assert mooncake_store.describe_code(-5) == "unknown code (-5)"


# VLLM-Omni's contract
class Folder:
    """A connector of another house: pickles nothing, keeps files, gives them away as often as asked."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._folder = Path(config["folder"])

    def put(self, from_stage: str, to_stage: str, put_key: str, data: bytes) -> tuple[bool, int, Any]:
        path = self._folder / f"{put_key}@{from_stage}_{to_stage}"
        path.write_bytes(data)
        return True, len(data), {"path": str(path)}

    def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> Any:
        path = Path(metadata["path"])
        return (path.read_bytes(), path.stat().st_size) if path.exists() else None

    def cleanup(self, request_id: str) -> None:
        for path in self._folder.glob(f"{request_id}@*"):
            path.unlink()

    def health(self) -> dict[str, Any]:
        return {"status": "healthy"}

    def close(self) -> None:
        pass


async def test_any_class_that_fulfils_the_contract(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1] / "support"), *sys.path]),
    )
    options = {
        "omni_connector": "test_transfer_stores:Folder",
        "omni_config": {"folder": str(tmp_path)},
        "copies": 2,
    }

    async with Two("omni", options) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 8, seed=1)
        assert list(tmp_path.iterdir()) == []
        await move_and_verify(here, there, peer, "read", 8, seed=2)
        await there.process.offer([0], DEADLINE_S)
        for _ in range(2):
            await here.process.transfer(peer, "read", [5], [0], DEADLINE_S)
        with pytest.raises(TransferError, match="all 2 copies of it have been read"):
            await here.process.transfer(peer, "read", [5], [0], DEADLINE_S)


def test_connectors_that_cannot_run_say_why() -> None:
    for protocol in transfer.get("omni").protocols:
        problem = omni.check_protocol(protocol)
        if protocol == "example":
            assert problem is None
        elif protocol == "YuanrongTransferEngineConnector":
            assert "NPU" in problem.reason
    with pytest.raises(TransferError, match=r"package\.module:Class"):
        omni.connector_class("nonsense")


def test_a_connector_that_is_not_installed_is_a_skipped_row() -> None:
    (record,) = run_cases([Case("omni", "YuanrongTransferEngineConnector", "write", 4096, 1)])
    assert record.status == "skipped"
    assert "NPU" in record.error


def test_example_connector_gives_a_key_away_once() -> None:
    serving = ExampleConnector({"host": "127.0.0.1"})
    using = ExampleConnector(serving.share())
    try:
        assert using.put("0", "1", "key", b"x" * 100_000) == (True, 100_000, None)
        assert serving.get("0", "2", "key") is None
        assert serving.get("0", "1", "key") == (b"x" * 100_000, 100_000)
        assert using.get("0", "1", "key") is None
        serving.put("0", "1", "other", b"y")
        using.cleanup("other")
        assert serving.get("0", "1", "other") is None
        assert using.health()["status"] == "healthy"
    finally:
        using.close()
        serving.close()


# Those that run where they are wanted
async def test_optional_libraries_move_bytes(optional: str) -> None:
    async with Two(optional) as (here, there, peer):
        for blocks in (1, 20):
            await move_and_verify(here, there, peer, "write", blocks, seed=blocks)
            await move_and_verify(here, there, peer, "read", blocks, seed=blocks)
        many = [here.process.transfer(peer, "write", [b], [b], DEADLINE_S) for b in range(LAYOUT.blocks)]
        await asyncio.gather(*many)
        await there.process.collect(range(LAYOUT.blocks), DEADLINE_S)
        assert there.pool[:] == here.pool[:]


def test_optional_libraries_are_measured(optional: str) -> None:
    cases = [Case(optional, "tcp", op, 65536, 4, threads=2) for op in transfer.get(optional).ops]
    for record in run_cases(cases, settings=Settings(seconds=0.1, min_calls=8, open_s=30.0)):
        assert (record.status, record.error, record.verified) == ("ok", "", True)


async def test_optional_target_killed(optional: str) -> None:
    async with Two(optional) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 4, seed=1)
        os.kill(there.process.pid, signal.SIGKILL)
        with pytest.raises(TransferError):
            await here.process.transfer(peer, "write", [0], [0], 2.0)
    if optional == "yuanrong":
        left = list(Path(tempfile.gettempdir()).glob("kvbench-yuanrong-*"))
        assert left, "the killed owner had no time to remove its worker's folder"
        yuanrong.sweep_folders()
        assert not [path for path in left if path.exists()]


async def test_gloo_deals_blocks_over_addresses() -> None:
    if not OPT_IN:
        pytest.skip("runs with KVBENCH_OPT_IN=1 only")
    _needed("gloo")
    nics = [{"name": "lo", "address": "127.0.0.1"}, {"name": "lo", "address": "127.0.0.2"}]

    async with Two("gloo", {"nics": nics}) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 20, seed=1)
        ends = psutil.Process(here.process.pid).net_connections("tcp")
        assert any("127.0.0.2" in (end.laddr.ip, end.raddr.ip) for end in ends if end.status == "ESTABLISHED")


# NCCL, as far as it goes without a GPU
def test_nccl_names_what_it_lacks() -> None:
    problem = transfer.check("nccl")
    if not os.path.exists("/dev/nvidiactl"):
        assert problem == nccl.NO_GPU
    (record,) = run_cases([Case("nccl", "tcp", "write", 4096, 1, memory="cuda")])
    assert record.status in ("skipped", "ok")


def test_nccl_transport_is_read_from_its_log() -> None:
    lines = [
        "host:11:42 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] via P2P/IPC",
        "host:11:42 [0] NCCL INFO Channel 01/0 : 1[1] -> 0[0] [send] via NET/Socket/0",
    ]
    assert (nccl.transport_in_log([]), nccl.transport_in_log(lines[:1])) == ("", "p2p")
    assert nccl.transport_in_log(lines) == "tcp"
    assert nccl.transport_in_log(["… Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"]) == "shm"
    assert nccl.transport_in_log(["… Channel 00/0 : 0[0] -> 1[1] [receive] via NET/IB/0/GDRDMA"]) == "rdma"


def test_nccl_is_forced_to_the_asked_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    rdma = nccl.env({"protocol": "rdma", "nics": [{"name": "mlx5_0"}, {"name": "mlx5_1"}]})
    assert (rdma["NCCL_NET"], rdma["NCCL_IB_HCA"]) == ("IB", "=mlx5_0,mlx5_1")
    tcp = nccl.env({"protocol": "tcp", "nics": [{"name": "eth0"}]})
    assert (tcp["NCCL_SOCKET_IFNAME"], tcp["NCCL_IB_DISABLE"], tcp["NCCL_DEBUG"]) == ("=eth0", "1", "INFO")


# The parts they share
def test_threads_keep_errors_and_never_wait() -> None:
    threads = Threads(2)
    try:
        started = [threads.start(lambda: None), threads.start(lambda: [][1])]  # type: ignore[func-returns-value]
        until(lambda: all(job.done for job in started), "the jobs do not end")
        assert started[0].finished()
        with pytest.raises(TransferError, match="IndexError"):
            started[1].finished()
    finally:
        threads.close()
        threads.close()


def test_threads_take_more_jobs_than_they_are_and_the_one_that_is_warm_first() -> None:
    threads, gate = Threads(2), threading.Event()
    seen: list[int] = []

    def note() -> None:
        gate.wait(DEADLINE_S)
        seen.append(threading.get_ident())

    try:
        held = [threads.start(note) for _ in range(5)]
        gate.set()
        until(lambda: all(job.done for job in held), "the jobs do not end")
        assert len(seen) == 5
        assert len(set(seen)) <= 2
        for _ in range(20):  # one at a time: always the thread that was busy last
            held.append(threads.start(note))
            until(lambda: held[-1].done, "the job does not end")
        assert len(set(seen[5:])) == 1
    finally:
        threads.close()


def test_a_door_opens_for_its_key_only() -> None:
    def echo(channel: ControlChannel, hello: dict[str, Any]) -> None:
        channel.serve(lambda message: {**hello, **message})

    door = Door("127.0.0.1", echo)
    try:
        with dialled(door, {"name": "a"}) as channel:
            assert channel.ask({"number": 1}, DEADLINE_S) == {"name": "a", "number": 1}
        with pytest.raises(TransferError, match="closed the connection"):
            dial({**door.address, "key": "00"}, {}, DEADLINE_S)
        for nonsense in (b"", b"[]\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n"):
            with socket.create_connection(("127.0.0.1", door.address["port"]), DEADLINE_S) as stranger:
                stranger.sendall(nonsense)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
    finally:
        door.close()
    with pytest.raises(TransferError, match="cannot reach"):
        dial(door.address, {}, DEADLINE_S)


class dialled:  # noqa: N801 - used like a function
    def __init__(self, door: Door, hello: dict[str, Any]) -> None:
        self._channel = dial(door.address, hello, DEADLINE_S)

    def __enter__(self) -> ControlChannel:
        return self._channel

    def __exit__(self, *error: Any) -> None:
        self._channel.close()


def test_checks_import_no_library() -> None:
    code = (
        "import json, sys\nfrom kvbench import transfer\n"
        "found = {name: transfer.get(name).check() for name in ('gloo', 'nccl', 'yuanrong', 'omni')}\n"
        "assert not {'torch', 'yr', 'vllm_omni', 'mooncake', 'numpy'} & set(sys.modules)\n"
        "print(json.dumps([bool(problem.fix) for problem in found.values() if problem]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True
    )
    assert all(json.loads(done.stdout))
