"""The main jobs end to end with real processes: the core of the default suite.

A busy machine may rightly refuse a trial. So these tests check states, files and exit codes, and neither a
verdict nor a rate.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import EASY, Finished, Running, invoke, kvbench, tagged_processes, the_run, wait_until

from kvbench import transfer
from tests.processes.exact_server.test_exact import exact

pytestmark = [pytest.mark.core, pytest.mark.timeout(600)]

ABLE = ("aggregated", "tcp", *(name for name in ("mooncake", "nixl") if transfer.check(name) is None))
SHORT = (*EASY, "search.trial_s=0.5", "search.min_requests=10", "search.max_trials=2")
MEASURED = (0, 1, 3)
"""Exit codes of a sweep that measured: rates, or only refused trials, or no rate that meets the SLO."""
ENDED = ("done", "refused")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """A short sweep over every connector that runs on this machine, and its results folder."""
    results = tmp_path_factory.mktemp("results")
    words = [part for name in ABLE for part in ("--connector", name)]
    sets = (*SHORT, "search.max_trials=1")
    return kvbench("sweep", "quickstart", "--output", str(results), *words, sets=sets), results


def test_a_sweep_measures_every_connector(swept: tuple[Finished, Path]) -> None:
    done, results = swept
    assert done.status in MEASURED, done.text
    run = the_run(results)
    assert run.manifest["status"] == "complete"
    assert {result.cell.connector: result.status in ENDED for result in run.cells} == dict.fromkeys(
        ABLE, True
    )
    assert not tagged_processes(run)


def test_each_trial_stores_its_requests(swept: tuple[Finished, Path]) -> None:
    run = the_run(swept[1])
    assert {trial.cell.connector for trial in run.all_trials} == set(ABLE)
    for trial in run.all_trials:
        rows = run.requests(trial.trial_id)
        assert len(rows) == trial.summary["sent"] > 0
        assert trial.labels == ["emulated"]


def test_kv_of_every_pair_crossed_the_network(swept: tuple[Finished, Path]) -> None:
    for trial in the_run(swept[1]).all_trials:
        if trial.cell.connector != "aggregated":
            assert trial.engine["kv_bytes_per_request"] == 64 * 2048, "64 tokens of 2 KiB"
            assert "tcp" in trial.engine["transport"]


def test_a_run_folder_is_complete(swept: tuple[Finished, Path]) -> None:
    folder = the_run(swept[1]).path
    for name in ("scenario.yaml", "environment.json", "report.md", "report.html", "tables/summary.csv"):
        assert (folder / name).stat().st_size > 0, name
    plan = json.loads((folder / "plan.json").read_text())
    assert set(plan["processes"]) == set(ABLE)
    assert {"prefill-0", "decode-0", "router"} == set(plan["processes"]["tcp"])


def test_a_report_is_made_again_from_raw_files(swept: tuple[Finished, Path]) -> None:
    folder = the_run(swept[1]).path
    before = (folder / "report.md").read_bytes()
    (folder / "report.md").unlink()
    done = invoke("report", str(folder))
    assert done.status == 0, done.text
    assert (folder / "report.md").read_bytes() == before


def test_verify_finds_a_new_run_sound_and_an_edited_one_not(swept: tuple[Finished, Path]) -> None:
    folder = the_run(swept[1]).path
    done = kvbench("verify", str(folder))
    assert done.status == 0, done.text
    trials = folder / "trials.jsonl"
    before = trials.read_text()
    trials.write_text(before.replace('"seed": ', '"seed": 1', 1))
    done = invoke("verify", str(folder))
    trials.write_text(before)
    assert done.status == 1, done.text


def test_a_run_is_listed_compared_and_exported(swept: tuple[Finished, Path], tmp_path: Path) -> None:
    folder = the_run(swept[1]).path
    assert "quickstart" in invoke("runs", str(swept[1])).text
    assert invoke("compare", str(folder), str(folder)).status == 0
    done = invoke("export", str(folder), "--format", "csv", "--output", str(tmp_path / "rows.csv"))
    assert done.status == 0, done.text
    assert (tmp_path / "rows.csv").stat().st_size > 0


def test_after_a_kill_a_sweep_resumes_and_keeps_what_it_had(tmp_path: Path) -> None:
    sweep = Running("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path), sets=SHORT)
    try:
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("*/trials.jsonl")), 120)
        sweep.signal(signal.SIGKILL)
    finally:
        sweep.kill()
    run = the_run(tmp_path)
    wait_until(lambda: not tagged_processes(run), 60)
    stored = (run.path / "trials.jsonl").read_bytes()
    done = kvbench("sweep", "--resume", str(run.path))
    assert done.status in MEASURED, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "complete"
    assert {result.cell.connector for result in run.cells} == {"tcp"}
    assert (run.path / "trials.jsonl").read_bytes().startswith(stored)


def test_an_interrupt_leaves_a_readable_run_and_no_process(tmp_path: Path) -> None:
    sweep = Running("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path), sets=SHORT)
    try:
        wait_until(lambda: any(tmp_path.glob("*/logs/tcp/decode-0.log")), 120)
        sweep.signal(signal.SIGINT)
        done = sweep.finish()
    finally:
        sweep.kill()
    assert done.status == 130, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "interrupted"
    wait_until(lambda: not tagged_processes(run))  # a killed engine's own child may end a moment later


def test_bench_measures_a_server_by_its_url(tmp_path: Path) -> None:
    with exact(tmp_path) as server:
        done = kvbench(
            *("bench", "--base-url", f"http://127.0.0.1:{server.port}", "--rate", "20", "--ttft-ms", "20000"),
            *("--input-len", "64", "--output-len", "4", "--output", str(tmp_path / "r")),
            sets=("search.trial_s=1", "search.min_requests=20"),
        )
    assert done.status in MEASURED, done.text
    run = the_run(tmp_path / "r")
    (trial,) = run.all_trials
    rows = run.requests(trial.trial_id)
    assert len(rows) >= 20
    assert set(rows["error"]) == {""}


def test_bench_refuses_a_server_that_is_not_there(tmp_path: Path) -> None:
    words = ("--rate", "1", "--input-len", "64", "--output-len", "4", "--ttft-ms", "1000")
    done = kvbench("bench", "--base-url", "http://127.0.0.1:9", *words, "--output", str(tmp_path))
    assert done.status == 1, done.text
    assert "Traceback" not in done.text


def test_a_microbenchmark_stores_rows_and_a_report(tmp_path: Path) -> None:
    able = ",".join(["null", *ABLE[1:]])
    sizes = ("--block-size", "4K", "--batch-size", "4", "--seconds", "0.05")
    done = kvbench("microbench", "--backend", able, *sizes, "--output", str(tmp_path))
    assert done.status == 0, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "complete"
    assert (run.path / "transfers.parquet").stat().st_size > 0
    assert (run.path / "report.md").stat().st_size > 0


@pytest.mark.parametrize("words", [("--help",), ("doctor",)])
def test_commands_that_only_look_start_from_a_shell(words: tuple[str, ...]) -> None:
    done = kvbench(*words)
    assert done.status == 0, done.text
    assert done.out
