"""A run folder that somebody changed: what is damaged costs itself, and answers are not mixed."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pytest
from resuming import Taped, cut_off, without_checksums
from rich.console import Console
from run_files import QUICKSTART, copied, edit_json, edit_rows
from sample_run import make_run

from kvbench.core.records import Cell
from kvbench.errors import LaunchError, StoreError
from kvbench.planning.overrides import CliOptions
from kvbench.report.report import render_terminal, write_report
from kvbench.report.tables.trial_values import measuring_share
from kvbench.report.timeline import counters
from kvbench.results.checksums import lost_requests
from kvbench.results.run import CellResult, load_run
from kvbench.sweep import resume
from kvbench.sweep.display import next_step
from kvbench.sweep.sweep import carry_out

LISTED = (
    "connectors=[aggregated]", "workload.input_len=[128,256]", "search.method=fixed", "search.rates=[5,10]",
    "search.trial_s=0.5", "search.max_trial_s=0.5", "search.min_requests=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("broken")
    whole = Taped(CliOptions("quickstart", LISTED)).unbroken(base / "whole")
    return cut_off(whole, base / "cut" / whole.name, 3, torn=False)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("sample"), connectors=("aggregated", "tcp"), input_lens=(512,))


# --- going on --------------------------------------------------------------------------------------
def test_an_edited_scenario_is_not_gone_on_with(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    with (folder / "scenario.yaml").open("a") as file:
        file.write("# another thought\n")
    with pytest.raises(StoreError, match=r"changed since the run began, in scenario\.yaml"):
        resume.resume(folder)
    (folder / "scenario.yaml").unlink()
    with pytest.raises(StoreError, match=r"scenario\.yaml cannot be read"):
        resume.resume(folder)


def test_an_edited_slo_is_not_gone_on_with(broken: Path, tmp_path: Path) -> None:
    folder = copied(broken, tmp_path)
    edit_json(folder / "plan.json", lambda plan: plan["scenario"]["slo"].update(ttft_ms=1.0))
    with pytest.raises(StoreError, match=r"changed since the run began, in plan\.json"):
        resume.resume(folder)


def test_an_untouched_one_is_gone_on_with_and_so_is_one_without_digests(broken: Path, tmp_path: Path) -> None:
    resume.resume(copied(broken, tmp_path / "a"))
    older = without_checksums(copied(broken, tmp_path / "b"))
    edit_json(older / "manifest.json", lambda manifest: manifest.pop("asked_digests"))
    resume.resume(older)


@pytest.mark.parametrize("value", ["a text", 7, {"pid": 1}, ["x"], [None]])
def test_sessions_of_a_wrong_type_are_left_out_and_said(broken: Path, tmp_path: Path, value: Any) -> None:
    folder = without_checksums(copied(broken, tmp_path))
    edit_json(folder / "manifest.json", lambda manifest: manifest.update(sessions=value))
    assert any("sessions is" in warning for warning in load_run(folder).warnings)
    resume.resume(folder)
    assert load_run(folder).manifest["status"] == "complete"


@pytest.mark.parametrize("name", ["labels", "hosts", "skipped", "asked", "trace"])
def test_no_field_of_a_wrong_type_is_unforeseen(sample: Path, tmp_path: Path, name: str) -> None:
    folder = without_checksums(copied(sample, tmp_path))
    edit_json(folder / "manifest.json", lambda manifest: manifest.update({name: "great"}))
    run = load_run(folder)
    assert any(f"{name} is 'great'" in warning for warning in run.warnings)
    render_terminal(run, Console(file=io.StringIO()))
    with pytest.raises(StoreError, match="cannot be resumed"):
        resume.reopen(folder)


def test_lost_requests_are_said_before_a_run_is_gone_on_with(sample: Path, tmp_path: Path) -> None:
    folder = without_checksums(copied(sample, tmp_path))
    assert list(lost_requests(load_run(folder))) == []
    missing, cut, short = sorted((folder / "requests").glob("*.parquet"))[:3]
    missing.unlink()
    cut.write_bytes(cut.read_bytes()[:-50])
    index = [trial.trial_id for trial in load_run(folder).trials].index(short.stem)
    edit_rows(folder / "trials.jsonl", lambda trial: trial["summary"].update(sent=1000), index, index + 1)
    lost = sorted(lost_requests(load_run(folder)))
    assert lost == sorted(
        [
            f"requests/{missing.name} is missing",
            f"requests/{cut.name} is cut off or damaged",
            f"requests/{short.name} has 120 of the 1000 requests that were sent",
        ]
    )
    with pytest.raises(StoreError, match="has changed since it was written:\n  requests/"):
        resume.reopen(folder)


# --- reading ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("damage", [
    {"verdict": "great"}, {"request_rate": float("nan")}, {"request_rate": -1.0},
    {"request_rate": float("inf")}, {"duration_s": -0.5}, {"duration_s": float("nan")},
])  # fmt: skip
def test_a_damaged_trial_is_left_out_and_said(sample: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    folder = copied(sample, tmp_path)
    before = len(load_run(folder).all_trials)
    edit_rows(folder / "trials.jsonl", lambda trial: trial.update(damage), 1, 2)
    run = load_run(folder)
    assert len(run.all_trials) == before - 1
    (name,) = damage
    assert any(f"{name} is " in warning for warning in run.warnings)
    write_report(folder, ("md", "csv"))


@pytest.mark.parametrize(
    "text", ["yesterday", "2026-13-45T99:00:00Z", "2026-11-21T13:30:00", "9" * 400, "\x00"]
)
def test_a_damaged_time_costs_no_report(sample: Path, tmp_path: Path, text: str) -> None:
    folder = copied(sample, tmp_path)
    edit_rows(folder / "trials.jsonl", lambda trial: trial.update(started_at=text), 1, 2)
    run = load_run(folder)
    assert measuring_share(run.all_trials) is not None
    assert list(counters(run, run.trials[1], {})) == []
    write_report(folder, ("md", "html", "csv", "json"))


# --- the command to go on --------------------------------------------------------------------------
def test_the_command_to_go_on_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / ("a-long-name-" * 8)
    folder.mkdir()
    sweep = Taped(CliOptions("quickstart", LISTED))
    from kvbench.sweep.bench import create_store

    store = create_store(folder, sweep.scenario, sweep._source, sweep.plan, "sweep", {})
    out = io.StringIO()

    def failing(_display: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        carry_out(store, 1, Console(file=out, width=80), failing)
    assert f"to resume it: kvbench sweep --resume {store.path}" in out.getvalue().splitlines()


def test_a_sweep_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    from kvbench.sweep.bench import create_store

    sweep = Taped(CliOptions("quickstart", LISTED))

    def failing(_display: Any) -> Any:
        raise LaunchError("host a is not reached")

    for log in ("", "agent.log"):
        store = create_store(tmp_path, sweep.scenario, sweep._source, sweep.plan, "sweep", {})
        if log:
            store.logs.mkdir(exist_ok=True)
            (store.logs / log).write_text("what it said")
        with pytest.raises(LaunchError):
            carry_out(store, 1, Console(file=io.StringIO()), failing)
        assert store.path.exists() == bool(log), "what a process has logged stays"


def next_of(folder: Path, *argv: str) -> str:
    run = load_run(folder)
    run.manifest["argv"] = list(argv)
    return next_step(run)


def test_the_next_command_has_each_option_once() -> None:
    options = ("--set", "search.precision=0.2", "--precision=0.3", "--precision", "0.4", "--max-trials", "4")
    words = next_of(QUICKSTART, "kvbench", "sweep", "quickstart", *options, "--slo", "'ttft_ms p90 <= 50'")
    kept = "kvbench sweep quickstart --max-trials 4 --slo 'ttft_ms p90 <= 50'"
    assert words.startswith(f"next: {kept} --precision 0.1  (narrower intervals for "), words


def test_the_next_command_compares_only_what_can_be_compared(tmp_path: Path) -> None:
    first, second = (tmp_path / f"2026-01-0{day}-quickstart-a" for day in (1, 2))
    for folder in (first, second):
        shutil.copytree(QUICKSTART, folder)
    assert next_of(second) == f"next: kvbench compare {first} {second}  (shows what has changed since)"
    assert next_of(first).startswith("next: kvbench export timeline ")
    other = {"engine_options": {"base_url": "http://another:1"}}
    edit_json(first / "plan.json", lambda plan: plan["scenario"]["deployment"].update(other))
    assert next_of(second).startswith("next: kvbench export timeline "), "another server"


class Failing:
    """A sweep whose only cell fails."""

    def run(self) -> list[CellResult]:
        return [CellResult(Cell("tcp", 128, 16), "failed", reason="it died")]


def test_the_command_for_failed_cells_is_one_line(tmp_path: Path) -> None:
    from kvbench.sweep.bench import create_store

    folder = tmp_path / ("a-long-name-" * 8)
    folder.mkdir()
    sweep = Taped(CliOptions("quickstart", LISTED))
    store = create_store(folder, sweep.scenario, sweep._source, sweep.plan, "sweep", {})
    store.put_cell(CellResult(Cell("tcp", 128, 16), "failed", reason="it died"))
    out = io.StringIO()
    words: Any = lambda _display: Failing()  # noqa: E731
    carry_out(store, 1, Console(file=out, width=80), words)
    hint = f"next: kvbench sweep --resume {store.path}  (measures the failed cells again)"
    assert hint in out.getvalue().splitlines()
