"""Mooncake's Transfer Engine, peer to peer, without a metadata server.

How it is driven, and why (measured with the non-CUDA wheel 0.3.13 over TCP on two cores):

- The blocking calls (``transfer_sync``, ``batch_transfer_sync``, ``get_batch_transfer_status``)
  spin, which costs the caller 0.7 CPU-seconds per GB against 0.4 for submitting and polling with
  pauses; and they cannot be left before the library's own time limit. So every run is submitted
  as a batch of one, the only kind whose status can be asked without waiting.
- The wait for a peer that accepts a connection and never answers is 61 s, inside
  ``send_probe`` as inside the first transfer. The probe runs in ``connect``, in a thread, and
  nothing is submitted to a peer that did not answer it.
- The protocol argument of ``initialize`` selects nothing; ``MC_FORCE_TCP`` does, by its presence.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Problem, Ticket
from kvbench.transfer.blocks import Span, merge_runs, spans
from kvbench.transfer.native import (
    VERBS_FIX,
    VERBS_LIBRARIES,
    import_native,
    inherited,
    preload,
    version_of,
)

DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
INSTALL = "pip install mooncake-transfer-engine-non-cuda"
# Runs under way to one peer. The library refuses what exceeds its queue per peer ("TCP lane
# queue-full rejection", seen with a few thousand runs); 1024 at a time were not faster than this.
MAX_UNDER_WAY = 256
# The library then gives up a stalled connection by itself, long after our own deadlines, so that
# its threads and buffers do not stay busy with a peer that is gone. Seconds.
STALL_LIMIT_S = "20"
DONE, PENDING = 1, 0


def check() -> Problem | None:
    """Is the package there? Whether it loads is asked in a child process."""
    if importlib.util.find_spec("mooncake") is None:
        return Problem("not installed", INSTALL)
    return None


def load() -> dict[str, str]:
    """Import the engine; for child processes only."""
    preload(VERBS_LIBRARIES)
    import_native("mooncake.engine", VERBS_FIX)
    return version_of(*DISTRIBUTIONS)


def env(options: Mapping[str, Any]) -> dict[str, str]:
    """The transport is forced by a variable's presence.

    The bind address is what the engine publishes; release 0.3.13 listens on all interfaces anyway.
    """
    variables = {
        "MC_TCP_BIND_ADDRESS": inherited("MC_TCP_BIND_ADDRESS", options.get("host"), "127.0.0.1"),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": inherited("MC_TCP_PROGRESS_TIMEOUT_SEC", None, STALL_LIMIT_S),
    }
    rdma = options.get("mooncake_protocol", "tcp") == "rdma" or "MC_FORCE_HCA" in os.environ
    variables["MC_FORCE_HCA" if rdma else "MC_FORCE_TCP"] = "1"
    return variables


def transport_in_log(lines: Sequence[str]) -> str:
    """The transport that the engine says it installed; empty if it does not say."""
    for line in reversed(lines):
        if found := re.search(r"installTransport, type=(\w+)", line):
            return found.group(1)
        if "TcpTransport: listen on port" in line:
            return "tcp"
    return ""


@dataclass
class _Batch:
    """One transfer: spans not yet submitted, and the library's ids of those under way."""

    segment: str
    op: Op
    waiting: deque[Span]
    under_way: deque[int] = field(default_factory=deque)
    error: str = ""


