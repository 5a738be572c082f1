"""What an engine's prefix cache achieves on virtual time is what is offered, or less, never more."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.sessions.corpus import Blocks, chained
from kvbench.core.sessions.offered_reuse import offered_reuse
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
        input_len=[SIZE * len(each) + 1 for each in given_prompts],
        output_len=[1] * len(given_prompts),
        timeout_s=1e9,
        hashes=[each.tolist() for each in given_prompts],
    )
    outcome = simulate(system, load)
    assert all(not each.error for each in outcome.records)
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
