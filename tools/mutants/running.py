"""Many mutants, several at a time, each in a forked process with a time limit; what comes of each.

There are two ways. In the quick one the tests are imported once, and each mutant is put into the functions
that exist (``Session``). It shows what kills a mutant, and nothing else: what a test module computed when it
was imported knows nothing of the change. So a mutant that survives, or is not in a function, is tried again
by ``run``, in a process that has imported nothing of the package yet: the mutant is imported in place of the
file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
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
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType, FunctionType
from typing import Final, NoReturn

import psutil
import pytest

from .operators import Mutant, mutated
from .reach import OPTIONS, function_of, steady

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


def module_name(path: str) -> str:
    """``kvbench/core/stats.py`` → ``kvbench.core.stats``"""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def begin(folder: Path, cpu_s: int) -> None:
    """Makes this process one that may end as it likes: by itself, silent, and bounded."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(output, number)
    os.environ.update(TMPDIR=str(folder), PYTEST_DEBUG_TEMPROOT=str(folder))
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")


def end(folder: Path, status: int | str, by: str) -> NoReturn:
    """Writes ``folder/outcome`` and ends the process: an exit code of pytest's, and which test failed."""
    with contextlib.suppress(OSError):
        (folder / "outcome.new").write_text(json.dumps({"status": status, "by": by}))
        (folder / "outcome.new").replace(folder / "outcome")
    os._exit(0)


def run(root: Path, mutant: Mutant, tests: Sequence[str], folder: Path, cpu_s: int) -> NoReturn:
    """Runs the tests in a Python that has imported nothing of the package yet, and ends the process."""
    begin(folder, cpu_s)
    path = root / mutant.module
    code = compile(mutated(mutant, path.read_text(encoding="utf-8")), path, "exec", dont_inherit=True)
    loader = _Loader(module_name(mutant.module), str(path), code)
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
    end(folder, status, first.failed)


Place = tuple[str, int]
"""A function's name and its first line."""


def _is_class(code: CodeType) -> bool:
    return "__module__" in code.co_names[:2]


def functions(code: CodeType) -> dict[Place, CodeType]:
    """The code of a module's functions and of its classes' methods; not of what these make when they run."""
    found: dict[Place, CodeType] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= functions(each) if _is_class(each) else {(each.co_name, each.co_firstlineno): each}
    return found


def _frame(code: CodeType) -> CodeType:
    """A module's code without that of its functions: what runs when it is imported."""
    consts = (
        (_frame(each) if _is_class(each) else None) if isinstance(each, CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_consts=tuple(consts))


def changed_function(path: Path, mutant: Mutant) -> tuple[Place, CodeType] | None:
    """The one function that a mutant changes, with its new code; None if it changes anything else."""
    source = path.read_text(encoding="utf-8")
    before = compile(source, path, "exec", dont_inherit=True)
    after = compile(mutated(mutant, source), path, "exec", dont_inherit=True)
    if _frame(before) != _frame(after):
        return None
    old, new = functions(before), functions(after)
    differ = [(place, new[place]) for place in old if place in new and old[place] != new[place]]
    return differ[0] if len(differ) == 1 and old.keys() == new.keys() else None


def live(path: Path, place: Place) -> list[FunctionType]:
    return [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType)
        and (each.__code__.co_name, each.__code__.co_firstlineno) == place
        and each.__code__.co_filename == str(path)
    ]


class Session:
    """A pytest plugin: runs no test by itself, but gives all that were collected to ``loop``."""

    def __init__(self, loop: Callable[[Session], None]) -> None:
        self._loop = loop
        self._items: dict[str, list[pytest.Item]] = defaultdict(list)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            self._items[function_of(item.nodeid)].append(item)
        self._loop(self)
        return True

    def run(self, root: Path, mutant: Mutant, tests: Sequence[str], folder: Path, cpu_s: int) -> None:
        """Runs the tests in this process, which was forked for it, and ends it."""
        begin(folder, cpu_s)
        failed = self._first_failure(root / mutant.module, mutant, tests)
        end(folder, 1 if failed else 0, failed)

    def _first_failure(self, path: Path, mutant: Mutant, tests: Sequence[str]) -> str:
        items = [item for test in tests for item in self._items[test]]
        changed = changed_function(path, mutant)
        if changed is None or not items:
            return ""
        place, code = changed
        for each in live(path, place):
            with contextlib.suppress(ValueError):  # it refers to other names of a function around it
                each.__code__ = code
        first = First()
        items[0].config.pluginmanager.register(first)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if first.failed:
                break
        failed: str = first.failed
        return failed


def in_session(test_files: Sequence[str], loop: Callable[[Session], None]) -> None:
    """Collects the tests of the files in a process of its own, and has ``loop`` use them there."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        steady()
        options = [*OPTIONS, "-s", "--timeout=0", "--tb=line", "--no-header", "--no-summary"]
        status = pytest.main([*options, *test_files], plugins=[Session(loop)])
        sys.stdout.flush()
        os._exit(int(status))
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"the tests could not be collected: {os.waitstatus_to_exitcode(status)}")


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
