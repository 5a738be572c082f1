"""The transfer child's loop and its peers: answers commands, polls transfers, enforces deadlines. Peers are
connected in threads and given up after a timeout."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.errors import KvbenchError, TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Ticket, TransferResult
from kvbench.transfer.parts.blocks import unpack_ids
from kvbench.transfer.parts.native import NativeLog


@dataclass
class _Connecting:
    """A connect in a thread. A success after its timeout is undone."""

    peer: str
    layout: Layout
    deadline: float
    deadline_s: float
    mark: int
    done: bool = False
    error: str = ""


class Peers:
    """Peers of one endpoint. Threads write to the pipe ``wake`` when a connect has ended."""

    def __init__(self, backend: str, endpoint: Endpoint, layout: Layout, wake: int) -> None:
        self._backend = backend
        self._endpoint = endpoint
        self._layout = layout
        self._wake = wake
        self._connecting: dict[int, _Connecting] = {}
        self._abandoned: deque[_Connecting] = deque()
        self._known: dict[str, Layout] = {}
        self._unusable: set[str] = set()

    @property
    def due(self) -> float:
        """The first deadline of an active connect (monotonic); infinite without one."""
        return min((connecting.deadline for connecting in self._connecting.values()), default=float("inf"))

    def layout_of(self, peer: str) -> Layout:
        """Return a peer's layout. Raises TransferError if no transfer to it can start."""
        if peer in self._unusable:
            raise TransferError(f"peer {peer} is unusable since a transfer to it timed out; connect again")
        if peer not in self._known:
            raise TransferError(f"there is no peer {peer!r}; connect first")
        return self._known[peer]

    def give_up(self, peer: str) -> None:
        """Block a peer after a timeout until it is connected again."""
        self._unusable.add(peer)

    def forget(self, peer: str) -> None:
        self._known.pop(peer, None)
        self._unusable.discard(peer)
        self._endpoint.forget(peer)

    def connect(self, number: int, peer: Mapping[str, Any], deadline_s: float, mark: int) -> None:
        """Begin to connect; ``connected`` reports the end under the same number. Raises TransferError."""
        if peer.get("backend") != self._backend:
            raise TransferError(f"the peer speaks {peer.get('backend')!r}, this side {self._backend!r}")
        layout = Layout(**peer["layout"])
        local = self._layout
        if (layout.regions, layout.block_bytes) != (local.regions, local.block_bytes):
            raise TransferError(
                f"the peer's layout is {layout.regions} regions of {layout.block_bytes}-byte blocks, "
                f"this side's {local.regions} of {local.block_bytes}"
            )
        name = str(peer["id"])
        connecting = _Connecting(name, layout, time.monotonic() + deadline_s, deadline_s, mark)
        self._connecting[number] = connecting

        def work() -> None:
            try:
                self._endpoint.connect(peer, deadline_s)
            except Exception as error:
                connecting.error = str(error) or type(error).__name__
            connecting.done = True
            os.write(self._wake, b"\0")

        threading.Thread(target=work, name="connect", daemon=True).start()

    def connected(self) -> Iterator[tuple[int, int, str, str]]:
        """Yield ended connects since the last call: number, mark, error (empty for none), peer."""
        now = time.monotonic()
        for number, connecting in list(self._connecting.items()):
            if connecting.done:
                del self._connecting[number]
                if not connecting.error:
                    self._known[connecting.peer] = connecting.layout
                    self._unusable.discard(connecting.peer)
                yield number, connecting.mark, connecting.error, connecting.peer
            elif now >= connecting.deadline:
                del self._connecting[number]
                self._abandoned.append(connecting)
                message = f"no answer from the peer within {connecting.deadline_s:g} s"
                yield number, connecting.mark, message, connecting.peer
        for late in [item for item in self._abandoned if item.done]:
            self._abandoned.remove(late)
            if not late.error and late.peer not in self._known:
                self._endpoint.forget(late.peer)


