"""The drawn systems: simulations against formulas and what must hold of any, truths, the protocol."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvbench.core.slo import Slo as ProductSlo
from tools.known_queues import md1_attainment
from tools.random_systems import __main__ as command
from tools.random_systems import roots, truth
from tools.random_systems.family import LEADS, SEEDS, SIZES, draw, family, seed_of
from tools.random_systems.queues import Engine, batching, fifo, shared
from tools.random_systems.serve import BadLineError, serve
from tools.random_systems.simulate import Jobs, State, end, run, trial
from tools.random_systems.system import Batch, Clock, Disturbances, FloatArray, Service, Slo, System, Workload
from tools.random_systems.truth import Mg1, erlang_c, mg1_mean_wait, mmc_mean, mmc_share

PLAIN = System(
    name="plain",
    kinds=(),
    discipline="fifo",
    servers=1,
    prefill_s=1.0,
    service=Service(),
    token_s=0.1,
    slope_s=0.0,
    batch=None,
    disturbances=Disturbances(),
    aborts=True,
    workload=Workload(100, 11, 1.0),
    slo=Slo(3000.0, None, 0.9),
)
SERVICES = (Service(), Service("exponential"), Service("lognormal", 1.0), Service("bimodal", 20.0))
MIXED = Service("lognormal", 0.5, ((0.8, 0.5), (0.2, 3.0)))


def poisson(rate: float, count: int, seed: int) -> FloatArray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def ask(
    system: System, arrivals: list[float], starts_at_s: float = 0.0, state: State | None = None, seed: int = 1
) -> tuple[list[float], list[float], State]:
    load = system.workload
    lengths = [np.full(len(arrivals), float(length)) for length in (load.input_len, load.output_len)]
    first, last, after = trial(
        system, np.array(arrivals), lengths[0], lengths[1], starts_at_s, seed, state or State()
    )
    return first.tolist(), last.tolist(), after


# The family


def test_a_system_is_the_same_one_for_the_same_numbers() -> None:
    assert draw(7, 3) == draw(7, 3)
    assert draw(7, 3).fingerprint != draw(7, 18).fingerprint
    assert draw(7, 3).fingerprint == replace(draw(7, 3), name="another", aborts=False).fingerprint


@pytest.mark.parametrize("name", SEEDS)
def test_each_kind_has_members_and_the_family_is_broad(name: str) -> None:
    systems = family(name)
    assert len(systems) == SIZES[name]
    leads = Counter(system.kinds[0] for system in systems)
    assert set(leads) == set(LEADS)
    assert min(leads.values()) >= SIZES[name] // len(LEADS)
    counted = Counter(kind for system in systems for kind in system.kinds)
    for kind in ("sharing", "batching", "SLO mean", "SLO percentile", "SLO tail", "slow", "fast", "aborts"):
        assert counted[kind] >= 4, kind
    assert {system.servers for system in systems} >= {1}
    assert max(system.servers for system in systems) > 64
    assert max(system.service.spread for system in systems if system.service.form == "lognormal") > 1.5
    assert min(system.capacity for system in systems) < 0.2
    assert max(system.capacity for system in systems) > 200


@given(seed=st.integers(0, 2**40), index=st.integers(0, 10_000))
@settings(max_examples=60)
def test_every_system_is_within_the_family(seed: int, index: int) -> None:
    system = draw(seed, index)
    assert 1 <= system.servers <= 128
    assert system.capacity > 0.01
    assert system.idle_ttft_s() > 0
    mixture = system.service.mixture
    assert sum(share for share, _ in mixture) == pytest.approx(1)
    assert sum(share * factor for share, factor in mixture) == pytest.approx(1, abs=1e-5)
    assert json.loads(json.dumps(system.to_json()))["name"] == system.name
    slo = ProductSlo.from_json(
        {"ttft_ms": system.slo.ttft_ms, "tpot_ms": system.slo.tpot_ms, "attainment": system.slo.attainment}
        | {"limits": list(system.slo.limits)}
    )
    assert slo.has_limits
    assert min(slo.shares) >= 0.5
    criteria = roots.criteria(system.slo)
    assert len(criteria) == len(system.slo.limits or (1,))
    if system.batch is not None:
        load = system.workload
        assert system.batch.kv_tokens > load.input_len + load.output_len


def test_seeds_have_names() -> None:
    assert seed_of("check") == SEEDS["check"]
    assert seed_of("12") == 12
    for wrong in ("latest", "-1"):
        with pytest.raises(ValueError, match="seed"):
            seed_of(wrong)


@pytest.mark.parametrize("service", [*SERVICES, MIXED], ids=lambda service: service.form)
def test_a_service_has_the_moments_and_quantiles_that_it_says(service: Service) -> None:
    work = service.draw(2_000_000, np.random.default_rng(3))
    assert work.mean() == pytest.approx(1.0, rel=0.01)
    assert (work**2).mean() == pytest.approx(service.second_moment, rel=0.05)
    for share in (0.5, 0.9, 0.995):
        quantile = service.quantile(share)
        assert service.cdf(quantile) >= share - 1e-9
        assert np.mean(work <= quantile * (1 + 1e-9)) == pytest.approx(service.cdf(quantile), abs=0.002)


# Formulas against each other


@pytest.mark.parametrize(("load", "limit"), [(0.3, 1.3), (0.8, 4.0), (0.95, 12.5)])
def test_the_grid_agrees_with_md1_and_mm1(load: float, limit: float) -> None:
    assert Mg1(Service(), limit).share(load) == pytest.approx(md1_attainment(load, 1.0, limit), abs=2e-4)
    assert Mg1(Service("exponential"), limit).share(load) == pytest.approx(
        mmc_share(1, load, limit), abs=1e-6
    )


def test_erlang() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    assert mmc_mean(1, 0.5) == pytest.approx(2.0)
    assert mmc_share(3, 2.0, 0.0) == pytest.approx(0.0, abs=1e-12)
    grid = np.linspace(0, 60, 60_001)
    late = [1 - mmc_share(3, 2.0, float(point)) for point in grid]
    assert np.trapezoid(late, grid) == pytest.approx(mmc_mean(3, 2.0), rel=1e-4)
    # Where 1 − (servers − load) vanishes, the two exponentials are one.
    assert mmc_share(3, 2.0, 1.5) == pytest.approx(mmc_share(3, 2.0 + 1e-6, 1.5), abs=1e-5)


# Simulations against formulas


@pytest.mark.parametrize("service", [*SERVICES, MIXED], ids=lambda service: service.form)
def test_one_server_agrees_with_pollaczek_and_khinchine(service: Service) -> None:
    load, count = 0.6, 2_000_000
    arrived = poisson(load, count, 4)
    late = fifo(1, arrived, service.draw(count, np.random.default_rng(5))) - arrived
    assert late.mean() == pytest.approx(1 + mg1_mean_wait(service, load), rel=0.06)
    for limit in (1.1, 3.0, 12.0):
        assert np.mean(late <= limit) == pytest.approx(Mg1(service, limit).share(load), abs=0.004)


def test_parallel_servers_agree_with_erlang() -> None:
    servers, load, count = 6, 5.0, 200_000
    arrived = poisson(load, count, 6)
    late = fifo(servers, arrived, Service("exponential").draw(count, np.random.default_rng(7))) - arrived
    assert late.mean() == pytest.approx(mmc_mean(servers, load), rel=0.03)
    assert np.mean(late <= 2.0) == pytest.approx(mmc_share(servers, load, 2.0), abs=0.01)


@pytest.mark.parametrize("servers", [1, 4])
@pytest.mark.parametrize("service", SERVICES[:3], ids=lambda service: service.form)
def test_sharing_is_insensitive(servers: int, service: Service) -> None:
    load, count = 0.7 * servers, 150_000
    arrived = poisson(load, count, 8)
    work = service.draw(count, np.random.default_rng(9))
    late = shared(lambda present: min(1.0, servers / present), arrived, work) - arrived
    assert late.mean() == pytest.approx(mmc_mean(servers, load), rel=0.04)


# What must hold of any


def slow_fifo(servers: int, arrived: FloatArray, work: FloatArray) -> list[float]:
    """Lindley's and Kiefer and Wolfowitz's recursion, as one writes it down."""
    free, done = [0.0] * servers, []
    for at, needs in zip(arrived.tolist(), work.tolist(), strict=True):
        free.sort()
        free[0] = max(free[0], at) + needs
        done.append(free[0])
    return done


@st.composite
def queued(draw: st.DrawFn) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(arrivals, work, when each leaves)."""
    count = draw(st.integers(1, 30))
    gaps = draw(st.lists(st.floats(0, 3), min_size=count, max_size=count))
    work = draw(st.lists(st.floats(0.01, 5), min_size=count, max_size=count))
    patience = draw(st.lists(st.sampled_from([0.5, 2.0, math.inf]), min_size=count, max_size=count))
    arrived = np.cumsum(gaps)
    return arrived, np.array(work), arrived + np.array(patience)


