"""The measure of ``compare --ci``: searches that differ in their seeds, and a slower system."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from kvbench.planning.overrides import CliOptions, resolve
from tools.perf_compare import SearchJob, cells, figures_of, time_overrides


def answers(count: int, rate: float, seed: int) -> list[str]:
    """Answers as a run folder has them: what they scatter by, and what their posteriors allow."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        median = rate * math.exp(0.04 * rng.standard_normal())
        posterior = [median * math.exp(0.1 * step) for step in np.linspace(-2, 2, 41)]
        found.append(
            {
                "status": "converged" if rng.random() > 0.1 else "exhausted",
                "max_request_rate": median,
                "lower": median * 0.9,
                "upper": median * 1.1,
                "level": 0.9,
                "posterior": posterior,
            }
        )
    return [json.dumps(row) for row in found]


def test_what_is_counted_are_alarms_of_the_product() -> None:
    figures = {
        (figure["before"], figure["after"]): figure
        for figure in figures_of("x", answers(400, 50, 1), answers(200, 45, 2), 200, 0.1, 0.05)
    }
    single, repeats = figures[1, 1], figures[4, 4]
    assert all(figure["false_alarms"] <= 0.05 * figure["pairs"] for figure in figures.values())
    assert 0 < single["untold"] < 100
    assert single["seen"] < 0.3 * single["pairs"]
    assert repeats["seen"] > 0.8 * repeats["pairs"]
    assert cells(repeats)[1] == "4 → 4"


def test_all_times_are_longer_by_the_factor() -> None:
    cli = CliOptions("quickstart", (), ("nixl",), input_len="256")
    sets = dict(override.split("=") for override in time_overrides(cli, 1.25))
    scenario, _ = resolve(CliOptions("quickstart", tuple(f"{k}={v}" for k, v in sets.items()), ("nixl",)))
    plain, _ = resolve(cli)
    assert scenario.slo.ttft_ms == pytest.approx(1.25 * (plain.slo.ttft_ms or 0))
    assert scenario.search.trial_s == pytest.approx(1.25 * plain.search.trial_s)
    assert scenario.simulate.time_scale == pytest.approx(1.25)
    assert float(sets["simulate.kv_gb_per_s"]) == pytest.approx(0.95 / 1.25)


def test_a_slower_system_holds_the_lower_rate() -> None:
    rates = [
        SearchJob("nixl", 256, 3, factor, ("search.max_trials=3",)).row()["answer"]["max_request_rate"]
        for factor in (1.0, 2.0)
    ]
    assert rates[1] == pytest.approx(rates[0] / 2, rel=0.25)
