"""Common code of backends that use a store: an object for each block of each region.

- write: the initiator puts objects; ``collect`` at the target asks each initiator over the control channel
  for the blocks' current keys, and gets them into the registered buffer.
- read: ``offer`` at the target puts the blocks' content and sends each initiator the keys; the initiator
  gets.

Every started write has new keys, since a store may keep an old value silently. If a second get may be refused
or served from a local copy, reads have new keys too: ``offer`` puts each block ``copies`` times, and
``Ticket.repeats`` is the number of starts until the next ``offer``. A thread removes objects that a newer
write replaced, after that call and only when there are many."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Layout, Op, Ticket
from kvbench.transfer.parts.control import ControlChannel, Door, Job, ThreadedEndpoint, dial

# Replaced objects are kept up to this many bytes, so that few removals affect a timed call.
SWEEP_BYTES = 4 << 20
# A fuller store evicts objects, even live ones (Mooncake's master at 0.99 of a segment).
FILL = 0.9

Place = tuple[int, int]
"""Region and block at the target."""
Notes = list[Any]
"""A put's result for each key, needed by the get, as JSON; often None."""


class Store(ABC):
    """One connection to a store. Calls block, come from several threads, and raise TransferError."""

    @abstractmethod
    def put(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> Notes:
        """Put each key."""

    @abstractmethod
    def get(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int, notes: Notes) -> None:
        """Get each key."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove keys; unknown ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Safe to call twice."""


@dataclass
class Written:
    """Keys of one started write, and their blocks at the target."""

    keys: list[str]
    places: Sequence[Place]
    notes: Notes
    nbytes: int
    released: bool = False


class StorePeer:
    """A target as its initiator sees it: written keys and offered keys."""

    def __init__(self, agent: Mapping[str, Any], store: Store, channel: ControlChannel) -> None:
        self.store = store
        self.channel = channel
        self.layout = Layout(**agent["layout"])
        self.copies = int(agent["copies"])
        self.greeted = threading.Event()
        """Set once the target knows this initiator and will send it offers."""
        self._room = int(agent["store"].get("room", 0))
        self._lock = threading.Lock()
        # The newest by ticket number.
        self._written: dict[int, Written] = {}
        self._replaced: deque[Written] = deque()
        self._replaced_bytes = 0
        self._planned_bytes = 0
        self._offered: dict[Place, list[tuple[str, Any]]] = {}

    def answer(self, message: Mapping[str, Any]) -> Any:
        """Handle the target's messages: a question for its blocks' keys, or an offer."""
        with self._lock:
            if message["cmd"] == "written":
                newest = list(self._written.values())
                self._written.clear()
                return [[done.keys, done.places, done.notes] for done in newest]
            for (region, block), items in message["offer"]:
                self._offered[region, block] = [(str(key), note) for key, note in items]
        self.greeted.set()
        return {}

    def plan(self, nbytes: int) -> None:
        """Prepare a repeated write: two generations must fit. Raises TransferError."""
        with self._lock:
            for number, done in list(self._written.items()):
                kept = sum(other.nbytes for other in self._written.values())
                if done.released and 4 * kept > self._room:
                    self._replace(self._written.pop(number))
            needed = 2 * (self._planned_bytes + nbytes)
            if self._room and needed > self._room:
                raise TransferError(
                    f"the store's segment of {self._room} bytes is too small: {needed} are needed for the "
                    f"present and the replaced objects of writes of {needed // 2} bytes; raise the "
                    "target's option segment_bytes"
                )
            self._planned_bytes += nbytes

    def put(
        self, number: int, keys: list[str], places: Sequence[Place], blocks: tuple[list[int], int]
    ) -> None:
        """Put ``blocks`` (addresses, and bytes of each) as the last write of ticket ``number``."""
        done = Written(keys, places, [], len(keys) * blocks[1])
        if self._crowded_by(done.nbytes):
            self.sweep()
        try:
            done.notes = self.store.put(keys, *blocks)
        except BaseException:
            with self._lock:
                self._replace(done)  # a part may have been stored
            raise
        with self._lock:
            old = self._written.pop(number, None)
            self._written[number] = done
            if old is not None:
                self._replace(old)

    def _crowded_by(self, nbytes: int) -> bool:
        """Whether a put of ``nbytes`` could cause evictions, and some objects may be removed."""
        with self._lock:
            kept = sum(done.nbytes for done in self._written.values())
            return 0 < self._room * FILL < kept + self._replaced_bytes + nbytes and self._replaced_bytes > 0

    def release(self, number: int, nbytes: int) -> None:
        """End a write's repetitions; its objects stay until collected or replaced."""
        with self._lock:
            self._planned_bytes -= nbytes
            if number in self._written:
                self._written[number].released = True

    def _replace(self, old: Written) -> None:
        self._replaced.append(old)
        self._replaced_bytes += old.nbytes

    @property
    def to_sweep(self) -> bool:
        """Whether enough objects were replaced for a removal."""
        return self._replaced_bytes > max(SWEEP_BYTES, self._planned_bytes)

    def sweep(self) -> None:
        with self._lock:
            old = list(self._replaced)
            self._replaced.clear()
            self._replaced_bytes = 0
        if old:
            self.store.remove([key for done in old for key in done.keys])

    def take(self, places: Sequence[Place], fresh: bool) -> tuple[list[str], Notes]:
        """Return the offered key of each place; with ``fresh`` each key only once. Raises TransferError."""
        with self._lock:
            stocks = [self._offered.get(place, []) for place in places]
            for (region, block), stock in zip(places, stocks, strict=True):
                if not stock:
                    read = f", or all {self.copies} copies of it have been read" if fresh else ""
                    raise TransferError(
                        f"block {block} of region {region} cannot be read: the target did not offer it{read}"
                    )
            items = [stock.pop() if fresh else stock[-1] for stock in stocks]
        return [key for key, _ in items], [note for _, note in items]


MAX_THREADS = 64
# Time for an initiator to send its keys, or to receive new ones, in seconds.
ASK_S = 3.0
COPIES = 16


@dataclass
class _Plan:
    number: int
    addresses: list[int]
    places: list[Place]
    job: Job | None = None


class KeyedEndpoint(ThreadedEndpoint[StorePeer]):
    """One side of a store. The backend defines how its store is provided and reached."""

    fresh_reads = False
    """Whether each read needs keys that were never read."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options, MAX_THREADS)
        self._options = options
        self._copies = int(options.get("copies", COPIES)) if self.fresh_reads else 1
        self._serial = 0
        self._store: Store | None = None
        self._provided: dict[str, Any] = {}
        self._initiators: dict[str, ControlChannel] = {}
        self._offers: dict[Place, list[tuple[str, Any]]] = {}
        self._offering = threading.Lock()

    @abstractmethod
    def provide(self, address: int, layout: Layout) -> tuple[Store, dict[str, Any]]:
        """Target: start the store; return it with JSON for ``reach``. The JSON's ``room`` is the capacity in
        bytes, if limited. Raises TransferError."""

    @abstractmethod
    def reach(self, provided: Mapping[str, Any], deadline_s: float) -> Store:
        """Initiator: connect to a target's store. Raises TransferError."""

    # --- both sides

    def register(self, address: int, layout: Layout) -> None:
        self._address, self._layout = address, layout
        if self._options.get("role") == "initiator":
            return
        self._store, self._provided = self.provide(address, layout)
        if room := int(self._provided.get("room", 0)):
            self._copies = max(min(self._copies, room // (2 * layout.nbytes)), 1)
        self._door = Door(self._host, self._welcome)

    def reshape(self, layout: Layout) -> bool:
        if self._store is not None:
            self._store.remove([key for items in self._offers.values() for key, _ in items])
            self._offers.clear()
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        control = self._door.address if self._door else {}
        return {"store": self._provided, "control": control, "copies": self._copies}

    def close(self) -> None:
        super().close()
        if self._store is not None:
            # Kept: freeing a library's last reference may take seconds.
            self._store.close()

    # --- the initiator's side

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        if not peer.get("control"):
            raise TransferError("the peer is not a target: it was opened as an initiator")
        until = time.monotonic() + deadline_s
        self.forget(str(peer["id"]))
        # Check the target first: libraries wait long for a lost one.
        channel = dial(peer["control"], {"id": self._id}, deadline_s)
        try:
            store = self.reach(peer["store"], max(until - time.monotonic(), 0.1))
        except BaseException:
            channel.close()
            raise
        known = StorePeer(peer, store, channel)
        serve = threading.Thread(target=channel.serve, args=(known.answer,), name="control", daemon=True)
        serve.start()
        self._peers[str(peer["id"])] = known
        if not known.greeted.wait(max(until - time.monotonic(), 0.1)):
            self.forget(str(peer["id"]))
            raise TransferError(f"the target said nothing within {deadline_s:g} s")

    def forget(self, peer: str) -> None:
        if (known := self._peers.pop(peer, None)) is not None:
            known.channel.close()
            # Its close may wait for a master that is gone.
            threading.Thread(target=known.store.close, name="close", daemon=True).start()

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        known = self._known(peer)
        began = time.perf_counter()
        size = self._layout.block_bytes
        pairs = list(zip(local, remote, strict=True))
        regions = range(self._layout.regions)
        offsets = [
            self._address + self._layout.offset(region, block) for region in regions for block, _ in pairs
        ]
        places = [(region, block) for region in regions for _, block in pairs]
        self._serial += 1
        ticket = Ticket(peer, op, len(places) * size, len(places), 0.0, _Plan(self._serial, offsets, places))
        if op == "write":
            known.plan(ticket.nbytes)
        elif self.fresh_reads:
            ticket.repeats = known.copies
        ticket.prepare_s = time.perf_counter() - began
        return ticket

    def start(self, ticket: Ticket) -> None:
        known = self._known(ticket.peer)
        plan: _Plan = ticket.handle
        size = self._layout.block_bytes
        if ticket.op == "read":
            keys, notes = known.take(plan.places, self.fresh_reads)
            plan.job = self._threads.start(lambda: known.store.get(keys, plan.addresses, size, notes))
            return
        self._serial += 1
        stem = f"kvbench-{self._id}-{self._serial}-"
        keys = [f"{stem}{region}_{block}" for region, block in plan.places]

        blocks = (plan.addresses, size)
        plan.job = self._threads.start(lambda: known.put(plan.number, keys, plan.places, blocks))

    def poll(self, ticket: Ticket) -> bool:
        plan: _Plan = ticket.handle
        assert plan.job is not None
        if not plan.job.finished():
            return False
        known = self._peers.get(ticket.peer)
        if known is not None and known.to_sweep:
            self._threads.start(known.sweep)
        return True

    def release(self, ticket: Ticket) -> None:
        known = self._peers.get(ticket.peer)
        if known is not None and ticket.op == "write":
            known.release(ticket.handle.number, ticket.nbytes)

    # --- the target's side

    def _welcome(self, channel: ControlChannel, hello: dict[str, Any]) -> None:
        """Keep an initiator's channel until it closes. This side asks."""
        name = str(hello.get("id"))
        try:
            with self._offering:
                self._initiators[name] = channel
                offer = [] if self.fresh_reads else list(self._offers.items())
                channel.ask({"cmd": "offer", "offer": offer}, ASK_S)
            channel.wait_for_end()
        finally:  # drop an initiator that gave up meanwhile; it would delay the others
            if self._initiators.get(name) is channel:
                del self._initiators[name]

    def _offered_store(self) -> Store:
        if self._store is None:
            raise TransferError("this side was opened as an initiator: it has no store to offer")
        return self._store

    def _address_of(self, place: Sequence[int]) -> int:
        return self._address + self._layout.offset(int(place[0]), int(place[1]))

    def collect(self, blocks: Sequence[int]) -> None:
        store, wanted = self._offered_store(), set(blocks)
        for channel in list(self._initiators.values()):
            for keys, places, notes in channel.ask({"cmd": "written"}, ASK_S):
                chosen = [i for i, place in enumerate(places) if place[1] in wanted]
                store.get(
                    [keys[i] for i in chosen],
                    [self._address_of(places[i]) for i in chosen],
                    self._layout.block_bytes,
                    [notes[i] for i in chosen],
                )
                store.remove(keys)

    def offer(self, blocks: Sequence[int]) -> None:
        store = self._offered_store()
        places = [(region, block) for region in range(self._layout.regions) for block in blocks]
        with self._offering:
            store.remove([key for place in places for key, _ in self._offers.pop(place, [])])
            offer = [] if self.fresh_reads else self._put_offer(store, places)
            for channel in list(self._initiators.values()):
                # Keys that are read only once are separate for each initiator.
                keys = self._put_offer(store, places) if self.fresh_reads else offer
                channel.ask({"cmd": "offer", "offer": keys}, ASK_S)

    def _put_offer(self, store: Store, places: Sequence[Place]) -> list[tuple[Place, list[tuple[str, Any]]]]:
        """Put the blocks as often as one initiator may read them, under new keys."""
        addresses = [self._address_of(place) for place in places]
        items: list[list[tuple[str, Any]]] = [[] for _ in places]
        for _ in range(self._copies):
            self._serial += 1
            keys = [f"kvbench-{self._id}-{self._serial}-{region}_{block}" for region, block in places]
            notes = store.put(keys, addresses, self._layout.block_bytes)
            for known, key, note in zip(items, keys, notes, strict=True):
                known.append((key, note))
        for place, offered in zip(places, items, strict=True):
            self._offers.setdefault(place, []).extend(offered)
        return list(zip(places, items, strict=True))