@given(case=queued(), servers=st.integers(1, 5))
def test_first_come_first_served(case: tuple[FloatArray, FloatArray, FloatArray], servers: int) -> None:
    arrived, work, gone = case
    done = fifo(servers, arrived, work)
    np.testing.assert_allclose(done, slow_fifo(servers, arrived, work), atol=1e-9)
    nobody_leaves = np.full(len(arrived), math.inf)
    np.testing.assert_allclose(fifo(servers, arrived, work, nobody_leaves), done, atol=1e-9)
    fewer = fifo(servers, arrived, work, gone)
    served = ~np.isnan(fewer)
    # Who stays is served no later than among all, by one server; and nobody after he left.
    if servers == 1:
        assert np.all(fewer[served] <= done[served] + 1e-9)
    assert np.all(fewer[served] <= gone[served])
    assert np.all(served[np.isinf(gone)])


@given(case=queued(), servers=st.integers(1, 5))
def test_sharing_conserves_work(case: tuple[FloatArray, FloatArray, FloatArray], servers: int) -> None:
    arrived, work, gone = case

    def speed(present: int) -> float:
        return min(1.0, servers / present)

    done = shared(speed, arrived, work)
    assert np.all(done >= arrived + work - 1e-9)
    if servers == 1:
        # Whatever the order, the server is busy for the same time.
        assert done.max() == pytest.approx(fifo(1, arrived, work).max())
    alone = shared(lambda present: 1.0, arrived, work)
    np.testing.assert_allclose(alone, arrived + work, atol=1e-9)
    stays = shared(speed, arrived, work, gone)
    served = ~np.isnan(stays)
    assert np.all(stays[served] <= np.minimum(gone, done)[served] + 1e-9)
    assert np.all(served[np.isinf(gone)])


