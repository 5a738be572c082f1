"""What backends share whose library sends and receives: the target takes part in each transfer.

The initiator asks over a control channel of its own for each transfer under way; a thread at the target then
receives what is written, or sends what is read, straight to and from the registered memory. A transfer is
done when both sides have said so. Ranks are those of torch.distributed: each target and initiator are a
group of two, the target with rank 0, without torch's default process group.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from kvbench.errors import TransferError
from kvbench.transfer.base import Layout, Op, Ticket
from kvbench.transfer.parts.blocks import BlockSpan, paired_spans, split_spans
from kvbench.transfer.parts.control import ControlChannel, Door, Job, ThreadedEndpoint, dial
from kvbench.transfer.parts.native import import_native

INSTALL = "pip install torch"
# A send or receive whose other side is gone is given up by the library after this long. Seconds.
LIBRARY_LIMIT_S = 20.0
JOIN_S = 10.0
# Spans are not cut for several NICs into less than this.
LEAST_PART_BYTES = 16 * 1024

Part = tuple[int, int]
"""Byte offset in the registered buffer, and bytes."""
Way = Literal["send", "receive"]


class TwoSidedPair(ABC):
    """Two ranks that have found each other."""

    @abstractmethod
    def move(self, way: Way, lanes: Sequence[Sequence[Part]], channel: int) -> None:
        """Send or receive all parts, in order, and wait for their end; the other side does the opposite.

        ``lanes`` are for as many NICs. Calls with different ``channel`` may overlap where the library can
        tell them apart. Raises whatever the library raises.
        """

    @abstractmethod
    def close(self) -> None:
        """Give it up. Safe to call twice."""


@dataclass
class _Peer:
    pair: TwoSidedPair
    agent: Mapping[str, Any]
    layout: Layout
    first: ControlChannel
    channels: dict[int, ControlChannel] = field(default_factory=dict)
    """By thread."""


@dataclass
class _Plan:
    number: int
    here: list[list[Part]]
    there: list[list[Part]]
    job: Job | None = None


class TwoSidedEndpoint(ThreadedEndpoint[_Peer]):
    """One side; a backend says how a pair is made."""

    max_threads = 16
    """Transfers that may be under way at a time; 1 for a library that only knows one order."""
    lanes = 1
    """How many NICs each transfer is dealt over."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options, self.max_threads)
        self._merge = bool(options.get("merge", True))
        self._numbers = itertools.count()
        self._local = threading.local()
        self._channel_numbers = itertools.count()
        self._joined: dict[str, TwoSidedPair] = {}
        self._joins = threading.Condition()
        self._torch: Any = import_native("torch", INSTALL)
        self._distributed: Any = import_native("torch.distributed", INSTALL)
        self._store: Any = None

    @abstractmethod
    def pair(self, store: Any, rank: int) -> TwoSidedPair:
        """Join the pair whose ranks meet in that store. Raises whatever the library raises."""

    def bind(self, address: int, layout: Layout) -> None:
        """See ``layout.nbytes`` bytes there as the library wants them. Raises TransferError."""

    # --- both sides

    def register(self, address: int, layout: Layout) -> None:
        self._address, self._layout = address, layout
        self.bind(address, layout)
        self._door = Door(self._host, self._welcome)
        limit = timedelta(seconds=LIBRARY_LIMIT_S)
        # Left to itself the store listens on all interfaces, whatever host it is given (torch 2.13).
        with socket.create_server((self._host, 0), backlog=128) as listener:
            port = int(listener.getsockname()[1])
            handle = listener.detach()
        self._store = self._distributed.TCPStore(
            self._host, port, None, True, limit, wait_for_workers=False, master_listen_fd=handle
        )

    def reshape(self, layout: Layout) -> bool:
        self._layout = layout
        self.bind(self._address, layout)
        return True

    def describe(self) -> dict[str, Any]:
        assert self._door is not None
        return {"control": self._door.address, "place": [self._host, self._store.port]}

    # --- the initiator's side

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        self.forget(str(peer["id"]))
        name = f"{self._id}-{next(self._numbers)}"
        first = dial(peer["control"], {"join": name}, deadline_s)
        try:
            left = timedelta(seconds=max(until - time.monotonic(), 0.1))
            host, port = peer["place"]
            store = self._distributed.TCPStore(host, port, None, False, left)
            pair = self.pair(self._distributed.PrefixStore(name, store), 1)
        except TransferError:
            first.close()
            raise
        except Exception as error:
            first.close()
            raise TransferError(f"no pair with the peer: {type(error).__name__}: {error}") from error
        known = _Peer(pair, {**peer, "name": name}, Layout(**peer["layout"]), first)
        self._peers[str(peer["id"])] = known

    def forget(self, peer: str) -> None:
        known = self._peers.pop(peer, None)
        if known is not None:
            for channel in [known.first, *known.channels.values()]:
                channel.close()
            known.pair.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        known = self._known(peer)
        began = time.perf_counter()
        spans = paired_spans(local, remote, self._layout, known.layout, self._merge)
        lanes: list[list[BlockSpan]] = split_spans(spans, self.lanes, LEAST_PART_BYTES)
        here = [[(span.local, span.nbytes) for span in lane] for lane in lanes]
        there = [[(span.remote, span.nbytes) for span in lane] for lane in lanes]
        plan = _Plan(next(self._numbers), here, there)
        nbytes = sum(span.nbytes for span in spans)
        return Ticket(peer, op, nbytes, sum(map(len, lanes)), time.perf_counter() - began, plan)

    def start(self, ticket: Ticket) -> None:
        known = self._known(ticket.peer)
        plan: _Plan = ticket.handle
        plan.job = self._threads.start(lambda: self._move(known, ticket.op, plan))

    def _move(self, known: _Peer, op: Op, plan: _Plan) -> None:
        """In a thread: send the target the plan, do our part, hear that it has done its own."""
        channel, number, sent = self._channel(known)
        message: dict[str, Any] = {"plan": plan.number, "op": op}
        if plan.number not in sent:
            message["lanes"] = plan.there
            sent.add(plan.number)
        way: Way = "send" if op == "write" else "receive"
        channel.ask(message, LIBRARY_LIMIT_S, lambda: known.pair.move(way, plan.here, number))

    def _channel(self, known: _Peer) -> tuple[ControlChannel, int, set[int]]:
        """This thread's channel to that peer, its number, and the plans that were sent over it."""
        mine = self._local.__dict__.setdefault("channels", {})
        if id(known) not in mine:
            number = next(self._channel_numbers)
            hello = {"work": known.agent["name"], "number": number}
            channel = dial(known.agent["control"], hello, JOIN_S)
            known.channels[threading.get_ident()] = channel
            mine[id(known)] = (known, channel, number, set())
        return tuple(mine[id(known)][1:])

    def poll(self, ticket: Ticket) -> bool:
        job: Job | None = ticket.handle.job
        assert job is not None
        return job.finished()

    # --- the target's side

    def _welcome(self, channel: ControlChannel, hello: dict[str, Any]) -> None:
        if "join" in hello:
            name = str(hello["join"])
            pair = self.pair(self._distributed.PrefixStore(name, self._store), 0)
            with self._joins:
                self._joined[name] = pair
                self._joins.notify_all()
            channel.wait_for_end()
            del self._joined[name]
            pair.close()
            return
        name, number = str(hello["work"]), int(hello["number"])
        with self._joins:
            if not self._joins.wait_for(lambda: name in self._joined, JOIN_S):
                raise TransferError(f"no pair is called {name}")
            pair = self._joined[name]
        plans: dict[int, list[list[Part]]] = {}

        def answer(message: dict[str, Any]) -> None:
            if "lanes" in message:
                plans[message["plan"]] = message["lanes"]
            way: Way = "receive" if message["op"] == "write" else "send"
            pair.move(way, plans[message["plan"]], number)

        channel.serve(answer)
