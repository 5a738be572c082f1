"""Two kinds of latency are told from one, and unequal servers from prompts that differ."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.core.gates.steady import populations, two_populations
from kvbench.core.records import RequestRecord
from tests.core.gates.test_gates import GOOD, evidence


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def lognormal(seed: int, n: int, median: float, sigma: float = 0.1) -> np.ndarray:
    return median * np.exp(sigma * rng(seed).standard_normal(n))


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(150, 400), every=st.integers(2, 6), factor=st.floats(2, 20))
def test_servers_taken_in_turn_are_found(seed: int, n: int, every: int, factor: float) -> None:
    values = lognormal(seed, n, 0.05, 0.05)
    values[::every] *= factor
    found = populations(values.tolist())
    assert (found.turn, found.share) == (every, pytest.approx(1 / every, abs=0.05))
    assert found.medians == pytest.approx((0.05, 0.05 * factor), rel=0.1)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), share=st.floats(0.2, 0.5))
def test_a_mixture_in_no_order_is_named_without_a_turn(seed: int, share: float) -> None:
    slow = rng(seed + 1).random(400) < share
    found = populations((lognormal(seed, 400, 0.05, 0.05) * np.where(slow, 5.0, 1.0)).tolist())
    assert found is None or found.turn == 0  # neighbours may be alike by chance


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(60, 600),
    shape=st.sampled_from(["normal", "uniform", "exponential", "heavy", "constant"]),
)
def test_one_hill_is_one_population(seed: int, n: int, shape: str) -> None:
    values = {
        "normal": lognormal(seed, n, 0.1, 0.3),
        "uniform": rng(seed).uniform(0.05, 0.15, n),
        "exponential": 0.02 + rng(seed).exponential(0.1, n),
        "heavy": lognormal(seed, n, 0.1, 2.0),
        "constant": np.full(n, 0.1),
    }[shape]
    assert populations(values.tolist()) is None


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), load=st.floats(0.1, 1.2), burst=st.sampled_from([0.25, 1.0, 4.0]))
def test_a_queue_is_no_second_server(seed: int, load: float, burst: float) -> None:
    """M/D/1 and burstier: who waits and who does not are two kinds of a sort, but come in stretches."""
    free, values = 0.0, []
    for at in np.cumsum(rng(seed).gamma(burst, 0.1 / load / burst, 300)).tolist():
        free = max(free, at) + 0.1
        values.append(free - at)
    found = populations(values)
    assert found is None or found.turn == 0


def test_a_pause_of_the_server_is_no_second_population() -> None:
    at = np.arange(300) / 10
    values = np.where(at % 10 < 2, 2.05 - at % 10, 0.05)
    assert populations(values.tolist()) is None


def test_lengths_that_differ_are_taken_out() -> None:
    lengths = np.where(np.arange(200) % 2, 4000.0, 100.0)
    values = lognormal(3, 200, 1.0, 0.02) * lengths / 1e4
    assert populations(values.tolist(), lengths.tolist()) is None
    assert populations(values.tolist()) is not None


def records(slow: float, gap: float = 1.0) -> list[RequestRecord]:
    found = []
    for i, record in enumerate(GOOD):
        first = record.scheduled_s + 0.05 * (slow if i % 2 else 1.0)
        step = 0.01 * (gap if i % 2 else 1.0)
        found.append(replace(record, first_token_s=first, last_token_s=first + 4 * step))
    return found


def test_the_gate_names_both_by_share_and_median() -> None:
    finding = two_populations(evidence(records(3.0)))
    assert finding.level == "warning"
    assert (
        "TTFT has two populations: 50 ms at the median of 50% of the requests, 150 ms of the other 50%"
        in (finding.message)
    )
    assert "repeats every 2 requests" in finding.message
    finding = two_populations(evidence(records(1.0, gap=1.8)))
    assert finding.evidence["metric"] == "TPOT"
    assert two_populations(evidence(records(1.1))) is None
    assert two_populations(evidence(records(3.0), reuse_expected=True)) is None
    assert two_populations(evidence(records(3.0)[:40])) is None
