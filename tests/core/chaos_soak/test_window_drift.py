"""What drifts over hours: straight lines with an interval, one level a session."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.core.chaos_soak.window_drift import LEAST_WINDOWS, SoakWindow, drift, settled, student_t


def windows(values, session=0, begin=0.0, step_s=60.0):
    return [SoakWindow(begin + place * step_s, session, value) for place, value in enumerate(values)]


def noisy(count, slope_per_hour, seed=1, spread=1.0, level=100.0):
    chance = random.Random(seed)
    return [level + slope_per_hour * place / 60 + chance.gauss(0, spread) for place in range(count)]


def test_a_leak_is_seen_with_its_slope():
    found = drift(windows(noisy(60, 30.0)))
    assert found.verdict == "grows"
    assert found.lower < 30.0 < found.upper
    assert found.growth == pytest.approx(30 * 0.75 / found.median, rel=0.15)


def test_what_falls_and_what_stays():
    assert drift(windows(noisy(60, -30.0))).verdict == "falls"
    assert drift(windows(noisy(60, 0.0))).verdict == "steady"


def test_a_sure_growth_that_does_not_matter_is_none():
    assert drift(windows(noisy(60, 2.0, spread=0.01))).verdict == "steady"  # 1.5 % over the soak
    assert drift(windows(noisy(60, 30.0)), least=50.0).verdict == "steady"


def test_the_warm_up_is_no_drift():
    warming = [50 + 50 * (1 - math.exp(-place / 3)) for place in range(60)]
    assert drift(windows(warming)).verdict == "steady"


def test_a_session_begins_at_its_own_level():
    both = [*windows([100.0] * 20), *windows([60.0] * 20, session=1, begin=1200.0)]
    assert drift(both).verdict == "steady"
    leaking = [*windows(noisy(30, 60.0)), *windows(noisy(30, 60.0, seed=2), session=1, begin=1800.0)]
    found = drift(leaking)
    assert found.verdict == "grows"
    assert found.lower < 60.0 < found.upper
    kept = settled(leaking)
    assert all(window.at_s != 1800.0 for window in kept)  # the new session's first window is its warm-up


def test_too_few_windows_tell_nothing():
    found = drift(windows([1.0] * LEAST_WINDOWS))
    assert (found.verdict, found.per_hour) == ("too short", None)
    assert (drift([]).verdict, drift(windows([None] * 60)).verdict) == ("too short", "too short")


def test_steady_noise_is_taken_for_drift_no_more_often_than_said():
    alarms = sum(drift(windows(noisy(40, 0.0, seed, spread=30.0))).verdict != "steady" for seed in range(300))
    assert alarms <= 9  # 1 % of 300, and three standard errors and a half


def test_a_wandering_queue_is_no_sure_drift():
    """Neighbours that fare alike: the interval is wider than that of independent windows."""
    chance, value, walk = random.Random(3), 0.0, []
    for _ in range(60):
        value = 0.8 * value + chance.gauss(0, 5)
        walk.append(100 + value)
    independent = drift(windows(noisy(60, 0.0, spread=5 / 0.6)))
    wandering = drift(windows(walk))
    assert wandering.upper - wandering.lower > 1.5 * (independent.upper - independent.lower)


@pytest.mark.parametrize(("freedom", "t"), [(1, 63.657), (5, 4.032), (30, 2.750), (1000, 2.581)])
def test_student_s_t_is_that_of_the_tables(freedom, t):
    assert student_t(0.99, freedom) == pytest.approx(t, rel=1e-3)


@given(st.lists(st.floats(1, 1e6), min_size=10, max_size=40), st.floats(0.1, 1000))
def test_units_do_not_matter(values, factor):
    here, there = drift(windows(values)), drift(windows([value * factor for value in values]))
    assert here.verdict == there.verdict or math.isclose(abs(here.growth), 0.05, rel_tol=1e-6)
    assert there.per_hour == pytest.approx(here.per_hour * factor, rel=1e-6, abs=1e-6 * factor * max(values))
