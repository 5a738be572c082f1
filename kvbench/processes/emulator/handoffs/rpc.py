"""The side channel between two emulated engines: calls as JSON lines over TCP. A call is ``{"id", "op",
"args"}``; its answer ``{"id", "ok"}`` or ``{"id", "error"}``. During a call ``{"id", "alive": true}`` comes
every half second. So the caller distinguishes a slow peer from a dead one: its timeout counts silence, not
total time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from kvbench.errors import PortInUseError, TransferError

log = logging.getLogger(__name__)

ALIVE_EVERY_S: Final = 0.5
_LINE_LIMIT: Final = 1 << 25  # an agent's description and a long list of block ids fit

RpcHandler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]


class RpcServer:
    """Serves ``handlers`` by op. A handler's TransferError is raised in the caller."""

    def __init__(self, handlers: Mapping[str, RpcHandler]) -> None:
        self._handlers = handlers
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_LINE_LIMIT)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(f"port {host}:{port} is in use") from error
            raise
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                call = json.loads(line)
                if not isinstance(call, dict):
                    raise ValueError("a call must be a JSON object")
                task = asyncio.ensure_future(self._answer(call, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (OSError, ValueError) as error:
            log.warning("side channel: connection dropped: %s", error)
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, call: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        handler = self._handlers.get(str(call.get("op")))
        if handler is None:
            _send(writer, {"id": call.get("id"), "error": f"unknown op {call.get('op')!r}"})
            return
        work = asyncio.ensure_future(handler(call.get("args") or {}))
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=ALIVE_EVERY_S)
                if not work.done():
                    _send(writer, {"id": call["id"], "alive": True})
            _send(writer, {"id": call["id"], "ok": work.result()})
        except TransferError as error:
            _send(writer, {"id": call["id"], "error": error.message})
        except (KeyError, TypeError, ValueError) as error:
            log.exception("side channel: %s failed", call.get("op"))
            _send(writer, {"id": call["id"], "error": f"{call.get('op')} failed: {error!r}"})
        finally:
            work.cancel()


def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    if not writer.transport.is_closing():
        writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")


class RpcSilenceError(TransferError):
    """The peer stopped answering; the state of its work is unknown."""


class RpcClient:
    """A connection to a peer's side channel, opened at the first call and again after a loss."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._pending: dict[int, tuple[asyncio.Future[dict[str, Any]], asyncio.Event]] = {}
        self._next = 0

    async def call(self, op: str, args: Mapping[str, Any], silence_s: float) -> dict[str, Any]:
        """Make one call. Raises TransferError with the peer's error, or RpcSilenceError if the peer is lost
        or silent for ``silence_s`` seconds."""
        writer = await self._connect(silence_s)
        self._next += 1
        number = self._next
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        alive = asyncio.Event()
        self._pending[number] = (answer, alive)
        _send(writer, {"id": number, "op": op, "args": dict(args)})
        try:
            while True:
                alive.clear()
                try:
                    await asyncio.wait_for(alive.wait(), silence_s)
                except asyncio.TimeoutError:
                    raise RpcSilenceError(
                        f"no answer to {op} from {self.address} within {silence_s:g} s"
                    ) from None
                if answer.done():
                    return answer.result()
        finally:
            self._pending.pop(number, None)
            answer.cancel()

    async def _connect(self, timeout_s: float) -> asyncio.StreamWriter:
        async with self._lock:
            if self._writer is not None and not self._writer.transport.is_closing():
                return self._writer
            try:
                reader, writer = await asyncio.wait_for(
                    asyncio.open_connection(self._host, self._port, limit=_LINE_LIMIT), timeout_s
                )
            except asyncio.TimeoutError:
                raise TransferError(f"no connection to {self.address} within {timeout_s:g} s") from None
            except OSError as error:
                raise TransferError(f"no connection to {self.address}: {error.strerror or error}") from None
            self._writer = writer
            self._listener = asyncio.ensure_future(self._listen(reader, writer))
            return writer

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cause = "it closed the connection"
        try:
            while line := await reader.readline():
                self._receive(json.loads(line))
        except (OSError, ValueError) as error:
            cause = str(error)
        finally:
            writer.close()
            for answer, alive in self._pending.values():
                if not answer.done():
                    answer.set_exception(RpcSilenceError(f"lost the peer at {self.address}: {cause}"))
                    alive.set()

    def _receive(self, message: Mapping[str, Any]) -> None:
        answer, alive = self._pending.get(message.get("id", -1), (None, None))
        if answer is None or alive is None or answer.done():
            return
        if "ok" in message:
            answer.set_result(message["ok"])
        elif "error" in message:
            answer.set_exception(TransferError(str(message["error"])))
        alive.set()

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._listener
