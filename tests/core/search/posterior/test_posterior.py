"""The posterior of a rate: its queue against formulas and simulated queues, and what trials tell it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kvbench.core.search.data import TrialFigures, TrialOutcome
from kvbench.core.search.posterior.posterior import PARTS, fit
from kvbench.core.search.posterior.queue_model import (
    late_share,
    log_normal_cdf,
    mean_wait,
    memory,
    queue_rate,
)
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting, waiting_of


def waits(rate: float, service_s: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(arrivals, waiting times) of an M/D/1 queue that was empty at first, in seconds."""
    at = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, n))
    ahead = np.arange(n) * service_s - at
    return at, ahead - np.minimum.accumulate(ahead)


def test_a_normal_tail_is_known_far_out() -> None:
    z = np.array([-8.0, -3.0, 0.0, 2.0])
    exact = [math.log(0.5 * math.erfc(-score / math.sqrt(2))) for score in z]
    assert log_normal_cdf(z) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("load", [0.7, 0.9, 0.97])
def test_a_queue_ends_at_its_exponential_law(load: float) -> None:
    depth, at_last = np.array(40.0), 1e6
    assert late_share(np.array(load), depth, at_last) == pytest.approx(math.exp(-40 * (1 - load)), rel=1e-2)
    assert mean_wait(np.array(load), depth, at_last) == pytest.approx(1 / (40 * (1 - load)), rel=0.15)


def test_a_queue_that_gets_too_much_is_late_only_after_a_while() -> None:
    load, depth = np.array(1.05), np.array(1000.0)
    shares = [float(late_share(load, depth, time)) for time in (5.0, 19.0, 21.0, 40.0)]
    assert shares[0] < 1e-3
    assert shares[1] < 0.5 < shares[2]
    assert shares[3] > 0.99


def test_the_filling_of_a_queue_is_that_of_simulated_ones() -> None:
    rate, service_s, headroom_s = 0.97, 1.0, 12.0
    depth = 2 * headroom_s / service_s  # σ² is service² · rate for Poisson arrivals: one variation
    late = np.mean([waits(rate, service_s, 400, seed)[1][300:] > headroom_s for seed in range(400)])
    expected = np.mean(
        [late_share(np.array(rate), np.array(depth), t / rate / headroom_s) for t in (320, 380)]
    )
    assert late == pytest.approx(float(expected), rel=0.25)


def test_a_queue_near_its_capacity_remembers_for_longer() -> None:
    near, far = memory(np.array([0.98, 0.8]), np.array(50.0))
    assert near == pytest.approx(100 * far)


def test_the_luck_of_arrivals_is_taken_out() -> None:
    rate, service_s, headroom_s = 1.0, 0.94, 8.0
    ratios, late = [], []
    for seed in range(60):
        at, waited = waits(rate, service_s, 1500, seed)
        found = queue_rate(at, rate, (float(at[300]), float(at[-1])), headroom_s, 0.95)
        ratios.append(found / rate)
        late.append(float(np.mean(waited[300:] > headroom_s)))
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)
    # What looks like a higher rate is what was late more often.
    assert np.corrcoef(ratios, late)[0, 1] > 0.5
    assert queue_rate(at, rate, (0.0, 1.0), headroom_s, 0.95) is None


def outcome(rate: float, late: float, *, ttft_s: float = 1.0) -> TrialOutcome:
    figures = TrialFigures(
        1 - late, n=1000, effective_n=50, target=0.95, score=0.0, score_error=0.3, ttft_limit_s=1.0,
        ttft_s=ttft_s, ttft_fast_s=0.05,
    )  # fmt: skip
    return TrialOutcome(rate, "undecided", "bisect", figures)


def test_what_is_left_for_waiting_is_told_by_the_fastest() -> None:
    assert waiting_of([outcome(10, 0.05)]) == Waiting(1.0, pytest.approx(0.95))
    assert waiting_of([TrialOutcome(10, "met")]) == Waiting()


def points(shares: list[tuple[float, float]], seconds: float = 100.0) -> list[RatePoint]:
    return [
        RatePoint(rate, misses=late * rate * seconds, n=rate * seconds, clump=20, end_s=seconds)
        for rate, late in shares
    ]


def test_the_rate_is_where_as_much_is_late_as_may_be() -> None:
    seen = points([(9.0, 0.0), (10.0, 0.05), (10.0, 0.05), (10.5, 0.3), (10.0, 0.05), (9.5, 0.01)])
    found = fit(seen, 0.1, 1000, Waiting(1.0, 0.95))
    assert found.median == pytest.approx(10, rel=0.04)
    assert found.lower < 10 < found.upper
    assert found.within(found.median, 0.05) > 0.7
    assert found.density.sum() == pytest.approx(1)


