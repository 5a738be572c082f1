"""Moves nothing, at once: measures the tool's overhead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import TransferError
from kvbench.transfer.base import Backend, Endpoint, Layout, Op, Ticket


class NullEndpoint(Endpoint):
    def __init__(self) -> None:
        self._layout = Layout(0, 0, 0)
        self._peers: set[str] = set()

    def register(self, address: int, layout: Layout) -> None:
        self._layout = layout

    def reshape(self, layout: Layout) -> bool:
        self._layout = layout
        return True

    def describe(self) -> dict[str, Any]:
        return {}

    def connect(self, peer: Mapping[str, Any], deadline_s: float) -> None:
        self._peers.add(peer["id"])

    def forget(self, peer: str) -> None:
        self._peers.discard(peer)

    def prepare(self, peer: str, op: Op, local: Sequence[int], remote: Sequence[int]) -> Ticket:
        if peer not in self._peers:
            raise TransferError(f"no peer is called {peer!r}")
        count = len(local) * self._layout.regions
        return Ticket(peer, op, count * self._layout.block_bytes, count, 0.0)

    def start(self, ticket: Ticket) -> None:
        pass

    def poll(self, ticket: Ticket) -> bool:
        return True

    def transport(self) -> str:
        return "none"

    def close(self) -> None:
        self._peers.clear()


BACKEND = Backend(
    name="null",
    title="null (moves nothing)",
    open=lambda options: NullEndpoint(),
    moves_bytes=False,
    protocols=("none",),
    nics=False,
)
