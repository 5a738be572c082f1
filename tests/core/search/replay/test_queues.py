"""Queues forwards and backwards: known systems, the compiled sums beside Python's, and departures undone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.core.search.replay import queues
from kvbench.core.search.replay.queues import FloatArray


def load(count: int = 600, rate: float = 1.0, seed: int = 1) -> tuple[FloatArray, FloatArray]:
    """(arrivals, work), both exponential with mean 1 / rate and 0.9."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.exponential(1 / rate, count)), rng.exponential(0.9, count)


def test_one_server_takes_requests_in_order_of_arrival() -> None:
    departed = queues.fifo(np.array([0.0, 1.0, 9.0]), np.array([3.0, 2.0, 1.0]), 1)
    assert departed.tolist() == [3.0, 5.0, 10.0]


def test_of_two_servers_the_free_one_takes_the_next() -> None:
    departed = queues.fifo(np.array([0.0, 0.5, 1.0]), np.array([4.0, 1.0, 1.0]), 2)
    assert departed.tolist() == [4.0, 1.5, 2.5]


def test_two_that_share_a_server_take_twice_as_long() -> None:
    assert queues.shared(np.array([0.0, 0.0]), np.array([1.0, 1.0]), 1).tolist() == [2.0, 2.0]
    assert queues.shared(np.array([0.0, 0.0]), np.array([1.0, 1.0]), 2).tolist() == [1.0, 1.0]


def test_a_request_beside_others_decodes_more_slowly() -> None:
    """Two of 10 tokens, 1 s a token alone and 0.5 s more for the other: 15 s each."""
    departed = queues.shared(np.array([0.0, 0.0]), np.array([10.0, 10.0]), math.inf, 1.0, 0.5)
    assert departed.tolist() == pytest.approx([15.0, 15.0])


def test_nobody_decodes_while_a_prompt_is_computed() -> None:
    arrived, prefill, tokens = np.array([0.0, 1.5]), np.array([1.0, 2.0]), np.array([2.0, 1.0])
    first, last = queues.engine(arrived, prefill, tokens, 1.0, 0.0, 8)
    assert first.tolist() == [1.0, 3.5]
    assert last.tolist() == [5.0, 4.5]  # half a token before the second prompt, the rest after it


def test_a_step_computes_prompts_and_gives_everybody_a_token() -> None:
    """Steps of 1 s and 0.5 s for each prompt, two prompts at most: the third waits for the second step."""
    first, last = queues.steps(np.zeros(3), np.array([2.0, 2.0, 0.0]), 1.0, 0.0, 0.5, 2.0)
    assert (first.tolist(), last.tolist()) == ([2.0, 2.0, 3.5], [4.5, 4.5, 3.5])


def test_a_long_prompt_takes_several_steps() -> None:
    first, _ = queues.steps(np.zeros(1), np.zeros(1), 1.0, 0.0, 0.5, 0.25)
    assert first.tolist() == pytest.approx([4.5])


def test_a_full_engine_lets_requests_wait_for_a_slot() -> None:
    first, last = queues.steps(np.zeros(2), np.array([3.0, 1.0]), 1.0, 0.0, 0.0, 9.0, slots=1)
    assert (first.tolist(), last.tolist()) == ([1.0, 5.0], [4.0, 6.0])


@pytest.mark.parametrize("compiled", [False, queues.COMPILED])
def test_engines_in_steps_don_t_wait_for_each_other(compiled: bool) -> None:
    first, _ = queues.steps(
        np.zeros(4), np.zeros(4), 1.0, 0.0, 0.5, 1.0, engine=np.array([0.0, 1, 0, 2]), compiled=compiled
    )
    assert first.tolist() == [1.5, 1.5, 3.0, 1.5]


@pytest.mark.skipif(not queues.COMPILED, reason="installed without a compiler")
@pytest.mark.parametrize("servers", [1, 3, 17])
def test_the_compiled_sums_are_those_of_python(servers: int) -> None:
    arrived, work = load(rate=servers)
    unseen = np.where(np.arange(len(work)) % 97 == 90, math.nan, queues.fifo(arrived, work, servers))
    tokens = np.floor(10 * work)
    for ours, compiled in zip(
        _played(arrived, work, tokens, servers, unseen, compiled=False),
        _played(arrived, work, tokens, servers, unseen, compiled=True),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, compiled)


def _played(
    arrived: FloatArray, work: FloatArray, tokens: FloatArray, servers: int, unseen: FloatArray, *,
    compiled: bool,
) -> list[FloatArray]:  # fmt: skip
    return [
        queues.fifo(arrived, work, servers, compiled=compiled),
        queues.fifo_work(arrived, unseen, servers, compiled=compiled),
        queues.shared(arrived, work, servers, 1.0, 0.02, compiled=compiled),
        *queues.engine(arrived, 0.5 * work, tokens, 0.01, 0.001, 9, compiled=compiled),
        *queues.steps(arrived, tokens, 0.01, 0.001, 0.05, 1.7, 9.0, compiled=compiled),
        *queues.steps(
            arrived, tokens, 0.01, 0.001, 0.05, 1.7, 9.0, np.floor(3 * work) % 4, compiled=compiled
        ),
    ]


@pytest.mark.parametrize("servers", [1, 2, 7])
def test_departures_tell_the_work(servers: int) -> None:
    arrived, work = load(rate=servers)
    departed = queues.fifo(arrived, work, servers)
    np.testing.assert_allclose(queues.fifo_work(arrived, departed, servers), work, rtol=1e-9, atol=1e-9)
    departed = queues.shared(arrived, work, servers)
    found, log_speed = queues.shared_work(arrived, departed, servers)
    np.testing.assert_allclose(found, work, rtol=1e-7, atol=1e-7)
    assert log_speed.max() <= 0.0


def test_what_nobody_saw_leave_keeps_its_server() -> None:
    """Of one server the next work is unknown, too, until a departure tells that it is free again."""
    arrived, departed = np.array([0.0, 1.0, 2.0]), np.array([math.nan, 1.5, 2.5])
    assert np.isnan(queues.fifo_work(arrived, departed, 1)).tolist() == [True, True, False]
    assert queues.fifo_work(arrived, departed, 2).tolist()[1:] == [0.5, 0.5]


@pytest.mark.skipif(not queues.COMPILED, reason="installed without a compiler")
def test_the_compiled_module_refuses_what_it_cannot_play() -> None:
    from kvbench.core.search.replay import _queues  # type: ignore[attr-defined]

    good = np.zeros(3)
    with pytest.raises(ValueError, match="one length"):
        _queues.fifo(good, np.zeros(2), 1, good)
    with pytest.raises(ValueError, match="doubles"):
        _queues.fifo(good, np.zeros(3, np.int64), 1, good)
    with pytest.raises(ValueError, match="a server"):
        _queues.fifo(good, good, 0, good)
    with pytest.raises(ValueError, match="a slot"):
        _queues.engine(good, good, good, 1.0, 0.0, 0, np.zeros(3), np.zeros(3))
    with pytest.raises(ValueError, match="a step must take time"):
        _queues.steps(good, good, good, 1, 0.0, 0.0, 0.0, 1.0, 1.0, np.zeros(3), np.zeros(3))
    with pytest.raises((TypeError, BufferError)):
        _queues.fifo([0.0], [0.0], 1, [0.0])
