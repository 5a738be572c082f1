"""A run whose processes may not open the files that its load needs is refused before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from kvbench.errors import EXIT_BAD_INPUT, EXIT_FAILED
from kvbench.planning.obstacles import open_files_needed
from kvbench.planning.scenario_files import load_scenario


def test_the_busiest_process_has_each_stream_on_both_sides() -> None:
    scenario, _ = load_scenario("quickstart")
    assert open_files_needed(scenario) == 2 * 64 + 64
    assert open_files_needed(scenario, concurrency=700) == 2 * 700 + 64
    rate = 1000 / scenario.allowed_s
    assert 2 * 1000 + 64 <= open_files_needed(scenario, rate) <= 2 * 1001 + 64


def test_a_hard_limit_that_is_too_low_is_refused_before_the_start(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    command = [sys.executable, "-m", "kvbench"]
    for words, status in (
        (("sweep", "quickstart", "--connector", "tcp", "--output", str(tmp_path / "runs")), EXIT_FAILED),
        (("plan", "quickstart", "--connector", "tcp"), EXIT_BAD_INPUT),
    ):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, preexec_fn=few)
        text = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == status, text
        assert "may open 64 files and sockets (ulimit -Hn), the planned load needs 192" in text
    assert not (tmp_path / "runs").exists()
