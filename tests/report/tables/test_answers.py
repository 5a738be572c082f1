"""What a result table says of an answer: which trial it rests on, whether it is sure, how time was spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from kvbench.core.records import Cell, Finding, TrialRecord, VerdictKind
from kvbench.report.findings.notes import notes
from kvbench.report.tables.cells import gist, result
from kvbench.report.tables.result import Row, read_answer, summary_table
from kvbench.report.tables.table import MISSING
from kvbench.report.tables.trial_values import measuring_share
from kvbench.results.run import CellResult, RunFolder
from kvbench.sweep.cell import confirmed_by

CELL = Cell("nixl", 256, 16)
START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def trial(
    name: str, rate: float, verdict: VerdictKind, purpose: str = "confirm", *, connector: str = "nixl",
    at_s: float = 0,
) -> TrialRecord:  # fmt: skip
    started = (START + timedelta(seconds=at_s)).isoformat(timespec="milliseconds")
    cell = Cell(connector, 256, 16)
    return TrialRecord(name, cell, rate, 0, verdict, "", purpose, started_at=started, duration_s=9.0)


def test_a_trial_that_was_met_at_an_answer_or_just_above_confirms_it() -> None:
    records = [
        trial("ceiling", 30, "measured", "ceiling"), trial("above", 31, "met"), trial("far", 40, "missed"),
        trial("below", 29.9, "met"), trial("at", 30, "undecided"),
    ]  # fmt: skip
    assert confirmed_by(records, "", 30, 0.05) == "above"
    assert confirmed_by([*records, trial("again", 30, "met")], "", 30, 0.05) == "again"
    assert confirmed_by([*records, trial("newer", 31, "met")], "", 30, 0.05) == "newer"


def test_a_trial_that_was_not_met_confirms_nothing() -> None:
    records = [trial("below", 29, "met"), trial("at", 30, "undecided"), trial("refused", 30, "invalid")]
    assert confirmed_by(records, "", 30, 0.05) is None
    assert confirmed_by([trial("missed", 30.2, "missed")], "", 30, 0.05) is None
    assert confirmed_by([trial("far", 40, "met")], "", 30, 0.05) is None
    assert confirmed_by(records, "", None, 0.05) is None


def row_of(records: Sequence[TrialRecord], **answer: object) -> Row:
    """The row of a cell with these trials; its search ended with this answer."""
    given = {"lower": 20.0, "upper": 40.0, "censored": "", "status": "converged", **answer}
    result = CellResult(CELL, "done", given, confirmed_by="above")
    run = RunFolder(Path(), 1, {}, "", {}, {}, list(records), [result], [])
    (row,) = summary_table(run)
    return row


def test_a_row_has_the_figures_of_the_highest_met_trial_at_or_below_the_answer() -> None:
    records = [
        trial("low", 20, "met"), trial("below", 29, "met"), trial("missed", 29.5, "missed"),
        trial("at", 30, "undecided"), trial("above", 30.2, "met"),
    ]  # fmt: skip
    for number, record in enumerate(records):
        record.summary["slo_attainment"] = number / 10
    row = row_of(records, max_request_rate=30.0)
    assert (row.trial_id, row.trial_rate, row.verdict) == ("below", 29, "met")
    assert row.values["slo_attainment"] == 0.1
    assert row.flat()["trial_request_rate"] == 29
    shown = dict(zip(result([row]).header, result([row]).cells[0], strict=True))
    assert (shown["measured at (req/s)"], shown["met (%) [95 %]"]) == ("29.0", "10.0")
    assert dict(zip(gist([row]).header, gist([row]).cells[0], strict=True))["measured at (req/s)"] == "29.0"
    again = [*records, trial("newer", 29, "met")]
    assert row_of(again, max_request_rate=30.0).trial_id == "newer"


def test_a_row_without_such_a_trial_has_empty_columns() -> None:
    """What converged was met a little above the rate."""
    row = row_of([trial("above", 30.2, "met"), trial("at", 30, "missed")], max_request_rate=30.0)
    assert row.answer.text() == "30.0 [20.0, 40.0]"
    assert (row.trial_id, row.trial_rate, row.verdict) == (None, None, "")
    assert set(row.values.values()) == {None}
    shown = dict(zip(result([row]).header, result([row]).cells[0], strict=True))
    assert (shown["measured at (req/s)"], shown["met (%) [95 %]"]) == (MISSING, MISSING)


def refused(name: str, rate: float, gate: str) -> TrialRecord:
    return replace(trial(name, rate, "invalid"), findings=[Finding(gate, "invalid", "why", "what to do")])


def test_a_rate_that_no_trial_met_is_not_printed() -> None:
    """Also where an older search has stored one."""
    records = [
        trial("ceiling", 390, "undecided", "ceiling"),
        refused("one", 120, "machine_disturbed"),
        refused("two", 120, "machine_disturbed"),
    ]
    row = row_of(records, max_request_rate=120.0, lower=49.4, upper=390.0, status="exhausted")
    assert (row.outcome, row.answer.text()) == ("undecided", "no rate (< 390)")
    assert row.rate_text() == "no rate (< 390); 2 of 3 trials refused: machine_disturbed"
    run = RunFolder(Path(), 1, {"status": "complete"}, "", {}, {}, records, [], [])
    texts = {note.text for note in notes(run, [row])}
    assert "nixl at 256: no rate determined: 2 of 3 trials refused: machine_disturbed" in texts
    assert (row.flat()["max_request_rate"], row.flat()["lower"]) == (None, None)
    stored = row_of(records, max_request_rate=None, lower=None, upper=390.0, status="exhausted")
    assert stored.answer == row.answer
    several = [*records[:2], refused("two", 120, "step_lag"), trial("missed", 120, "missed")]
    row = row_of(several, max_request_rate=None, lower=None, upper=120.0, censored="below")
    assert row.rate_text() == "none (< 120); 2 of 4 trials refused: machine_disturbed 1, step_lag 1"
    unknown = row_of(
        [refused("one", 9, "step_lag"), trial("x", 9, "undecided")], max_request_rate=None, upper=None
    )
    assert unknown.rate_text() == "no rate; 1 of 2 trials refused: step_lag"


@pytest.mark.parametrize(("status", "text"), [
    ("converged", "30.0 [28.0, 32.0]"), ("undecided", "30.0? [28.0, 32.0]"),
    ("exhausted", "30.0? [28.0, 32.0]"),
])  # fmt: skip
def test_a_rate_that_no_trial_held_is_marked(status: str, text: str) -> None:
    answer = {"max_request_rate": 30.0, "lower": 28.0, "upper": 32.0, "status": status}
    assert read_answer(answer).text() == text


def test_the_share_of_time_that_was_measuring() -> None:
    """Ten seconds apart, nine of them offered; bringing the second deployment up does not count."""
    first = [trial(f"{n}", 1, "met", at_s=10 * n) for n in range(5)]
    second = [trial(f"{n}", 1, "met", connector="tcp", at_s=500 + 12 * n) for n in range(3)]
    assert measuring_share(first) == pytest.approx(45 / 49)
    assert measuring_share([*second, *first]) == pytest.approx((45 + 27) / (49 + 33))
    assert (measuring_share(first[:1]), measuring_share([])) == (None, None)
