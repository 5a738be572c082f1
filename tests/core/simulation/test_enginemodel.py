"""The pure engine model: block pool, scheduler, timing profiles, and the engine on virtual time."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_engine import VirtualEngine, serve

from kvbench.core.simulation.kv_cache import (
    BlockPool,
    block_hashes,
    extend_hashes,
    mix64,
    mix64_array,
    powers,
    prefix_hashes,
    salt_seed,
)
from kvbench.core.simulation.scheduler import EngineConfig, EngineRequest, Scheduler, Status, StepPlan
from kvbench.core.simulation.step_time import PROFILE_NAMES, StepLoad, attention_waves, timing_profile
from kvbench.errors import InputError


# -- hashes ---------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mix64_is_the_same_for_one_and_for_many(values: list[int]) -> None:
    assert mix64_array(np.array(values, dtype=np.uint64)).tolist() == [mix64(value) for value in values]


@given(st.lists(st.integers(0, 200_000), min_size=2, max_size=80), st.data())
def test_hashes_are_chained(tokens: list[int], data: st.DataObject) -> None:
    weights = powers(len(tokens) + 1)
    hashes = prefix_hashes(np.array(tokens, dtype=np.uint64), weights, salt_seed(""))
    # One token more is the same as having hashed all at once.
    position = data.draw(st.integers(1, len(tokens) - 1))
    one_more = extend_hashes(
        hashes[position - 1 : position],
        np.array(tokens[position : position + 1], dtype=np.uint64),
        np.array([position]),
        weights,
    )
    assert one_more[0] == hashes[position]
    # A change at one position changes every hash from there on, and none before.
    changed = list(tokens)
    changed[position] += 1
    other = prefix_hashes(np.array(changed, dtype=np.uint64), weights, salt_seed(""))
    assert (other[:position] == hashes[:position]).all()
    assert (other[position:] != hashes[position:]).all()
    salted = prefix_hashes(np.array(tokens, dtype=np.uint64), weights, salt_seed("other"))
    assert (salted != hashes).all()


def test_block_hashes_are_those_of_full_blocks() -> None:
    hashes = np.arange(10, dtype=np.uint64)
    assert (block_hashes(hashes, 4), block_hashes(hashes[:3], 4)) == ([3, 7], [])


# -- block pool -----------------------------------------------------------------------------------
@settings(max_examples=70)
@given(st.data(), st.integers(1, 12), st.booleans())
def test_pool_never_loses_or_doubles_a_block(data: st.DataObject, size: int, caching: bool) -> None:
    pool = BlockPool(size, caching)
    owned: list[list[int]] = []
    names = [[10 * family + index for index in range(4)] for family in range(3)]
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["take", "release", "reset"]))
        if action == "take":
            chain = data.draw(st.sampled_from(names))
            cached = pool.lookup(chain, data.draw(st.integers(0, 4)))
            fresh = data.draw(st.integers(0, 5))
            if pool.can_take(cached, fresh):
                blocks = pool.take(cached, fresh)
                assert (blocks[: len(cached)], len(blocks)) == (cached, len(cached) + fresh)
                owned.append(blocks)
                for block, name in zip(blocks, chain, strict=False):
                    pool.register(block, name)
            else:
                with pytest.raises(ValueError, match="blocks wanted"):
                    pool.take(cached, fresh)
        elif action == "release" and owned:
            pool.release(owned.pop(data.draw(st.integers(0, len(owned) - 1))))
        elif action == "reset":
            pool.reset_cache()
            assert all(pool.lookup(chain, 4) == [] for chain in names)
        references = Counter(block for blocks in owned for block in blocks)
        assert [pool.references(block) for block in range(size)] == [
            references[block] for block in range(size)
        ]
        assert pool.free_blocks == size - len(references)
        assert pool.usage == pytest.approx(len(references) / size)
        assert caching or not any(pool.lookup(chain, 4) for chain in names)


def test_pool_evicts_the_least_recently_used_and_the_tail_first() -> None:
    pool = BlockPool(4)
    first = pool.take((), 2)
    second = pool.take((), 2)
    for block, name in zip(first + second, (1, 2, 11, 12), strict=True):
        pool.register(block, name)
    pool.release(first)
    pool.release(second)
    pool.take((), 1)
    assert pool.lookup([1, 2], 2) == first[:1]  # the tail of the older chain went first
    assert pool.lookup([11, 12], 2) == second


def test_pool_refuses_a_double_release() -> None:
    pool = BlockPool(2)
    blocks = pool.take((), 1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release(blocks)


# -- scheduler ------------------------------------------------------------------------------------
CONFIGS = st.builds(
    EngineConfig, block_tokens=st.integers(1, 5), num_blocks=st.integers(6, 30),
    max_num_seqs=st.integers(1, 5), max_num_batched_tokens=st.integers(1, 12), max_model_len=st.just(64),
    enable_prefix_caching=st.booleans(),
)  # fmt: skip


def check_invariants(scheduler: Scheduler, plan: StepPlan) -> None:
    config = scheduler.config
    assert len(scheduler.running) <= config.max_num_seqs
    assert sum(chunk.count for chunk in plan.chunks) <= config.max_num_batched_tokens
    planned = [chunk.request for chunk in plan.chunks]
    assert len(set(map(id, planned))) == len(planned)
    references: Counter[int] = Counter()
    queues = (scheduler.waiting, scheduler.ready, scheduler.running)
    live = [*chain(*queues), *scheduler.loading.values(), *scheduler.held.values()]
    for request in live:
        assert len(set(request.blocks)) == len(request.blocks)
        references.update(request.blocks)
        assert (request.status is Status.WAITING) == (request in scheduler.waiting)
        if request.status is not Status.WAITING:
            assert len(request.blocks) * config.block_tokens >= request.num_computed
    for chunk in plan.chunks:
        assert chunk.start == chunk.request.num_computed
        assert len(chunk.request.blocks) * config.block_tokens >= chunk.start + chunk.count
    assert all(scheduler.pool.references(block) == references[block] for block in range(config.num_blocks))
    assert scheduler.pool.free_blocks == config.num_blocks - len(references)


@settings(max_examples=60, deadline=None)
@given(st.data(), CONFIGS)
def test_scheduler_serves_everybody_and_keeps_its_limits(data: st.DataObject, config: EngineConfig) -> None:
    scheduler = Scheduler(config)
    longest = min(config.max_model_len, config.num_blocks * config.block_tokens)
    chains = [[100 * family + index for index in range(64)] for family in range(2)]
    requests: list[EngineRequest] = []
    for index in range(data.draw(st.integers(1, 8))):
        prompt_len = data.draw(st.integers(1, longest - 1))
        requests.append(EngineRequest(
            str(index), prompt_len, data.draw(st.integers(1, min(12, longest - prompt_len))),
            arrival_s=float(index),
            hashes=data.draw(st.sampled_from(chains))[: prompt_len // config.block_tokens],
            remote_kv=data.draw(st.booleans()), hold_kv=data.draw(st.booleans()),
        ))  # fmt: skip
        scheduler.add(requests[-1])
    admitted: list[EngineRequest] = []
    first_tokens: set[str] = set()
    aborted: set[str] = set()
    for now in range(5000):
        if not scheduler.unfinished and not scheduler.held:
            break
        plan = scheduler.schedule(float(now))
        check_invariants(scheduler, plan)
        new = [chunk.request for chunk in plan.chunks] + plan.loads
        admitted += [item for item in new if item not in admitted and item.preemptions == 0]
        assert all(item.arrival_s <= now for item in new)
        if data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(requests))
            if victim.status is not Status.FINISHED:
                scheduler.abort(victim)
                aborted.add(victim.request_id)
        for request in scheduler.complete(plan) if plan.chunks else []:
            assert request.request_id not in aborted
            first_tokens.add(request.request_id)
            if request.output_len == request.max_tokens:
                scheduler.finish(request)
        for request in list(scheduler.loading.values()):
            if data.draw(st.booleans()):
                scheduler.kv_arrived(request)
        for request in list(scheduler.held.values()):
            if data.draw(st.booleans()):
                scheduler.release(request)
        check_invariants(scheduler, StepPlan())
    assert all(request.status is Status.FINISHED for request in requests)
    assert scheduler.pool.free_blocks == config.num_blocks
    for request in requests:
        if request.request_id not in aborted:
            assert request.output_len == request.max_tokens
    # First come, first served: nobody is admitted before an earlier arrival (KV loads may overtake).
    local = [int(request.request_id) for request in admitted if not request.external_tokens]
    never_aborted = [number for number in local if str(number) not in aborted]
    assert never_aborted == sorted(never_aborted)


def test_what_can_never_fit_is_refused_with_a_reason() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4, num_blocks=4, max_model_len=32))
    with pytest.raises(InputError, match=r"maximum context length is 32 tokens, but 30 prompt tokens"):
        scheduler.add(EngineRequest("a", 30, 3))
    with pytest.raises(InputError, match="needs 5 KV blocks and this engine has 4"):
        scheduler.add(EngineRequest("b", 16, 2))
    scheduler.add(EngineRequest("c", 16, 1))  # the last token's KV is never needed
    with pytest.raises(InputError, match="at least one prompt token"):
        scheduler.add(EngineRequest("d", 0, 1))


def run_alone(scheduler: Scheduler, request: EngineRequest) -> list[int]:
    """Serves one request; returns the tokens of each step."""
    scheduler.add(request)
    counts: list[int] = []
    while scheduler.unfinished:
        plan = scheduler.schedule(1e9)
        counts.append(sum(chunk.count for chunk in plan.chunks))
        for done in scheduler.complete(plan):
            if done.output_len == done.max_tokens:
                scheduler.finish(done)
    return counts


def test_long_prompts_are_cut_to_the_token_budget() -> None:
    scheduler = Scheduler(EngineConfig(max_num_batched_tokens=100))
    assert run_alone(scheduler, EngineRequest("a", 250, 3)) == [100, 100, 50, 1, 1]


def test_running_sequences_come_before_waiting_ones() -> None:
    scheduler = Scheduler(EngineConfig(max_num_batched_tokens=10))
    scheduler.add(EngineRequest("a", 4, 5))
    scheduler.complete(scheduler.schedule(0.0))
    scheduler.add(EngineRequest("b", 30, 1))
    plan = scheduler.schedule(0.0)
    assert [(chunk.request.request_id, chunk.count) for chunk in plan.chunks] == [("a", 1), ("b", 9)]


def test_prefix_cache_counts_tokens_as_vllm_does() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4))
    hashes = [1, 2, 3, 4]
    run_alone(scheduler, EngineRequest("a", 16, 1, hashes=hashes))
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (16, 0)
    # All four blocks are known, but one token must be computed: the last block is not taken.
    assert run_alone(scheduler, EngineRequest("b", 16, 1, hashes=hashes)) == [4]
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (32, 12)
    assert run_alone(scheduler, EngineRequest("c", 17, 1, hashes=hashes)) == [1]
    assert scheduler.stats.prefix_hits == 12 + 16
    scheduler.pool.reset_cache()
    assert run_alone(scheduler, EngineRequest("d", 16, 1, hashes=hashes)) == [16]


def test_prefix_cache_can_be_off() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4, enable_prefix_caching=False))
    for name in "ab":
        assert run_alone(scheduler, EngineRequest(name, 16, 1, hashes=[1, 2, 3, 4])) == [16]
    assert (scheduler.stats.prefix_queries, scheduler.stats.prefix_hits) == (0, 0)


def test_remote_request_waits_outside_the_batch_and_computes_nothing() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4, max_num_seqs=1))
    remote = EngineRequest("remote", 10, 2, remote_kv=True)
    scheduler.add(remote)
    local = EngineRequest("local", 4, 1)
    scheduler.add(local)
    plan = scheduler.schedule(0.0)
    assert (plan.loads, len(remote.blocks)) == ([remote], 3)
    assert [chunk.request for chunk in plan.chunks] == [local]  # it took no place in the batch
    for done in scheduler.complete(plan):
        scheduler.finish(done)
    assert scheduler.schedule(0.0).chunks == []
    scheduler.kv_arrived(remote)
    plan = scheduler.schedule(0.0)
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in plan.chunks] == [(9, 1, True)]
    assert plan.load == StepLoad([], 1, 9)
    assert (remote.external_tokens, remote.cached_tokens) == (10, 0)
    assert (scheduler.stats.external_queries, scheduler.stats.external_hits) == (10, 10)


def test_failed_kv_frees_the_blocks_and_an_abort_waits_for_the_transfer() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4, num_blocks=8))
    first, second = (EngineRequest(name, 8, 1, remote_kv=True) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule(0.0)
    assert scheduler.pool.free_blocks == 4
    scheduler.kv_failed(first)
    assert (first.status, scheduler.pool.free_blocks) == (Status.FINISHED, 6)
    scheduler.abort(second)
    assert scheduler.pool.free_blocks == 6  # somebody may still write into them
    scheduler.kv_arrived(second)
    assert (second.status, scheduler.pool.free_blocks) == (Status.FINISHED, 8)


def test_held_blocks_stay_until_they_are_released() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=4, num_blocks=8))
    request = EngineRequest("a", 10, 1, hold_kv=True)
    assert run_alone(scheduler, request) == [10]
    assert (request.status, scheduler.pool.free_blocks) == (Status.HELD, 5)
    scheduler.release(request)
    assert (request.status, scheduler.pool.free_blocks) == (Status.FINISHED, 8)


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(EngineConfig(block_tokens=2, num_blocks=5))
    old, young, waiting = (
        EngineRequest("old", 4, 4),
        EngineRequest("young", 4, 4),
        EngineRequest("waiting", 4, 1),
    )
    for request in (old, young):
        scheduler.add(request)
    scheduler.complete(scheduler.schedule(0.0))
    scheduler.add(waiting)
    plan = scheduler.schedule(0.0)  # both need a third block and one is left
    assert (plan.preempted, [chunk.request for chunk in plan.chunks]) == ([young], [old])
    assert list(scheduler.waiting) == [young, waiting]
    assert young.num_tokens == 5  # what it had made is kept and computed again
    assert scheduler.stats.preemptions == 1


# -- timing ---------------------------------------------------------------------------------------
def decode_ms(profile: str, seqs: int, context: int, tensor_parallel_size: int = 1) -> float:
    load = StepLoad([], seqs, seqs * context)
    return timing_profile(profile, tensor_parallel_size).step_s(load) * 1000


H200 = "h200-tp8-qwen3-30b-a3b"


@pytest.mark.parametrize(("seqs", "input_len", "measured_ms", "tolerance"), [
    # Published median TPOT with all slots busy; context = input + half of 1024 output tokens.
    (256, 1024, 13.05, 0.04),
    (256, 4096, 17.13, 0.04),
    (256, 8192, 21.84, 0.04),
    (256, 16384, 31.55, 0.04),
    (225, 32768, 49.38, 0.04),
    (175, 32768, 47.70, 0.04),
    # The second, smaller group of each run, inferred from the means.
    (144, 1024, 11.6, 0.11),
    (104, 4096, 12.0, 0.11),
    (69, 8192, 13.2, 0.11),
    (44, 16384, 11.5, 0.11),
])  # fmt: skip
def test_h200_decode_is_as_published(seqs: int, input_len: int, measured_ms: float, tolerance: float) -> None:
    assert decode_ms(H200, seqs, input_len + 512) == pytest.approx(measured_ms, rel=tolerance)


@pytest.mark.parametrize(
    ("tokens", "compute_ms"), [(1024, 2.3), (4096, 10.6), (8192, 25.5), (16384, 67.6), (32768, 202)]
)
def test_h200_prefill_is_flops_plus_a_floor(tokens: int, compute_ms: float) -> None:
    profile = timing_profile(H200)
    first_token_s = profile.overhead_s() + profile.step_s(StepLoad([(tokens, 0)]))
    assert first_token_s * 1000 == pytest.approx(40 + compute_ms, rel=0.02)


@pytest.mark.parametrize(("name", "input_len", "rate", "count", "first_token_s", "seed"), [
    # (duration s, mean TTFT ms, mean TPOT ms) of the published bursts, see the tolerances below.
    ("1k", 1024, 80, 400, 0.15, (26.6, 3798, 12.6)),
    ("32k", 32768, 45, 225, 0.41, (54.8, 413, 49.2)),
])  # fmt: skip
def test_virtual_engine_reproduces_published_bursts(
    name: str, input_len: int, rate: float, count: int, first_token_s: float, seed: tuple[float, float, float]
) -> None:
    rng = random.Random(0)
    gaps = [rng.expovariate(1.0) for _ in range(count)]
    requests, now = [], 0.0
    for index, gap in enumerate(gaps):
        now += gap / sum(gaps) * count / rate
        requests.append(EngineRequest(str(index), input_len, 1024, arrival_s=now, remote_kv=True))
    config = EngineConfig(16, 600_000, 256, 65_536, 66_560, enable_prefix_caching=False)
    engine = VirtualEngine(config, timing_profile(H200), load_s=lambda request: first_token_s)
    times = serve(engine, requests)
    duration, ttft, tpot = seed
    assert engine.now == pytest.approx(duration, rel=0.08)
    tpots = [(seen[-1] - seen[0]) / 1023 * 1000 for seen in times.values()]
    assert statistics.mean(tpots) == pytest.approx(tpot, rel=0.08)
    ttfts = [(times[request.request_id][0] - request.arrival_s) * 1000 for request in requests]
    # At 32k nothing queues, so the mean is the constant first-token delay and what the step adds to it.
    assert statistics.mean(ttfts) == pytest.approx(ttft, rel=0.20 if name == "32k" else 0.08)


@pytest.mark.parametrize(("tp", "itl_ms"), [(1, 14.1), (2, 15.5), (4, 17.0)])
def test_a10_decodes_as_published(tp: int, itl_ms: float) -> None:
    assert decode_ms("a10-qwen2.5-7b", 1, 1010, tp) == pytest.approx(itl_ms, rel=0.04)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a10_computes_no_faster_than_its_share_of_the_peak(tp: int) -> None:
    """The rows themselves follow with the hand-off of that time: tests/sweep/against/test_seeds.py."""
    tokens = 8192
    seconds = timing_profile("a10-qwen2.5-7b", tp).step_s(StepLoad([(tokens, 0)]))
    share = (2 * 6.53e9 * tokens + 2 * 28 * 3584 * tokens**2) / seconds / (tp * 125e12)
    assert 0.2 < share < 0.38
    assert (share > 0.36) == (tp == 1)  # the others wait for their all-reduces, too


def saturation(input_len: int) -> float:
    """Requests per second of a full quick engine with 32 slots and 16 output tokens."""
    config = EngineConfig(16, 8192, 32, 2048, 32_768)
    engine = VirtualEngine(config, timing_profile("quick"))
    serve(engine, [EngineRequest(str(index), input_len, 16) for index in range(200)])
    return 200 / engine.now


def test_quick_saturates_where_two_cores_can_follow() -> None:
    rates = [saturation(input_len) for input_len in (256, 512, 1024, 2048)]
    assert rates == sorted(rates, reverse=True)
    assert 40 <= rates[0] <= 70
    assert 18 <= rates[-1] <= 25


@pytest.mark.parametrize("name", PROFILE_NAMES)
@given(
    chunks=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 32_768)), max_size=4),
    seqs=st.integers(0, 256),
    mean=st.integers(1, 32_768),
    scale=st.floats(0.01, 10),
)
def test_step_time_grows_with_work_and_scales(
    name: str, chunks: list[tuple[int, int]], seqs: int, mean: int, scale: float
) -> None:
    profile = timing_profile(name)
    load = StepLoad(chunks, seqs, seqs * mean)
    seconds = profile.step_s(load)
    assert (seconds == 0) == (not chunks and not seqs)
    assert profile.step_s(load, scale) == pytest.approx(seconds * scale)
    decode = StepLoad((), seqs, seqs * mean)
    assert profile.decode_step_s(seqs, seqs * mean, scale) == profile.step_s(decode, scale)
    more = StepLoad([*chunks, (1, 0)], seqs, seqs * (mean + 1))
    assert profile.step_s(more) >= seconds


@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from(PROFILE_NAMES))
def test_cutting_a_prompt_costs_only_the_base(first: int, second: int, name: str) -> None:
    profile = timing_profile(name)
    whole = profile.prefill_ms(first + second, 0)
    cut = profile.prefill_ms(first, 0) + (profile.prefill_ms(second, first) if second else 0.0)
    assert cut == pytest.approx(whole)


def test_attention_waves() -> None:
    assert attention_waves(132) == 1
    assert attention_waves(133) == attention_waves(264) == 2
    assert attention_waves(66) == pytest.approx(0.5)


def test_unknown_timing_is_refused() -> None:
    with pytest.raises(InputError, match="unknown timing profile 'fast'"):
        timing_profile("fast")
    with pytest.raises(InputError, match="has no tensor_parallel_size 8"):
        timing_profile("a10-qwen2.5-7b", 8)


# -- virtual time -----------------------------------------------------------------------------------
def test_virtual_engine_waits_for_arrivals_and_loads() -> None:
    engine = VirtualEngine(EngineConfig(), timing_profile("quick"), load_s=lambda request: 2.0)
    remote = EngineRequest("remote", 100, 2, arrival_s=1.0, remote_kv=True)
    local = EngineRequest("local", 100, 1, arrival_s=5.0)
    times = serve(engine, [remote, local])
    decode = timing_profile("quick").step_s(StepLoad([], 1, 99))
    assert times["remote"][0] == pytest.approx(3.0 + decode)
    assert times["local"] == [pytest.approx(5.0 + timing_profile("quick").step_s(StepLoad([(100, 0)])))]
    assert engine.busy_s < 0.1
