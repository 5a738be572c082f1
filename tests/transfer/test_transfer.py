"""The contract of a transfer backend, for every backend that this machine can load."""

import asyncio
import contextlib
import functools
import mmap
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults import Seen
from loops import on_asyncio
from processes import lives, still_living

from kvbench import transfer
from kvbench.errors import InputError, Problem, TransferError
from kvbench.processes.transfer_worker.remote import TransferProcess
from kvbench.transfer.base import Layout

DEADLINE_S = 5.0
SHORT_S = 0.4
MAX_STREAMS = 4
LOCAL = Layout(regions=4, blocks=64, block_bytes=4096)
REMOTE = Layout(regions=4, blocks=96, block_bytes=4096)
on_loop = on_asyncio


@functools.cache
def _problem(name: str) -> Problem | None:
    return transfer.check(name)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.native) for name in transfer.names()])
def backend(request: pytest.FixtureRequest) -> str:
    """Every backend in turn; what cannot run here is skipped with its reason."""
    problem = _problem(request.param)
    if problem is not None:
        pytest.skip(f"{request.param}: {problem.reason} ({problem.fix})")
    return str(request.param)


@pytest.fixture
def mover(backend: str) -> str:
    """Every backend that moves bytes."""
    if not transfer.get(backend).moves_bytes:
        pytest.skip(f"{backend} moves no bytes")
    if transfer.get(backend).staged and not transfer.get(backend).loopback_only:
        pytest.skip(f"{backend} moves bytes through a store: see test_transfer_stores.py")
    return backend


@pytest.fixture
def asker(mover: str) -> str:
    """Every backend whose transfers need the peer's process, and not only its memory."""
    if transfer.get(mover).loopback_only:
        pytest.skip(f"{mover} copies memory, which a frozen process leaves readable and writable")
    return mover


