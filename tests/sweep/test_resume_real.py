"""Real sweeps that are ended by a signal, by a full disk and by a dead engine, and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from commands import EASY, Running, tagged_processes, the_run, wait_until

from kvbench.core.load.arrivals import trial_seed
from kvbench.results.run import RunFolder

pytestmark = pytest.mark.timeout(230)

SMALL = (*EASY, "search.trial_s=0.5", "search.min_requests=10", "search.equal_rate=false")
MEASURED = ("done", "refused")
"""On a machine that is busy otherwise an emulated engine may fall behind its model, and be refused for it."""


@contextmanager
def begun(*words: str, sets: Sequence[str] = ()) -> Iterator[Running]:
    """A sweep under way, which is killed if a test leaves it so."""
    sweep = Running("sweep", *words, sets=sets)
    try:
        yield sweep
    finally:
        sweep.kill()


def test_after_any_end_it_goes_on_and_redoes_no_trial_that_is_stored(tmp_path: Path) -> None:
    words = ("--connector", "aggregated", "--connector", "tcp", "--output", str(tmp_path))
    with begun("quickstart", *words, sets=SMALL) as sweep:
        sweep.wait_for(" 64 in ")
        sweep.signal(signal.SIGINT)
        first = sweep.finish()
    run = the_run(tmp_path)
    assert first.status == 130
    assert f"to resume it: kvbench sweep --resume {run.path}" in first.out
    assert run.manifest["status"] == "interrupted"
    assert run.trials
    lines = [stored(run)]

    with begun("--resume", str(run.path)) as sweep:  # its engine dies
        sweep.wait_for("tcp: ready")
        commands = {process.pid: " ".join(process.cmdline()) for process in tagged_processes(run)}
        os.kill(next(pid for pid, command in commands.items() if "decode-0" in command), signal.SIGKILL)
        wait_until(lambda: '"failed"' in (run.path / "cells.jsonl").read_text(), 30.0)
        sweep.kill()  # all is stored, and the report takes its time
    run = the_run(tmp_path)
    found = {result.cell.connector: result.status for result in run.cells}
    assert found["aggregated"] in MEASURED
    assert found["tcp"] == "failed"
    lines.append(stored(run))

    with begun("--resume", str(run.path)) as sweep:
        sweep.wait_for("tcp: ready")
        sweep.wait_for(" 64 in ")
        sweep.kill()
    wait_until(lambda: not tagged_processes(run), 10.0)
    run = the_run(tmp_path)
    assert run.manifest["status"] == "interrupted"
    lines.append(stored(run))

    with begun("--resume", str(run.path)) as sweep:
        last = sweep.finish()
    run = the_run(tmp_path)
    lines.append(stored(run))
    assert [result.status in MEASURED for result in run.cells] == [True, True], last.text
    assert "failed" not in last.text
    assert all(after.startswith(before) for before, after in pairwise(lines))
    names = [trial.trial_id for trial in run.all_trials]
    assert len(names) == len(set(names))
    for trial in run.trials:
        number = int(trial.trial_id.rsplit("-", 1)[1])
        assert trial.seed == trial_seed(1, trial.cell.lengths_key, number)
    ways = [session["why"].split(":")[0] for session in run.manifest["sessions"]]
    assert ways in (["interrupted", way, "cut off", "complete"] for way in ("complete", "cut off"))
    assert (run.path / "logs" / "tcp-session-4").is_dir()


def stored(run: RunFolder) -> bytes:
    return (run.path / "trials.jsonl").read_bytes()


FULL = """
import subprocess, sys
from pathlib import Path
from kvbench.sweep import resume
from kvbench.errors import StoreError
from kvbench.planning.overrides import CliOptions
from kvbench.results.run import load_run
from kvbench.sweep.simulate import simulated

disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=380k", "tmpfs", disk], check=True)
rates = ",".join(str(rate) for rate in range(5, 25))
sets = ("connectors=[aggregated]", "workload.input_len=[64]", "search.method=fixed", "search.trial_s=2",
        f"search.rates=[{rates}]")
try:
    simulated(CliOptions("quickstart", sets), Path(disk))
except StoreError as error:
    print(error.message)
(folder,) = Path(disk).iterdir()
run = load_run(folder)
print(run.manifest["status"], run.warnings)
kept = [trial.to_json() for trial in run.all_trials]
for trial in run.all_trials:
    assert len(run.requests(trial.trial_id))
try:
    resume.resume(folder)
except StoreError as error:
    print(error.message)
assert [trial.to_json() for trial in load_run(folder).all_trials][: len(kept)] == kept
subprocess.run(["mount", "-o", "remount,size=40m", disk], check=True)
run = load_run(resume.resume(folder))
print(run.manifest["status"], 0 < len(kept) < len(run.all_trials) == 20, run.warnings)
print([trial.to_json() for trial in run.all_trials][: len(kept)] == kept)
"""


def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("user namespaces are not allowed here")
    done = subprocess.run(
        [*inside, sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, timeout=90,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    message, ended, again, whole, equal = done.stdout.splitlines()
    assert message.startswith(f"cannot write {tmp_path}/")
    assert message.endswith("No space left on device")
    assert ended == "failed []"
    assert again.endswith("No space left on device")
    assert (whole, equal) == ("complete True []", "True")
