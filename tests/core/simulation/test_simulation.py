"""Deployments on virtual time: conservation, causality, agreement with formulas and with the plain engine."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_engine import VirtualEngine, serve

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.metrics.metrics import Slo, summarise
from kvbench.core.simulation.data import Link, Outcome, Overheads, SimulatedLoad, System, Tick
from kvbench.core.simulation.deployment import TICK_S, SimulatedTrial, simulate
from kvbench.core.simulation.engine import CountingPool, StepEngine
from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest
from kvbench.core.simulation.step_time import StepLoad, TimingProfile, timing_profile
from kvbench.errors import InputError

QUICK = timing_profile("quick")
CONFIG = EngineConfig(num_blocks=6000, max_num_seqs=64, max_model_len=4096)
PAIR = System(
    QUICK, CONFIG, link=Link(1.0, 1.0), overheads=Overheads(1.0, 2.0, 0.5, 1.0), block_bytes=32768.0
)


def poisson(rate: float, n: int, seed: int) -> list[float]:
    return planned_offsets(rate, n, 1.0, seed).tolist()


# -- conservation and causality ------------------------------------------------------------------------
systems = st.builds(
    System,
    timing=st.just(QUICK),
    config=st.builds(
        EngineConfig,
        num_blocks=st.integers(40, 400),
        max_num_seqs=st.integers(1, 12),
        max_num_batched_tokens=st.sampled_from([64, 256, 2048]),
        max_model_len=st.just(4096),
    ),
    decode_config=st.none()
    | st.builds(EngineConfig, num_blocks=st.integers(40, 200), max_num_seqs=st.integers(1, 6)),
    prefill=st.integers(0, 3),
    decode=st.integers(1, 3),
    dispatch=st.sampled_from(["sequential", "concurrent"]),
    link=st.builds(Link, st.floats(0.01, 10), st.floats(0, 5)),
    overheads=st.builds(Overheads, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)),
    block_bytes=st.just(32768.0),
)
loads = st.lists(
    st.tuples(st.floats(0, 0.2), st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=30
)


def load_of(requests: list[tuple[float, int, int]], timeout_s: float = 1e6) -> SimulatedLoad:
    offsets = np.cumsum([gap for gap, _, _ in requests]).tolist()
    return SimulatedLoad(
        offsets, [prompt for _, prompt, _ in requests], [out for _, _, out in requests], timeout_s
    )


def everything_is_free(trial: SimulatedTrial) -> None:
    for role in trial.roles.values():
        for engine in role.engines:
            scheduler = engine.scheduler
            assert scheduler.unfinished == 0
            assert not scheduler.held
            assert scheduler.pool.free_blocks == engine.config.num_blocks


@settings(max_examples=80, deadline=None)
@given(systems, loads)
def test_each_request_is_served_once_in_order(system: System, requests: list[tuple[float, int, int]]) -> None:
    load = load_of(requests)
    trial = SimulatedTrial(system, load, None)
    outcome = trial.run()
    assert len(outcome.records) == len(requests)
    last = "decode" if system.prefill else "aggregated"
    for index, (record, (_, prompt, out)) in enumerate(zip(outcome.records, requests, strict=True)):
        assert record.request_id == f"sim-{index}"
        assert record.ok
        assert (record.input_len, record.output_len) == (prompt, out)
        assert len(record.itl_s) == out - 1
        assert all(gap > 0 for gap in record.itl_s)
        times = [record.scheduled_s, record.sent_s]
        if system.prefill:
            times += [record.router_received_s, record.prefill_sent_s]
            if system.dispatch == "sequential":
                times += [record.prefill_answered_s, record.decode_sent_s]
            else:
                assert record.decode_sent_s == record.prefill_sent_s
            times.append(record.decode_first_byte_s)
        times += [record.first_token_s, record.last_token_s]
        known = [time for time in times if time is not None]
        assert len(known) == len(times)
        assert known == sorted(known)
        assert record.last_token_s == pytest.approx(record.first_token_s + sum(record.itl_s))  # type: ignore[operator]
    everything_is_free(trial)
    figures = outcome.figures
    assert figures[last].requests == len(requests)
    assert figures[last].generation_tokens == sum(out for _, _, out in requests)
    assert figures[last].prompt_tokens == sum(prompt for _, prompt, _ in requests)
    if system.prefill:
        assert figures["prefill"].prompt_tokens == figures[last].prompt_tokens
        # A request that was preempted on D before it ran has its KV computed there again, not moved again.
        assert outcome.transfers == len(requests)
        blocks = sum(-(-prompt // 16) for _, prompt, _ in requests)
        assert outcome.transfer_bytes == blocks * system.block_bytes
    assert outcome.duration_s == max(record.last_token_s or 0.0 for record in outcome.records)


@settings(max_examples=80, deadline=None)
@given(systems, loads, st.floats(0.02, 0.5))
def test_deadlines_end_requests_wherever_they_are_and_leak_nothing(
    system: System, requests: list[tuple[float, int, int]], timeout_s: float
) -> None:
    trial = SimulatedTrial(system, load_of(requests, timeout_s), None)
    outcome = trial.run()
    for record in outcome.records:
        assert record.error in ("", "timeout")
        if record.ok:
            assert (record.e2el_s or 0.0) <= timeout_s + 1e-9
        else:
            assert record.output_len < record.requested_output_len
    # What was on its way when the last request was settled still arrives; then nothing is left.
    while trial.step():
        pass
    everything_is_free(trial)


@settings(max_examples=50, deadline=None)
@given(systems, loads, st.integers(0, 3))
def test_a_stopped_trial_keeps_what_it_knows(
    system: System, requests: list[tuple[float, int, int]], ticks: int
) -> None:
    seen: list[Tick] = []

    def watch(tick: Tick) -> bool:
        seen.append(tick)
        return len(seen) > ticks

    outcome = simulate(system, load_of(requests), watch)
    settled = [index for tick in seen for index in tick.settled]
    assert len(settled) == len(set(settled))
    assert [tick.t_s for tick in seen] == pytest.approx([TICK_S * (n + 1) for n in range(len(seen))])
    if outcome.stopped:
        assert (len(seen), outcome.duration_s) == (ticks + 1, seen[-1].t_s)
        sent = [record for record in outcome.records if record.error == "cancelled"]
        assert len(sent) == seen[-1].in_flight
        assert all(record.scheduled_s <= outcome.duration_s for record in outcome.records)
    else:
        assert all(record.ok for record in outcome.records)


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(1, 8), st.integers(60, 300), st.sampled_from([64, 2048]))
def test_steps_taken_in_one_go_are_the_steps_taken_one_by_one(
    requests: list[tuple[float, int, int]], slots: int, blocks: int, budget: int
) -> None:
    config = EngineConfig(
        num_blocks=blocks, max_num_seqs=slots, max_num_batched_tokens=budget, enable_prefix_caching=False
    )
    load = load_of(requests)
    plain = VirtualEngine(config, QUICK)
    expected = serve(
        plain,
        [
            EngineRequest(f"sim-{index}", prompt, out, arrival_s=load.offsets_s[index])
            for index, (_, prompt, out) in enumerate(requests)
        ],
    )
    outcome = simulate(System(QUICK, config, prefill=0), load)
    for record in outcome.records:
        times = expected[record.request_id]
        assert record.first_token_s == pytest.approx(times[0], abs=1e-9)
        assert record.itl_s == pytest.approx([b - a for a, b in pairwise(times)], abs=1e-9)
    assert outcome.figures["aggregated"].busy_s == pytest.approx(plain.busy_s)
    assert outcome.figures["aggregated"].preemptions == plain.scheduler.stats.preemptions


def test_the_same_load_gives_the_same_trial() -> None:
    load = SimulatedLoad.alike(poisson(30, 200, 1), 512, 16)
    assert simulate(PAIR, load).records == simulate(PAIR, load).records


# -- formulas ------------------------------------------------------------------------------------------
def service(prefill_ms: float) -> TimingProfile:
    """A prompt takes so long, and a decode step next to nothing."""
    return TimingProfile(
        "fixed", "test", 0.0, 0.0, prefill_ms, 0.0, 0.0, 1e-6, 0.0, lambda seqs, context: 0.0
    )


def mean_wait_s(outcome: Outcome, unloaded_s: float) -> float:
    return float(np.mean([(record.ttft_s or 0.0) - unloaded_s for record in outcome.records]))


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_prefill_alone_is_an_m_d_1_queue(load: float) -> None:
    # One prompt fills a step's budget, so that P serves them one after the other in 10 ms each.
    config = replace(CONFIG, max_num_batched_tokens=256)
    system = System(service(10.0), config, link=Link(1e6, 0.0), block_bytes=1.0)
    waits = [
        mean_wait_s(simulate(system, SimulatedLoad.alike(poisson(load / 0.01, 3000, seed), 256, 1)), 0.01)
        for seed in range(3)
    ]
    expected = load * 0.01 / (2 * (1 - load))  # Pollaczek-Khinchine, constant service
    assert np.mean(waits) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("dispatch", ["sequential", "concurrent"])
def test_the_link_is_an_m_d_1_queue_too(dispatch: str) -> None:
    system = System(
        service(1e-6),
        replace(CONFIG, num_blocks=10**6, max_num_seqs=10**4),
        dispatch=dispatch,  # type: ignore[arg-type]
        link=Link(1.0, 2.0),
        block_bytes=10e6 / 16,
    )
    waits = []
    for seed in range(3):
        outcome = simulate(system, SimulatedLoad.alike(poisson(60, 2000, seed), 256, 1))
        waits.append(mean_wait_s(outcome, 0.012))
        assert outcome.link_busy_share == pytest.approx(0.6, rel=0.1)
    assert np.mean(waits) == pytest.approx(0.6 * 0.01 / (2 * 0.4), rel=0.15)
    mean_transfer_s = outcome.transfer_s / outcome.transfers
    assert mean_transfer_s == pytest.approx(0.012 + waits[-1], rel=0.01)


def test_links_of_other_instances_are_other_links() -> None:
    burst = SimulatedLoad.alike([0.0, 0.0], 256, 1)
    slow = replace(PAIR, link=Link(0.01, 0.0), overheads=Overheads(), timing=service(1e-6))
    shared = simulate(slow, burst).duration_s
    separate = simulate(replace(slow, prefill=2, decode=2), burst).duration_s
    one_end = simulate(replace(slow, prefill=2), burst).duration_s
    assert shared == pytest.approx(2 * separate, rel=1e-3)
    assert one_end == pytest.approx(shared, rel=1e-3)  # D's link is the same for both


def test_instances_are_taken_in_turn() -> None:
    one = simulate(replace(PAIR, prefill=1), SimulatedLoad.alike([0.0] * 8, 1024, 4))
    four = simulate(replace(PAIR, prefill=4), SimulatedLoad.alike([0.0] * 8, 1024, 4))
    assert four.figures["prefill"].busy_s == pytest.approx(one.figures["prefill"].busy_s, rel=0.2)
    assert max(r.ttft_s or 0 for r in four.records) < 0.5 * max(r.ttft_s or 0 for r in one.records)
    assert four.use["prefill"].engines == 4


def test_unloaded_latency_is_the_sum_of_its_parts() -> None:
    outcome = simulate(PAIR, SimulatedLoad.alike([1.0], 1024, 3))
    (record,) = outcome.records
    prefill_s = QUICK.step_s(StepLoad([(1024, 0)]))
    first_step_s = (QUICK.decode_base_ms + QUICK.decode_ms(1, 1023)) / 1e3
    around_s = (1.0 + 2.0 + 0.5 + 2.0 + 1.0) / 1e3  # router, P's front end, turn, D's front end, arrival
    transfer_s = 64 * 32768 / 1e9 + 0.001
    assert record.ttft_s == pytest.approx(prefill_s + first_step_s + around_s + transfer_s)
    assert record.prefill_answered_s == pytest.approx(1.0 + (1.0 + 2.0) / 1e3 + prefill_s)
    assert outcome.phases["prefill"].prefill == pytest.approx(prefill_s)
    assert outcome.phases["decode"].token_gap == pytest.approx(first_step_s, rel=0.01)


def test_concurrent_dispatch_saves_the_way_to_decode() -> None:
    load = SimulatedLoad.alike([1.0], 1024, 3)
    sequential, concurrent = (
        simulate(replace(PAIR, dispatch=dispatch), load).records[0].ttft_s or 0.0  # type: ignore[arg-type]
        for dispatch in ("sequential", "concurrent")
    )
    # P's answer (1 ms), the router's turn (0.5 ms) and D's front end (2 ms) pass while P computes.
    assert sequential - concurrent == pytest.approx(0.0035)


def test_shared_prompts_are_found_in_the_prefix_cache() -> None:
    hashes = [[1, 2, 3, 4], [1, 2, 3, 5], [9, 8, 7, 6]]
    load = SimulatedLoad([0.0, 1.0, 2.0], [70] * 3, [2] * 3, hashes=hashes)
    outcome = simulate(PAIR, load)
    assert (outcome.figures["prefill"].prefix_hits, outcome.figures["decode"].prefix_hits) == (48, 48)
    assert outcome.transfer_bytes == (5 + 2 + 5) * PAIR.block_bytes


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(InputError, match="maximum context length is 4096"):
        simulate(PAIR, SimulatedLoad.alike([0.0], 5000, 10))


def test_no_requests_are_no_trouble() -> None:
    outcome = simulate(PAIR, SimulatedLoad.alike([], 512, 16))
    assert (outcome.records, outcome.duration_s) == ([], 0.0)


def test_use_tells_full_slots_and_full_pools() -> None:
    few = replace(PAIR, decode_config=replace(CONFIG, max_num_seqs=2))
    outcome = simulate(few, SimulatedLoad.alike(poisson(40, 200, 1), 256, 64))
    assert (outcome.use["decode"].slots, outcome.use["decode"].running_peak) == (2, 2)
    assert (outcome.use["decode"].slots_full_share or 0.0) > 0.8
    small = replace(PAIR, decode_config=replace(CONFIG, num_blocks=40))
    outcome = simulate(small, SimulatedLoad.alike(poisson(40, 200, 1), 256, 64))
    assert (outcome.use["decode"].kv_full_share or 0.0) > 0.8
    assert (outcome.use["decode"].kv_use_peak or 0.0) > 0.8
    idle = simulate(PAIR, SimulatedLoad.alike(poisson(2, 50, 1), 256, 16)).use["decode"]
    assert idle.slots_full_share == idle.kv_full_share == 0.0
    assert 0.0 < (idle.busy_share or 0.0) < 0.3


def test_a_run_of_steps_is_cut_at_the_step_under_way() -> None:
    engine = StepEngine(CONFIG, QUICK)
    engine.scheduler.add(EngineRequest("a", 16, 50))
    assert engine.begin(0.0) is not None
    engine.end()
    start = 1.0
    end = engine.begin(start)
    step = (end - start) / 49
    assert engine.cut(end + 1) is None
    cut = engine.cut(start + 2.5 * step)
    assert cut == pytest.approx(start + 3 * step, rel=1e-3)
    sampled, ends = engine.end()
    assert ([request.request_id for request in sampled], len(ends)) == (["a"], 3)
    assert sampled[0].output_len == 1 + 3


def test_the_counting_pool_refuses_what_a_real_one_refuses() -> None:
    pool = CountingPool(4)
    assert pool.can_take((), 4)
    blocks = pool.take((), 3)
    assert (pool.free_blocks, pool.usage) == (1, 0.75)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 free"):
        pool.take((), 2)
    pool.release(blocks)
    with pytest.raises(ValueError, match="given back"):
        pool.release([0])


def test_records_go_through_the_same_summary_as_measured_ones() -> None:
    outcome = simulate(PAIR, SimulatedLoad.alike(poisson(20, 300, 7), 512, 16))
    summary = summarise(outcome.records, Slo(250, 15, 0.9), 20.0, outcome.duration_s)
    assert summary.completed == 300
    assert summary.attained
    assert summary.achieved_rate == pytest.approx(20, rel=0.2)
