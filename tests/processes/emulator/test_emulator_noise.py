"""An engine that differs from itself in batches, as kernels do whose sums depend on the batch."""

from __future__ import annotations

import numpy as np

from kvbench.core.simulation.scheduler import EngineRequest
from kvbench.processes.emulator.kvbytes import KvCompute, KvPool
from kvbench.processes.emulator.running_request import LiveRequest
from kvbench.transfer.base import Layout


class Nobody:
    """Where tokens go that nobody waits for."""

    def on_token(self, token: int, finish_reason: str | None) -> None:
        return None

    def on_error(self, status: int, message: str) -> None:
        return None


def drawn(noise: float, batch: int, rounds: int) -> list[list[int]]:
    """The tokens of each round, of sequences whose states are the same each time."""
    pool = KvPool(Layout(1, 4, 128), 16)
    try:
        compute = KvCompute(pool, 1000, 64, noise)
        lives = [
            LiveRequest(EngineRequest(f"r{n}", 4, 8), np.zeros(4, np.uint64), Nobody(), ignore_eos=True)
            for n in range(batch)
        ]
        for number, live in enumerate(lives):
            live.state = 977 * number + 5
        found = []
        for _ in range(rounds):
            compute.draw(lives)
            found.append([live.drawn for live in lives])
        return found
    finally:
        pool.close()


def test_without_noise_the_same_states_give_the_same_tokens() -> None:
    assert len({tuple(tokens) for tokens in drawn(0.0, 8, 20)}) == 1


def test_alone_nothing_differs() -> None:
    assert len({tuple(tokens) for tokens in drawn(0.5, 1, 20)}) == 1


def test_in_a_batch_about_the_share_asked_for_differs() -> None:
    (right,) = {tuple(tokens) for tokens in drawn(0.0, 16, 1)}
    found = drawn(0.1, 16, 400)
    share = np.mean([[one != other for one, other in zip(tokens, right, strict=True)] for tokens in found])
    assert 0.07 < share < 0.13