def freeze(pid: int) -> None:
    """Stop a process and wait until each of its threads has stopped."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + DEADLINE_S
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until, "the process does not stop"
            time.sleep(0.001)


async def ended(pid: int) -> None:
    """Wait until a killed process has ended with all its threads; /proc shows the state of one of them."""
    until = time.monotonic() + DEADLINE_S
    with contextlib.suppress(ProcessLookupError):
        number = os.pidfd_open(pid)
        try:
            while not select.select([number], [], [], 0)[0]:
                assert time.monotonic() < until, "the process does not end"
                await asyncio.sleep(0.005)
        finally:
            os.close(number)


class Side:
    """One endpoint in its child process, over a memory file that the test can see."""

    def __init__(self, process: TransferProcess, pool: mmap.mmap, layout: Layout) -> None:
        self.process = process
        self.pool = pool
        self.layout = layout

    def block(self, region: int, block: int) -> bytes:
        at = self.layout.offset(region, block)
        return self.pool[at : at + self.layout.block_bytes]


@contextlib.asynccontextmanager
async def side(name: str, layout: Layout, options: dict[str, Any] | None = None) -> AsyncIterator[Side]:
    """A started endpoint over random bytes, closed at the end whatever happened to it."""
    fd = os.memfd_create("kvbench-test")
    try:
        os.ftruncate(fd, layout.nbytes)
        with mmap.mmap(fd, layout.nbytes) as pool:
            pool[:] = random.Random(layout.nbytes).randbytes(layout.nbytes)
            process = await TransferProcess.start(name, options or {}, fd, layout)
            try:
                yield Side(process, pool, layout)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                await process.close()
    finally:
        os.close(fd)


@contextlib.asynccontextmanager
async def pair(name: str, options: dict[str, Any] | None = None) -> AsyncIterator[tuple[Side, Side, str]]:
    """Two connected sides with different block counts, and the id of the second."""
    async with side(name, LOCAL, options) as here, side(name, REMOTE, options) as there:
        peer = await here.process.connect(there.process.agent, DEADLINE_S)
        yield here, there, peer


async def move_and_verify(here: Side, there: Side, peer: str, op: Any, blocks: int, seed: int) -> None:
    """Move shuffled blocks and compare both pools byte by byte with what they must hold."""
    dice = random.Random(seed)
    local = dice.sample(range(here.layout.blocks), blocks)
    remote = dice.sample(range(there.layout.blocks), blocks)
    expected = {here: bytearray(here.pool[:]), there: bytearray(there.pool[:])}
    source, sink = ((here, local), (there, remote)) if op == "write" else ((there, remote), (here, local))
    for region in range(here.layout.regions):
        for from_block, to_block in zip(source[1], sink[1], strict=True):
            at = sink[0].layout.offset(region, to_block)
            expected[sink[0]][at : at + sink[0].layout.block_bytes] = source[0].block(region, from_block)
    if op == "read":
        await there.process.offer(remote, DEADLINE_S)
    result = await here.process.transfer(peer, op, local, remote, DEADLINE_S)
    if op == "write":
        await there.process.collect(remote, DEADLINE_S)
    assert result.nbytes == blocks * here.layout.regions * here.layout.block_bytes
    # Each further stream or NIC may cut one block.
    assert 0 < result.descriptors < blocks * here.layout.regions + MAX_STREAMS
    assert result.transfer_s > 0
    assert here.pool[:] == bytes(expected[here])
    assert there.pool[:] == bytes(expected[there])


def test_every_backend_is_found_and_checked() -> None:
    assert {"null", "tcp", "mooncake", "nixl"} <= set(transfer.names())
    for name in transfer.names():
        assert transfer.get(name).name == name
        problem = _problem(name)
        assert problem is None or (problem.reason and problem.fix)
    assert _problem("tcp") is None
    with pytest.raises(InputError, match=r"there are: .*tcp"):
        transfer.get("tpc")


def test_nothing_native_is_loaded_here() -> None:
    code = (
        "import sys\nfrom kvbench import transfer\n"
        "for name in transfer.names(): transfer.check(name)\n"
        "assert not {'mooncake', 'nixl', 'nixl_cu12', 'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_moves_exactly_the_named_blocks(mover: str) -> None:
    async with pair(mover) as (here, there, peer):
        for op in transfer.get(mover).ops:
            for blocks in (1, 7, 64):
                await move_and_verify(here, there, peer, op, blocks, seed=blocks)
        assert here.process.transport
        assert "configured" not in here.process.transport, "the transport is not proven"
        assert here.process.library["version"]
        assert (await here.process.transfer(peer, "write", [], [], DEADLINE_S)).nbytes == 0


async def test_both_sides_may_initiate(mover: str) -> None:
    async with pair(mover) as (here, there, peer):
        back = await there.process.connect(here.process.agent, DEADLINE_S)
        await move_and_verify(here, there, peer, "write", 16, seed=1)
        await move_and_verify(there, here, back, "write", 16, seed=2)


async def test_many_transfers_at_once(mover: str) -> None:
    async with pair(mover) as (here, there, peer):
        sent = bytes(here.pool[:])
        await asyncio.gather(
            *(
                here.process.transfer(peer, "write", [block], [block + 32], DEADLINE_S)
                for block in range(LOCAL.blocks)
            )
        )
        await there.process.collect(range(32, 32 + LOCAL.blocks), DEADLINE_S)
        assert bytes(here.pool[:]) == sent
        for region in range(LOCAL.regions):
            for block in range(LOCAL.blocks):
                assert there.block(region, block + 32) == here.block(region, block)


async def test_thousands_of_runs_at_once(mover: str) -> None:
    """More than a library's queue holds must wait its turn, not fail."""
    layout = Layout(regions=32, blocks=512, block_bytes=512)

    async with side(mover, layout) as here, side(mover, layout) as there:
        peer = await here.process.connect(there.process.agent, DEADLINE_S)
        there.pool[:] = bytes(layout.nbytes)
        orders = [list(range(first, 512, 8)) for first in range(8)]
        await asyncio.gather(*(here.process.transfer(peer, "write", order, order, 20.0) for order in orders))
        await there.process.collect(range(512), DEADLINE_S)
        assert there.pool[:] == here.pool[:]


async def test_tcp_deals_blocks_over_streams() -> None:
    async with pair("tcp", {"streams": 3}) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 40, seed=3)
        await move_and_verify(here, there, peer, "read", 40, seed=4)


async def test_wrong_requests_are_refused_and_do_no_harm(backend: str) -> None:
    async with pair(backend) as (here, there, peer):
        call = here.process.transfer
        wrong = [
            (("nobody", "write", [0], [0]), "there is no peer"),
            ((peer, "write", [LOCAL.blocks], [0]), "local block 64 is outside the pool"),
            ((peer, "read", [0], [REMOTE.blocks]), "remote block 96 is outside the pool"),
            ((peer, "write", [-1], [0]), "local block -1 is outside"),
            ((peer, "write", [1, 2], [1]), "do not pair"),
            ((peer, "write", [1, 2], [3, 3]), "named twice"),
            ((peer, "copy", [1], [1]), "cannot copy"),
        ]
        before = there.pool[:]
        for (name, op, local, remote), message in wrong:
            with pytest.raises(TransferError, match=message):
                await call(name, op, local, remote, DEADLINE_S)  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="bad request"):
            await here.process._ask({"cmd": "transfer"}, DEADLINE_S)
        with pytest.raises(TransferError, match="unknown command"):
            await here.process._ask({"cmd": "dance"}, DEADLINE_S)
        assert there.pool[:] == before
        await call(peer, "write", [LOCAL.blocks - 1], [REMOTE.blocks - 1], DEADLINE_S)