def slow_engine(batch: Batch, arrived: FloatArray, prompt: int, output: int) -> list[tuple[float, float]]:
    """Continuous batching step by step, with nothing done at once."""
    count = len(arrived)
    left, made, first, last = [0] * count, [0] * count, [math.nan] * count, [math.nan] * count
    waiting, running, came, now = list[int](), list[int](), 0, 0.0
    while True:
        while came < count and arrived[came] <= now:
            waiting.append(came)
            came += 1
        if not waiting and not running:
            if came == count:
                return list(zip(first, last, strict=True))
            now = max(now, float(arrived[came]))
            continue
        dropped = False

        def held() -> int:
            return sum(prompt + made[request] for request in running)

        def decoding() -> list[int]:
            return [request for request in running if not left[request]]

        while held() + len(decoding()) > batch.kv_tokens:
            waiting.insert(0, running.pop())
            dropped = True
        decodes = decoding()
        budget, prompts = batch.token_budget - len(decodes), dict[int, int]()
        for request in [request for request in running if left[request]]:
            prompts[request] = min(budget, left[request])
            budget -= prompts[request]
        while waiting and not dropped and budget > 0 and len(running) < batch.slots:
            request = waiting[0]
            if held() + prompt + made[request] + len(decodes) > batch.kv_tokens:
                break
            running.append(waiting.pop(0))
            left[request] = prompt + made[request]
            prompts[request] = min(budget, left[request])
            budget -= prompts[request]
        now += batch.step_s + batch.sequence_s * len(decodes) + batch.token_s * sum(prompts.values())
        for request, tokens in prompts.items():
            left[request] -= tokens
        for request in [*decodes, *(request for request in prompts if not left[request])]:
            made[request] += 1
            if made[request] == 1:
                first[request] = now
            if made[request] == output:
                last[request] = now
                running.remove(request)


