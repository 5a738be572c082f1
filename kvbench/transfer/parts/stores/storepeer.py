"""A store, and what an initiator knows of a target that it reached through one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Layout
from kvbench.transfer.parts.control import ControlChannel

# Replaced objects are left alone until they are this many bytes, so that few removals meet a timed call.
SWEEP_BYTES = 4 << 20
# A fuller store puts objects out by itself, live ones among them (Mooncake's master at 0.99 of a segment).
FILL = 0.9

Place = tuple[int, int]
"""Region and block at the target."""
Notes = list[Any]
"""What a put returns for each key and the get of it needs, as JSON; often None."""


class Store(ABC):
    """One connection to a store. Each call blocks, is made from several threads, and raises TransferError."""

    @abstractmethod
    def put(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int) -> Notes:
        """Put ``nbytes`` bytes from each address under each key."""

    @abstractmethod
    def get(self, keys: Sequence[str], addresses: Sequence[int], nbytes: int, notes: Notes) -> None:
        """Get each key's ``nbytes`` bytes to each address."""

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Forget keys; unknown ones are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Free everything. Safe to call twice."""


@dataclass
class Written:
    """What one start of a write put, and where it belongs at the target."""

    keys: list[str]
    places: Sequence[Place]
    notes: Notes
    nbytes: int
    released: bool = False


class StorePeer:
    """A target as its initiator sees it: keys that were put there, and keys that are offered."""

    def __init__(self, agent: Mapping[str, Any], store: Store, channel: ControlChannel) -> None:
        self.store = store
        self.channel = channel
        self.layout = Layout(**agent["layout"])
        self.copies = int(agent["copies"])
        self.greeted = threading.Event()
        """Set once the target knows this initiator, so that it will hear of offers."""
        self._room = int(agent["store"].get("room", 0))
        self._lock = threading.Lock()
        # By ticket number, the newest.
        self._written: dict[int, Written] = {}
        self._replaced: deque[Written] = deque()
        self._replaced_bytes = 0
        self._planned_bytes = 0
        self._offered: dict[Place, list[tuple[str, Any]]] = {}

    def answer(self, message: Mapping[str, Any]) -> Any:
        """What the target asks: where its blocks are; and what it says: what it offers."""
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
        """A write of so many bytes may be repeated: two generations must fit. Raises TransferError."""
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
        """Put ``blocks`` (addresses, and bytes of each) as what ticket ``number`` wrote last."""
        done = Written(keys, places, [], len(keys) * blocks[1])
        if self._crowded_by(done.nbytes):
            self.sweep()
        try:
            done.notes = self.store.put(keys, *blocks)
        except BaseException:
            with self._lock:
                self._replace(done)  # some of it may be there
            raise
        with self._lock:
            old = self._written.pop(number, None)
            self._written[number] = done
            if old is not None:
                self._replace(old)

    def _crowded_by(self, nbytes: int) -> bool:
        """Whether a put of so many bytes could make the store put objects out, and some may be removed."""
        with self._lock:
            kept = sum(done.nbytes for done in self._written.values())
            return 0 < self._room * FILL < kept + self._replaced_bytes + nbytes and self._replaced_bytes > 0

    def release(self, number: int, nbytes: int) -> None:
        """A write is repeated no more; what it wrote stays until it is collected or in the way."""
        with self._lock:
            self._planned_bytes -= nbytes
            if number in self._written:
                self._written[number].released = True

    def _replace(self, old: Written) -> None:
        self._replaced.append(old)
        self._replaced_bytes += old.nbytes

    @property
    def to_sweep(self) -> bool:
        """Whether replaced objects are so many that they should go."""
        return self._replaced_bytes > max(SWEEP_BYTES, self._planned_bytes)

    def sweep(self) -> None:
        """Remove what newer writes replaced."""
        with self._lock:
            old = list(self._replaced)
            self._replaced.clear()
            self._replaced_bytes = 0
        if old:
            self.store.remove([key for done in old for key in done.keys])

    def take(self, places: Sequence[Place], fresh: bool) -> tuple[list[str], Notes]:
        """The offered key of each place; ``fresh``: one that is given once only. Raises TransferError."""
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
