"""What follows from a search's trials, whichever rule goes on from there."""

from __future__ import annotations

import pytest

from kvbench.core.records import VerdictKind
from kvbench.core.search.data import SearchLimits, TrialFigures, TrialOutcome
from kvbench.core.search.trial_history import TrialHistory

LIMITS = SearchLimits(start_rate=8, min_rate=0.5, max_rate=512, precision=0.05)


def outcome(rate: float, verdict: VerdictKind = "met", share: float = 1.0) -> TrialOutcome:
    return TrialOutcome(rate, verdict, "bisect", TrialFigures(attainment=share, target=0.95, n=100))


@pytest.mark.parametrize(
    ("rates", "support"),
    [
        ((9.9, 10.0, 10.3), 10.0),
        ((9.9, 10.3, 10.2), 10.2),  # the nearest
        ((9.0, 9.99), None),  # what holds below says nothing of it
        ((10.5,), 10.5),
        ((10.51,), None),  # farther above than the precision
    ],
)
def test_an_answer_rests_on_a_met_trial_at_it_or_just_above(
    rates: tuple[float, ...], support: float | None
) -> None:
    found = TrialHistory(LIMITS, tuple(outcome(rate) for rate in rates)).support(10.0)
    assert (None if found is None else found.rate) == support


def test_a_missed_trial_or_one_short_of_its_share_supports_nothing() -> None:
    short = outcome(10.1, share=0.94)
    refused = outcome(10.1, "invalid")
    assert TrialHistory(LIMITS, (outcome(10.2, "missed"), short, refused)).support(10.0) is None
    newest = outcome(10.1, share=0.97)
    assert TrialHistory(LIMITS, (outcome(10.1), newest, short)).support(10.0) is newest
