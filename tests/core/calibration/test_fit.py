"""The fit finds coefficients that are known, because the loads were served with them on virtual time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvbench.core.calibration.fit import FittedTiming, ServedLoad, Times, fit
from kvbench.core.calibration.least_squares import least_squares
from kvbench.core.calibration.profile_file import timing_of_values
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.scheduler import EngineConfig
from kvbench.errors import InputError

CONFIG = EngineConfig(16, 8000, 32, 1024, 8192, enable_prefix_caching=False)
TOKEN_BYTES = 1e5


def a_load(rate: float, count: int, seed: int, *, prefill: int = 0, noise: float = 0.0) -> ServedLoad:
    """A load whose times are still to be filled in."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    load = SimulatedLoad(
        arrivals.tolist(),
        rng.choice([64, 200, 700, 1500, 3000], count).tolist(),
        rng.integers(5, 60, count).tolist(),
        1e9,
    )
    system = System(
        timing_of_values({}), CONFIG, prefill=prefill, decode=1, block_bytes=TOKEN_BYTES * CONFIG.block_tokens
    )
    nothing = np.zeros(count)
    return ServedLoad("made", system, load, Times(nothing, nothing))


def served_with(values: dict[str, float], load: ServedLoad, noise: float = 0.0, seed: int = 0) -> ServedLoad:
    rng = np.random.default_rng(seed)
    times = load.predicted(values)
    factors = np.exp(noise * rng.normal(size=(2, len(times.ttft_s))))
    return replace(load, measured=Times(times.ttft_s * factors[0], times.decode_s * factors[1]))


COEFFICIENTS = st.fixed_dictionaries({
    "front_end_ms": st.floats(1, 10), "prefill_step_ms": st.floats(2, 20),
    "prefill_token_ms": st.floats(0.02, 0.2), "prefill_attention_ms": st.floats(1e-6, 1e-5),
    "decode_step_ms": st.floats(8, 40), "decode_seq_ms": st.floats(0.1, 1),
    "decode_context_ms": st.floats(5e-5, 5e-4),
})  # fmt: skip


# A fit takes seconds: a smaller failing example is not worth the minutes of looking for it.
@settings(
    max_examples=1,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.generate),
)
@given(COEFFICIENTS, st.integers(0, 1000))
def test_known_coefficients_are_found_again(truth: dict[str, float], seed: int) -> None:
    """What a prompt and a step cost is found, and a load of another rate is predicted."""
    loads = [served_with(truth, a_load(rate, 30, seed + at)) for at, rate in enumerate((0.3, 3.0))]
    found = fit(loads)
    # A lone prompt of 1,000 tokens, whose parts are hardly told apart; a step of 10 sequences of as many.
    for counts in (
        {"front_end_ms": 1, "prefill_step_ms": 1, "prefill_token_ms": 1e3, "prefill_attention_ms": 1e6},
        {"decode_step_ms": 1, "decode_seq_ms": 10, "decode_context_ms": 1e4},
    ):
        cost, known = (sum(costs[name] * n for name, n in counts.items()) for costs in (found.values, truth))
        assert cost == pytest.approx(known, rel=0.15), (found.values, found.errors)
    unseen = served_with(truth, a_load(1.0, 40, seed + 50))
    times = unseen.predicted(found.values)
    assert times.ttft_s.mean() == pytest.approx(unseen.measured.ttft_s.mean(), rel=0.08)
    assert times.decode_s.mean() == pytest.approx(unseen.measured.decode_s.mean(), rel=0.03)


TRUTH = {
    "front_end_ms": 5.0, "prefill_step_ms": 8.0, "prefill_token_ms": 0.08, "prefill_attention_ms": 4e-6,
    "decode_step_ms": 20.0, "decode_seq_ms": 0.5, "decode_context_ms": 2e-4,
}  # fmt: skip


def test_noise_is_in_the_errors_and_in_what_is_left_over() -> None:
    """Of 2 % noise on every time a fit keeps that it is there, and predicts all the same."""
    loads = [served_with(TRUTH, a_load(rate, 30, at), 0.02, at) for at, rate in enumerate((0.3, 2.0))]
    found = fit(loads)
    assert 0 < found.errors["decode_step_ms"] < 0.05 * TRUTH["decode_step_ms"]
    assert 0.01 < found.rms[1] < 0.04
    unseen = served_with(TRUTH, a_load(1.0, 50, 77))
    assert unseen.predicted(found.values).decode_s.mean() == pytest.approx(
        unseen.measured.decode_s.mean(), rel=0.02
    )


