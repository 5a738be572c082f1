"""The screen of a sweep: a line for each cell, a live one, then the answer; no width cuts anything."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from run_files import QUICKSTART
from sample_run import ENVIRONMENT, PLAN, SCENARIO, make_requests, make_trial

from kvbench.core.load.workers import Progress
from kvbench.core.records import Cell, TrialRecord, VerdictKind
from kvbench.report.report import render_terminal
from kvbench.report.sections.requests import subject_lines
from kvbench.report.terminal import LiveLine, print_text
from kvbench.report.watch_state import RunWatch
from kvbench.results.run import LIVE, load_run
from kvbench.results.store import CellResult, RunInfo, RunStore
from kvbench.sweep.display import Display, Silent, why

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
WIDTHS = (60, 80, 100, 120, 160)
RUN_NAME = "20261126T135802Z-quickstart-c6021e"
CELL = Cell("mooncake", 1024, 16)


def trial(verdict: VerdictKind, **fields: object) -> TrialRecord:
    summary = {"slo_attainment": 0.5, "missed_by": {"ttft": 7, "tpot": 1}}
    return TrialRecord("t1", CELL, 24.5, 1, verdict, "the client was late", summary=summary, **fields)  # type: ignore[arg-type]


def console(width: int | None) -> Console:
    """A terminal of a width, or a pipe."""
    return Console(
        file=io.StringIO(), force_terminal=width is not None, width=width or 160, color_system=None,
        highlight=False, legacy_windows=False,
    )  # fmt: skip


def text(shown: Console) -> str:
    """What is left on it, without what moves the cursor."""
    assert isinstance(shown.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", shown.file.getvalue())


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run of quickstart, where a sweep would have put it."""
    path = tmp_path_factory.mktemp("results") / RUN_NAME
    shutil.copytree(QUICKSTART, path, ignore=shutil.ignore_patterns("requests"))
    (path / "report.html").touch()
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    """A run that is going on."""
    with RunStore.create(tmp_path, "quickstart", SCENARIO.encode(), PLAN, ENVIRONMENT, RunInfo()) as made:
        yield made


def replay(path: Path, width: int | None, *, verbose: bool = False) -> str:
    """The screen of a recorded sweep, without the live line's states."""
    run, shown = load_run(path), console(width)
    for line in subject_lines(run):
        print_text(shown, line)
    display = Display(shown, path, len(run.cells), verbose=verbose)
    for result in run.cells:
        for record in run.trials_of(result.cell):
            display.trial_finished(record)
        display.cell_finished(result)
    (path / LIVE).unlink(missing_ok=True)
    render_terminal(run, shown, writer="screen")
    return re.sub(r"(?m)^\d+:\d\d  ", "0:00  ", text(shown))


@pytest.fixture(scope="module")
def words(quickstart: Path) -> set[str]:
    """All words of the screen, as a pipe gets it."""
    return set(replay(quickstart, None).split())


@pytest.mark.parametrize("width", WIDTHS)
def test_no_width_cuts_or_splits_a_word(quickstart: Path, words: set[str], width: int) -> None:
    shown = replay(quickstart, width, verbose=True)
    for line in shown.splitlines():
        assert len(line) <= width or " " not in line.strip(), line
    assert {word for word in shown.split() if not set(word) <= set("─")} <= words
    assert str(quickstart / "report.html") in shown
    assert "74.0 [67.7, 86.4]" in shown


@pytest.mark.parametrize("width", WIDTHS[1:])
def test_the_screen_of_quickstart_has_less_than_thirty_lines(quickstart: Path, width: int) -> None:
    lines = replay(quickstart, width).splitlines()
    commands = 2  # the next command, below it
    assert len(lines) + commands < 30
    assert not any("trial" in line for line in lines)


def test_the_screen_says_what_is_measured_and_answers_in_one_sentence(quickstart: Path) -> None:
    lines = replay(quickstart, 160).splitlines()
    assert lines[0] == (
        "EMULATED · quickstart · tiny · aggregated, mooncake and nixl · 256 and 1,024 tokens in, 16 out"
    )
    assert lines[1] == "highest request rate with TTFT ≤ 250 ms and TPOT ≤ 15 ms for 90 % of requests"
    assert lines[2].endswith("aggregated     256 in  74.0 [67.7, 86.4] req/s")
    shown = " ".join("\n".join(lines).split())
    assert "aggregated is ahead: 1.17× mooncake [1.04, 1.52], confidence 96 %" in shown
    assert re.search(r"report \(\d+ warnings?\): \S+/report\.html$", shown)
    for gone in ("client (P99", "gates that saw nothing", "what limits", "emulator_behind"):
        assert gone not in shown, gone


def test_a_question_mark_after_a_rate_is_explained(quickstart: Path) -> None:
    run, shown = load_run(quickstart), console(60)
    render_terminal(run, shown, writer="screen")
    assert "?" not in text(shown)
    first, *rest = run.cells
    unsure = replace(first, answer={**(first.answer or {}), "status": "exhausted"})
    for writer in ("screen", "terminal"):
        shown = console(60)
        render_terminal(replace(run, cells=[unsure, *rest]), shown, writer=writer)  # type: ignore[arg-type]
        lines = text(shown).splitlines()
        assert any("74.0?" in line for line in lines)
        assert lines.count("? = the search stopped before it converged") == 1