@given(
    gaps=st.lists(st.floats(0, 0.5), min_size=1, max_size=15),
    slots=st.integers(1, 6),
    prompt=st.integers(1, 40),
    output=st.integers(1, 25),
    budget=st.integers(8, 64),
    room=st.floats(1.0, 5.0),
)
@settings(deadline=None)
def test_steps_done_at_once_are_those_done_one_by_one(
    gaps: list[float], slots: int, prompt: int, output: int, budget: int, room: float
) -> None:
    batch = Batch(slots, max(budget, slots + 1), math.ceil(room * (prompt + output)), 0.01, 0.001, 0.0005)
    arrived = np.cumsum(gaps)
    ones = np.ones(len(gaps))
    first, last = batching(batch, arrived, prompt * ones, prompt * ones, output * ones)
    np.testing.assert_allclose(
        np.stack([first, last], axis=1), slow_engine(batch, arrived, prompt, output), atol=1e-7
    )
    assert np.all(last >= first)
    assert np.all(first >= arrived + batch.idle_ttft_s(prompt) - 1e-9)


def test_an_engine_preempts_and_serves_all_in_the_end() -> None:
    batch = Batch(64, 512, 4000, 0.01, 0.0001, 0.00002)
    count = 400
    arrived, ones = poisson(30.0, count, 3), np.ones(count)
    engine = Engine(batch, arrived, 100 * ones, 100 * ones, 150 * ones)
    _, last = engine.run()
    assert engine.preempted > 20
    assert not np.isnan(last).any()
    # One that never fits is never served, and is in nobody's way.
    prompt = 100 * ones
    prompt[5] = 4000
    first, last = batching(batch, arrived, prompt, prompt, 150 * ones)
    assert np.flatnonzero(np.isnan(first)).tolist() == [5]
    # Half of them leave at once: none of those is served later, and all others are.
    gone = np.where(np.arange(count) < 200, float(arrived[200]), math.inf)
    first, last = batching(batch, arrived, 100 * ones, 100 * ones, 150 * ones, gone)
    assert 10 < (~np.isnan(last[:200])).sum() < 200
    assert np.nanmax(last[:200]) <= arrived[200]
    assert not np.isnan(last[200:]).any()


# The clock


@example(at=[8728.0], pause=2.0, drift=0.0, warmup=1.0, noise=((10.0, 1.1), (700.0, 0.9)))
@given(
    at=st.lists(st.floats(0, 10_000), min_size=1, max_size=20),
    pause=st.sampled_from([0.0, 2.0]),
    drift=st.sampled_from([0.0, 0.01]),
    warmup=st.sampled_from([1.0, 1.5]),
    noise=st.sampled_from([(), ((10.0, 1.1), (700.0, 0.9))]),
)
def test_the_clock_goes_forward_and_back(
    at: list[float], pause: float, drift: float, warmup: float, noise: tuple[tuple[float, float], ...]
) -> None:
    clock = Clock(Disturbances(pause_s=pause, pause_every_s=30.0, drift=drift, warmup_factor=warmup), noise)
    seconds = np.sort(np.array(at))
    work = clock.work(seconds)
    assert np.all(np.diff(work) >= -1e-9)
    np.testing.assert_allclose(clock.work(clock.seconds(work)), work, atol=1e-6)
    # Earlier by at most the pause that it was in; what ends just where a pause begins may be rounded past it.
    assert np.all(clock.seconds(np.maximum(work - 1e-6, 0.0)) <= seconds + 1e-6)
    assert np.all(clock.seconds(work) >= seconds - pause - 1e-6)


