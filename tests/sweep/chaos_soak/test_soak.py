"""``kvbench soak`` on real processes: windows, drift, resume, a death."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import Running, invoke, kvbench, tagged_processes, the_run, wait_until
from processes import words_of

from kvbench.report.tables.soak_rows import soak_problems, soak_series
from kvbench.results.run import load_run

pytestmark = pytest.mark.timeout(300)
EASY = (
    "connectors=[aggregated,tcp]", "workload.input_len=[64]", "workload.output_len=4", "slo.ttft_ms=4000",
    "slo.tpot_ms=2000", "slo.attainment=0.5", "deployment.base_port=0", "deployment.ready_timeout_s=60",
)  # fmt: skip
WORDS = ("soak", "quickstart", "--rate", "15", "--hours", "0.0055", "--window", "2")  # ten windows


def test_windows_are_stored_and_a_verdict_is_given(tmp_path: Path) -> None:
    done = kvbench(*WORDS, "--output", str(tmp_path), sets=EASY)
    run = the_run(tmp_path)
    assert (len(run.all_trials), {trial.method for trial in run.all_trials}) == (10, {"soak"})
    windows = [trial.engine["soak"] for trial in run.all_trials]
    answers = [trial.engine["canaries"] for trial in run.all_trials]
    assert all(answer["checked"] >= 10 for answer in answers)
    assert all(answer["wrong"] == 0 for answer in answers)
    assert all(window["holdings"]["decode-0"]["rss_bytes"] > 1e7 for window in windows)
    assert all(window["holdings"]["prefill-0"]["blocks"] == 0 for window in windows)
    named = {(series.of, series.name) for series in soak_series(run)}
    assert {("", "TTFT P50 (ms)"), ("prefill-0", "memory (MB)"), ("router", "descriptors")} < named
    assert (run.path / "figures" / "soak.svg").stat().st_size > 5000
    assert f"0 of {sum(answer['checked'] for answer in answers)} answers wrong: at most" in " ".join(
        done.out.split()
    )
    assert "Drift" in (run.path / "report.md").read_text()
    # A busy machine may have windows refused, or slow down: then it says so, and ends with 1.
    assert done.status == (1 if soak_problems(run) else 0), done.text
    assert invoke("verify", str(run.path)).status == 0
    both = invoke("compare", str(run.path), str(run.path), "--json")
    assert {row["what"] for row in json.loads(both.out)["rows"]} >= {"memory (MB)", "TPOT P99 (ms)"}


@pytest.mark.heavy
def test_an_interrupt_keeps_the_windows_and_it_goes_on_in_a_new_session(tmp_path: Path) -> None:
    with Running(*WORDS, "--output", str(tmp_path), sets=EASY) as running:
        for _ in range(3):
            running.wait_for("req/s")
        running.signal(signal.SIGINT)
        ended = running.finish()
    assert ended.status == 130, ended.text
    run = the_run(tmp_path)
    kept = len(run.all_trials)
    assert kept >= 3
    wait_until(lambda: not tagged_processes(run))
    assert "to resume it: kvbench soak --resume" in ended.text
    before = (run.path / "trials.jsonl").read_bytes()
    again = kvbench("soak", "--resume", str(run.path))
    whole = load_run(run.path)
    assert whole.manifest["status"] == "complete", again.text
    assert (run.path / "trials.jsonl").read_bytes().startswith(before)
    assert len(whole.all_trials) == 10
    assert [trial.engine["soak"]["session"] for trial in whole.all_trials] == [0] * kept + [1] * (10 - kept)
    assert "of 2 sessions" in again.out


def test_a_process_that_dies_ends_it_with_what_was_measured(tmp_path: Path) -> None:
    with Running(*WORDS, "--output", str(tmp_path), sets=EASY) as running:
        for _ in range(2):
            running.wait_for("req/s")
        run = the_run(tmp_path)
        (decode,) = [
            process
            for process in tagged_processes(run)
            if "".join(words_of(process)[-1:]).endswith("/decode-0.json")
        ]
        decode.kill()
        done = running.finish()
    assert done.status == 1, done.text
    run = the_run(tmp_path)
    (problem,) = [text for text in soak_problems(run) if "ended after" in text]
    assert "decode-0 was killed by signal 9" in problem
    assert problem in " ".join(done.text.split())
    assert len(run.all_trials) >= 2
    assert not tagged_processes(run)
