"""Sort tests into suites, and report a test that starts a process outside of them.

A test is *real* if it, one of its fixtures, or a helper below ``tests`` that they call starts a process. The
search reads their code when tests are collected, so nobody writes the marker by hand. It does not look into
kvbench: ``STARTERS`` lists what starts processes there. An audit hook sees each start that the search missed.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import pytest

TESTS = f"{Path(__file__).parents[1]}{os.sep}"

STARTERS = {
    "subprocess": ("Popen", "run", "call", "check_call", "check_output"),
    "kvbench.hosts.lab.lab": ("Lab",),
    "kvbench.hosts.nics.listing": ("there",),
    "kvbench.launchers.agents.channel": ("PipeChannel",),
    "kvbench.launchers.agents.remote": ("Fleet",),
    "kvbench.launchers.local": ("LocalLauncher",),
    "kvbench.launchers.parts.liveness": ("Heartbeat",),
    "kvbench.microbench.cases": ("run_cases",),
    "kvbench.processes.transfer_worker.remote": ("TransferProcess",),
    "kvbench.sweep.sweep": ("deployed_sweep",),
    "tools.liars.trials": ("honest", "run_case"),
}
"""Functions and classes that start processes, by module."""

COUNTED = {"ip", "mooncake_master", "sshd", "unshare"}
"""Programs that count as a server or a namespace. Short look-ups such as ``git`` or ``lscpu`` don't count."""

GUARD = "launchers/parts/guard.py"
"""Script with which kvbench starts every server."""

_started: list[str] = []


class CodeSearch:
    """Find out which functions start processes. Each piece of code is read once."""

    def __init__(self) -> None:
        self._known: dict[CodeType, bool] = {}

    def starts_processes(self, functions: Iterable[Any]) -> bool:
        """Return whether one of the functions, or a helper of the tests that they call, starts a process."""
        return any(self._reaches(part) for function in functions for part in _functions_in(function))

    def _reaches(self, function: FunctionType) -> bool:
        code = function.__code__
        if code not in self._known:
            self._known[code] = False  # ends a recursion
            names = {name for block in _nested(code) for name in block.co_names}
            values = list(_values(function, names))
            self._known[code] = _names_a_starter(names, values) or self.starts_processes(
                member for value in values for member in _members(value, names)
            )
        return self._known[code]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _nested(const)


def _values(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield what a function's names stand for: globals, and variables of the functions around it."""
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def _names_a_starter(names: set[str], values: Sequence[Any]) -> bool:
    for module, starters in STARTERS.items():
        imported = module in names or any(value is sys.modules.get(module) for value in values)
        if imported and names & set(starters):
            return True
        if any(
            getattr(value, "__module__", None) == module and getattr(value, "__qualname__", None) in starters
            for value in values
        ):
            return True
    return False


def _members(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield what belongs to the tests among a value: itself, or the named members of a module."""
    if isinstance(value, ModuleType):
        if _is_below_tests(value):
            yield from (vars(value)[name] for name in names if name in vars(value))
    elif _is_below_tests(sys.modules.get(getattr(value, "__module__", None) or "")):
        yield value


def _is_below_tests(module: ModuleType | None) -> bool:
    return (getattr(module, "__file__", None) or "").startswith(TESTS)


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield a function, the methods of a class, and what decorators and fixtures wrap."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from _functions_in(value.fget)
    elif isinstance(value, type):
        for member in vars(value).values():
            yield from _functions_in(member)
    inner = getattr(value, "__wrapped__", None) or getattr(
        getattr(value, "hypothesis", None), "inner_test", None
    )
    if isinstance(inner, FunctionType):
        yield from _functions_in(inner)


def mark(items: Iterable[pytest.Item]) -> None:
    """Add the marker ``real`` to each test that starts processes."""
    search = CodeSearch()
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 - it has no public name
        functions = [item.function, item.cls, *(fixture.func for several in fixtures for fixture in several)]  # type: ignore[attr-defined]
        if search.starts_processes(functions):
            item.add_marker("real")


_STARTS: Final = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"})
"""Audit events of a start of a process."""


def watch() -> None:
    """Keep a list of the processes that this process starts."""
    sys.addaudithook(_record)


def _record(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _STARTS:  # millions of them
        return
    if event in ("subprocess.Popen", "os.posix_spawn"):
        argv = arguments[1] if isinstance(arguments[1], (list, tuple)) else [arguments[1]]
        words = [os.fsdecode(word) for word in argv]
        if _counts(words):
            _started.append(" ".join(words)[:200])
    else:
        _started.append(event)


def _counts(words: Sequence[str]) -> bool:
    """Return whether a command is kvbench, an engine, a server or a namespace."""
    programs = {os.path.basename(word) for word in words[:2]}
    if "--check" in words:  # asks whether a transfer library can be imported
        return False
    return bool(programs & {*COUNTED, "kvbench"}) or any(
        word == "kvbench" or word.startswith("kvbench.") or word.endswith(GUARD) for word in words
    )


def unmarked_starts(item: pytest.Item) -> list[str]:
    """Return what a test without the marker ``real`` started since the last call."""
    started = _started[:]
    _started.clear()
    return [] if item.get_closest_marker("real") else started