def test_what_a_pause_a_warm_up_and_a_drift_are() -> None:
    paused = replace(PLAIN, disturbances=Disturbances(pause_s=2.0, pause_every_s=30.0))
    first, _, _ = ask(paused, [0.0, 27.5, 28.5])
    assert first == pytest.approx([1.0, 30.5, 31.5])
    warm = replace(PLAIN, disturbances=Disturbances(warmup_factor=1.5))
    first, _, _ = ask(warm, [0.0, 100.0])
    assert first == pytest.approx([1.5, 101.0])
    slower = replace(PLAIN, disturbances=Disturbances(drift=0.01))
    first, _, _ = ask(slower, [0.0, 30.0], starts_at_s=600.0)
    assert first == pytest.approx([1.1, 31.1])
    assert slower.disturbances.drift_factor(1e9) == 1.5


# Trials and what they leave


def test_a_trial_of_one_server() -> None:
    first, last, _ = ask(PLAIN, [0.0, 0.5, 5.0])
    assert first == pytest.approx([1.0, 2.0, 6.0])
    assert last == pytest.approx([2.0, 3.0, 7.0])
    # Arrivals in any order; a longer prompt takes longer.
    first_s, last_s, _ = trial(
        PLAIN, np.array([5.0, 0.0]), np.array([200.0, 100.0]), np.array([1.0, 11.0]), 0.0, 1, State()
    )
    assert first_s.tolist() == pytest.approx([7.0, 1.0])
    assert last_s.tolist() == pytest.approx([7.0, 2.0])


@pytest.mark.parametrize("aborts", [True, False])
def test_a_backlog_is_carried_or_dropped(aborts: bool) -> None:
    system = replace(PLAIN, aborts=aborts)
    _, _, state = ask(system, [0.0] * 10)
    state = end(system, state, 2.5, list(range(2, 10)))
    first, _, state = ask(system, [0.0], starts_at_s=3.0, state=state)
    # Eight seconds of work were left; the third request was half done when it was dropped.
    assert first == pytest.approx([1.0 if aborts else 8.0])
    first, _, _ = ask(system, [0.0], starts_at_s=50.0, state=end(system, state, 20.0, []))
    assert first == pytest.approx([1.0])


def test_what_was_to_come_after_the_cut_never_came() -> None:
    _, _, state = ask(PLAIN, [0.0, 4.0, 4.0, 4.0])
    state = end(PLAIN, state, 3.0, [])
    assert ask(PLAIN, [0.0], starts_at_s=4.0, state=state)[0] == pytest.approx([1.0])
    with pytest.raises(IndexError):
        end(PLAIN, state, 3.0, [4])
    with pytest.raises(ValueError, match="starts at"):
        ask(PLAIN, [0.0], starts_at_s=-1.0, state=state)


@pytest.mark.parametrize("index", range(15))
def test_two_trials_without_an_end_are_one(index: int) -> None:
    system = draw(99, index)
    steady = replace(
        system, service=Service(), disturbances=replace(system.disturbances, noise=0.0), slope_s=0.0
    )
    rate = 1.2 * steady.capacity
    arrivals = poisson(rate, 60, 1)
    whole, _, _ = ask(steady, arrivals.tolist())
    cut = float(arrivals[30]) + 1e-9
    before, _, state = ask(steady, arrivals[:31].tolist())
    after, _, _ = ask(steady, (arrivals[31:] - cut).tolist(), starts_at_s=cut, state=state)
    np.testing.assert_allclose(np.array(after) + cut, whole[31:], rtol=1e-6)
    if steady.discipline == "fifo":
        np.testing.assert_allclose(before, whole[:31], rtol=1e-6)


