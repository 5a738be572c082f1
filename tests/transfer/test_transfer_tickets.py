"""Tickets started again, merging, NICs and protocols, for every backend and protocol that runs here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loops import on_asyncio

from kvbench import transfer
from kvbench.errors import TransferError
from kvbench.hosts import devices
from kvbench.processes.transfer_worker.remote import TransferProcess
from kvbench.transfer.base import Layout
from tests.transfer.test_transfer import _problem

DRIVER = Path(__file__).parents[1] / "support" / "tickets.py"
TRANSPORTS = {
    ("tcp", "tcp"): "tcp", ("mooncake", "tcp"): "tcp", ("nixl", "tcp"): "ucx:tcp/lo",
    ("nixl", "cma"): "ucx:cma/memory", ("nixl", "shm"): "ucx:posix/memory",
    ("nixl", "posix"): "posix (file)", ("memcpy", "memcpy"): "memcpy", ("shm", "shm"): "shm",
}  # fmt: skip
LOOPBACKS = [{"name": "lo", "address": "127.0.0.1"}, {"name": "lo", "address": "127.0.0.2"}]
on_loop = on_asyncio


def ways() -> Iterator[tuple[str, str]]:
    """Every backend that moves bytes from memory to memory, with each protocol that needs no hardware."""
    for name in transfer.names():
        backend = transfer.get(name)
        if backend.moves_bytes and (backend.loopback_only or not backend.staged) and not backend.optional:
            yield from ((name, protocol) for protocol in backend.protocols if protocol not in backend.needs)


@pytest.fixture(params=[pytest.param(way, id="-".join(way), marks=pytest.mark.native) for way in ways()])
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    name, protocol = request.param
    if (problem := _problem(name)) is not None:
        pytest.skip(f"{name}: {problem.reason} ({problem.fix})")
    return name, protocol


def drive(backend: str, op: str, pairs: list[tuple[list[int], list[int]]], **options: Any) -> dict[str, Any]:
    """What ``tickets.py`` tells; nothing may have gone wrong."""
    local, remote = [list(pair[0]) for pair in pairs], [list(pair[1]) for pair in pairs]
    spec = {"backend": backend, "options": {**options, "op": op}, "op": op, "local": local, "remote": remote}
    command = [sys.executable, str(DRIVER), json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == []
    assert result["prepared"]
    return result


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_ticket_is_started_again_and_several_are_under_way(way: tuple[str, str], op: str) -> None:
    backend, protocol = way
    run, apart, one = ([4, 5, 6, 7], [0, 1, 2, 3]), ([20, 9, 13], [8, 30, 11]), ([31], [31])
    result = drive(backend, op, [run, apart, one], protocol=protocol)
    assert (result["descriptors"], result["nbytes"]) == ([2, 6, 2], [8 * 4096, 6 * 4096, 2 * 4096])
    assert result["transport"] == TRANSPORTS[way]


def test_without_merging_every_block_is_a_descriptor(way: tuple[str, str]) -> None:
    backend, protocol = way
    order = [1, 3, 5, 7, 0, 2, 4, 6]
    result = drive(backend, "write", [(order, order), ([21, 20], [22, 21])], protocol=protocol, merge=False)
    assert result["descriptors"] == [16, 4]


@pytest.mark.native
@pytest.mark.parametrize("protocol", ["tcp", "posix"])
def test_nixl_merges_neighbours_itself_as_under_vllm(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvbench never tells NIXL to skip merging, and counts the descriptors as NIXL's own log does."""
    if (problem := _problem("nixl")) is not None:
        pytest.skip(f"nixl: {problem.reason}")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "DEBUG")
    ascending, descending, whole = list(range(8)), list(range(15, 7, -1)), list(range(32))
    pairs = [(ascending, ascending), (descending, descending), (whole, whole), ([16, 17, 19], [20, 21, 22])]
    result = drive("nixl", "write", pairs[:2] + pairs[3:], protocol=protocol, merge=False)
    assert result["descriptors"] == result["merged"] == [2, 16, 4]
    # Whole regions are neighbours of each other.
    assert drive("nixl", "write", pairs[2:3], protocol=protocol)["descriptors"] == [1]


@pytest.mark.native
@pytest.mark.parametrize("op", ["read", "write"])
@pytest.mark.parametrize("backend", ["tcp", "mooncake", "nixl"])
def test_bytes_are_split_over_nics(backend: str, op: str) -> None:
    if (problem := _problem(backend)) is not None:
        pytest.skip(f"{backend}: {problem.reason}")
    order = list(range(16))
    # 128 KiB in two regions: half of them on each NIC.
    result = drive(backend, op, [(order, order)], nics=LOOPBACKS)
    if backend == "nixl":
        assert result["transport"].startswith("ucx:tcp/lo")  # UCX takes a device, whatever its addresses
    else:
        assert result["addresses"] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.native
@pytest.mark.parametrize("backend", sorted({name for name, _ in ways()}))
async def test_an_unknown_protocol_is_refused(backend: str) -> None:
    if (problem := _problem(backend)) is not None:
        pytest.skip(f"{backend}: {problem.reason}")
    known = transfer.get(backend).protocols[0]

    fd = os.memfd_create("kvbench-test")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(TransferError, match=f"no protocol 'pigeon'.*there are: {known}"):
            await TransferProcess.start(backend, {"protocol": "pigeon"}, fd, Layout(1, 1, 4096))
    finally:
        os.close(fd)


@pytest.mark.native
@pytest.mark.parametrize("backend", ["mooncake", "nixl"])
async def test_rdma_without_a_device_fails_instead_of_running_over_something_else(backend: str) -> None:
    if (problem := _problem(backend)) is not None:
        pytest.skip(f"{backend}: {problem.reason}")
    if devices.rdma():
        pytest.skip("this machine has RDMA")

    fd = os.memfd_create("kvbench-test")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(TransferError, match="does not start"):
            await TransferProcess.start(backend, {"protocol": "rdma"}, fd, Layout(1, 1, 4096))
    finally:
        os.close(fd)
