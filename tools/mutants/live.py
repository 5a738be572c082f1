"""The quick way: the tests are imported once, and each mutant is put into the functions that there are.

It shows what kills a mutant, and nothing else. What a test module computed when it was imported knows
nothing of the change, so a mutant that survives here is tried again in a Python of its own (``trial.py``);
and so is one that is not in a function.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from tools.mutants.operators import Mutant, mutated
from tools.mutants.reach import OPTIONS, function_of, steady
from tools.mutants.trial import First, begin, end

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
    """The functions of that place that exist."""
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