@pytest.mark.parametrize("index", range(15))
def test_after_everybody_was_dropped_it_is_as_new(index: int) -> None:
    system = draw(41, index)
    system = replace(system, aborts=True, disturbances=replace(system.disturbances, noise=0.0))
    arrivals = poisson(2 * system.capacity, 60, 1)
    _, last, state = ask(system, arrivals.tolist())
    cut = float(arrivals[40])
    open_ones = [place for place in range(41) if last[place] > cut]
    state = end(system, state, cut, open_ones)
    later = arrivals[:20].tolist()
    begins = 2 * cut + 1  # an engine that was in the middle of a step has ended it
    after, _, _ = ask(system, later, starts_at_s=begins, state=state)
    assert after == pytest.approx(ask(system, later, starts_at_s=begins)[0], rel=1e-6)
    # One that does not abort has more to do before.
    stubborn = replace(system, aborts=False)
    _, _, state = ask(stubborn, arrivals.tolist())
    state = end(stubborn, state, cut, open_ones)
    stubborn_after, _, _ = ask(stubborn, later, starts_at_s=cut, state=state)
    assert sum(stubborn_after) > sum(ask(stubborn, later, starts_at_s=cut)[0])


def test_noise_is_a_factor_of_a_trial_and_tenants_take_their_share() -> None:
    noisy = replace(PLAIN, disturbances=Disturbances(noise=0.05))
    slow = [ask(noisy, [0.0, 10.0], seed=seed)[0] for seed in range(200)]
    assert np.std([np.log(first) for first, _ in slow]) == pytest.approx(0.05, rel=0.2)
    for first, second in slow:
        assert second - 10.0 == pytest.approx(first)
    busy = replace(PLAIN, disturbances=Disturbances(tenants=0.3))
    arrivals = poisson(0.3, 4000, 5)
    late = np.array(ask(busy, arrivals.tolist())[0]) - arrivals
    # Together they are a queue with the sum of the loads.
    assert late.mean() == pytest.approx(1 + mg1_mean_wait(Service(), 0.6), rel=0.06)


@pytest.mark.parametrize("index", range(15))
def test_every_kind_answers_and_forgets_when_idle(index: int) -> None:
    system = draw(5, index)
    count = 200
    arrivals = poisson(0.5 * system.capacity, count, 2).tolist()
    first, last, state = ask(system, arrivals)
    assert all(at < a <= b < math.inf for at, a, b in zip(arrivals, first, last, strict=True))
    assert first == ask(system, arrivals)[0]
    idle_at = max(last) * 10 + 100
    _, _, state = ask(system, [0.0], starts_at_s=idle_at, state=state)
    assert len(state.jobs) == 1


# Truths


def test_criteria_count_what_is_used_up() -> None:
    ttft, tpot = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.01, 0.01, 0.03, 0.03])
    assert [limit.value(ttft, tpot) for limit in roots.criteria(Slo(250, 20, 0.5))] == [pytest.approx(1.0)]
    limits = Slo(None, None, 0.95, ("ttft_ms mean <= 500", "tpot_ms p75 <= 20"))
    assert [limit.value(ttft, tpot) for limit in roots.criteria(limits)] == pytest.approx([0.5, 2.0])
    with pytest.raises(ValueError, match="unknown"):
        roots.criteria(Slo(None, None, 0.95, ("e2el_ms p75 <= 20",)))


@pytest.mark.parametrize(
    "system",
    [
        PLAIN,
        replace(PLAIN, service=Service("lognormal", 0.8), slo=Slo(6000.0, None, 0.95)),
        replace(PLAIN, service=MIXED, slo=Slo(None, None, 0.95, ("ttft_ms mean <= 2500",))),
        replace(PLAIN, servers=3, service=Service("exponential"), slo=Slo(4000.0, None, 0.9)),
        replace(PLAIN, discipline="sharing", slo=Slo(None, None, 0.95, ("ttft_ms mean <= 2500",))),
    ],
    ids=["M/D/1", "M/G/1", "P-K", "M/M/c", "PS"],
)
def test_simulated_roots_agree_with_formulas(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "AFFORDED_LINE", 100_000)
    monkeypatch.setattr(roots, "AFFORDED", {"fifo": 40_000, "sharing": 15_000})
    formula = truth.by_formula(system)
    assert formula is not None
    found = roots.Runs(system).root()
    assert found.rate == pytest.approx(formula[1], rel=max(0.01, 4 * found.error))
    assert found.slope == pytest.approx(formula[2], rel=0.3)
    assert found.error < 0.02
    # Slower as a whole: the limit is that much tighter.
    slower = truth.by_formula(system, 1.2)
    assert slower is not None
    assert slower[1] < formula[1] / 1.2