async def test_peers_that_do_not_fit_are_refused(backend: str) -> None:
    async with pair(backend) as (here, there, _):
        for change, message in (
            ({"layout": {"regions": 5, "blocks": 64, "block_bytes": 4096}}, "the peer's layout is 5"),
            ({"layout": {"regions": 4, "blocks": 64, "block_bytes": 512}}, "512-byte"),
            ({"backend": "pigeon"}, "the peer speaks 'pigeon'"),
        ):
            with pytest.raises(TransferError, match=message):
                await here.process.connect({**there.process.agent, **change}, DEADLINE_S)


async def test_forgotten_peer_can_be_connected_again(mover: str) -> None:
    async with pair(mover) as (here, there, peer):
        await move_and_verify(here, there, peer, "write", 4, seed=5)
        await here.process.forget(peer)
        with pytest.raises(TransferError, match="no peer"):
            await here.process.transfer(peer, "write", [0], [0], DEADLINE_S)
        peer = await here.process.connect(there.process.agent, DEADLINE_S)
        await move_and_verify(here, there, peer, "read", 4, seed=6)


@pytest.mark.fault("peer_killed")
@pytest.mark.parametrize("op", ["read", "write"])
async def test_killed_peer_is_an_error_and_others_stay_usable(mover: str, op: Any, fault: Seen) -> None:
    async with pair(mover) as (here, there, peer), side(mover, REMOTE) as third:
        await here.process.transfer(peer, op, [0], [0], DEADLINE_S)
        os.kill(there.process.pid, signal.SIGKILL)
        if transfer.get(mover).loopback_only:
            await ended(there.process.pid)  # until then its memory is there, and can be copied
        fault.struck()
        for _ in range(2):
            with pytest.raises(TransferError) as caught:
                await here.process.transfer(peer, op, list(range(64)), list(range(64)), DEADLINE_S)
            fault.check(caught.value.message)
        other = await here.process.connect(third.process.agent, DEADLINE_S)
        await move_and_verify(here, third, other, op, 8, seed=7)


@pytest.mark.fault("peer_frozen")
@pytest.mark.parametrize("op", ["read", "write"])
async def test_frozen_peer_ends_at_our_deadline(asker: str, op: Any, fault: Seen) -> None:
    async with pair(asker) as (here, there, peer):
        await here.process.transfer(peer, op, [0], [0], DEADLINE_S)
        freeze(there.process.pid)
        fault.struck()
        blocks = list(range(64))
        with pytest.raises(TransferError, match=r"did not end within 0\.4 s") as caught:
            await here.process.transfer(peer, op, blocks, blocks, SHORT_S)
        fault.check(caught.value.message)
        with pytest.raises(TransferError, match="connect again"):
            await here.process.transfer(peer, op, [0], [0], SHORT_S)
        os.kill(there.process.pid, signal.SIGCONT)
        # What was given up may still arrive with some libraries; let it, then start afresh.
        await asyncio.sleep(0.5)
        peer = await here.process.connect(there.process.agent, DEADLINE_S)
        await move_and_verify(here, there, peer, op, 8, seed=8)


async def test_connecting_to_a_frozen_peer_ends_at_our_deadline(asker: str) -> None:
    async with side(asker, LOCAL) as here, side(asker, REMOTE) as there:
        freeze(there.process.pid)
        with pytest.raises(TransferError, match=r"within 0\.4 s|timed out"):
            await here.process.connect(there.process.agent, SHORT_S)


@pytest.mark.parametrize("name", ["tcp", "mooncake"])
async def test_listener_that_never_answers_ends_at_our_deadline(name: str) -> None:
    if (problem := _problem(name)) is not None:
        pytest.skip(f"{name}: {problem.reason}")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        async with pair(name) as (here, there, peer):
            lie = {"listeners": [["127.0.0.1", port]], "segments": [f"127.0.0.1:{port}"], "id": "silent"}
            stuck = asyncio.create_task(here.process.connect({**there.process.agent, **lie}, SHORT_S))
            # The wait must not keep the process from its other work.
            await move_and_verify(here, there, peer, "write", 8, seed=9)
            assert not stuck.done()
            with pytest.raises(TransferError, match=r"within 0\.4 s|timed out"):
                await stuck


