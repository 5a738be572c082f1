"""Rates found by replaying requests: servers whose true rate is known, and servers that no model explains."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.search import by_measurements, by_replay
from kvbench.core.search.data import SearchLimits, TrialOutcome
from kvbench.core.search.posterior.posterior import RateEstimate
from kvbench.core.search.replay import queues
from kvbench.core.search.replay.models import (
    Candidate,
    Decode,
    QueueFamily,
    QueueModel,
    candidates,
    error_between,
    whole_work,
)
from kvbench.core.search.replay.queues import FloatArray
from kvbench.core.search.replay.replay import NearTrials, ReplayResult, replayed
from kvbench.core.search.replay.unit_load import UnitLoad
from kvbench.core.search.trial_history import TrialHistory
from kvbench.core.search.trial_requests import Goal, Latencies, Objective, TrialRequests
from kvbench.core.slo import Limit, Slo
from tests.support.simulators import md1_rate

Server = Callable[[FloatArray, np.random.Generator], FloatArray]
"""First tokens, in seconds, of requests that arrive so."""
TTFT_300 = Objective((Goal("share", 0.9, (("ttft_ms", 0.3),)),))


def trial(
    server: Server, rate: float, seconds: float, seed: int, stop_s: float | None = None
) -> TrialRequests:
    """Poisson arrivals for so many seconds, of one token each."""
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(1 / rate, math.ceil(2 * rate * seconds) + 20))
    arrived = arrived[arrived < seconds]
    first = server(arrived, rng)
    end = seconds if stop_s is None else stop_s
    kept = arrived < end
    seen = np.where(first[kept] <= end, first[kept], math.nan)
    return TrialRequests(rate, end, arrived[kept], seen, seen, np.zeros(int(kept.sum())))


def even(work_s: float, servers: int = 1) -> Server:
    return lambda arrived, rng: queues.fifo(arrived, np.full(len(arrived), work_s), servers)


def exponential(work_s: float) -> Server:
    return lambda arrived, rng: queues.fifo(arrived, rng.exponential(work_s, len(arrived)), 1)


def result(found: ReplayResult | None) -> ReplayResult:
    assert found is not None
    return found


def models(found: ReplayResult) -> tuple[str, ...]:
    return tuple(found.to_json()["models"])


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_of_even_work_is_known_after_some_seconds(seed: int) -> None:
    """M/D/1 of 100 ms: 90 % within 300 ms up to 5.87 req/s (Crommelin's formula)."""
    trials = [trial(even(0.1), 5.0, 30, 10 + seed), trial(even(0.1), 5.8, 60, 20 + seed)]
    found = result(replayed(tuple(trials), TTFT_300))
    assert not found.objections
    assert models(found) == ("1 server in order of arrival, 0 ms fixed",)
    assert found.estimate.lower < 5.87 < found.estimate.upper
    assert found.estimate.width < 0.05


def test_one_trial_that_is_replayed_exactly_suffices_where_few_requests_queue() -> None:
    """M/D/1 of 100 ms with idle servers for 90 %: the share within 1.005 times the service is 1 − load."""
    near_idle = Objective((Goal("share", 0.9, (("ttft_ms", 0.1005),)),))
    found = result(replayed((trial(even(0.1), 0.97, 600, 1),), near_idle))
    assert found.roots[0].near.error < 0.01
    assert found.estimate.lower < 1.0 < found.estimate.upper
    random = result(replayed((trial(exponential(0.1), 0.97, 600, 1),), TTFT_300))
    assert random.roots[0].near.error > found.roots[0].near.error


def test_random_work_takes_longer() -> None:
    """M/M/1 of 60 ms: P(T > 0.3) = exp(−(μ − λ) 0.3) = 0.1 at λ = μ − ln(10) / 0.3 = 8.99 req/s."""
    short = result(replayed((trial(exponential(0.06), 8.5, 30, 1),), TTFT_300))
    trials = [trial(exponential(0.06), 8.5, 400, seed) for seed in (2, 3)]
    long = result(replayed(tuple(trials), TTFT_300))
    assert long.estimate.width < short.estimate.width
    assert long.estimate.lower < 8.99 < long.estimate.upper
    stored = long.to_json()
    assert stored["lower"] < stored["rate"] < stored["upper"]
    assert (stored["requests"], stored["seconds"]) == (sum(len(trial) for trial in trials), 800.0)


@pytest.mark.parametrize("rates", [(8.5, 8.9), (8.9, 20.0)], ids=["near", "one far above"])
def test_the_forecast_of_requests_is_about_what_the_precision_then_takes(rates: tuple[float, ...]) -> None:
    """M/M/1 of 60 ms: the interval after that many more requests near the rate is about as narrow. How
    much the trials will scatter is not foreseen."""
    trials = [trial(exponential(0.06), rate, 60, 10 + place) for place, rate in enumerate(rates)]
    short = result(replayed(tuple(trials), TTFT_300))
    further = short.further_requests(0.08)
    assert further > short.requests
    rate = short.estimate.median
    longer = result(replayed((*trials, trial(exponential(0.06), rate, further / rate, 30)), TTFT_300))
    assert longer.estimate.width == pytest.approx(0.08, rel=0.3)


def test_no_more_requests_are_forecast_exactly_once_the_precision_is_reached() -> None:
    found = result(replayed((trial(exponential(0.06), 8.5, 60, 1),), TTFT_300))
    assert found.further_requests(found.estimate.width * 1.001) == 0
    assert found.further_requests(found.estimate.width / 1.001) > 0


def test_no_number_of_requests_is_forecast_where_none_is_enough() -> None:
    found = result(replayed((trial(exponential(0.06), 8.5, 60, 1),), TTFT_300))
    assert found.further_requests(found.finest) == math.inf
    (root,) = found.roots
    differ = dataclasses.replace(found, roots=(root, dataclasses.replace(root, rate=1.3 * root.rate)))
    assert differ.further_requests(0.05) == math.inf
    assert math.isfinite(found.further_requests(0.05))


def history_of(*trials: TrialRequests, seconds_left: float) -> tuple[TrialHistory, ReplayResult]:
    outcomes = tuple(TrialOutcome(trial.rate, "missed", requests=trial) for trial in trials)
    limits = SearchLimits(8.0, 0.1, 100.0, seconds_left=seconds_left)
    history = TrialHistory(limits, outcomes, TTFT_300)
    return history, result(history.replay)


def test_a_search_gives_up_for_its_time_only_after_a_trial_near_the_answer() -> None:
    far = [trial(exponential(0.06), rate, 60, seed) for seed, rate in enumerate((14.0, 20.0))]
    near = trial(exponential(0.06), 8.9, 60, 3)
    unknown = history_of(*far, seconds_left=100)
    assert not by_replay.too_far(*unknown)
    assert by_replay.needed_text(*unknown).startswith("what ±5 % needs is not known before a trial near 9")
    known = history_of(*far, near, seconds_left=100)
    assert by_replay.too_far(*known)
    assert re.fullmatch(r"±5 % needs about \d\d min more: why", by_replay.needed_text(*known, ": why"))
    assert not by_replay.too_far(*history_of(*far, near, seconds_left=2000))
    assert not by_replay.too_far(*history_of(near, seconds_left=100))


def test_requests_of_a_rare_kind_had_a_chance_to_appear_before_an_answer() -> None:
    """At ±5 %, a kind with a share of 0.5 % is absent from 600 requests with 5 %: 0.995 ** 600."""
    trials = [trial(even(10.0), rate, 4000, seed) for seed, rate in enumerate((0.057, 0.062))]
    slow = dataclasses.replace(TTFT_300, goals=(Goal("share", 0.9, (("ttft_ms", 30.0),)),))
    outcomes = tuple(TrialOutcome(trial.rate, "met", requests=trial) for trial in trials)
    history = TrialHistory(SearchLimits(0.06, 0.01, 100.0), outcomes, slow)
    replay = result(history.replay)
    assert replay.estimate.width < 0.05
    assert replay.requests == 450
    assert not by_replay.suffices(history, replay)
    probe = by_replay.next_probe(history, replay)
    assert probe is not None
    assert probe.least_s * probe.rate >= 600 - replay.requests
    assert by_replay.suffices(history, dataclasses.replace(replay, requests=600))


def test_a_trial_above_the_answer_is_no_leap_and_not_at_refused_rates() -> None:
    history, vague = history_of(trial(even(0.1), 1.5, 400, 1), seconds_left=math.inf)
    sure = dataclasses.replace(vague.roots[0], near=NearTrials(1, 0.0, 0.001, 0.0))
    replay = dataclasses.replace(vague, roots=(sure,))
    assert replay.estimate.width <= history.limits.precision
    assert replay.estimate.median > 3 * 1.5
    above = by_replay.next_probe(history, replay)
    assert above is not None
    assert above.rate == 3 * 1.5
    refused = (TrialOutcome(4.5, "invalid"),) * 4
    after = by_replay.next_probe(dataclasses.replace(history, outcomes=history.outcomes + refused), replay)
    assert after is not None
    assert after.rate < 4.5


def test_once_trials_near_the_answer_suffice_without_a_met_one_the_next_is_further_below() -> None:
    """Else all trials are at rates where many miss, and a known rate is never shown: an answer needs one."""
    near = [trial(even(0.1), rate, 60, seed) for seed, rate in enumerate((5.8, 5.9, 6.7))]
    history, replay = history_of(*near, seconds_left=math.inf)
    assert replay.estimate.width <= history.limits.precision
    lower = by_replay.next_probe(history, replay)
    assert lower is not None
    assert lower.rate == pytest.approx(replay.highest / 1.05, rel=1e-3)
    met = dataclasses.replace(history.outcomes[0], verdict="met")
    after = by_replay.next_probe(dataclasses.replace(history, outcomes=(met, *history.outcomes[1:])), replay)
    assert after is not None
    assert after.rate > 1.01 * lower.rate


def test_a_precision_that_no_replay_has_ends_a_search_once_trials_gain_nothing() -> None:
    even_trials = [trial(even(0.1), rate, 60, seed) for seed, rate in enumerate((5.7, 5.8, 5.7, 5.8))]
    history, replay = history_of(*even_trials, seconds_left=500)
    finer = dataclasses.replace(history, limits=dataclasses.replace(history.limits, precision=0.012))
    assert by_replay.too_far(finer, replay)
    assert by_replay.needed_text(finer, replay) == "±1.2 % is finer than any replay of requests (±1.9 %)"
    less = dataclasses.replace(finer, outcomes=finer.outcomes[:3])
    assert not by_replay.too_far(less, result(less.replay))


@pytest.mark.parametrize(
    ("servers", "work_s", "rates"), [(13, 1.0, (8.0, 12.0)), (75, 0.3675, (190.0, 201.0))]
)
def test_servers_side_by_side_are_counted(servers: int, work_s: float, rates: tuple[float, ...]) -> None:
    """Also where one server with a fixed part is more likely than 73 or 77."""
    objective = Objective((Goal("share", 0.9, (("ttft_ms", 1.5),)),))
    trials = tuple(trial(even(work_s, servers), rate, 60, seed) for seed, rate in enumerate(rates))
    found = result(replayed(trials, objective))
    assert models(found) == (f"{servers} servers in order of arrival, 0 ms fixed",)


def rarely_slow(arrived_s: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Twenty servers: of a hundred requests one takes 45 s, the others 2 s; they hold 8.23 a second."""
    return queues.fifo(arrived_s, np.where(rng.random(len(arrived_s)) < 0.01, 45.0, 2.0), 20)


def test_requests_that_outlast_their_trial_count_with_the_work_of_those_that_ended() -> None:
    limit = Objective((Goal("share", 0.8, (("ttft_ms", 15.0),)),))
    trials = tuple(trial(rarely_slow, 8.0, seconds, 20 + seconds) for seconds in range(52, 76, 4))
    (candidate, *_) = candidates(trials)
    ended = np.concatenate(candidate.work)
    assert 20 / np.nanmean(ended) > 9.0, "those that ended were shorter"
    assert 20 / whole_work(trials, candidate).mean() == pytest.approx(8.23, rel=0.05)
    found = result(replayed(trials, limit))
    assert not found.objections
    assert found.estimate.lower < 8.23 < found.estimate.upper


def test_work_of_which_none_has_ended_is_unknown() -> None:
    short = tuple(trial(rarely_slow, 9.5, seconds, seconds) for seconds in (30, 35, 40))
    limit = Objective((Goal("share", 0.8, (("ttft_ms", 15.0),)),))
    (first, *_) = result(replayed(short, limit)).objections
    assert re.fullmatch(r"\d+% of the work is in requests longer than any that ended", first)


def test_many_equal_short_works_are_no_fixed_part_of_the_latency() -> None:
    """On 40 servers, 72 % of the requests take 0.96 s, the others 4.26 s."""

    def mixed(arrived: FloatArray, rng: np.random.Generator) -> FloatArray:
        return queues.fifo(arrived, rng.choice([0.96, 4.26], len(arrived), p=[0.72, 0.28]), 40)

    objective = Objective((Goal("share", 0.8, (("ttft_ms", 25.0),)),))
    trials = (trial(mixed, rate, 100, seed) for seed, rate in enumerate((4.0, 8.0, 18.0)))
    assert models(result(replayed(tuple(trials), objective))) == (
        "40 servers in order of arrival, 0 ms fixed",
    )


def test_a_fixed_part_of_the_latency_is_not_taken_for_work() -> None:
    delayed: Server = lambda arrived, rng: 0.2 + queues.fifo(arrived, np.full(len(arrived), 0.05), 1)  # noqa: E731
    found = result(replayed((trial(delayed, 15.0, 60, 3),), TTFT_300))
    assert models(found) == ("1 server in order of arrival, 200 ms fixed",)


@pytest.mark.parametrize(
    ("servers", "text"), [(1, "1 server, shared evenly"), (28, "28 servers, shared evenly")]
)
def test_requests_that_share_a_server_are_told_from_those_in_a_line(servers: int, text: str) -> None:
    def shared(arrived: FloatArray, rng: np.random.Generator) -> FloatArray:
        return queues.shared(arrived, servers * rng.uniform(0.05, 0.07, len(arrived)), servers)

    found = result(replayed((trial(shared, 8.0, 300, 4), trial(shared, 20.0, 60, 5)), TTFT_300))
    assert models(found)[0] == text


def test_a_trial_that_was_stopped_tells_as_much_as_it_has() -> None:
    """What was not seen to end is not taken for fast, nor for slow."""
    trials = [trial(even(0.1), 12.0, 60, 5, stop_s=9.0), trial(even(0.1), 5.8, 40, 6)]
    found = result(replayed(tuple(trials), TTFT_300))
    assert not found.objections
    assert found.estimate.lower < 5.87 < found.estimate.upper


@pytest.mark.parametrize(
    ("server", "objection"),
    [
        # Slower from its fortieth second on.
        (lambda a, rng: queues.fifo(a, np.where(a < 40, 0.05, 0.12), 1), "the work drifts"),
        # Slow and fast in turns of five seconds.
        (lambda a, rng: queues.fifo(a, np.where(a % 10 < 5, 0.04, 0.12), 1), "is correlated"),
    ],
    ids=["drifts", "turns"],
)
def test_a_server_that_no_queue_explains_is_refuted(server: Server, objection: str) -> None:
    found = result(replayed((trial(server, 6.0, 80, 7), trial(server, 9.0, 80, 8)), TTFT_300))
    assert found.objections
    assert any(objection in text for text in found.objections)


def test_the_rate_is_the_capacity_where_the_limit_is_far_above_the_latency() -> None:
    """No load of 100,000 requests reaches the limit at 60 servers' capacity of 60 req/s."""
    far = Objective((Goal("share", 0.9, (("ttft_ms", 500.0),)),))

    def servers(arrived: FloatArray, rng: np.random.Generator) -> FloatArray:
        return queues.fifo(arrived, rng.exponential(1.0, len(arrived)), 60)

    found = result(replayed((trial(servers, 57.0, 100.0, 3),), far))
    assert found.estimate.lower < 60 < found.estimate.upper
    assert found.error < 0.05


def test_near_the_capacity_the_error_by_sampling_is_that_of_the_mean_work() -> None:
    """4 servers of 0.6 s, 1,440 requests: those of another sample would differ by 1 / √1440 in the mean."""
    far = Objective((Goal("share", 0.9, (("ttft_ms", 8.0),)),))

    def servers(arrived: FloatArray, rng: np.random.Generator) -> FloatArray:
        return queues.fifo(arrived, rng.exponential(0.6, len(arrived)), 4)

    trials = tuple(trial(servers, rate, 120.0, seed) for seed, rate in enumerate((5.9, 6.1)))
    root = result(replayed(trials, far)).roots[0]
    assert root.rate > 0.95 * 4 / 0.6
    assert root.sampling == pytest.approx(1.2 / math.sqrt(sum(map(len, trials))), rel=0.4)


def test_a_rate_far_below_the_capacity_is_found() -> None:
    """M/D/1 of 100 ms: at 0.05 req/s it is busy 0.5 % of the time, so 99.5 % of requests don't wait."""
    at_once = Objective((Goal("share", 0.995, (("ttft_ms", 0.1001),)),))
    found = result(replayed(tuple(trial(even(0.1), rate, 4000, 3) for rate in (0.5, 0.25)), at_once))
    assert not found.objections
    assert found.estimate.median == pytest.approx(0.05, rel=0.1)


def test_a_replay_with_all_met_trials_above_its_interval_widens_that_of_the_answer() -> None:
    history, found = history_of(trial(exponential(0.06), 8.0, 400, 1), seconds_left=math.inf)
    assert history.trusted_replay is found
    above = trial(exponential(0.06), 12.0, 100, 2)
    met = TrialOutcome(12.0, "met", requests=above)
    contradicted = dataclasses.replace(history, outcomes=(*history.outcomes, met))
    assert not result(contradicted.replay).objections
    assert contradicted.trusted_replay is None
    by_figures = RateEstimate(np.array([11.0, 12.0, 13.0]), np.array([0.25, 0.5, 0.25]))
    answer = by_measurements.answer(contradicted, by_figures, finished=False)
    assert (answer.max_request_rate, answer.upper) == (12.0, by_figures.upper)
    assert answer.lower == result(contradicted.replay).estimate.lower < by_figures.lower
    below = TrialOutcome(8.0, "met", requests=history.outcomes[0].requests)
    assert dataclasses.replace(history, outcomes=(below, met)).trusted_replay is not None


def test_trials_that_differ_by_more_than_their_replays_are_less_certain() -> None:
    """A machine's speed varies, and the mean TTFT of requests that hardly wait says little on the rate."""
    near_idle = Objective((Goal("mean", 1.0, (("ttft_ms", 1.25),)),))

    def error(speeds: tuple[float, ...]) -> float:
        trials = (trial(even(speed), 0.32, 1500.0, seed) for seed, speed in enumerate(speeds))
        return result(replayed((*trials,), near_idle)).roots[0].near.error

    assert error((0.94, 1.06, 0.97, 1.03)) > 2 * error((1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize(("count", "t_95"), [(2, 6.314), (4, 2.353), (16, 1.753)])
def test_differences_between_few_trials_are_less_certain_than_between_many(count: int, t_95: float) -> None:
    """Half of the trials have even work of 1 s, the others of 1.1 s."""
    works = tuple(np.full(50, 1.0 + 0.1 * (number % 2)) for number in range(count))
    normal = math.sqrt(0.05**2 / (count - 1)) / 1.05
    found = error_between(Candidate(QueueFamily("fifo", 1), 0.0, works))
    assert found == pytest.approx(normal * t_95 / 1.645, rel=1e-3)


def test_trials_that_contradict_a_flat_score_move_the_rate_by_a_bounded_factor() -> None:
    """The mean TTFT hardly depends on the rate, and one trial's server was slower."""
    rates = ((1.0, 0.01), (1.0, 0.0102), (1.1, 0.02))
    trials = tuple(trial(even(work_s), rate, 30000.0, seed) for seed, (work_s, rate) in enumerate(rates))

    def found(limit_s: float) -> ReplayResult:
        near_idle = Objective((Goal("mean", 1.0, (("ttft_ms", limit_s),)),))
        return result(replayed(trials, near_idle))

    assert found(1.0594).roots[0].near.shift == 1.0
    assert found(1.0622).error == 1.0


def test_a_server_that_was_slow_at_first_is_refuted_by_the_next_trial() -> None:
    trials = [trial(even(0.15), 4.0, 60, 9), trial(even(0.1), 5.0, 60, 10)]
    assert result(replayed(tuple(trials), TTFT_300)).objections


def test_trials_after_a_warm_up_are_replayed_without_it() -> None:
    slow, later = trial(even(0.15), 4.0, 130, 9), [trial(even(0.1), rate, 70, 10) for rate in (5.5, 6.5)]

    def found(*trials: TrialRequests) -> ReplayResult:
        outcomes = tuple(TrialOutcome(trial.rate, "met", requests=trial) for trial in trials)
        return result(TrialHistory(SearchLimits(6, 0.5, 512), outcomes, objective=TTFT_300).replay)

    warm = found(slow, *later)
    assert (warm.left_out, warm.objections, round(warm.seconds)) == (1, (), 140)
    assert warm.estimate.lower < 5.87 < warm.estimate.upper
    assert found(*later, slow).objections  # a system that changed later


def test_a_few_failed_requests_are_no_objection() -> None:
    trials = [trial(even(0.1), rate, 60, 12) for rate in (5.5, 6.5)]

    def objections(failed: int) -> tuple[str, ...]:
        known = dataclasses.replace(trials[0], failed=failed)
        return result(replayed((known, trials[1]), TTFT_300)).objections

    assert not objections(3)  # a hundredth, of a tenth that may miss
    assert objections(4) == ("4 requests failed at 5.5 req/s",)


def test_a_rate_above_the_answer_that_goes_better_than_replayed_refutes_it() -> None:
    trials = [trial(even(0.13), 4.5, 60, 11), trial(even(0.1), 8.0, 60, 12)]
    assert any(
        "better at 8 req/s" in objection for objection in result(replayed(tuple(trials), TTFT_300)).objections
    )


def test_a_rate_above_the_answer_that_goes_better_by_two_percent_of_the_rate_does_not() -> None:
    """The server is 2 % slower in the first trial, and 2 % faster in the last one."""
    trials = [trial(even(0.102), 5.6, 120, 1), trial(even(0.1), 11.0, 30, 2), trial(even(0.098), 11.0, 30, 3)]
    objective = Objective((Goal("mean", 1.0, (("ttft_ms", 0.3),)),))
    assert not result(replayed(tuple(trials), objective)).objections


def test_steps_of_an_engine_are_found_from_its_tokens() -> None:
    """20 ms a step, 0.2 ms for each that decodes, 10 ms for each prompt; TPOT ≤ 40 ms for 90 %."""
    objective = Objective((Goal("share", 0.9, (("ttft_ms", 0.5), ("tpot_ms", 0.04))),))

    def served(rate: float, seed: int, seconds: float = 40.0) -> TrialRequests:
        rng = np.random.default_rng(seed)
        arrived = np.cumsum(rng.exponential(1 / rate, int(seconds * rate)))
        tokens = np.full(len(arrived), 99.0)
        first, last = queues.steps(arrived, tokens, 0.02, 0.0002, 0.01, 4.0)
        return TrialRequests(rate, float(last.max()), arrived, first, last, tokens)

    def score(rate: float) -> float:
        long = served(rate, 99, 2000.0)
        return objective.worst(Latencies.of(long.arrived_s, long.first_s, long.last_s, long.tokens))

    found = result(replayed((served(10.0, 1), served(20.0, 2), served(28.0, 3)), objective))
    assert not found.objections
    assert score(found.estimate.lower * 0.97) > 0 > score(found.estimate.upper * 1.03)


@pytest.mark.parametrize(("share", "limit_s"), [(0.9, 0.3), (0.99, 0.5), (0.999, 1.2)])
def test_the_error_of_a_finite_load_is_known(share: float, limit_s: float) -> None:
    objective = Objective((Goal("share", share, (("ttft_ms", limit_s),)),))
    model, load = QueueModel(QueueFamily("fifo", 1), np.array([0.1])), UnitLoad(1.0, np.zeros(1), objective)
    rate = load.root(model, objective)
    error = load.error(model, objective, rate, load.slope(model, objective, rate))
    assert 0.002 < error < 0.015
    assert rate == pytest.approx(md1_rate(0.1, limit_s, share), rel=3 * error)


def test_the_times_of_decode_steps_are_exact_however_the_number_of_requests_varies() -> None:
    """A request gets most of its tokens while few others decode: means over time and over tokens differ."""
    rng = np.random.default_rng(6)
    first, tokens = np.cumsum(rng.exponential(0.4, 500)), rng.integers(5, 100, 500).astype(np.float64)
    last = queues.shared(first, tokens, math.inf, 0.002, 0.004)
    found = Decode.fitted([TrialRequests(2.5, float(last.max()), first, first, last, tokens)])
    assert found is not None
    assert (found.alone_s, found.each_s, found.prefill_s) == pytest.approx((0.002, 0.004, 0.0), abs=1e-6)
    assert (found.noise[0], found.noise[-1]) == pytest.approx((1.0, 1.0), abs=1e-3)


def test_decoding_beside_prompts_that_take_no_time_is_decoding_without_them() -> None:
    rng = np.random.default_rng(5)
    first, tokens = np.cumsum(rng.exponential(0.1, 300)), np.full(300, 50.0)
    alone, beside = (
        Decode(0.002, 0.001, prefill_s, np.ones(1)).last_s(first, tokens, np.full(300, 1e-9), np.zeros(300))
        for prefill_s in (0.0, 1e-9)
    )
    np.testing.assert_allclose(beside, alone, rtol=1e-6)


def test_a_trial_whose_first_request_failed_is_not_replayed() -> None:
    nothing = dataclasses.replace(trial(even(0.1), 9.0, 0, 1), failed=3)
    assert len(nothing) == 0
    assert replayed((trial(even(0.1), 5.5, 60, 12), nothing), TTFT_300) is None


def test_too_few_requests_are_not_replayed() -> None:
    assert replayed((trial(even(0.1), 5.0, 3, 1),), TTFT_300) is None


def test_what_an_slo_asks_is_judged_by_times() -> None:
    slo = Slo(300.0, 20.0, 0.9, (Limit.parse("e2el_ms mean <= 2000"),))
    objective = Objective.of(slo.all_criteria())
    assert objective.needs_last
    times = Latencies.of(
        np.zeros(4),
        np.array([0.1, 0.2, 0.4, math.nan]),
        np.array([1.0, 5.2, 1.4, math.nan]),
        np.full(4, 100.0),
    )
    share, mean = objective.goals
    assert share.ratios(times)[:3].tolist() == pytest.approx([0.45, 2.5, 4 / 3])
    assert share.score(share.ratios(times)[:3]) == pytest.approx(1 / 3 - 0.9)
    assert mean.score(mean.ratios(times)[:3]) == pytest.approx(1 - (1.0 + 5.2 + 1.4) / 3 / 2)


def test_an_slo_of_sessions_or_of_answers_alone_is_not_replayed() -> None:
    assert Objective.of(Slo(limits=(Limit.parse("session_ms p90 <= 9000"),)).all_criteria()) is None
    assert Objective.of(Slo().all_criteria()) is None


times = st.floats(0, 100, allow_nan=False)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(times, times, times, st.integers(0, 9), st.booleans()), min_size=45, max_size=80),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from(["ttft_ms", "tpot_ms", "e2el_ms"]),
    st.booleans(),
)
def test_whatever_a_trial_saw_it_is_replayed_or_not(
    rows: list[tuple[float, float, float, int, bool]], target: float, metric: str, twice: bool
) -> None:
    """No answer is too odd: ties, no waiting at all, requests without an end, limits that nobody keeps."""
    arrived = np.sort(np.array([row[0] for row in rows]))
    seen = np.array([row[4] for row in rows])
    first = np.where(seen, arrived + np.array([row[1] for row in rows]), math.nan)
    last = first + np.array([row[2] for row in rows])
    tokens = np.array([float(row[3]) for row in rows])
    one = TrialRequests(1.0, 300.0, arrived, first, last, tokens)
    found = replayed((one, one) if twice else (one,), Objective((Goal("share", target, ((metric, 1.0),)),)))
    if found is not None:
        assert all(math.isfinite(value) for value in found.estimate.rates)
        assert json.dumps(found.to_json(), allow_nan=False)