def test_there_may_be_nothing_to_find() -> None:
    assert truth.compute(replace(PLAIN, slo=Slo(990.0, None, 0.9))).how == "none"
    assert truth.compute(replace(PLAIN, slo=Slo(3000.0, 90.0, 0.9))).rates == (0.0,)
    bursty = replace(PLAIN, slo=Slo(990.0, None, 0.9), workload=Workload(100, 11, 0.5))
    assert not truth.compute(bursty).exists


def test_a_cliff_has_a_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roots, "AFFORDED", {"fifo": 20_000})
    wide = replace(PLAIN, servers=64, slo=Slo(20_000.0, None, 0.5))
    found = roots.Runs(wide).root()
    assert 0.97 * 64 < found.rate <= 64


def test_a_drift_has_a_truth_of_each_time() -> None:
    drifting = replace(PLAIN, disturbances=Disturbances(drift=0.01, warmup_factor=1.3, noise=0.05))
    true = truth.compute(drifting)
    plain = truth.compute(PLAIN)
    assert true.at(0.0) == plain.at(0.0) == plain.at(1e5)
    expected = truth.by_formula(PLAIN, 1.1)
    assert expected is not None
    assert true.at(600.0) == pytest.approx(expected[1], rel=2e-3)
    assert true.at(1e6) == true.rates[-1]


def test_truths_are_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("truths") / "truth.json"
    assert truth.known(path) == {}
    kept = {PLAIN.fingerprint: truth.compute(PLAIN)}
    truth.keep(kept, path)
    assert truth.known(path) == kept
    path.write_text(path.read_text().replace('"version": ', '"version": 10'))
    assert truth.known(path) == {}


def test_the_committed_truths_are_those_of_the_drawn_systems() -> None:
    known = truth.known()
    systems = [*family("develop"), *family("check")]
    missing = [system.name for system in systems if system.fingerprint not in known]
    assert missing == []
    assert len(known) == len(systems)
    found = [known[system.fingerprint] for system in systems]
    exist = [true for true in found if true.exists]
    assert len(exist) > 0.8 * len(systems)
    assert np.mean([true.error <= 0.005 for true in exist]) > 0.9
    for system, true in zip(systems, found, strict=True):
        if true.exists and system.batch is None:
            assert true.rates[0] <= system.capacity * 1.001
    for system in systems[:15]:
        if known[system.fingerprint].how != "simulation":
            assert truth.compute(system).rates == pytest.approx(known[system.fingerprint].rates, rel=1e-4)