def test_a_log_and_verbose_have_a_line_for_each_trial(quickstart: Path) -> None:
    count = len(load_run(quickstart).trials)
    for shown in (replay(quickstart, None), replay(quickstart, 160, verbose=True)):
        assert len(re.findall(r"  trial \d+ ", shown)) == count
    plain = console(None)
    with Display(plain, quickstart, 1) as display:
        display.stage("mooncake: starting")
        display.trial_finished(trial("invalid"))
    assert "\x1b" not in text(plain)
    assert "mooncake: starting" in text(plain)
    assert "invalid  the client was late" in text(plain)


def test_forecasts_are_for_verbose_alone(quickstart: Path) -> None:
    for verbose in (False, True):
        shown = console(100)
        with Display(shown, quickstart, 1, verbose=verbose) as display:
            display.note("nixl is skipped")
            display.note("it will not do", caveat=True)
        assert "nixl is skipped" in text(shown)
        assert ("it will not do" in text(shown)) is verbose


def test_a_rate_whose_trials_were_all_refused_is_no_answer(store: RunStore) -> None:
    for number in (1, 2):
        requests = make_requests(CELL, 120.0, number)
        record = make_trial(CELL, 120.0, number, requests)
        record.verdict, record.reason = "invalid", "emulator_behind"
        store.add_trial(record, requests)
    answer = {"max_request_rate": 120.0, "lower": 49.4, "upper": 390.0, "status": "exhausted", "trials": 2}
    result = CellResult(CELL, "done", answer=answer)
    store.put_cell(result)
    shown = console(None)
    with Display(shown, store.path, 1) as display:
        display.cell_finished(result)
    render_terminal(load_run(store.path), shown, writer="screen")
    assert "no rate (< 390); 2 of 2 trials refused: emulator_behind" in text(shown)
    assert not re.search(r"\b120\b", text(shown))


# --- the live line ---------------------------------------------------------------------------------
LINE = LiveLine("mooncake 1,024 in", "cell 4/6", "trial 3", "28.9 req/s", "about 1:05 left", share=0.5)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_live_line_is_one_line_of_whole_parts(width: int) -> None:
    shown = LINE.text(width, "2:10").plain
    assert len(shown) <= width
    parts = [part for part in re.split(r"  +|━+", shown) if part]
    assert [
        part for part in ("2:10", LINE.what, LINE.count, LINE.trial, LINE.rate, LINE.left) if part in parts
    ] == parts
    assert {"2:10", LINE.what, LINE.left} <= set(parts)
    assert "━━━━━━━━" in shown
    if width >= 100:
        assert len(parts) == 6


def test_watch_shows_the_numbers_of_the_live_line(store: RunStore) -> None:
    with Display(console(100), store.path, 2) as display:
        display.trial_progress(CELL, 28.9, 400, Progress(done=100, t_s=1.0))
        seen = RunWatch(store.path).look()
        assert seen.live == LiveLine("mooncake 1,024 in", "cell 1/2", "trial 1", "28.9 req/s", "", 0.125)
        assert json.loads(json.dumps(seen.to_json()))["live"]["rate"] == "28.9 req/s"
        (store.path / LIVE).write_text('{"what": 3, "share": "x"}')
        assert RunWatch(store.path).look().live == LiveLine("3")
    assert not (store.path / LIVE).exists()
    assert RunWatch(store.path).look().live.what == "cells 0/?"


def test_a_load_that_takes_long_to_prepare_says_how_far_it_is(store: RunStore) -> None:
    with Display(console(100), store.path, 1) as display:
        display.trial_progress(CELL, 1e5, 2_000_000, Progress(prepared=500_000))
        live = RunWatch(store.path).look().live
    assert (live.rate, live.share) == ("preparing 500,000 of 2,000,000 requests", 0.25)


# --- what is said of a trial -----------------------------------------------------------------------
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
    assert why(record) == "the client was late; effective sample size 13 of 34 (correlated requests)"
    record.summary["effective_n"] = 34.0
    assert why(record) == "the client was late"


def test_a_saturation_says_what_it_is_and_what_came_out(quickstart: Path) -> None:
    record = trial("measured", purpose="ceiling")
    record.summary |= {"completion_rate": 65.99, "completion_steady": True}
    assert why(record) == "saturation probe: about 66 req/s served"
    record.summary["completion_steady"] = False
    assert why(record).endswith("served, still changing")
    shown = console(None)
    with Display(shown, quickstart, 1) as display:
        display.trial_finished(record)
    assert "within SLO" not in text(shown)
    record.summary |= {"completion_rate": None}
    assert why(record) == "saturation probe: too few requests served to measure the capacity"


def test_silence() -> None:
    watcher = Silent()
    watcher.stage("x")
    watcher.note("x")
    watcher.trial_finished(trial("met"))
    watcher.trial_progress(CELL, 1, 1, Progress())
    watcher.cell_finished(CellResult(CELL, "done"))
