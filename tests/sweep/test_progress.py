"""What a user sees while a sweep runs: plain lines, and a live line on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.core.records import Cell, TrialRecord, VerdictKind
from kvbench.results.run import CellResult
from kvbench.sweep.display import Display, Silent, why
from kvbench.sweep.trial.loadgen_driver import Progress

CELL = Cell("mooncake", 1024, 16)


def trial(verdict: VerdictKind, **fields: object) -> TrialRecord:
    summary = {"slo_attainment": 0.5, "missed_by": {"ttft": 7, "tpot": 1}}
    return TrialRecord("t1", CELL, 24.5, 1, verdict, "the client was late", summary=summary, **fields)  # type: ignore[arg-type]


def shown(*, terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=120, highlight=False, color_system=None)
    with Display(console, 1) as display:
        display.stage("mooncake: starting")
        display.trial_progress(CELL, 24.5, 100, Progress(met=9, missed=1, done=10))
        display.trial_finished(trial("missed"))
        display.trial_finished(trial("invalid"))
        display.cell_finished(CellResult(CELL, "done"))
        display.note("nixl is skipped")
    return stream.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_each_trial_is_a_whole_line(terminal: bool) -> None:
    text = shown(terminal=terminal)
    words = ("mooncake", "1024 in", "24.50 req/s", "50.0% within SLO", "missed")
    for word in (*words, "1 missed TPOT, 7 missed TTFT"):
        assert word in text
    assert "invalid  the client was late" in text
    assert "nixl is skipped" in text


def test_plain_lines_hold_no_control_characters() -> None:
    text = shown(terminal=False)
    assert "\x1b" not in text
    assert "mooncake: starting" in text
    assert len([line for line in text.splitlines() if "req/s" in line]) == 2


def test_a_refused_trial_says_why_and_a_missed_one_what() -> None:
    assert why(trial("invalid")) == "the client was late"
    assert why(trial("missed")) == "1 missed TPOT, 7 missed TTFT"
    grown = trial("missed")
    grown.summary["missed_by"] = {}
    grown.reason = "the queue grows at 15.7 req/s offered"
    assert why(grown) == grown.reason


def test_an_undecided_trial_says_why_and_as_how_many_its_requests_count() -> None:
    record = trial("undecided")
    assert why(record) == "the client was late; 1 missed TPOT, 7 missed TTFT"
    record.summary |= {"missed_by": {}, "judged_met": 34, "judged_missed": 0, "effective_n": 13.2}
    assert why(record) == "the client was late; the 34 count as 13, since neighbours fare alike"
    record.summary["effective_n"] = 34.0
    assert why(record) == "the client was late"


def test_a_flood_says_what_it_is_and_what_came_out() -> None:
    record = trial("measured", purpose="ceiling")
    record.summary |= {"completion_rate": 65.99, "completion_steady": True}
    assert why(record) == "saturating probe to find the capacity: about 66 req/s served"
    record.summary["completion_steady"] = False
    assert why(record).endswith("served, still changing")
    stream = io.StringIO()
    with Display(Console(file=stream, width=200, color_system=None), 1) as display:
        display.trial_finished(record)
    assert "within SLO" not in stream.getvalue()
    record.summary |= {"completion_rate": None}
    assert why(record) == "saturating probe to find the capacity: too little was served in its time to tell"


def test_silence() -> None:
    watcher = Silent()
    watcher.stage("x")
    watcher.note("x")
    watcher.trial_finished(trial("met"))
    watcher.trial_progress(CELL, 1, 1, Progress())
    watcher.cell_finished(CellResult(CELL, "done"))
