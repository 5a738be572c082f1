"""Mooncake's Transfer Engine, peer to peer, without a metadata server.

Design, and its reasons (measured with the non-CUDA wheel 0.3.13 over TCP on two cores):

- The blocking calls (``transfer_sync``, ``batch_transfer_sync``, ``get_batch_transfer_status``) busy-wait,
  which costs 0.7 CPU-seconds per GB against 0.4 for submit and poll, and they only end at the library's time
  limit. So every span is a batch of one: ``transfer_check_status`` reports only a batch's first span. This
  loses nothing: a submission takes 25 to 40 µs per span either way, and eight blocks of 1 MiB in one batch
  through the C++ symbols took 1.01 to 1.04 times as long, with the same CPU time (120 to 250 calls of each,
  both ops).
- A peer that accepts a connection and never answers blocks ``send_probe`` and the first transfer for 61 s.
  The probe runs in ``connect``, in a thread, and an unanswered probe means no submissions.
- The protocol argument of ``initialize`` has no effect; the presence of ``MC_FORCE_TCP`` has.
- Over TCP an engine uses one address. So there is one engine per NIC, connected to the peer's engine of the
  same index, and bytes are split evenly. Over RDMA one engine stripes over its list of devices; each device
  talks to the peer's device of the same name, since cross-rail pairs fail on many networks.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket, nics_of, protocol_of
from kvbench.transfer.parts import native
from kvbench.transfer.parts.blocks import MIN_PART_BYTES, paired_spans, split_spans
from kvbench.transfer.parts.native import variable_value

# Maximum active runs per peer. The library refuses more than its queue per peer ("TCP lane
# queue-full rejection", seen with a few thousand runs); 1024 at a time were not faster than this.
MAX_UNDER_WAY = 256
DONE, PENDING = 1, 0
# Results of a submission: 0 is failure; some builds return -1 as an unsigned number for a lost segment.
FAILED = frozenset({0, -1, 2**64 - 1})
REFUSED = "the engine refused a span"


class PeerQueue:
    """One engine's queue to one peer: parts to submit, and number of active spans."""

    __slots__ = ("queue", "under_way")

    def __init__(self) -> None:
        self.queue: deque[TransferPart] = deque()
        self.under_way = 0


class TransferPart:
    """Spans of a transfer that one engine moves to one peer, and the library's ids of active ones."""

    __slots__ = ("calls", "error", "lane", "under_way", "waiting", "way")

    def __init__(self, lane: EngineLane, way: PeerQueue, calls: list[tuple[Any, ...]]) -> None:
        self.lane = lane
        self.way = way
        self.calls = calls
        self.waiting: deque[tuple[Any, ...]] = deque()
        self.under_way: deque[int] = deque()
        self.error = ""


class EngineLane:
    def __init__(self, host: str, protocol: str, devices: str) -> None:
        module = native.mooncake_module("engine")
        self.opcodes = {"read": module.TransferOpcode.Read, "write": module.TransferOpcode.Write}
        self.engine = module.TransferEngine()
        code = self.engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransferError(f"the Transfer Engine does not start: initialize returned {code}")
        self.segment = f"{host}:{self.engine.get_rpc_port()}"
        self._submit = self.engine.batch_transfer_async
        self._status = self.engine.transfer_check_status
        self.ways: defaultdict[str, PeerQueue] = defaultdict(PeerQueue)
        """Queues by the peer's segment."""

    def start(self, part: TransferPart) -> None:
        way, calls = part.way, part.calls
        part.error = ""
        if way.queue or way.under_way + len(calls) > MAX_UNDER_WAY:
            part.waiting.extend(calls)
            way.queue.append(part)
            self._submit_more(way)
            return
        # Fast path for an empty queue with room: a third of the time.
        for call in calls:
            number = self._submit(*call)
            if number in FAILED:
                part.error = REFUSED
                return
            part.under_way.append(number)
            way.under_way += 1

    def _submit_more(self, way: PeerQueue) -> None:
        """Keep the library busy within its queue limit; older transfers go first."""
        queue = way.queue
        while queue and way.under_way < MAX_UNDER_WAY:
            part = queue[0]
            if not part.waiting or part.error:
                queue.popleft()
                continue
            number = self._submit(*part.waiting.popleft())
            if number in FAILED:
                part.error = REFUSED
                continue
            part.under_way.append(number)
            way.under_way += 1

    def poll(self, part: TransferPart) -> bool:
        """Whether the part is done. Raises TransferError."""
        way, under_way, status = part.way, part.under_way, self._status
        while under_way and not part.error:
            # Spans end about in order, so check the oldest one.
            found = status(under_way[0])
            if found == PENDING:
                break
            under_way.popleft()
            way.under_way -= 1
            if found != DONE:
                part.error = f"the engine reports status {found}"
        if way.queue:
            self._submit_more(way)
        if part.error:
            raise TransferError(part.error)
        return not under_way and not part.waiting

    def drop(self, part: TransferPart) -> None:
        """Forget a failed transfer's spans; they cannot be cancelled and end by the library's limits."""
        part.way.under_way -= len(part.under_way)
        part.waiting.clear()
        part.under_way.clear()


# The library then gives up a stalled connection, long after kvbench's deadlines, so that
# its threads and buffers do not stay busy with a peer that is gone. Seconds.
STALL_LIMIT_S = "20"
PROTOCOLS = ("tcp", "rdma")


