"""The analytic queue against a simulated one, and against what must hold of any."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.errors import InputError
from tools.known_queues import md1_attainment, md1_in_system, md1_max_rate, md1_wait_cdf

SERVICE_S = 0.02
loads = st.floats(0.01, 0.97)


def md1_mean_wait_s(rate: float, service_s: float) -> float:
    """Mean time from arrival to the start of service (Pollaczek and Khinchine)."""
    load = rate * service_s
    return math.inf if load >= 1 else load * service_s / (2 * (1 - load))


def simulated_waits(load: float, count: int, seed: int) -> np.ndarray:
    """Lindley's recursion, W(n+1) = max(0, W(n) + service − gap), by its running-minimum form."""
    random = np.random.default_rng(seed)
    steps = SERVICE_S - random.exponential(SERVICE_S / load, count)
    walk = np.concatenate(([0.0], np.cumsum(steps)))
    return walk - np.minimum.accumulate(walk)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8, 0.9])
def test_the_distribution_is_that_of_a_simulated_queue(load: float) -> None:
    rate = load / SERVICE_S
    waits = np.concatenate([simulated_waits(load, 400_000, seed) for seed in range(5)])
    for quantile in (0.2, 0.5, 0.9, 0.95, 0.99):
        wait = float(np.quantile(waits, quantile))
        if wait > 0:
            assert md1_wait_cdf(rate, SERVICE_S, wait) == pytest.approx(quantile, abs=0.006)
    assert md1_wait_cdf(rate, SERVICE_S, 0.0) == pytest.approx(np.mean(waits < 1e-12), abs=0.006)
    assert float(waits.mean()) == pytest.approx(md1_mean_wait_s(rate, SERVICE_S), rel=0.04)


@given(load=loads, wait=st.floats(0, 3.0))
def test_it_agrees_with_erlangs_sum_where_that_has_digits(load: float, wait: float) -> None:
    """(1 − ρ) Σ_{k=0…⌊t/D⌋} (λ(kD − t))^k / k! · e^{−λ(kD − t)}, time in services."""
    total = sum(
        (load * (k - wait)) ** k / math.factorial(k) * math.exp(-load * (k - wait))
        for k in range(math.floor(wait) + 1)
    )
    assert md1_wait_cdf(load, 1.0, wait) == pytest.approx((1 - load) * total, abs=1e-9)


@given(load=loads)
def test_the_mean_is_the_integral_of_the_tail(load: float) -> None:
    horizon = 20 / (1 - load)
    grid = np.linspace(0, horizon, 400)
    tail = np.array([1 - md1_wait_cdf(load, 1.0, float(t)) for t in grid])
    mean = float(np.sum((tail[1:] + tail[:-1]) / 2 * np.diff(grid)))
    assert mean == pytest.approx(md1_mean_wait_s(load, 1.0), rel=0.05, abs=0.01)


@given(load=loads)
def test_the_number_in_system_is_a_distribution_with_the_right_mean(load: float) -> None:
    shares = md1_in_system(load, 600)
    assert shares.min() >= 0
    assert shares.sum() == pytest.approx(1.0, abs=1e-6)
    # Little's law: number in system = rate × (wait + service).
    expected = load * (md1_mean_wait_s(load, 1.0) + 1.0)
    assert float(np.dot(shares, np.arange(600))) == pytest.approx(expected, rel=1e-3)


@given(share=st.floats(0.5, 0.999), limit=st.floats(1.0, 30.0))
def test_the_max_rate_is_where_the_attainment_is_the_share(share: float, limit: float) -> None:
    rate = md1_max_rate(SERVICE_S, limit * SERVICE_S, share)
    assert 0 < rate < 1 / SERVICE_S
    assert md1_attainment(rate, SERVICE_S, limit * SERVICE_S) == pytest.approx(share, abs=1e-6)
    assert md1_attainment(rate * 1.01, SERVICE_S, limit * SERVICE_S) < share


def test_the_ends() -> None:
    assert md1_max_rate(0.05, 0.049, 0.95) == 0.0
    assert md1_wait_cdf(60.0, 0.02, 1.0) == 0.0
    assert math.isinf(md1_mean_wait_s(50.0, 0.02))
    assert md1_wait_cdf(0.0, 0.02, 0.0) == 1.0
    assert md1_wait_cdf(25.0, 0.02, 0.0) == pytest.approx(0.5)
    assert md1_wait_cdf(49.5, 0.02, 40.0) == pytest.approx(1.0)  # a wait of 2,000 services keeps its digits
    with pytest.raises(InputError):
        md1_wait_cdf(-1.0, 0.02, 0.0)
    with pytest.raises(InputError):
        md1_max_rate(0.02, 0.1, 1.0)
