"""What an engine's prefix cache achieves on virtual time is what is offered, or less, never more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.scenario.deployment_section import Routing
from kvbench.core.sessions.corpus import Blocks, Session, Turn, chained, offered_reuse
from kvbench.core.sessions.session_load import PromptHashes, session_load
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.core.simulation.step_time import timing_profile

SIZE = 16
APART_S = 1000.0
prompts = st.lists(
    st.lists(st.integers(0, 3), max_size=7).map(lambda ids: np.array(ids, np.int64)), min_size=1, max_size=15
)


def achieved(given_prompts: list[Blocks], blocks: int, gap_s: float) -> int:
    """Blocks that an aggregated engine found. Each prompt ends in a part of a block, so that all whole ones
    may be found: engines compute one token at the least.
    """
    config = EngineConfig(block_tokens=SIZE, num_blocks=blocks)
    system = System(timing=timing_profile("quick"), config=config, prefill=0)
    load = SimulatedLoad(
        offsets_s=[gap_s * place for place in range(len(given_prompts))],
        input_len=[SIZE * len(prompt) + 1 for prompt in given_prompts],
        output_len=[1] * len(given_prompts),
        timeout_s=1e9,
        hashes=[prompt.tolist() for prompt in given_prompts],
    )
    outcome = simulate(system, load)
    assert all(not record.error for record in outcome.records)
    return round(outcome.figures["aggregated"].prefix_hits) // SIZE


@settings(deadline=None)
@given(prompts)
def test_one_after_the_other_all_that_is_offered_is_found(lists: list[Blocks]) -> None:
    nodes, _ = chained(lists)
    assert achieved(nodes, 4096, APART_S) == offered_reuse(nodes).found()


@settings(deadline=None)
@given(prompts, st.integers(8, 30), st.sampled_from([0.0, 1e-3, APART_S]))
def test_no_pool_finds_more_than_is_offered_to_its_size(
    lists: list[Blocks], blocks: int, gap_s: float
) -> None:
    nodes, _ = chained(lists)
    offered = offered_reuse(nodes)
    assert achieved(nodes, blocks, gap_s) <= offered.found(blocks if gap_s == APART_S else None)


def reuse_by_routing(routing: Routing, prefill: int, decode: int) -> float:
    """Share of the offered reuse that 40 sessions of six turns find in their engines' caches."""
    turns = tuple(
        Turn(SIZE * (4 + place) + 5, 1, 0.5, 0.0, np.arange(4 + place, dtype=np.int64)) for place in range(6)
    )
    load = session_load(
        [Session(f"s{number}", 0.0, turns) for number in range(40)], [0.03 * number for number in range(40)],
        "session", SIZE, own_answers=False,
    )  # fmt: skip
    system = System(
        timing=timing_profile("quick"), config=EngineConfig(block_tokens=SIZE, num_blocks=8192),
        prefill=prefill, decode=decode, routing=routing,
    )  # fmt: skip
    sim_load = SimulatedLoad(
        load.offsets_s, load.input_len, load.output_len, 1e9, hashes=PromptHashes(load, SIZE),
        following=load.following,
    )  # fmt: skip
    outcome = simulate(system, sim_load)
    assert all(not record.error for record in outcome.records)
    found = outcome.figures["prefill" if prefill else "aggregated"].prefix_hits / SIZE
    return found / (40 * sum(range(4, 9)))


@pytest.mark.parametrize(("prefill", "decode"), [(0, 2), (2, 1)])
def test_a_session_finds_its_conversation_on_its_engine(prefill: int, decode: int) -> None:
    """In turn, a prompt's beginning is on the other engine half of the time."""
    assert reuse_by_routing("session", prefill, decode) == 1
    assert reuse_by_routing("round_robin", prefill, decode) < 0.9