@pytest.mark.parametrize("index", [0, 5, 9, 12, 18, 20, 21])
def test_a_long_trial_keeps_its_slo_below_the_true_rate_and_not_above(index: int) -> None:
    system = draw(SEEDS["develop"], index)
    true, load, count = truth.known()[system.fingerprint], system.workload, 15_000
    assert true.slope > 5
    shape = np.cumsum(np.random.default_rng(8).gamma(load.burstiness, 1 / load.burstiness, count))
    for factor in (0.9, 1.1):
        arrivals = shape / (factor * true.rates[0])
        lengths = [np.full(count, float(length)) for length in (load.input_len, load.output_len)]
        first, last, _ = trial(system, arrivals, lengths[0], lengths[1], 1000.0, 9, State())
        steady = slice(count // 10, None)
        tpot = (last - first) / max(load.output_len - 1, 1)
        used = [limit.value((first - arrivals)[steady], tpot[steady]) for limit in roots.criteria(system.slo)]
        assert (max(used) > 1) == (factor > 1)


# The protocol


def replies(system: System, *messages: object) -> list[dict[str, list[float | None]]]:
    output = io.StringIO()
    serve(system, [json.dumps(message) + "\n" for message in messages], output)
    return [json.loads(line) for line in output.getvalue().splitlines()]


TRIAL = {"type": "trial", "seed": 7, "starts_at_s": 812.4, "arrivals_s": [0.0, 0.25], "input_len": [100, 100]}
TRIAL |= {"output_len": [11, 11]}


def test_the_protocol() -> None:
    end_of_it = {"type": "end", "cut_at_s": 1.5, "cancelled": [1]}
    kept = replace(PLAIN, aborts=False)
    for system, second in ((PLAIN, 1.1), (kept, 1.5)):
        answers = replies(system, TRIAL, end_of_it, {**TRIAL, "starts_at_s": 813.9})
        assert answers[0]["first_token_s"] == pytest.approx([1.0, 2.0])
        assert answers[0]["last_token_s"] == pytest.approx([2.0, 3.0])
        assert answers[1]["first_token_s"][0] == pytest.approx(1.0 if system.aborts else second)
    assert replies(PLAIN) == []
    assert replies(PLAIN, {**TRIAL, "arrivals_s": [], "input_len": [], "output_len": 3})[0] == {
        "first_token_s": [],
        "last_token_s": [],
    }


def test_what_never_comes_is_null() -> None:
    never = replace(PLAIN, discipline="batching", batch=Batch(4, 512, 110, 0.01, 0.0, 0.0))
    assert replies(never, TRIAL)[0] == {"first_token_s": [None, None], "last_token_s": [None, None]}


@pytest.mark.parametrize(
    ("message", "about"),
    [
        ([], "object"),
        ({"type": "stop"}, "stop"),
        ({**TRIAL, "seed": -1}, "seed"),
        ({**TRIAL, "seed": "x"}, "seed"),
        ({**TRIAL, "starts_at_s": None}, "starts_at_s"),
        ({**TRIAL, "arrivals_s": [0.0, math.nan]}, "arrivals_s"),
        ({**TRIAL, "arrivals_s": [0.0, "1"]}, "arrivals_s"),
        ({**TRIAL, "arrivals_s": [0.0]}, "input_len"),
        ({**TRIAL, "output_len": [1, 0]}, "output_len"),
        ({"type": "end", "cut_at_s": 1.0}, "none"),
    ],
)
def test_a_bad_line_is_refused(message: object, about: str) -> None:
    with pytest.raises(BadLineError, match=f"line 1: .*{about}"):
        replies(PLAIN, message)


def test_a_bad_end_is_refused() -> None:
    for message, about in (
        ({"type": "end", "cut_at_s": 1.0, "cancelled": [2]}, "2"),
        ({"type": "end", "cut_at_s": 1.0, "cancelled": "all"}, "cancelled"),
        ({"type": "end", "cancelled": []}, "cut_at_s"),
        ({**TRIAL, "starts_at_s": 800.0}, "starts at"),
    ):
        with pytest.raises(BadLineError, match=f"line 2: .*{about}"):
            replies(PLAIN, TRIAL, message)


def test_a_process_of_its_own() -> None:
    words = [sys.executable, "-m", "tools.random_systems.serve", "develop", "1"]
    done = subprocess.run(words, input=json.dumps(TRIAL) + "\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["first_token_s"]) == 2
    # A line is answered before the next one is there.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for starts_at_s in (0.0, 100.0):
            process.stdin.write(json.dumps({**TRIAL, "starts_at_s": starts_at_s}) + "\n")
            process.stdin.flush()
            assert len(json.loads(process.stdout.readline())["last_token_s"]) == 2
            process.stdin.write('{"type": "end", "cut_at_s": 12.1, "cancelled": []}\n')
    assert process.returncode == 0
    done = subprocess.run(words, input="{]\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: line 1: Invalid JSON")


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "develop", "--count", "15"]) == 0
    assert "develop-014" in capsys.readouterr().out


def test_jobs_that_left_before_they_came_are_nobodys() -> None:
    jobs = Jobs.identical(np.array([0.0, 1.0]), np.ones(2), PLAIN.workload)
    first, _ = run(PLAIN, Clock(PLAIN.disturbances), replace(jobs, gone_s=np.array([0.0, math.inf])))
    assert math.isnan(first[0])
    assert first[1] == pytest.approx(2.0)
