"""The verdict of a trial of sessions: what it sends is known when it is sent, and filling is no load."""

from __future__ import annotations

import math

import numpy as np
import pytest
from serving import first_tokens

from kvbench.core.search.live_config import CriterionTarget, Decision, LiveConfig, Observation, TurnsLive
from kvbench.core.search.sequential_trial import FILLS, LiveTrial

BEAT_S = 0.25
FILLED_S = 8.0
DECODE_S = 0.2


def run(
    rate: float, per_s: float, limit_s: float, *, seed: int = 1, filled_s: float = FILLED_S, every: int = 1
) -> tuple[Decision, float]:
    """A server of ``per_s`` requests a second, whose load grows until ``filled_s``. Of requests only every
    so-many-th has a value of the criterion. Gives the decision and when it came."""
    random = np.random.default_rng(seed)
    seconds = (FILLS + 1) * filled_s + 240 / rate * 10
    gaps = random.exponential(1 / rate, round(seconds * rate))
    offsets = np.cumsum(gaps)
    ramp = offsets < filled_s
    offsets[ramp] = filled_s * np.sqrt(offsets[ramp] / filled_s)  # few at first
    offsets.sort()
    first = first_tokens(offsets, np.full(len(offsets), 1 / per_s), 1)
    turns = TurnsLive(len(offsets) + 50, filled_s, 1.0)
    config = LiveConfig(
        [0.0, seconds], rate, 1 / per_s + DECODE_S, max_s=seconds, ttft_limit_s=limit_s, turns=turns
    )
    live = LiveTrial(config, [CriterionTarget("share", 0.9)])
    sent = reported = 0
    known = first + DECODE_S
    t_s = 0.0
    while True:
        t_s += BEAT_S
        now_sent = int(np.searchsorted(offsets, t_s, side="right"))
        now_reported = int(np.searchsorted(known, t_s, side="right"))
        rows: list[Observation] = []
        for place in range(reported, now_reported):
            wait_s = float(first[place] - offsets[place])
            tells = place % every == 0
            kept = float(wait_s <= limit_s) if tells else math.nan
            rows.append((place, (kept,), (wait_s / limit_s if tells else math.nan,), wait_s))
        waiting = now_sent - int(np.searchsorted(first, t_s, side="right"))
        found = live.feed(t_s, rows, waiting, now_sent, offsets[sent:now_sent].tolist())
        sent, reported = now_sent, now_reported
        if found is not None:
            return found, t_s
        assert t_s < 2 * seconds


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(("load", "verdict"), [(0.5, "met"), (1.5, "missed")])
def test_what_is_clear_is_said_once_the_load_has_filled(load: float, verdict: str, every: int) -> None:
    for seed in range(4):
        found, t_s = run(20.0 * load, 20.0, 1.0, seed=seed, every=every)
        assert found.verdict == verdict, found
        assert t_s >= FILLED_S


def test_nothing_is_said_while_a_load_fills() -> None:
    """An idle beginning would be met at any rate, and a clear one is still looked at when it has filled."""
    found, t_s = run(5.0, 100.0, 5.0, filled_s=40.0)
    assert (found.verdict, t_s >= 40.0) == ("met", True)
    assert found.window_s[0] >= 40.0 - 1e-9


def test_a_trial_without_a_value_of_its_criterion_is_no_yes() -> None:
    """Only one of 400 requests is of a kind that the criterion speaks of."""
    found, _ = run(10.0, 20.0, 1.0, every=400)
    assert found.verdict != "met"
