"""Engines in steps, found from the latencies of simulated requests."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from kvbench.core.search.replay.engines import EngineModel, engine_model, engine_objections
from kvbench.core.search.trial_requests import TrialRequests

TWO = EngineModel(False, 2, 8.0, math.inf, (0.004, 0.00012, 0.013, 0.0, 0.003))
"""Two engines behind a router: a step of 4 ms, 13 ms more for each prompt."""
PAIR = EngineModel(True, 1, 8.0, math.inf, (0.002, 0.0, 0.0135, 0.005, 0.01), (0.004, 0.00012))
"""P computes up to 8 prompts a step, and hands each over in 5 ms."""


def trial(
    model: EngineModel, rate: float, seed: int, seconds: float = 10.0, spread: int = 0
) -> TrialRequests:
    """Requests that the model serves, of 16 tokens or up to ``spread`` more; 1 % of noise."""
    rng = np.random.default_rng(seed)
    arrived = np.cumsum(rng.exponential(1 / rate, int(seconds * rate)))
    tokens = 15.0 + rng.integers(0, spread + 1, len(arrived))
    first, last = model.played(arrived, tokens, np.arange(len(arrived)))
    first = arrived + (first - arrived) * rng.lognormal(0, 0.01, len(arrived))
    end = float(last.max()) + 0.1
    return TrialRequests(rate, end, arrived, first, np.maximum(last, first), tokens)


@pytest.mark.parametrize(
    ("model", "rates"), [(TWO, (60.0, 75.0)), (PAIR, (55.0, 66.0, 75.0))], ids=["two", "pair"]
)
def test_the_structure_of_engines_predicts_other_trials(model: EngineModel, rates: tuple[float, ...]) -> None:
    trials = [trial(model, rate, seed) for seed, rate in enumerate(rates)]
    found = engine_model((*trials,))
    assert (found.pair, found.engines) == (model.pair, model.engines)
    assert found.error < 0.05
    other = trial(model, 0.9 * rates[-1], 9, 100.0)
    first, last = found.played(other.arrived_s, other.tokens, np.arange(len(other)))
    for simulated, true in ((first, other.first_s), (last, other.last_s)):
        waits = (np.quantile(times - other.arrived_s, (0.5, 0.9)) for times in (simulated, true))
        assert next(waits) == pytest.approx(next(waits), rel=0.06)


@pytest.mark.parametrize(
    ("base", "count", "rate"), [(TWO, 3, 37.0), (TWO, 5, 37.0), (TWO, 8, 37.0), (PAIR, 3, 66.0)]
)
def test_any_number_of_engines_is_found(base: EngineModel, count: int, rate: float) -> None:
    times = (*base.seconds[:3], base.seconds[3] / count, base.seconds[4])
    model = dataclasses.replace(base, engines=count, seconds=times)
    found = engine_model((trial(model, 0.8 * rate * count, 0), trial(model, rate * count, 1)))
    assert (found.pair, found.engines) == (base.pair, count)


def test_a_limit_on_prompts_of_a_step_is_found_where_it_matters() -> None:
    limited = EngineModel(True, 1, 2.0, math.inf, (0.02, 0.0, 0.005, 0.001, 0.01), (0.004, 0.0))
    trials = [trial(limited, rate, seed) for seed, rate in enumerate((40.0, 60.0, 80.0))]
    found = engine_model((*trials,))
    assert found.prompts == 2.0


def test_a_limit_on_sequences_shows_in_the_capacity() -> None:
    limited = EngineModel(False, 1, 16.0, 8.0, (0.01, 0.0005, 0.002, 0.0, 0.002))
    trials = [trial(limited, rate, seed, spread=60) for seed, rate in enumerate((5.0, 15.0, 20.0))]
    found = engine_model((*trials,))
    assert found is not None
    assert (found.engines, found.slots) == (1, 8.0)
    tokens = np.concatenate([trial.tokens for trial in trials])
    assert found.capacity(tokens) == pytest.approx(limited.capacity(tokens), rel=0.05)


def test_too_few_requests_are_not_fitted() -> None:
    assert engine_model((trial(TWO, 2.0, 1),)) is None


def test_a_trial_far_above_the_capacity_is_no_objection() -> None:
    """There a server that is 5 % slower has a TTFT twice as far off."""
    slower = dataclasses.replace(TWO, seconds=(*(1.05 * duration for duration in TWO.seconds),))
    trials = (trial(slower, 60.0, 1), trial(slower, 150.0, 1, 2.0))
    model = dataclasses.replace(TWO, error=0.05)
    assert engine_objections(trials, model, 140.0) == ()
    found = engine_objections(trials, model, 160.0)
    assert [text[:26] for text in found] == ["TTFT at 150 req/s is +12 %", "TTFT at 150 req/s is +21 %"]
    assert engine_objections(trials, dataclasses.replace(model, engines=1), 140.0)
