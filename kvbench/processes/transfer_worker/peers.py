"""The peers of a transfer child: connected in threads, known by their layouts, given up after a timeout."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Endpoint, Layout


@dataclass
class _Connecting:
    """A connect under way in a thread. Once given up, a late success is undone."""

    peer: str
    layout: Layout
    deadline: float
    deadline_s: float
    mark: int
    done: bool = False
    error: str = ""


class Peers:
    """Of one endpoint. ``wake`` is a pipe that is written to when a thread has connected, or failed to."""

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
        """The first deadline of a connect under way (monotonic); infinite without one."""
        return min((each.deadline for each in self._connecting.values()), default=float("inf"))

    def layout_of(self, peer: str) -> Layout:
        """Raises TransferError for one that no transfer can be started to."""
        if peer in self._unusable:
            raise TransferError(f"peer {peer} is unusable since a transfer to it timed out; connect again")
        if peer not in self._known:
            raise TransferError(f"no peer is called {peer!r}; connect first")
        return self._known[peer]

    def give_up(self, peer: str) -> None:
        """A transfer to it timed out: it takes no more before it is connected again."""
        self._unusable.add(peer)

    def forget(self, peer: str) -> None:
        self._known.pop(peer, None)
        self._unusable.discard(peer)
        self._endpoint.forget(peer)

    def connect(self, number: int, peer: Mapping[str, Any], deadline_s: float, mark: int) -> None:
        """Begin; ``connected`` reports the end under the same number. Raises TransferError."""
        if peer.get("backend") != self._backend:
            raise TransferError(f"the peer speaks {peer.get('backend')!r}, this side {self._backend!r}")
        layout = Layout(**peer["layout"])
        mine = self._layout
        if (layout.regions, layout.block_bytes) != (mine.regions, mine.block_bytes):
            raise TransferError(
                f"the peer's layout is {layout.regions} regions of {layout.block_bytes}-byte blocks, "
                f"this side's {mine.regions} of {mine.block_bytes}"
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
        """What has ended since the last call: number, mark, error (empty for none), peer."""
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
    """Block ids must exist and be named once. Raises TransferError."""
    if not ids:
        return
    low, high = min(ids), max(ids)
    if low < 0 or high >= layout.blocks:
        wrong = low if low < 0 else high
        raise TransferError(f"{side} block {wrong} is outside the pool of {layout.blocks} blocks")
    if len(set(ids)) != len(ids):
        raise TransferError(f"a {side} block is named twice")
