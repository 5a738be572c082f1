"""Exact bounds, evidence, correlation, trends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core import stats
from kvbench.core.stats import StepSeries


@pytest.mark.parametrize(("k", "n", "confidence", "low", "high"), [
    # Closed forms and textbook values.
    (0, 10, 0.95, 0.0, 0.30850),
    (10, 10, 0.95, 0.69150, 1.0),
    (5, 10, 0.95, 0.18709, 0.81291),
    (4, 20, 0.95, 0.05733, 0.43661),
    (95, 100, 0.95, 0.88717, 0.98357),
    (1, 2, 0.90, 0.02532, 0.97468),
])  # fmt: skip
def test_clopper_pearson_against_tables(k: int, n: int, confidence: float, low: float, high: float) -> None:
    assert stats.share_interval(k, n, confidence) == pytest.approx((low, high), abs=2e-5)


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.data())
def test_binomial_cdf_is_the_sum(n: int, p: float, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n))
    summed = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))
    assert stats.binomial_cdf(k, n, p) == pytest.approx(summed, rel=1e-9, abs=1e-12)


@settings(max_examples=50)
@given(st.integers(0, 200), st.integers(1, 200), st.floats(0.5, 0.999))
def test_bounds_hold_the_estimate_and_invert_the_cdf(k: int, more: int, confidence: float) -> None:
    n = k + more
    low, high = stats.lower_bound(k, n, confidence), stats.upper_bound(k, n, confidence)
    assert 0.0 <= low <= k / n <= high <= 1.0
    assert stats.binomial_cdf(k, n, high) == pytest.approx(1 - confidence, abs=1e-9)


def test_bounds_of_nothing_and_of_fractions() -> None:
    assert stats.share_interval(0, 0, 0.95) == (0.0, 1.0)
    low, high = stats.share_interval(23.75, 25.0, 0.95)  # 95 % of an effective 25
    assert low < stats.share_interval(95, 100, 0.95)[0] < 0.95 < high


@pytest.mark.parametrize("n", [0.5, 1.0])
def test_a_single_request_tells_something(n: float) -> None:
    low, high = stats.share_interval(n, n, 0.9)
    assert (low, high) == (pytest.approx(0.05 ** (1 / n)), 1.0)  # x to the power of n is the chance of all
    low, high = stats.share_interval(0, n, 0.9)
    assert (low, high) == (0.0, pytest.approx(1 - 0.05 ** (1 / n)))


def test_beta_of_large_arguments_converges() -> None:
    assert stats.beta_cdf(50_000, 50_000, 0.5) == pytest.approx(0.5, abs=1e-9)
    assert stats.beta_cdf(1e5, 1e3, 1e5 / (1e5 + 1e3)) == pytest.approx(0.5, abs=0.01)


def test_autocorrelation_time_of_an_ar1_process() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(size=20_000)
    values = np.zeros_like(noise)
    for i in range(1, len(noise)):
        values[i] = 0.8 * values[i - 1] + noise[i]
    assert stats.autocorrelation_time(values) == pytest.approx((1 + 0.8) / (1 - 0.8), rel=0.2)
    assert stats.autocorrelation_time(noise) == pytest.approx(1.0, abs=0.15)
    assert stats.autocorrelation_time([1.0] * 50) == stats.autocorrelation_time([]) == 1.0
    assert stats.autocorrelation_time([1.0] * 30 + [0.0] * 30) > 10


def test_autocorrelation_time_is_that_of_the_sums_by_hand() -> None:
    values = np.array([3.0, 2.5, 2.0, 2.2, 0.5, 0.1, 0.3, -0.4, 1.0, -1.0])
    centred = values - values.mean()
    rho = [float(centred[lag:] @ centred[: len(values) - lag] / (centred @ centred)) for lag in range(10)]
    pairs = [rho[lag] + rho[lag + 1] for lag in range(0, 9, 2)]
    kept = pairs[: next(place for place, pair in enumerate(pairs) if pair <= 0)]
    assert len(kept) > 1
    assert stats.autocorrelation_time(values) == pytest.approx(-1 + 2 * sum(kept))
    assert stats.autocorrelation_time([0.0] * 4 + [1.0] * 4) == pytest.approx(2.5)
    assert stats.autocorrelation_time([0.0, 1.0] * 10) == 1.0
    assert stats.autocorrelation_time([1.0, 1.0, 0.0]) == 1.0  # too few to tell


@pytest.mark.parametrize(
    ("p", "degrees", "table"),
    [(0.975, 1, 12.706), (0.95, 3, 2.353), (0.975, 7, 2.365), (0.995, 10, 3.169), (0.975, 1000, 1.962)],
)
def test_students_t_against_the_table(p: float, degrees: float, table: float) -> None:
    assert stats.t_quantile(p, degrees) == pytest.approx(table, abs=1e-3)
    assert stats.t_quantile(0.5, degrees) == pytest.approx(0.0, abs=1e-6)


def test_students_t_refuses_what_it_cannot() -> None:
    for p, degrees in ((0.3, 5.0), (1.0, 5.0), (0.9, 0.0)):
        with pytest.raises(ValueError, match="needed"):
            stats.t_quantile(p, degrees)


def test_sections_know_the_error_of_a_mean_and_of_a_quantile() -> None:
    random = np.random.default_rng(3)
    means, quantiles = [], []
    for _ in range(200):
        mean, error = stats.sectioned(random.normal(5.0, 2.0, 800), 8, None)
        means.append((mean - 5.0) / error)
        quantile, error = stats.sectioned(random.exponential(1.0, 800), 8, 0.9)
        quantiles.append((quantile - math.log(10)) / error)
    assert 0.8 < np.std(means) < 1.5  # t with 7 degrees: 1.18
    assert 0.7 < np.std(quantiles) < 1.6
    assert stats.sectioned(np.ones(10), 5, 0.95) == (1.0, 0.0)
    with pytest.raises(ValueError, match="do not fill"):
        stats.sectioned(np.ones(3), 4, None)


def test_sections_that_resemble_their_neighbours_count_for_less() -> None:
    figure, alone = stats.sectioned(np.repeat([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], 4), 6, None)
    assert (figure, alone) == (0.0, pytest.approx(math.sqrt(6 / 5 / 6)))
    _, alike = stats.sectioned(np.repeat([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], 4), 6, None)
    assert alike == pytest.approx(
        alone * math.sqrt((1 + 0.5) / (1 - 0.5))
    )  # neighbours agree in 4 of 5: 3 / 6
    ten = [1.0] * 10 + [-1.0] * 10
    _, most = stats.sectioned(np.repeat(ten, 2), 20, None)
    assert most == pytest.approx(math.sqrt(20 / 19 / 20 * (1 + 0.6) / (1 - 0.6)))  # 17 / 20, and 0.6 at most


def test_the_design_effect_counts_clumps() -> None:
    random = np.random.default_rng(4)
    free = (random.random(8000) < 0.1).astype(float)
    assert stats.design_effect(free, 40) == pytest.approx(1.0, abs=0.6)
    clumped = np.repeat((random.random(800) < 0.1).astype(float), 10)
    assert stats.design_effect(clumped, 40) == pytest.approx(10.0, rel=0.5)
    assert stats.design_effect(np.zeros(100), 4) == stats.design_effect(np.ones(3), 4) == 1.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 5)), max_size=30))
def test_step_series_counts_open_intervals(intervals: list[tuple[float, float]]) -> None:
    starts = [start for start, _ in intervals]
    ends = [start + length for start, length in intervals]
    series = StepSeries.of_intervals(starts, ends)
    for t in (0.0, 1.5, 5.0, 20.0):
        assert series.sampled(np.array([t])) == sum(a <= t < b for a, b in zip(starts, ends, strict=True))
    covered = sum(max(0.0, min(b, 8.0) - max(a, 1.0)) for a, b in zip(starts, ends, strict=True))
    assert series.block_means(1.0, 8.0, 4).mean() * 7.0 == pytest.approx(covered, abs=1e-6)


def test_the_peak_is_of_what_is_open_at_once() -> None:
    assert StepSeries.of_intervals([], []).peak() == 0
    assert StepSeries.of_intervals([0.0, 1.0, 2.0], [2.0, 3.0, 4.0]).peak() == 2


def test_trend_finds_a_slope_and_none_in_an_empty_span() -> None:
    # One more request waits after each second, and none ever leaves.
    rising = StepSeries.of_intervals(list(range(20)), [100.0] * 20)
    found = stats.trend(rising, 0.0, 20.0)
    assert (found.per_s, found.error) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    assert stats.trend(rising, 5.0, 5.0) is None
    flat = stats.trend(StepSeries.of_intervals([], []), 0.0, 1.0)
    assert flat.per_s == 0.0


def test_values_vary_by_more_than_their_own_variances() -> None:
    rng = np.random.default_rng(3)
    var = rng.uniform(0.5, 2.0, 4000)
    assert stats.variance_between(rng.normal(0.0, np.sqrt(var)), var) < 0.05
    assert stats.variance_between(rng.normal(0.0, np.sqrt(var + 3.0)), var) == pytest.approx(3.0, rel=0.1)
    assert stats.variance_between(np.array([4.0]), np.array([1.0])) == 0.0
