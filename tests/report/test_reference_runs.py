"""Every answer of every reference run rests on what the reader takes it to rest on.

The README's figures, and what it proves by them, are those of ``results/reference``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.core.records import TrialRecord
from kvbench.results.run import CellResult, RunFolder, load_run

REFERENCE = Path(__file__).parents[2] / "results" / "reference"
RUNS = {path.parent.name: load_run(path.parent) for path in sorted(REFERENCE.glob("*/manifest.json"))}
DISTURBED = "machine_disturbed"


def answered() -> Iterator[object]:
    """Each cell of each run that has an answer."""
    for name, run in RUNS.items():
        for cell in [*run.cells, *run.other_cells]:
            if cell.answer is not None:
                words = (name, *map(str, vars(cell.cell).values()), cell.method, cell.tier)
                yield pytest.param(run, cell, id="-".join(filter(None, words)))


ANSWERED = list(answered())


def trials_of(run: RunFolder, result: CellResult) -> list[TrialRecord]:
    """What the cell's method offered, but for probes of the capacity: they are judged by nothing."""
    return [
        trial
        for trial in run.all_trials
        if (trial.cell, trial.method) == (result.cell, result.method) and trial.purpose != "ceiling"
    ]


def claims_a_met_rate(result: CellResult) -> bool:
    """Whether a reader takes the answer for a rate that was held: by its status, or by "confirmed"."""
    assert result.answer is not None
    claimed = result.answer["confirmed"] or result.answer["status"] in ("converged", "censored")
    return bool(claimed and result.answer["max_request_rate"] is not None)


def disturbances(trial: TrialRecord) -> list[str]:
    return [finding.message for finding in trial.findings if finding.gate == DISTURBED]


def test_there_are_answers_to_look_at() -> None:
    assert len(RUNS) >= 8
    assert len(ANSWERED) >= 20
    assert {result.method for run in RUNS.values() for result in [*run.cells, *run.other_cells]} >= {
        "sustained",
        "burst",
    }


@pytest.mark.parametrize(("run", "result"), ANSWERED)
def test_a_confirmed_answer_rests_on_a_trial_that_was_met(run: RunFolder, result: CellResult) -> None:
    """A trial at the answer, or up to the search's precision above it: what holds more holds less, too. Where
    replays decide, a trial within the interval or below it."""
    assert result.answer is not None
    if not claims_a_met_rate(result):
        return
    rate = result.answer["max_request_rate"]
    if (result.answer.get("replay") or {}).get("decides"):
        met_rates = [trial.request_rate for trial in trials_of(run, result) if trial.verdict_of("") == "met"]
        assert min(met_rates) <= result.answer["upper"]
        return
    highest = rate * (1 + run.plan["scenario"]["search"]["precision"])
    verdicts = {
        trial.trial_id: (trial.request_rate, trial.verdict_of(result.tier))
        for trial in trials_of(run, result)
    }
    met = {
        name
        for name, (offered, verdict) in verdicts.items()
        if verdict == "met" and rate * (1 - 1e-6) <= offered <= highest * (1 + 1e-6)
    }
    assert met, f"{rate} req/s is called {result.answer['status']}, and nothing at it was met: {verdicts}"
    assert result.confirmed_by in met


def test_what_proves_that_a_burst_is_no_rate_is_a_rate_that_was_held() -> None:
    run = RUNS["burst-or-sustained"]
    (sustained,), (burst,) = (
        [cell for cell in [*run.cells, *run.other_cells] if cell.method == method]
        for method in ("sustained", "burst")
    )
    assert sustained.answer["status"] == "converged"
    assert claims_a_met_rate(sustained)
    assert burst.answer["max_request_rate"] > 1.5 * sustained.answer["upper"]


@pytest.mark.parametrize(("run", "result"), ANSWERED)
def test_a_rate_below_which_an_answer_lies_was_missed(run: RunFolder, result: CellResult) -> None:
    assert result.answer is not None
    if result.answer["censored"] == "below":
        verdicts = [trial.verdict_of(result.tier) for trial in trials_of(run, result)]
        assert "missed" in verdicts
        assert "met" not in verdicts
    elif result.answer["censored"] == "above":
        assert result.answer["upper"] is None


@pytest.mark.parametrize(("run", "result"), ANSWERED)
def test_the_trial_an_answer_rests_on_had_the_machine_alone(run: RunFolder, result: CellResult) -> None:
    """Within the limits of the gate: what a reference says of a system must not be that of its neighbours."""
    by_id = {trial.trial_id: trial for trial in run.all_trials}
    assert result.confirmed_by is None or disturbances(by_id[result.confirmed_by]) == []


@pytest.mark.parametrize("name", RUNS)
def test_a_trial_on_a_disturbed_machine_is_marked_in_the_report(name: str) -> None:
    text = (RUNS[name].path / "report.md").read_text("utf-8")
    lines = [line for line in text.splitlines() if DISTURBED in line]
    for trial in RUNS[name].all_trials:
        for message in disturbances(trial):
            assert [line for line in lines if trial.trial_id in line and message in line], trial.trial_id