def load() -> dict[str, str]:
    native.mooncake_module("engine")
    return native.mooncake_version()


def env(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables: their presence forces the transport. The engine publishes the bind address;
    release 0.3.13 listens on all interfaces anyway."""
    variables = {
        "MC_TCP_BIND_ADDRESS": variable_value("MC_TCP_BIND_ADDRESS", options.get("host"), "127.0.0.1"),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": variable_value("MC_TCP_PROGRESS_TIMEOUT_SEC", None, STALL_LIMIT_S),
    }
    if _rdma(options):
        variables["MC_FORCE_HCA"] = "1"
        if len(nics_of(options)) > 1:
            variables["MC_ENABLE_DEST_DEVICE_AFFINITY"] = "1"
    else:
        variables["MC_FORCE_TCP"] = "1"
    return variables


def _rdma(options: Mapping[str, Any]) -> bool:
    """Whether RDMA is requested, by the option or else by the environment."""
    protocol = protocol_of(options, PROTOCOLS)
    return protocol == "rdma" or (not options.get("protocol") and "MC_FORCE_HCA" in os.environ)


def transport_in_log(lines: Sequence[str]) -> str:
    """Return the transport that the engine's log reports, or an empty text."""
    for line in reversed(lines):
        if found := re.search(r"installTransport, type=(\w+)", line):
            return found.group(1)
        if "TcpTransport: listen on port" in line:
            return "tcp"
    return ""


@dataclass(frozen=True)
class _Peer:
    segments: list[str]
    address: int
    layout: Layout


class MooncakeEndpoint(Endpoint):
    """One engine, or over TCP one for each NIC, each with its own RPC port."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        host = str(options.get("host", "127.0.0.1"))
        nics = nics_of(options)
        self._merge = bool(options.get("merge", True))
        if _rdma(options):
            # A variable's presence forces a transport, so the other one must be absent.
            os.environ.pop("MC_FORCE_TCP", None)
            devices = ",".join(nic.name for nic in nics) or str(options.get("device_name", ""))
            self._lanes = [EngineLane(host, "rdma", devices)]
        else:
            os.environ.pop("MC_FORCE_HCA", None)
            self._lanes = [_tcp_lane(address) for address in [nic.address for nic in nics] or [host]]
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._peers: dict[str, _Peer] = {}

    def register(self, address: int, layout: Layout) -> None:
        for lane in self._lanes:
            code = lane.engine.register_memory(address, layout.nbytes)
            if code != 0:
                raise TransferError(f"register_memory returned {code} for {layout.nbytes} bytes")
        self._address, self._layout = address, layout

    def reshape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        return {"segments": [lane.segment for lane in self._lanes], "address": self._address}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        known = _Peer(list(peer["segments"]), int(peer["address"]), Layout(**peer["layout"]))
        if len(known.segments) != len(self._lanes):
            ours, theirs = len(self._lanes), len(known.segments)
            raise TransferError(f"this side has {ours} engines, the peer {theirs}: both need as many NICs")
        for lane, segment in zip(self._lanes, known.segments, strict=True):
            code = lane.engine.send_probe(segment)
            if code != 0:
                raise TransferError(f"cannot reach {segment}: send_probe returned {code}")
        self._peers[peer["id"]] = known

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        known = self._peers[peer]
        wanted = paired_spans(local, remote, self._layout, known.layout, self._merge)
        dealt = split_spans(wanted, len(self._lanes), MIN_PART_BYTES) if wanted else []
        parts = []
        for lane, segment, spans in zip(self._lanes, known.segments, dealt, strict=False):
            code = lane.opcodes[op]
            base, peer_base = self._address, known.address
            parts.append(
                TransferPart(
                    lane,
                    lane.ways[segment],
                    [(segment, [base + a], [peer_base + b], [n], code) for a, b, n in spans],
                )
            )
        nbytes = sum(span.nbytes for span in wanted)
        return Ticket(peer, op, nbytes, sum(map(len, dealt)), time.perf_counter() - began, parts)

    def start(self, ticket: Ticket) -> None:
        for part in ticket.handle:
            part.lane.start(part)

    def poll(self, ticket: Ticket) -> bool:
        done = True
        for part in ticket.handle:
            try:
                done = part.lane.poll(part) and done
            except TransferError as error:
                raise TransferError(f"the {ticket.op} of {ticket.nbytes} bytes: {error}") from None
        return done

    def release(self, ticket: Ticket) -> None:
        for part in ticket.handle:
            part.lane.drop(part)

    def transport(self) -> str:
        configured = "tcp" if "MC_FORCE_TCP" in os.environ else "rdma"
        return transport_in_log(self.native_log()) or f"{configured} (configured)"

    def library(self) -> dict[str, str]:
        return native.mooncake_version()

    def close(self) -> None:
        self._peers.clear()
        if self._address:
            with contextlib.suppress(Exception):
                for lane in self._lanes:
                    lane.engine.unregister_memory(self._address)
            self._address = 0


def _tcp_lane(address: str) -> EngineLane:
    """Start an engine at one address, which it reads from the environment."""
    os.environ["MC_TCP_BIND_ADDRESS"] = address
    return EngineLane(address, "tcp", "")


BACKEND = Backend(
    name="mooncake",
    title="Mooncake Transfer Engine",
    check=native.mooncake_absent,
    open=MooncakeEndpoint,
    env=env,
    load=load,
    protocols=PROTOCOLS,
    needs={"rdma": "rdma"},
)
