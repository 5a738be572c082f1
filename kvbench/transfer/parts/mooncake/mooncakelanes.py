"""Mooncake's engines, each with the order in which spans are given to it."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.parts.mooncake import mooncakewheel

# Runs under way to one peer. The library refuses what exceeds its queue per peer ("TCP lane
# queue-full rejection", seen with a few thousand runs); 1024 at a time were not faster than this.
MAX_UNDER_WAY = 256
DONE, PENDING = 1, 0
# Of a submission: 0 means failure; some builds return -1 as an unsigned number when the segment is gone.
FAILED = frozenset({0, -1, 2**64 - 1})
REFUSED = "the engine refused a span"


class PeerQueue:
    """One engine's way to one peer: the parts that have spans to submit, oldest first, and all under way."""

    __slots__ = ("queue", "under_way")

    def __init__(self) -> None:
        self.queue: deque[TransferPart] = deque()
        self.under_way = 0


class TransferPart:
    """The spans of a transfer that one engine moves to one peer, and the library's ids of those under way."""

    __slots__ = ("calls", "error", "lane", "under_way", "waiting", "way")

    def __init__(self, lane: EngineLane, way: PeerQueue, calls: list[tuple[Any, ...]]) -> None:
        self.lane = lane
        self.way = way
        self.calls = calls
        """The arguments of each submission."""
        self.waiting: deque[tuple[Any, ...]] = deque()
        self.under_way: deque[int] = deque()
        self.error = ""


class EngineLane:
    """One engine, and the order in which spans are given to it."""

    def __init__(self, host: str, protocol: str, devices: str) -> None:
        module = mooncakewheel.imported("engine")
        self.opcodes = {"read": module.TransferOpcode.Read, "write": module.TransferOpcode.Write}
        self.engine = module.TransferEngine()
        code = self.engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
        if code != 0:
            raise TransferError(f"the Transfer Engine does not start: initialize returned {code}")
        self.segment = f"{host}:{self.engine.get_rpc_port()}"
        self._submit = self.engine.batch_transfer_async
        self._status = self.engine.transfer_check_status
        self.ways: defaultdict[str, PeerQueue] = defaultdict(PeerQueue)
        """By the peer's segment."""

    def start(self, part: TransferPart) -> None:
        way, calls = part.way, part.calls
        part.error = ""
        if way.queue or way.under_way + len(calls) > MAX_UNDER_WAY:
            part.waiting.extend(calls)
            way.queue.append(part)
            self._submit_more(way)
            return
        # Nobody is before it and all have room: the same, in a third of the time.
        for call in calls:
            number = self._submit(*call)
            if number in FAILED:
                part.error = REFUSED
                return
            part.under_way.append(number)
            way.under_way += 1

    def _submit_more(self, way: PeerQueue) -> None:
        """Keep the library busy, but not beyond its queue; older transfers go first."""
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
            # Spans end about in order, so the oldest one is the one to ask.
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
        """Spans of a failed transfer cannot be called back; they end by the library's own limits."""
        part.way.under_way -= len(part.under_way)
        part.waiting.clear()
        part.under_way.clear()
