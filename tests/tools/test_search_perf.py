"""`make perf-search` in small: its virtual systems, its truths, the search on them, and the other rules."""

from __future__ import annotations

import numpy as np
import pytest

from tools.known_queues import md1_attainment
from tools.perf_search import trials, truth
from tools.perf_search.__main__ import show
from tools.perf_search.pipeline import Found, Outcomes, Step, System, offsets, run_closed, run_open
from tools.perf_search.rivals import RULES, Bench, adaptive_rule, mlr_rule, run_rule
from tools.perf_search.systems import SYSTEMS
from tools.perf_search.trials import search

pytestmark = pytest.mark.timeout(400)
MD1 = SYSTEMS["md1"]


def test_a_pipeline_of_one_queue_agrees_with_the_formula() -> None:
    rate = 0.95 * 17.4
    share, _ = truth.attainment(MD1, rate, 200_000, 1)
    assert share == pytest.approx(md1_attainment(rate, 0.05, 0.6), abs=0.005)


def test_decode_slots_are_never_exceeded_and_tokens_take_their_time() -> None:
    system = System("", "", 0.01, 50, Step(0.01, 1e-3), 1.0, slots=4)
    outcomes = run_open(system, np.linspace(0.1, 1.0, 40), np.random.default_rng(1))
    begun = outcomes.first_s
    for moment in np.linspace(0.2, 5.0, 60):
        assert ((begun <= moment) & (outcomes.end_s > moment)).sum() <= 4
    alone = run_open(system, np.array([1.0]), np.random.default_rng(1))
    assert alone.e2el_s[0] == pytest.approx(0.01 + 50 * 0.011)
    assert alone.ttft_s[0] == pytest.approx(0.01 + 0.011)
    full = outcomes.end_s[-8:-4] - outcomes.first_s[-8:-4]
    assert full == pytest.approx(50 * 0.014, rel=0.1)


def test_a_closed_loop_obeys_littles_law() -> None:
    outcomes = run_closed(SYSTEMS["slots"], 40, 200.0, np.random.default_rng(1))
    inside = (outcomes.end_s > 50) & (outcomes.end_s < 200)
    rate = inside.sum() / 150
    assert rate * float(outcomes.e2el_s[inside].mean()) == pytest.approx(40, rel=0.05)


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_the_kept_truths_are_those_of_the_systems(name: str) -> None:
    system = SYSTEMS[name]
    true = truth.known().get(truth.fingerprint(system))
    assert true is not None, "a system was changed: run python -m tools.perf_search --truth"
    if system.truth in ("above", "below"):
        return
    below, above = (
        [truth.attainment(system, true.rate * off, 50_000, seed) for seed in (91, 92, 93)]
        for off in (0.98, 1.02)
    )
    assert np.mean([share for share, _ in below]) > system.attainment
    assert np.mean([share for share, _ in above]) < system.attainment
    assert below[0][1] == pytest.approx(true.latency_s, rel=0.2)


@pytest.mark.heavy
def test_the_search_is_true_and_fast() -> None:
    names = ("md1", "prefill", "slots", "tpot", "cliff", "drift")
    work = [
        trials.Job(trials.OURS, SYSTEMS[name], trials.truth_of(SYSTEMS[name]), seed)
        for name in names
        for seed in range(5)
    ]
    row = trials.rows_of(work, [trials.run_job(job) for job in work])[-1]
    assert row["system"] == "all"
    assert row["median"] == pytest.approx(1.0, abs=0.025)
    assert row["within"] >= 0.95
    assert row["trials"] <= 8
    assert row["latencies"] <= 75


def test_the_search_says_where_there_is_nothing_to_find() -> None:
    for name in ("never", "always"):
        system = SYSTEMS[name]
        work = [trials.Job(trials.OURS, system, trials.truth_of(system), seed) for seed in range(3)]
        rows = trials.rows_of(work, [trials.run_job(job) for job in work])
        assert (rows[0]["right"], rows[0]["median"]) == (1.0, None)


def test_a_search_repeats_itself() -> None:
    assert search(MD1, 3) == search(MD1, 3)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_the_other_rules_answer(rule: str) -> None:
    system = SYSTEMS["prefill"]
    found = run_rule(rule, system, 1)
    assert found.rate is not None
    assert found.trials > 3
    ratio = found.rate / trials.truth_of(system).rate
    assert (1.5 < ratio < 10) if rule.startswith("seed") else 0.3 < ratio < 1.4
    assert run_rule(rule, SYSTEMS["always"], 1).rate is None


class Limited(Bench):
    """All requests miss above ``limits``, one for each trial, the last for the rest; below it none does."""

    def __init__(self, *limits: float) -> None:
        super().__init__(MD1, 1)
        self.limits, self.rates = limits, list[float]()

    def seconds(self, rate: float, seconds: float) -> Outcomes:
        self.rates.append(rate)
        return super().seconds(10.0, seconds)

    def misses(self, outcomes: Outcomes) -> float:
        limit = self.limits[min(len(self.rates), len(self.limits)) - 1]
        return 10.0 if self.rates[-1] > limit else 0.0


@pytest.mark.parametrize("limit", [0.7, 5.0, 17.4, 31.0])
def test_mlrsearch_ends_within_its_width(limit: float) -> None:
    bench = Limited(limit)
    found = mlr_rule(bench)
    assert found is not None
    assert 0.95 * limit <= found <= limit
    # A load is an upper bound only after two bad trials.
    assert bench.rates[-1] == bench.rates[-2] > limit
    assert mlr_rule(Limited(0.0)) is None


def test_adaptive_scale_goes_up_until_it_misses_and_sustains_what_passed() -> None:
    bench = Limited(30.5)
    assert (adaptive_rule(bench), bench.converged) == (29.0, True)
    assert bench.rates == [*range(1, 22), 23, 25, 27, 29, 31, 29, 29]
    assert adaptive_rule(Limited(0.9)) is None
    assert adaptive_rule(Limited(1e9)) == MD1.max_rate


def test_adaptive_scale_goes_down_once_and_then_gives_up() -> None:
    up = [9.0] * 10
    bench = Limited(*up, 8.0, 8.0)
    assert (adaptive_rule(bench), bench.rates[-2:], bench.converged) == (8.0, [9.0, 8.0], True)
    bench = Limited(*up, 7.0)
    assert (adaptive_rule(bench), bench.rates[-2:], bench.converged) == (9.0, [9.0, 8.0], False)


def test_a_table_has_seconds_and_convergence_beside_what_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = trials.Job(trials.OURS, MD1, trials.truth_of(MD1), 1)
    rows = trials.rows_of([job], [Found(17.0, "converged", 5, 90.0, (16.0, None))])
    assert (rows[0]["seconds"], rows[0]["converged"], rows[0]["held"]) == (90.0, 1.0, 1.0)
    show(rows)
    assert "seconds" in capsys.readouterr().out


def test_a_bench_counts_what_it_offers() -> None:
    bench = Bench(MD1, 1)
    assert bench.meets_slo(bench.seconds(5.0, 30.0))
    outcomes = bench.requests(50.0, 100)
    assert outcomes.arrived_s[-1] == pytest.approx(2.0)
    assert bench.margin(outcomes) > 0
    assert bench.trials == 2
    assert bench.measured_s > 30
    assert len(offsets(MD1, 10.0, 100.0, np.random.default_rng(1))) == pytest.approx(1000, rel=0.15)
