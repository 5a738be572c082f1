"""What endpoints share whose library blocks: calls in threads, a door for peers, and peers by their id."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from kvbench.errors import TransferError
from kvbench.transfer.base import Endpoint, Layout
from kvbench.transfer.parts.control import Door
from kvbench.transfer.parts.threads import Threads

PeerT = TypeVar("PeerT")


class ThreadedEndpoint(Endpoint, Generic[PeerT]):
    """One side, with up to ``threads`` calls under way. A backend says what its peers are."""

    def __init__(self, options: Mapping[str, Any], threads: int) -> None:
        self._host = str(options.get("host", "127.0.0.1"))
        self._id = os.urandom(6).hex()
        self._address = 0
        self._layout = Layout(0, 0, 0)
        self._threads = Threads(threads)
        self._peers: dict[str, PeerT] = {}
        self._door: Door | None = None

    def wait_fds(self) -> Sequence[int]:
        return (self._threads.fd,)

    def progress(self) -> None:
        self._threads.clear()

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)
        if self._door is not None:
            self._door.close()
        self._threads.close()

    def _known(self, peer: str) -> PeerT:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        return self._peers[peer]
