"""Many mutants, several at a time, each in a forked process with a time limit; what comes of each."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Final, NoReturn

import psutil
import pytest

from .operators import Mutant, mutated
from .reach import OPTIONS, steady

MOST_MEMORY: Final = 8 << 30
"""Bytes of address space: a mutant that never stops to collect shall not take the machine."""
PRELOADED: Final = (
    *("httptools", "httpx", "hypothesis.extra.numpy", "jinja2", "numpy", "pandas", "psutil"),
    *("pyarrow.parquet", "pydantic", "rich.console", "rich.table", "typer", "uvloop", "yaml"),
)
"""What most tests import, and no mutant changes: imported once, before the first fork."""


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads the mutated tree, and keeps nothing of it on disk."""

    def __init__(self, name: str, path: str, code: types.CodeType) -> None:
        super().__init__(name, path)
        self._code = code
        self.loaded = False

    def get_code(self, fullname: str) -> types.CodeType:
        self.loaded = True
        return self._code


class _Finder(MetaPathFinder):
    def __init__(self, loader: _Loader) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._loader.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


class First:
    """A pytest plugin: which test was the first that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def run(root: Path, mutant: Mutant, tests: Sequence[str], folder: Path, cpu_s: int) -> NoReturn:
    """Run the tests in this forked process, bounded and silent, and end it with ``folder/outcome``: an exit
    code of pytest's, and which test failed. The package has not been imported yet.
    """
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(TMPDIR=str(folder), PYTEST_DEBUG_TEMPROOT=str(folder))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    path = root / mutant.module
    code = compile(mutated(mutant, path.read_text(encoding="utf-8")), path, "exec", dont_inherit=True)
    loader = _Loader(
        mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", "."), str(path), code
    )
    sys.meta_path.insert(0, _Finder(loader))
    first = First()
    steady()
    options = [*OPTIONS, "-x", "--timeout=0", "--tb=line", "--no-header"]
    status: int | str
    try:
        status = int(pytest.main([*options, *tests], plugins=[first]))
    except BaseException as error:
        status = repr(error)
    if not loader.loaded and status in (0, 5):
        status = "the mutated module was not imported"
    with contextlib.suppress(OSError):
        (folder / "outcome.new").write_text(json.dumps({"status": status, "by": first.failed}))
        (folder / "outcome.new").replace(folder / "outcome")
    os._exit(0)


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


class Pool:
    def __init__(self, root: Path, jobs: int) -> None:
        self._root = root
        self._jobs = jobs
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
                run(self._root, task.mutant, task.tests, folder, task.limit_s)
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