async def test_nobody_listens(mover: str) -> None:
    async with side(mover, LOCAL) as here:
        async with side(mover, REMOTE) as there:
            gone = there.process.agent
        with pytest.raises(TransferError):
            await here.process.connect(gone, DEADLINE_S)


async def test_killed_child_fails_all_calls(backend: str) -> None:
    async with pair(backend) as (here, there, peer):
        freeze(there.process.pid)
        blocks = list(range(64))
        calls = [
            asyncio.create_task(here.process.transfer(peer, "write", blocks, blocks, DEADLINE_S))
            for _ in range(3)
        ]
        await asyncio.sleep(0.05)
        os.kill(here.process.pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if transfer.get(backend).moves_bytes and not transfer.get(backend).loopback_only:
                assert isinstance(outcome, TransferError)
                assert "killed by signal 9" in str(outcome)
        with pytest.raises(TransferError, match="killed by signal 9"):
            await here.process.transfer(peer, "write", [0], [0], DEADLINE_S)


async def test_close_ends_a_frozen_child_too() -> None:
    async with side("null", LOCAL) as here:
        freeze(here.process.pid)
        await here.process.close()
        assert not lives(here.process.pid)
        await here.process.close()


def test_child_dies_with_its_parent(backend: str) -> None:
    code = f"""
import asyncio, os, sys
from kvbench.errors import Problem
from kvbench.transfer.base import Layout
from kvbench.processes.transfer_worker.remote import TransferProcess
async def main():
    layout = Layout(1, 4, 4096)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, layout.nbytes)
    process = await TransferProcess.start({backend!r}, {{}}, fd, layout)
    print(process.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert not still_living([child]), "the child outlived its parent"


async def test_sigterm_ends_the_child(backend: str) -> None:
    async with side(backend, LOCAL) as here:
        os.kill(here.process.pid, signal.SIGTERM)
        await asyncio.wait_for(here.process._process.wait(), DEADLINE_S)
        with pytest.raises(TransferError, match="exit code 0"):
            await here.process.forget("anyone")


async def test_a_start_that_fails_says_why() -> None:
    fd = os.memfd_create("small")
    try:
        os.ftruncate(fd, 100)
        with pytest.raises(TransferError, match="smaller than its layout"):
            await TransferProcess.start("tcp", {}, fd, LOCAL)
        os.ftruncate(fd, LOCAL.nbytes)
        with pytest.raises(TransferError, match=r"cannot listen on 203\.0\.113\.1"):
            await TransferProcess.start("tcp", {}, fd, LOCAL, host="203.0.113.1")
        with pytest.raises(TransferError, match="not ready within 0 s"):
            await TransferProcess.start("tcp", {}, fd, LOCAL, ready_timeout_s=0.0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("arguments", [[], ["{"], ["{}"], ['{"backend": "tcp", "surprise": 1}']])
def test_child_refuses_a_wrong_spec(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "kvbench.processes.transfer_worker.child", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "spec" in done.stderr


async def test_tcp_tells_strangers_nothing_and_serves_them_nothing() -> None:
    async with pair("tcp") as (here, there, peer):
        agent = there.process.agent
        key = bytes.fromhex(agent["key"])
        for guess in (bytes(16), os.urandom(16), key[:15] + bytes([key[15] ^ 1])):
            with socket.create_connection(tuple(agent["listeners"][0]), timeout=5) as stranger:
                answer = stranger.recv(16, socket.MSG_WAITALL) if stranger.send(guess) else b""
                assert answer == bytes(16)
                with contextlib.suppress(OSError):
                    stranger.sendall(answer + struct.pack("<BIQQ", 0, 1, 0, 64))
                    assert stranger.recv(1) == b""
        with socket.create_connection(tuple(agent["listeners"][0]), timeout=20) as silent:
            silent.sendall(key[:15])
            assert silent.recv(1) == b""  # after some seconds; its thread does not wait for ever
        await move_and_verify(here, there, peer, "write", 8, seed=10)


async def test_tcp_server_survives_nonsense() -> None:
    async with pair("tcp") as (here, there, peer):
        agent = there.process.agent
        for message in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes.fromhex(agent["key"]) + b"\xff" * 64):
            with socket.create_connection(tuple(agent["listeners"][0]), timeout=5) as stranger:
                stranger.sendall(message)
        await move_and_verify(here, there, peer, "write", 8, seed=10)
