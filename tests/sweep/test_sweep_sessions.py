"""Sessions on real processes: what a trial of them tells, and what nobody may believe."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import kvbench, the_run
from emulated import running, spec

from kvbench.results.run import RunFolder

pytestmark = pytest.mark.timeout(240)

SHAPE = "{turns: 4, shared_prefix_len: 64, first_len: 128, added_len: 32, output_len: 8, think_time_s: 0.05}"
SETS = (
    f"workload.sessions.shape={SHAPE}", "deployment.base_port=0", "deployment.engine_options.time_scale=0.5",
    "search.trial_s=3", "search.max_trial_s=3", "search.min_requests=20",
)  # fmt: skip


def benched(folder: Path, *words: str, sets: tuple[str, ...] = ()) -> RunFolder:
    done = kvbench(
        "bench", "agentic-emulated", "--rate", "12", *words, "--output", str(folder), sets=(*SETS, *sets)
    )
    assert done.status in (0, 1), done.text  # a busy machine refuses its trials
    return the_run(folder)


@pytest.mark.parametrize("connector", ["aggregated", "nixl"])
def test_a_trial_of_sessions_tells_offered_and_achieved_reuse(connector: str, tmp_path: Path) -> None:
    run = benched(tmp_path, "--connector", connector)
    (trial,) = run.trials
    found = trial.engine["sessions"]
    assert found["begun"] > 3
    assert found["ended"] > 0
    assert found["session_rate"] * found["requests_each"] == pytest.approx(12)
    assert 0.0 < found["achieved_reuse"] <= found["offered_reuse_in_pool"] <= found["offered_reuse"] < 1.0
    requests = run.request_records(trial.trial_id)
    assert {request.error for request in requests} == {""}
    assert {request.turn for request in requests} >= {0, 1, 2}
    gates = {finding.gate for finding in trial.findings if finding.level == "invalid"}
    assert gates <= {"emulator_behind", "client_limited", "host_starved"}, "it is the machine's at most"
    if trial.verdict != "invalid":
        assert "sessions/s" in (run.path / "report.md").read_text()
    if connector == "aggregated":
        # An idle aggregated engine that lets go of nothing finds all that is offered.
        assert found["achieved_reuse"] == pytest.approx(found["offered_reuse"], abs=0.01)


def test_a_server_by_its_url_is_sent_sessions(tmp_path: Path) -> None:
    sets = (
        *(setting for setting in SETS if "deployment" not in setting),
        "workload.sessions.source=shape",
        "model.vocab_size=8192",
    )
    with running(tmp_path, spec()) as engine:
        limits = ("--slo", "first_ttft_ms p90 <= 900", "--slo", "later_ttft_ms p90 <= 900")
        words = ("bench", "--base-url", engine.url, "--rate", "12", *limits)
        done = kvbench(*words, "--output", str(tmp_path / "runs"), sets=sets)
    assert done.status in (0, 1), done.text
    (trial,) = the_run(tmp_path / "runs").trials
    found = trial.engine["sessions"]
    assert 0.0 < found["achieved_reuse"] <= found["offered_reuse"] + 0.01


def test_recorded_answers_are_found_by_nobody(tmp_path: Path) -> None:
    sets = ("workload.sessions.answers=recorded",)
    (trial,) = benched(tmp_path, "--connector", "aggregated", sets=sets).trials
    found = trial.engine["sessions"]
    assert 0.0 < found["achieved_reuse"] <= found["offered_reuse"] + 0.01
