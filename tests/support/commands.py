"""Run kvbench's commands: as processes, with exit codes and signals, or in the process of the test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from typer.testing import CliRunner

from kvbench import files
from kvbench.cli.app import app
from kvbench.core.plan.processes import RUN_TAG_ENV
from kvbench.core.records import TrialRecord
from kvbench.results.run import RunFolder, load_run

DEADLINE_S = 150.0

# A sweep whose outcome does not depend on how fast this machine is: rates that anything holds, and limits
# wide enough for a busy machine. It ends at max_rate, censored, after two trials a cell.
EASY = (
    "workload.input_len=[64]", "workload.output_len=4", "slo.ttft_ms=20000", "slo.tpot_ms=5000",
    "slo.attainment=0.5", "search.start_rate=20", "search.max_rate=20", "search.trial_s=1",
    "search.min_requests=20", "deployment.base_port=0",
)  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """What a command printed and how it ended."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    def succeeded(self, *printed: str) -> Finished:
        """Require that it did, and printed this."""
        assert self.status == 0, self.text
        for words in printed:
            assert words in self.out
        return self

    def failed(self, status: int, *expected: str) -> Finished:
        """Require that it ended with this status, and said this on stderr."""
        assert self.status == status, self.text
        for words in expected:
            assert words in self.err
        return self


def argv(*words: str, sets: Sequence[str] = ()) -> list[str]:
    """The command line of kvbench in this environment."""
    return [sys.executable, "-m", "kvbench.cli", *_with_sets(words, sets)]


def _with_sets(words: Sequence[str], sets: Sequence[str]) -> list[str]:
    return [*words, *(part for value in sets for part in ("--set", value))]


def kvbench(*words: str, sets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end."""
    done = subprocess.run(
        argv(*words, sets=sets), capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, **(env or {})}, check=False,
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def invoke(*words: str, sets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end in this process, which saves the start of Python and of kvbench.

    For commands that look, print or write files. It cannot show what signals, a terminal or a process of
    its own would change: use ``kvbench`` for that. An error that the command does not handle is in ``err``
    as a traceback, and the status is 1, as a process has it.
    """
    arguments = _with_sets(words, sets)
    with _restored():
        sys.argv = ["kvbench", *arguments]
        os.environ.update(env or {})
        done = CliRunner().invoke(app, arguments, prog_name="kvbench")
    unhandled = "" if isinstance(done.exception, SystemExit | None) else _traceback(done.exception)
    return Finished(done.exit_code, done.stdout, done.stderr + unhandled)


@contextmanager
def _restored() -> Iterator[None]:
    """Restore arguments, environment and working directory."""
    arguments, environment, folder = sys.argv, dict(os.environ), Path.cwd()
    try:
        yield
    finally:
        sys.argv = arguments
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


class Running:
    """A command under way, to be interrupted."""

    def __init__(self, *words: str, sets: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            argv(*words, sets=sets), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._printed: list[str] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, word: str) -> str:
        """Read lines until one contains the word; returns that line."""
        for line in self._process.stdout:
            self._printed.append(line)
            if word in line:
                return line
        raise AssertionError(f"never printed {word!r}:\n" + "".join(self._printed))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def finish(self) -> Finished:
        """Wait for its end."""
        rest, _ = self._process.communicate(timeout=DEADLINE_S)
        return Finished(self._process.returncode, "".join(self._printed) + rest, "")

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once, if it still runs. What one that was killed could not remove is removed."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
        self._process.communicate(timeout=DEADLINE_S)
        if self._process.returncode in (-signal.SIGKILL, -signal.SIGQUIT):
            for folder, _ in files.left():
                shutil.rmtree(folder, ignore_errors=True)


def the_run(results: Path) -> RunFolder:
    """The one run folder in a results folder."""
    (folder,) = [path for path in results.iterdir() if not path.name.startswith(".")]
    return load_run(folder)


SPOILT_BY_THE_MACHINE = {"client_limited", "router_limited", "host_starved", "emulator_behind"}
"""Gates by which it shows that a process did not get its core in time. Any other one is a fault of ours."""


def not_spoilt(measure: Callable[[int], TrialRecord], scales: Sequence[int]) -> tuple[TrialRecord, int]:
    """The first trial that a machine with other work did not spoil, and the time scale that it had.

    Each further one is of a slower emulated system, for which the same delays are smaller. That none is
    valid, or that one is refused for another reason, is a failure.
    """
    reasons = []
    for scale in scales:
        trial = measure(scale)
        if trial.verdict != "invalid":
            return trial, scale
        refused_by = {finding.gate for finding in trial.findings if finding.level == "invalid"}
        assert refused_by <= SPOILT_BY_THE_MACHINE, trial.reason
        reasons.append(f"{scale} times slower: {trial.reason}")
    raise AssertionError("not one valid trial; " + "; ".join(reasons))


def tagged_processes(run: RunFolder) -> list[psutil.Process]:
    """Processes of a run that still live, found by their run tag."""
    found = []
    for process in psutil.process_iter():
        try:
            tag = process.environ().get(RUN_TAG_ENV, "")
            if tag.startswith(run.run_id) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def tagged(tag: str) -> list[int]:
    """Processes that live and carry exactly this run tag."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_TAG_ENV) == tag and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return sorted(found)


def wait_until(condition: Callable[[], bool], deadline_s: float = 15.0) -> None:
    """Poll until it holds; fails past the deadline."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
