"""Shared code of backends with send and receive: the target takes part in each transfer.

The initiator sends a request over a control channel per transfer; a thread at the target then receives a
write, or sends a read, directly to and from the registered memory. A transfer is done when both sides report
it. Ranks are those of torch.distributed: each target and initiator are a group of two, the target with rank
0, without torch's default process group."""

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
# The library's timeout of a send or receive with a lost peer, in seconds.
LIBRARY_LIMIT_S = 20.0
JOIN_S = 10.0
# Minimum size of spans cut for several NICs.
LEAST_PART_BYTES = 16 * 1024

Part = tuple[int, int]
"""Byte offset in the registered buffer, and bytes."""
Way = Literal["send", "receive"]


class TwoSidedPair(ABC):
    @abstractmethod
    def move(self, way: Way, lanes: Sequence[Sequence[Part]], channel: int) -> None:
        """Send or receive all parts, in order, and wait for the end; the other side does the opposite.
        ``lanes``: one list per NIC. Calls with different ``channel`` may overlap if the library supports it.
        Raises the library's exceptions."""

    @abstractmethod
    def close(self) -> None:
        """Close it. Safe to call twice."""


@dataclass
class _Peer:
    pair: TwoSidedPair
    agent: Mapping[str, Any]
    layout: Layout
    first: ControlChannel
    channels: dict[int, ControlChannel] = field(default_factory=dict)
    """Channel by thread."""


@dataclass
class _Plan:
    number: int
    local: list[list[Part]]
    remote: list[list[Part]]
    job: Job | None = None


class TwoSidedEndpoint(ThreadedEndpoint[_Peer]):
    """One side; the backend defines how a pair is made."""

    max_threads = 16
    """Maximum concurrent transfers; 1 for a library with one order only."""
    lanes = 1
    """Number of NICs per transfer."""

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
        """Join the pair whose ranks meet in that store. Raises the library's exceptions."""

    def bind(self, address: int, layout: Layout) -> None:
        """Prepare ``layout.nbytes`` bytes for the library. Raises TransferError."""

    # --- both sides

    def register(self, address: int, layout: Layout) -> None:
        self._address, self._layout = address, layout
        self.bind(address, layout)
        self._door = Door(self._host, self._welcome)
        limit = timedelta(seconds=LIBRARY_LIMIT_S)
        # By default the store listens on all interfaces, for any host (torch 2.13).
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
        if (known := self._peers.pop(peer, None)) is not None:
            for channel in [known.first, *known.channels.values()]:
                channel.close()
            known.pair.close()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        known = self._known(peer)
        began = time.perf_counter()
        spans = paired_spans(local, remote, self._layout, known.layout, self._merge)
        lanes: list[list[BlockSpan]] = split_spans(spans, self.lanes, LEAST_PART_BYTES)
        local_parts = [[(span.local, span.nbytes) for span in lane] for lane in lanes]
        remote_parts = [[(span.remote, span.nbytes) for span in lane] for lane in lanes]
        plan = _Plan(next(self._numbers), local_parts, remote_parts)
        nbytes = sum(span.nbytes for span in spans)
        return Ticket(peer, op, nbytes, sum(map(len, lanes)), time.perf_counter() - began, plan)

    def start(self, ticket: Ticket) -> None:
        known = self._known(ticket.peer)
        plan: _Plan = ticket.handle
        plan.job = self._threads.start(lambda: self._move(known, ticket.op, plan))

    def _move(self, known: _Peer, op: Op, plan: _Plan) -> None:
        """Send the target the plan, do this side's part, wait for the target's; called in a thread."""
        channel, number, sent = self._channel(known)
        message: dict[str, Any] = {"plan": plan.number, "op": op}
        if plan.number not in sent:
            message["lanes"] = plan.remote
            sent.add(plan.number)
        way: Way = "send" if op == "write" else "receive"
        channel.ask(message, LIBRARY_LIMIT_S, lambda: known.pair.move(way, plan.local, number))

    def _channel(self, known: _Peer) -> tuple[ControlChannel, int, set[int]]:
        """Return this thread's channel to a peer, its number, and the plans sent over it."""
        channels = self._local.__dict__.setdefault("channels", {})
        if id(known) not in channels:
            number = next(self._channel_numbers)
            hello = {"work": known.agent["name"], "number": number}
            channel = dial(known.agent["control"], hello, JOIN_S)
            known.channels[threading.get_ident()] = channel
            channels[id(known)] = (known, channel, number, set())
        return tuple(channels[id(known)][1:])

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
                raise TransferError(f"there is no pair {name}")
            pair = self._joined[name]
        plans: dict[int, list[list[Part]]] = {}

        def answer(message: dict[str, Any]) -> None:
            if "lanes" in message:
                plans[message["plan"]] = message["lanes"]
            way: Way = "receive" if message["op"] == "write" else "send"
            pair.move(way, plans[message["plan"]], number)

        channel.serve(answer)