def check_ids(side: str, ids: Sequence[int], layout: Layout) -> None:
    """Raise TransferError for unknown or repeated block ids."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= layout.blocks:
        wrong = low if low < 0 else high
        raise TransferError(f"{side} block {wrong} is outside the pool of {layout.blocks} blocks")
    if len(set(ids)) != len(ids):
        raise TransferError(f"a {side} block is named twice")


LOG_LINES_IN_ERRORS = 5
# After SIGTERM, transfers under way get this long to end. Seconds.
TERM_GRACE_S = 1.0


@dataclass
class _Pending:
    ticket: Ticket
    began: float
    deadline: float
    deadline_s: float
    mark: int


@dataclass
class WorkerLoop:
    """Answers commands, polls transfers, enforces deadlines; otherwise sleeps."""

    backend: Backend
    endpoint: Endpoint
    layout: Layout
    log: NativeLog

    def __post_init__(self) -> None:
        self._control: socket.socket | None = None
        self._in = bytearray()
        self._out = bytearray()
        self._pending: dict[int, _Pending] = {}
        self._stop_at = float("inf")
        self._transport = ""
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._peers = Peers(self.backend.name, self.endpoint, self.layout, self._wake_w)
        self._epoll = select.epoll()

    def run(self, control: socket.socket, ready: dict[str, Any]) -> None:
        self._control = control
        control.setblocking(False)
        self._epoll.register(control, select.EPOLLIN)
        self._epoll.register(self._wake_r, select.EPOLLIN)
        for fd in self.endpoint.wait_fds():
            self._epoll.register(fd, select.EPOLLIN)
        # Also the wake-up pipe: Python resumes an interrupted select.
        signal.set_wakeup_fd(self._wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        self._transport = self.endpoint.transport()
        self._send({"ready": {**ready, "transport": self._transport}})
        while time.monotonic() < self._stop_at:
            self._wait()
            self.endpoint.progress()
            now = time.monotonic()
            for number, pending in list(self._pending.items()):
                self._poll_one(number, pending, now)
            for number, mark, error, peer in self._peers.connected():
                if error:
                    self._refuse(number, error, mark)
                else:
                    self._answer(number, {"peer": peer})
            if self._stop_at < float("inf") and not self._pending:
                break
        control.settimeout(0.5)
        with contextlib.suppress(OSError):  # the parent may have gone
            control.sendall(self._out)

    def _on_sigterm(self, signum: int, frame: Any) -> None:
        self._stop_at = min(self._stop_at, time.monotonic() + TERM_GRACE_S)

    def _wait(self) -> None:
        now = time.monotonic()
        due = min([p.deadline for p in self._pending.values()] + [self._peers.due, self._stop_at, now + 60.0])
        pause = self.endpoint.poll_interval_s if self._pending else self.endpoint.progress_interval_s
        timeout = max(min(due - now, due - now if pause is None else pause), 0.0)
        # epoll counts in whole milliseconds; select on the epoll set in microseconds.
        if not select.select([self._epoll], [], [], timeout)[0]:
            return
        assert self._control is not None
        for fd, events in self._epoll.poll(0):
            if fd == self._wake_r:
                os.read(self._wake_r, 4096)
            elif fd == self._control.fileno():
                if events & select.EPOLLOUT:
                    self._flush()
                if events & ~select.EPOLLOUT:
                    self._read_commands()

    def _read_commands(self) -> None:
        assert self._control is not None
        try:
            chunk = self._control.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._stop_at = 0.0  # the parent has gone or closed the socket
            return
        self._in += chunk
        *lines, rest = self._in.split(b"\n")
        self._in = bytearray(rest)
        for line in lines:
            self._command(bytes(line))

    def _command(self, line: bytes) -> None:
        """Handle one request; an error becomes its answer."""
        number = -1
        mark = self.log.mark()
        try:
            request = json.loads(line)
            number = int(request["n"])
            match request["cmd"]:
                case "transfer":
                    self._start_transfer(number, request, mark)
                case "connect":
                    self._peers.connect(number, request["peer"], float(request["deadline_s"]), mark)
                case "collect" | "offer" as side:
                    blocks = unpack_ids(request["blocks"])
                    check_ids("local", blocks, self.layout)
                    (self.endpoint.collect if side == "collect" else self.endpoint.offer)(blocks)
                    self._answer(number, {})
                case "forget":
                    self._peers.forget(str(request["peer"]))
                    self._answer(number, {})
                case other:
                    self._refuse(number, f"unknown command {other!r}", mark)
        except KvbenchError as error:
            self._refuse(number, str(error), mark)
        except Exception as error:
            self._refuse(number, f"bad request: {type(error).__name__}: {error}", mark)

    # --- transfers

    def _start_transfer(self, number: int, request: dict[str, Any], mark: int) -> None:
        began = time.monotonic()
        deadline_s = float(request["deadline_s"])
        peer, op = request["peer"], request["op"]
        local, remote = unpack_ids(request["local"]), unpack_ids(request["remote"])
        if op not in self.backend.ops:
            raise TransferError(f"{self.backend.name} cannot {op}")
        theirs = self._peers.layout_of(peer)
        if len(local) != len(remote):
            raise TransferError(f"{len(local)} local blocks do not pair with {len(remote)} remote ones")
        check_ids("local", local, self.layout)
        check_ids("remote", remote, theirs)
        ticket = self.endpoint.prepare(peer, op, local, remote)
        try:
            self.endpoint.start(ticket)
        except BaseException:
            self.endpoint.release(ticket)
            raise
        pending = _Pending(ticket, began, began + deadline_s, deadline_s, mark)
        self._pending[number] = pending
        self._poll_one(number, pending, time.monotonic())

    def _poll_one(self, number: int, pending: _Pending, now: float) -> None:
        ticket = pending.ticket
        try:
            if self.endpoint.poll(ticket):
                took_s = time.monotonic() - pending.began - ticket.prepare_s
                result = TransferResult(ticket.nbytes, ticket.descriptors, ticket.prepare_s, took_s)
                del self._pending[number]
                self.endpoint.release(ticket)
                self._answer(number, asdict(result))
            elif now >= pending.deadline:
                del self._pending[number]
                self._peers.give_up(ticket.peer)
                self.endpoint.release(ticket)
                self._refuse(
                    number,
                    f"the {ticket.op} of {ticket.nbytes} bytes did not end within {pending.deadline_s:g} s",
                    pending.mark,
                )
        except Exception as error:
            self._pending.pop(number, None)
            self.endpoint.release(ticket)
            cause = str(error) if isinstance(error, KvbenchError) else f"{type(error).__name__}: {error}"
            self._refuse(number, cause, pending.mark)

    # --- answers

    def _answer(self, number: int, ok: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"n": number, "ok": ok}
        if "(configured)" in self._transport or "peer" in ok:
            # It is certain only after a transfer or a connect.
            self._transport = self.endpoint.transport()
            answer["transport"] = self._transport
        self._send(answer)

    def _refuse(self, number: int, cause: str, mark: int) -> None:
        lines = self.log.since(mark)[-LOG_LINES_IN_ERRORS:]
        self._send({"n": number, "error": cause, "log": lines})

    def _send(self, message: dict[str, Any]) -> None:
        self._out += json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        assert self._control is not None
        try:
            while self._out:
                del self._out[: self._control.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._stop_at = 0.0
            return
        self._epoll.modify(self._control, select.EPOLLIN | (select.EPOLLOUT if self._out else 0))
