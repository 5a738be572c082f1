"""A rate of sessions, searched by `kvbench simulate`; a sweep refuses to ask for one."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import kvbench, the_run

pytestmark = pytest.mark.timeout(180)

SETS = (
    "workload.sessions.shape={turns: 4, first_len: 512, added_len: 128, output_len: 16, think_time_s: 0.5}",
    "search.precision=0.15",
    "search.max_trials=8",
)


def test_a_rate_of_sessions_is_searched_and_told(tmp_path: Path) -> None:
    words = ("simulate", "agentic-simulated", "--connector", "aggregated", "--output", str(tmp_path))
    done = kvbench(*words, sets=SETS)
    assert done.status == 0, done.text
    run = the_run(tmp_path)
    assert run.manifest["status"] == "complete"
    assert "sessions/s" in done.text
    figures = [each.engine["sessions"] for each in run.trials]
    for each in figures:
        assert 0.0 < each["achieved_reuse"] <= each["offered_reuse_in_pool"] <= each["offered_reuse"] < 1.0
        assert each["requests_each"] > 1.0
    report = (run.path / "report.md").read_text()
    for words_ in ("sessions/s", "open loop", "first TTFT", "later TTFT", "offered"):
        assert words_ in report


def test_one_rate_of_sessions_is_offered(tmp_path: Path) -> None:
    words = ("simulate", "agentic-simulated", "--connector", "nixl", "--rate", "4", "--output", str(tmp_path))
    done = kvbench(*words, sets=SETS)
    assert done.status == 0, done.text
    (trial,) = the_run(tmp_path).trials
    assert trial.engine["sessions"]["ended"] > 0


@pytest.mark.parametrize("command", ["sweep", "bench"])
def test_real_servers_are_not_sent_sessions(command: str, tmp_path: Path) -> None:
    rate = ("--rate", "4") if command == "bench" else ()
    done = kvbench(command, "agentic-simulated", *rate, "--output", str(tmp_path))
    assert done.status == 2
    assert "sessions can be simulated only" in done.err
    assert "kvbench simulate" in done.err
    assert not any(tmp_path.iterdir())
