"""One mutant against its tests, in a process forked for it: it is imported in place of the file."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Final, NoReturn

import pytest

from tools.mutants.operators import Mutant, mutated
from tools.mutants.reach import OPTIONS, steady

MOST_MEMORY: Final = 8 << 30
"""Bytes of address space: a mutant that never stops to collect shall not take the machine."""
PRELOADED: Final = (
    "httptools",
    "httpx",
    "hypothesis.extra.numpy",
    "jinja2",
    "numpy",
    "pandas",
    "psutil",
    "pyarrow.parquet",
    "pydantic",
    "rich.console",
    "rich.table",
    "typer",
    "uvloop",
    "yaml",
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
