"""What a result table says of an answer: which trial it rests on, whether it is sure, how time was spent."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from kvbench.core.records import Cell, TrialRecord, VerdictKind
from kvbench.report.tables.result import read_answer
from kvbench.report.tables.trial_values import measuring_share
from kvbench.sweep.cell import resting_on

CELL = Cell("nixl", 256, 16)
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def trial(
    name: str,
    rate: float,
    verdict: VerdictKind,
    purpose: str = "confirm",
    *,
    connector: str = "nixl",
    at_s: float = 0,
) -> TrialRecord:
    started = (START + timedelta(seconds=at_s)).isoformat(timespec="milliseconds")
    cell = Cell(connector, 256, 16)
    return TrialRecord(name, cell, rate, 0, verdict, "", purpose, started_at=started, duration_s=9.0)


def test_an_answer_rests_on_a_trial_that_was_met_at_it_or_just_above() -> None:
    records = [
        trial("ceiling", 30, "measured", "ceiling"),
        trial("above", 31, "met"),
        trial("far", 40, "missed"),
        trial("below", 29.9, "met"),
        trial("at", 30, "undecided"),
    ]
    assert resting_on(records, "", 30, 0.05) == "above"
    assert resting_on([*records, trial("again", 30, "met")], "", 30, 0.05) == "again"
    assert resting_on([*records, trial("newer", 31, "met")], "", 30, 0.05) == "newer"


def test_an_answer_without_such_a_trial_shows_what_came_out_nearest() -> None:
    """Not the one that looks better, a bit lower."""
    records = [trial("below", 29, "met"), trial("at", 30, "undecided"), trial("refused", 30, "invalid")]
    assert resting_on(records, "", 30, 0.05) == "at"
    assert resting_on([trial("missed", 30.2, "missed")], "", 30, 0.05) == "missed"
    assert resting_on([trial("far", 40, "met")], "", 30, 0.05) is None
    assert resting_on(records, "", None, 0.05) is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        ("converged", "30.0 [28.0, 32.0]"),
        ("undecided", "30.0? [28.0, 32.0]"),
        ("exhausted", "30.0? [28.0, 32.0]"),
    ],
)
def test_a_rate_that_no_trial_held_is_marked(status: str, text: str) -> None:
    answer = {"max_request_rate": 30.0, "lower": 28.0, "upper": 32.0, "status": status}
    assert read_answer(answer).text() == text


def test_the_share_of_time_that_was_measuring() -> None:
    """Ten seconds apart, nine of them offered; bringing the second deployment up does not count."""
    first = [trial(f"{n}", 1, "met", at_s=10 * n) for n in range(5)]
    second = [trial(f"{n}", 1, "met", connector="tcp", at_s=500 + 12 * n) for n in range(3)]
    assert measuring_share(first) == pytest.approx(45 / 49)
    assert measuring_share([*second, *first]) == pytest.approx((45 + 27) / (49 + 33))
    assert measuring_share(first[:1]) is None
    assert measuring_share([]) is None
