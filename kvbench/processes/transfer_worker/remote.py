"""The asyncio client of a transfer child: starts it, sends it commands, and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench import transfer
from kvbench.core.plan.processes import TRANSFER_CHILD_MODULE
from kvbench.errors import TransferError
from kvbench.transfer.base import Layout, Op, TransferResult
from kvbench.transfer.parts.blocks import pack_ids

# The child enforces deadlines; this many seconds later it counts as hung.
CHILD_GRACE_S = 2.0
LINE_LIMIT = 1 << 26

log = logging.getLogger(__name__)


class TransferProcess:
    """One endpoint in a separate child process, sharing a memory file with this process; made by ``start``.
    If the child dies, every pending and every later call raises TransferError."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        hello: Mapping[str, Any],
    ) -> None:
        self.agent: dict[str, Any] = hello["agent"]
        """Data that a peer needs to connect; JSON."""
        self.library: dict[str, str] = hello["library"]
        self.transport: str = hello["transport"]
        """Transport in use; certain after the first connect or transfer."""
        self._process = process
        self._reader = reader
        self._writer = writer
        self._next = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._dead = ""
        self._listener = asyncio.ensure_future(self._listen())

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls,
        backend: str,
        options: Mapping[str, Any],
        pool_fd: int,
        layout: Layout,
        host: str = "127.0.0.1",
        ready_timeout_s: float = 10.0,
    ) -> TransferProcess:
        """Start a child over the memory file ``pool_fd`` of ``layout.nbytes`` bytes. Call it from a thread
        that lives as long as the child: Linux ends the child with the thread that started it. Raises
        TransferError, with the library's output, when the child is not ready in time."""
        if os.fstat(pool_fd).st_size < layout.nbytes:
            raise TransferError(f"the pool's memory file is smaller than its layout ({layout.nbytes} bytes)")
        wanted = {**options, "host": host}
        env = {**os.environ, **transfer.get(backend).env(wanted)}
        ours, theirs = socket.socketpair()
        spec = {
            "backend": backend,
            "options": wanted,
            "layout": layout.to_json(),
            "pool_fd": pool_fd,
            "control_fd": theirs.fileno(),
            "parent_pid": os.getpid(),
        }
        process = None
        writer = None
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", TRANSFER_CHILD_MODULE, json.dumps(spec)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,
                pass_fds=(pool_fd, theirs.fileno()),
                env=env,
            )
            theirs.close()
            reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_LIMIT)
            hello = await _hello(reader, backend, ready_timeout_s)
            return cls(process, reader, writer, hello)
        except BaseException:
            theirs.close()
            await _end(process, writer)
            ours.close()
            raise

    async def connect(self, peer: Mapping[str, Any], deadline_s: float) -> str:
        """Connect to a peer by its ``agent``; return the id to use in ``transfer``. Raises TransferError."""
        answer = await self._ask({"cmd": "connect", "peer": peer, "deadline_s": deadline_s}, deadline_s)
        return str(answer["peer"])

    async def transfer(
        self, peer_id: str, op: Op, local: Sequence[int], remote: Sequence[int], deadline_s: float
    ) -> TransferResult:
        """Move blocks in every region: ``write`` local → remote, ``read`` remote → local. ``local[i]`` pairs
        with ``remote[i]``. Raises TransferError with the cause and the library's last lines; after a timeout
        connect the peer again. Bytes of a transfer that timed out or was cancelled may still arrive: do not
        reuse its local (read) or remote (write) blocks at once."""
        request = {
            "cmd": "transfer",
            "peer": peer_id,
            "op": op,
            "local": pack_ids(local),
            "remote": pack_ids(remote),
            "deadline_s": deadline_s,
        }
        return TransferResult(**await self._ask(request, deadline_s))

    async def collect(self, blocks: Sequence[int], deadline_s: float) -> None:
        """Target: copy what a peer wrote into the pool, for libraries that write elsewhere."""
        await self._ask({"cmd": "collect", "blocks": pack_ids(blocks)}, deadline_s)

    async def offer(self, blocks: Sequence[int], deadline_s: float) -> None:
        """Target: make these blocks readable, for libraries that do not read the pool."""
        await self._ask({"cmd": "offer", "blocks": pack_ids(blocks)}, deadline_s)

    async def forget(self, peer_id: str) -> None:
        await self._ask({"cmd": "forget", "peer": peer_id}, CHILD_GRACE_S)

    async def close(self) -> None:
        self._dead = self._dead or "the transfer process has been closed"
        await _end(self._process, self._writer)
        await self._listener

    async def _ask(self, request: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        if self._dead:
            raise TransferError(self._dead)
        number = self._next
        self._next += 1
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._writer.write(json.dumps({"n": number, **request}, separators=(",", ":")).encode() + b"\n")
        try:
            return await asyncio.wait_for(future, deadline_s + CHILD_GRACE_S)
        except asyncio.TimeoutError:
            raise TransferError(
                f"the transfer process gave no answer to {request['cmd']!r} "
                f"within {deadline_s + CHILD_GRACE_S:g} s"
            ) from None
        finally:
            self._waiting.pop(number, None)

    async def _listen(self) -> None:
        """Deliver answers to their callers; at the end of file fail all, since the child has gone."""
        try:
            with contextlib.suppress(OSError):  # a killed child ends the stream like a closed one
                while line := await self._reader.readline():
                    self._receive(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self._dead = f"the transfer process sent something unreadable: {type(error).__name__}: {error}"
            log.critical(self._dead)
        if not self._dead:
            code = await self._process.wait()
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._dead = f"the transfer process has ended ({how})"
            log.critical(self._dead)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(TransferError(self._dead))

    def _receive(self, answer: Mapping[str, Any]) -> None:
        self.transport = answer.get("transport", self.transport)
        future = self._waiting.get(answer["n"])
        if future is None or future.done():
            return  # the caller gave up
        if "ok" in answer:
            future.set_result(answer["ok"])
        else:
            future.set_exception(_error(answer["error"], answer["log"]))


async def _hello(reader: asyncio.StreamReader, backend: str, timeout_s: float) -> dict[str, Any]:
    try:
        line = await asyncio.wait_for(reader.readline(), timeout_s)
    except asyncio.TimeoutError:
        raise TransferError(f"the {backend} transfer process was not ready within {timeout_s:g} s") from None
    if not line:
        raise TransferError(f"the {backend} transfer process ended while it started")
    hello: dict[str, Any] = json.loads(line)
    if "failed" in hello:
        raise _error(f"the {backend} transfer process did not start: {hello['failed']}", hello["log"])
    ready: dict[str, Any] = hello["ready"]
    return ready


async def _end(process: asyncio.subprocess.Process | None, writer: asyncio.StreamWriter | None) -> None:
    """Close the socket, give the child a moment, then kill it."""
    if writer is not None:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if process is None:
        return
    try:
        await asyncio.wait_for(process.wait(), CHILD_GRACE_S)
    except asyncio.TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _error(cause: str, log: Sequence[str]) -> TransferError:
    if not log:
        return TransferError(cause)
    return TransferError("\n  ".join([f"{cause}; the library's last lines:", *log]))
