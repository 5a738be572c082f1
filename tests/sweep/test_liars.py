"""The liars' bench in small: each lie is planted in a real trial and caught by the gate meant for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from commands import EASY, kvbench, the_run

from kvbench import transfer
from kvbench.core.gates.gates import gate_table
from kvbench.core.gates.lies import LIES, labels_of
from tools.liars.cases import CASES, Case
from tools.liars.trials import false_alarms, honest, run_case, unable
from tools.random_systems.honest import honest_trials

pytestmark = pytest.mark.timeout(180)

HOG = "import time; end = time.time() + 12\nwhile time.time() < end: pass"


FIRST = {case.gate: case.name for case in reversed(CASES)}
"""One case for each gate; ``make liars`` and ``make test-heavy`` plant the others, too."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if FIRST[case.gate] == case.name else pytest.mark.heavy)
        for case in CASES
    ],
)
def test_each_lie_is_caught_by_its_gate(case: Case, tmp_path: Path) -> None:
    if reason := unable(case):
        pytest.skip(reason)
    outcome = run_case(case, tmp_path)
    assert outcome.caught, (outcome.verdict, outcome.findings, outcome.reason)
    # It can never be mistaken for an honest run.
    planted = case.lie in LIES and not case.servers
    labels = tuple(label for label in outcome.labels if label != "emulated")
    assert labels == (labels_of(case.lie) if planted else ())


@pytest.mark.parametrize("connector", ["aggregated", "mooncake", "nixl", "tcp"])
def test_honest_trials_are_not_refused(connector: str, tmp_path: Path) -> None:
    if connector != "aggregated" and (problem := transfer.check(connector)) is not None:
        pytest.skip(problem.reason)
    for record in honest(connector, 2, tmp_path):
        assert not false_alarms(record), record.reason
        assert record.labels == ["emulated"]


def test_honest_trials_on_random_systems_raise_no_alarm() -> None:
    """The bench has 200 of them."""
    trials = list(honest_trials(16))
    assert {trial.verdict for trial in trials} >= {"met", "missed"}
    for trial in trials:
        assert not trial.alarms, (trial.system.name, trial.load, trial.alarms)


def test_every_lie_is_in_the_bench_and_has_a_gate() -> None:
    assert {case.lie for case in CASES} >= set(LIES)
    names = {gate.name for gate in gate_table()}
    several = {"hidden_retries", "lost_requests"}  # what requests_lost_or_repeated says
    assert {case.gate for case in CASES} <= names | several


def test_bench_refuses_a_liar_by_name_with_exit_code_1(tmp_path: Path) -> None:
    # A process of nobody's takes the CPU meanwhile, which is told beside.
    with subprocess.Popen([sys.executable, "-c", HOG], start_new_session=True) as hog:
        try:
            done = kvbench(
                *("bench", "quickstart", "--rate", "20", "--connector", "tcp", "--output", str(tmp_path)),
                sets=(*EASY, "deployment.engine_options.lie=warm_cache"),
            )
        finally:
            hog.terminate()
    run = the_run(tmp_path)
    assert done.status == 1, done.text
    assert "prefix cache of prefill: the trial measured the cache" in " ".join(done.text.split())
    assert "LIE: WARM_CACHE" in done.out
    (trial,) = run.trials
    seen = {finding.gate: finding.level for finding in trial.findings}
    assert (trial.verdict, seen["warm_cache"], seen["machine_disturbed"]) == ("invalid", "invalid", "warning")
    assert trial.labels == ["emulated", "lie: warm_cache"]
    assert "lie: warm_cache" in (run.path / "report.md").read_text()
    assert "lie: warm_cache" in (run.path / "tables" / "summary.csv").read_text()
