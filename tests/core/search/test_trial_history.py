"""What follows from a search's trials, whichever rule goes on from there."""

from __future__ import annotations

import pytest

from kvbench.core.records import VerdictKind
from kvbench.core.search.data import SearchLimits, TrialFigures, TrialOutcome
from kvbench.core.search.trial_history import TrialHistory

LIMITS = SearchLimits(start_rate=8, min_rate=0.5, max_rate=512, precision=0.05)


def outcome(rate: float, verdict: VerdictKind = "met", share: float = 1.0) -> TrialOutcome:
    return TrialOutcome(rate, verdict, "bisect", TrialFigures(attainment=share, target=0.95, n=100))


@pytest.mark.parametrize(("rates", "confirming"), [
    ((9.9, 10.0, 10.3), 10.0),
    ((9.9, 10.3, 10.2), 10.2),  # the nearest
    ((9.0, 9.99), None),  # what holds below says nothing of it
    ((10.5,), 10.5),
    ((10.51,), None),  # farther above than the precision
])  # fmt: skip
def test_a_met_trial_at_or_just_above_confirms_it(rates: tuple[float, ...], confirming: float | None) -> None:
    found = TrialHistory(LIMITS, tuple(outcome(rate) for rate in rates)).confirming(10.0)
    assert (None if found is None else found.rate) == confirming


@pytest.mark.parametrize(("trials", "supporting"), [
    (((9.0, "met"), (9.9, "met"), (10.0, "missed"), (10.1, "met")), 9.9),
    (((9.0, "met"), (10.0, "met"), (9.5, "undecided")), 10.0),
    (((10.1, "met"),), None),
    (((9.9, "undecided"), (9.8, "missed"), (9.7, "invalid")), None),
])  # fmt: skip
def test_the_highest_met_trial_at_or_below_an_answer_supports_it(
    trials: tuple[tuple[float, VerdictKind], ...], supporting: float | None
) -> None:
    history = TrialHistory(LIMITS, tuple(outcome(rate, verdict) for rate, verdict in trials))
    found = history.supporting(10.0)
    assert (None if found is None else found.rate) == supporting


def test_a_missed_trial_or_one_short_of_its_share_confirms_nothing() -> None:
    short = outcome(10.1, share=0.94)
    refused = outcome(10.1, "invalid")
    assert TrialHistory(LIMITS, (outcome(10.2, "missed"), short, refused)).confirming(10.0) is None
    newest = outcome(10.1, share=0.97)
    assert TrialHistory(LIMITS, (outcome(10.1), newest, short)).confirming(10.0) is newest