class MooncakeEndpoint(Endpoint):
    """One TransferEngine with its own RPC port."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        preload(VERBS_LIBRARIES)
        engine = import_native("mooncake.engine", VERBS_FIX)
        self._host = str(options.get("host", "127.0.0.1"))
        self._opcodes = {"read": engine.TransferOpcode.Read, "write": engine.TransferOpcode.Write}
        self._engine = engine.TransferEngine()
        devices = str(options.get("device_name", ""))
        protocol = str(options.get("mooncake_protocol", "tcp"))
        code = self._engine.initialize(self._host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransferError(f"the Transfer Engine does not start: initialize returned {code}")
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._peers: dict[str, tuple[str, int, Layout]] = {}
        # Per segment: the transfers that have spans to submit, oldest first, and all runs under way.
        self._queues: defaultdict[str, deque[_Batch]] = defaultdict(deque)
        self._under_way: Counter[str] = Counter()

    def register(self, address: int, layout: Layout) -> None:
        code = self._engine.register_memory(address, layout.nbytes)
        if code != 0:
            raise TransferError(f"register_memory returned {code} for {layout.nbytes} bytes")
        self._address, self._layout = address, layout

    def describe(self) -> dict[str, Any]:
        segment = f"{self._host}:{self._engine.get_rpc_port()}"
        return {"segment": segment, "address": self._address}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        segment = str(peer["segment"])
        code = self._engine.send_probe(segment)
        if code != 0:
            raise TransferError(f"cannot reach {segment}: send_probe returned {code}")
        self._peers[peer["id"]] = (segment, int(peer["address"]), Layout(**peer["layout"]))

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def submit(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        began = time.perf_counter()
        segment, address, layout = self._peers[peer]
        wanted = deque(
            Span(self._address + span.local, address + span.remote, span.nbytes)
            for span in spans(merge_runs(local, remote), self._layout, layout)
        )
        nbytes = sum(span.nbytes for span in wanted)
        batch = _Batch(segment, op, wanted)
        ticket = Ticket(peer, op, nbytes, len(wanted), time.perf_counter() - began, batch)
        self._queues[segment].append(batch)
        self._submit_more(segment)
        return ticket

    def _submit_more(self, segment: str) -> None:
        """Keep the library busy, but not beyond its queue; older transfers go first."""
        queue = self._queues[segment]
        while queue and self._under_way[segment] < MAX_UNDER_WAY:
            batch = queue[0]
            if not batch.waiting or batch.error:
                queue.popleft()
                continue
            span = batch.waiting.popleft()
            number = self._engine.batch_transfer_async(
                segment, [span.local], [span.remote], [span.nbytes], self._opcodes[batch.op]
            )
            # 0 means failure; some builds return -1 as an unsigned number when the segment is gone.
            if number in (0, -1, 2**64 - 1):
                batch.error = f"the engine refused a {batch.op} of {span.nbytes} bytes"
                continue
            batch.under_way.append(number)
            self._under_way[segment] += 1

    def poll(self, ticket: Ticket) -> bool:
        batch: _Batch = ticket.handle
        while batch.under_way and not batch.error:
            # Runs end about in order, so the oldest one is the one to ask.
            status = self._engine.transfer_check_status(batch.under_way[0])
            if status == PENDING:
                break
            batch.under_way.popleft()
            self._under_way[batch.segment] -= 1
            if status != DONE:
                batch.error = f"the engine reports status {status} for a {batch.op}"
        self._submit_more(batch.segment)
        if batch.error:
            raise TransferError(batch.error)
        return not batch.under_way and not batch.waiting

    def release(self, ticket: Ticket) -> None:
        # Runs of a failed transfer cannot be called back; they end by the library's own limits.
        batch: _Batch = ticket.handle
        self._under_way[batch.segment] -= len(batch.under_way)
        batch.waiting.clear()
        batch.under_way.clear()

    def transport(self) -> str:
        configured = "tcp" if "MC_FORCE_TCP" in os.environ else "rdma"
        return transport_in_log(self.native_log()) or f"{configured} (configured)"

    def library(self) -> dict[str, str]:
        return version_of(*DISTRIBUTIONS)

    def close(self) -> None:
        self._peers.clear()
        if self._address:
            with contextlib.suppress(Exception):
                self._engine.unregister_memory(self._address)
            self._address = 0


BACKEND = Backend(
    name="mooncake",
    title="Mooncake Transfer Engine",
    ops=("read", "write"),
    check=check,
    open=MooncakeEndpoint,
    env=env,
    load=load,
)