def test_a_rate_that_was_only_met_has_no_end_above() -> None:
    found = fit(points([(10.0, 0.0)] * 4), 0.1, 1000, Waiting(1.0, 0.95))
    assert found.lower > 8
    assert found.upper > 12


def test_a_short_trial_says_little_where_the_limit_leaves_much_time() -> None:
    """No request can be late yet, so that nobody was proves nothing."""
    seen = points([(10.0, 0.0)] * 3, seconds=5.0)
    patient, strict = (fit(seen, 0.1, 1000, Waiting(slack + 0.05, slack)) for slack in (30.0, 0.2))
    assert patient.lower < strict.lower


def test_the_answer_is_that_of_the_end() -> None:
    """A system that became slower: what early trials said counts less."""
    early, late = [(14.0, 0.0)] * 5, [(10.0, 0.05), (10.5, 0.2), (9.5, 0.0), (10.0, 0.06), (10.2, 0.1)]
    slower = fit(points(early + late), 0.1, 1000, Waiting(1.0, 0.95))
    assert slower.median == pytest.approx(10, rel=0.08)
    same = fit(points(early), 0.1, 1000, Waiting(1.0, 0.95))
    assert same.lower > 1.1 * slower.median
    assert slower.wanders > same.wanders


def test_a_posterior_is_kept_in_equal_parts_of_it() -> None:
    found = fit(points([(9.0, 0.0), (10.0, 0.05), (10.5, 0.3), (10.0, 0.05)]), 0.1, 1000, Waiting(1.0, 0.95))
    kept = found.equal_parts()
    assert len(kept) == PARTS
    assert list(kept) == sorted(kept)
    step = found.rates[1] / found.rates[0]
    assert np.median(kept) == pytest.approx(found.median, rel=step - 1)
    assert np.quantile(kept, 0.05, method="hazen") == pytest.approx(found.lower, rel=2 * (step - 1))
    for share in (0.1, 0.3, 0.8):
        at = kept[int(share * PARTS)]
        assert found.density[found.rates <= at].sum() == pytest.approx(share, abs=0.05)


def test_trials_that_disagree_make_the_interval_wide() -> None:
    steady, waiting = [(8.0, 0.0), (9.5, 0.01), (10.5, 0.2), (11.0, 0.6)], Waiting(1.0, 0.95)
    agreeing = points([*steady, *[(10.0, 0.05)] * 4])
    apart = points([*steady, (10.0, 0.6), (10.0, 0.0), (10.0, 0.6), (10.0, 0.0)])
    assert fit(apart, 0.1, 1000, waiting).width > 1.2 * fit(agreeing, 0.1, 1000, waiting).width


def test_scores_that_hardly_change_show_a_rate_far_away() -> None:
    """From 16 to 4 requests a second the percentile got hardly better: it is not kept at 3 either."""
    scores = [(16.0, -0.25), (12.0, -0.22), (8.0, -0.18), (6.0, -0.16), (4.0, -0.14)]
    seen = [
        RatePoint(rate, misses=150, n=1000, clump=5, attainment=0.9, score=score, score_error=0.02)
        for rate, score in scores
    ]
    assert fit(seen, 0.01, 1000, Waiting()).median < 2.5


def test_a_first_token_soon_shows_that_nothing_waits_and_a_late_one_nothing() -> None:
    """Nobody was late; but the slowest twentieth came soon, or just in time."""
    seen = points([(9.0, 0.0), (9.2, 0.0), (9.1, 0.0), (11.0, 0.4)])
    unknown, soon, late = (
        fit([replace(point, ttft_s=ttft_s) for point in seen[:3]] + seen[3:], 0.1, 1000, Waiting(1.0, 0.95))
        for ttft_s in (None, 0.1, 0.9)
    )
    assert soon.median > unknown.median
    assert soon.lower > unknown.lower
    assert late.median < soon.median


def test_a_steady_drift_is_followed() -> None:
    """2 % slower each minute: the answer is that of the end, not of the middle."""
    minutes = range(0, 20, 2)
    roots = [12.0 * math.exp(-0.02 * minute) for minute in minutes]
    shares = [
        (root * off, late) for root, (off, late) in zip(roots, [(0.97, 0.01), (1.02, 0.15)] * 5, strict=True)
    ]
    found = fit(points(shares, seconds=120.0), 0.1, 1000, Waiting(1.0, 0.95))
    end = 12.0 * math.exp(-0.02 * 19)
    assert found.median == pytest.approx(end, rel=0.035)
    assert found.wanders > 0.6