def test_a_load_with_a_hand_off_is_predicted() -> None:
    truth = {**TRUTH, "transfer_ms": 12.0, "transfer_token_ms": 0.05}
    loads = [served_with(truth, a_load(rate, 26, 7 + at, prefill=1)) for at, rate in enumerate((0.3, 1.5))]
    found = fit(loads)
    # Prefill and transfer of a prompt follow one another: only queues tell them apart.
    both = found.values["prefill_token_ms"] + found.values["transfer_token_ms"]
    assert both == pytest.approx(truth["prefill_token_ms"] + truth["transfer_token_ms"], rel=0.1)
    unseen = served_with(truth, a_load(0.8, 40, 99, prefill=1))
    assert unseen.predicted(found.values).ttft_s.mean() == pytest.approx(
        unseen.measured.ttft_s.mean(), rel=0.08
    )


def test_what_a_load_does_not_tell_is_said() -> None:
    """Prompts of one length alone do not tell a step's time from its tokens'."""
    load = a_load(0.05, 30, 3)
    alike = replace(load, load=replace(load.load, input_len=[512] * 30, output_len=[2] * 30))
    found = fit([served_with(TRUTH, alike, 0.02)])
    assert "prefill_attention_ms" not in found.values
    assert {"front_end_ms", "prefill_step_ms", "decode_seq_ms", "decode_context_ms"} & set(found.undetermined)


@pytest.mark.parametrize("request_ms", [0.0, 9.0])
def test_what_each_prompt_takes_besides_its_tokens_is_fitted_where_it_shows(request_ms: float) -> None:
    """The emulated engine's own profile has 9 ms of it, which other coefficients would be bent for."""
    truth = {**TRUTH, "prefill_request_ms": request_ms, "front_end_ms": 2.0, "prefill_step_ms": 4.0}
    loads = [served_with(truth, a_load(rate, 50, 11 + at)) for at, rate in enumerate((0.3, 6.0))]
    found = fit(loads)
    assert found.values.get("prefill_request_ms", 0.0) == pytest.approx(request_ms, rel=0.15)
    unseen = served_with(truth, a_load(4.0, 60, 99))
    ttft = unseen.predicted(found.values).ttft_s.mean()
    assert ttft == pytest.approx(unseen.measured.ttft_s.mean(), rel=0.02)


def test_too_few_requests_are_refused() -> None:
    with pytest.raises(InputError, match="4 requests with known times cannot fit 7 coefficients"):
        fit([served_with(TRUTH, a_load(1.0, 4, 1))])


def test_draws_have_the_covariance_of_the_fit() -> None:
    covariance = np.array([[4.0, 1.8], [1.8, 1.0]])
    found = FittedTiming({"a": 100.0, "b": 50.0}, covariance, (0.0, 0.0), 1)
    made = np.array([list(draw.values()) for draw in found.draws(4000, 1)])
    assert np.cov(made.T) == pytest.approx(covariance, rel=0.1)
    assert all(
        draw["b"] >= 0 for draw in FittedTiming({"a": 1.0, "b": 0.1}, covariance, (0, 0), 1).draws(50, 2)
    )


@given(st.lists(st.floats(0.0, 5.0), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_a_linear_model_is_solved_as_by_formula(truth: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    design = rng.uniform(0.5, 2.0, size=(40, 3)) + 3 * np.eye(3)[rng.integers(0, 3, 40)]
    observed = design @ np.array(truth)
    ones = np.ones(3)
    found = least_squares(lambda values: observed - design @ values, ones, ones, np.arange(40), 30)
    assert found.values == pytest.approx(truth, abs=1e-3)


def test_what_would_be_negative_is_held_at_0() -> None:
    design = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    observed = np.array([2.0, -1.0, 1.5])
    found = least_squares(lambda values: observed - design @ values, np.ones(2), np.ones(2), np.arange(3))
    assert (found.values, found.at_zero) == (pytest.approx([1.75, 0.0], abs=1e-4), (False, True))
