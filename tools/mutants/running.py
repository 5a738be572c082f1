"""Many mutants, several at a time, each with a time limit; what comes of each."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from tools.mutants.operators import Mutant
from tools.mutants.trial import PRELOADED, run

PR_SET_CHILD_SUBREAPER: Final = 36  # linux/prctl.h
START_S: Final = 15.0
"""Of processor time, for imports and collection."""
TIMES_AS_LONG: Final = 5.0
WAITING: Final = 10.0
"""So many times the processor time may pass by the clock, on a busy machine."""
OUT_OF_TIME: Final = [(code, signal.SIGXCPU) for code in (os.CLD_KILLED, os.CLD_DUMPED)]
FAILED: Final = (1, 2, 3, 4)
"""pytest's exit codes for tests that failed, and for ones that could not be imported or collected."""


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant: ``killed``, ``too long`` (killed, too), ``survived``, or ``unreached``."""

    status: str
    by: str = ""
    seconds: float = 0.0
    left_out: int = 0
    """So many of its tests were not run, for want of time."""


@dataclass(frozen=True)
class Task:
    """A mutant, its tests, and how much processor time these take."""

    mutant: Mutant
    tests: Sequence[str]
    seconds: float
    left_out: int = 0

    @property
    def limit_s(self) -> int:
        return int(START_S + TIMES_AS_LONG * self.seconds)


def preload() -> None:
    """Imports what no mutant changes. Raises SystemExit if what one may change is there already."""
    for name in PRELOADED:
        importlib.import_module(name)
    if mine := [name for name in sys.modules if name.partition(".")[0] == "kvbench"]:
        raise SystemExit(f"{mine[0]} was imported before any mutant of it")


Start = Callable[[Path, Mutant, Sequence[str], Path, int], None]
"""What runs a mutant's tests in its process, as ``trial.run`` does, and ends it."""


class Pool:
    """Forks a process a task, ``jobs`` at a time."""

    def __init__(self, root: Path, jobs: int, start: Start = run) -> None:
        self._root = root
        self._jobs = jobs
        self._run = start
        self._running: dict[int, tuple[Task, float, Path]] = {}
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def run(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, Outcome]]:
        """Takes tasks until there are none, and yields what came of each."""
        try:
            more = True
            while more or self._running:
                while more and len(self._running) < self._jobs:
                    task = next(tasks, None)
                    more = task is not None
                    if task is not None:
                        self._start(task)
                yield from self._ended()
                time.sleep(0.02)
        finally:
            for pid in list(self._running):
                self._end(pid)

    def _start(self, task: Task) -> None:
        folder = Path(tempfile.mkdtemp(prefix="kvbench-mutant-"))
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                self._run(self._root, task.mutant, task.tests, folder, task.limit_s)
            finally:
                os._exit(70)
        self._running[pid] = task, time.monotonic(), folder

    def _ended(self) -> Iterator[tuple[Task, Outcome]]:
        for pid, (task, began, folder) in list(self._running.items()):
            took = time.monotonic() - began
            late = took > WAITING * task.limit_s
            # It is looked at only: while nobody has taken its exit status, its number is no other process's.
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if not late and ended is None:
                continue
            late |= ended is not None and (ended.si_code, ended.si_status) in OUT_OF_TIME
            outcome = _outcome(folder, took, late, task.left_out)
            self._end(pid)
            yield task, outcome

    def _end(self, pid: int) -> None:
        """Ends a process with all that it started, and takes its folder away."""
        _, _, folder = self._running.pop(pid)
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for child in psutil.Process().children():  # what came to us as its orphan
            if child.pid not in self._running:
                for each in [*child.children(recursive=True), child]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                child.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _outcome(folder: Path, took: float, late: bool, left_out: int) -> Outcome:
    try:
        said = json.loads((folder / "outcome").read_text())
    except (OSError, ValueError):
        # Neither: it crashed, as from want of memory, or did not end.
        return Outcome("too long" if late else "killed", "", took)
    status, by = said["status"], said["by"]
    if status == 0:
        return Outcome("survived", "", took, left_out)
    output = (folder / "output").read_text(errors="replace")[-2000:]
    if status in FAILED and (by or "rror" in output):
        return Outcome("killed", by or "import", took)
    raise SystemExit(f"a mutant's tests did not run: {status}\n{output}")


def within(tests: Sequence[str], seconds: Callable[[str], float], most_s: float) -> tuple[list[str], float]:
    """The first tests that together take no longer than that, one at least, and how long they take."""
    taken: list[str] = []
    total = 0.0
    for test in tests:
        if taken and total + seconds(test) > most_s:
            continue
        taken.append(test)
        total += seconds(test)
    return taken, total
