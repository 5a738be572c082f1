"""Which tests reach which line, and how long they take: one run of each test file under coverage.

``python -m tools.mutants.reach TEST_FILE OUT`` writes it for one file; it is kept until the file or the
package changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import coverage
import pytest
from hypothesis import HealthCheck, settings

ROOT: Final = Path(__file__).resolve().parents[2]
BUILD: Final = ROOT / "build" / "mutants"
SLOW_S: Final = 20
"""Processor time; a test that takes more is not used."""
DEADLINE_S: Final = 300
"""Of one test, by the clock."""
FILE_DEADLINE_S: Final = 3600.0
AT_IMPORT: Final = ""
"""Coverage's context of what runs outside of any test."""

OPTIONS: Final = (
    "-q",
    "--noconftest",  # it watches what is left behind, also by others on this machine
    "--hypothesis-seed=0",
    *("-p", "no:cacheprovider", "-p", "no:xdist", "-o", "faulthandler_timeout=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what was imported before
)
"""Of pytest, for a run that depends on nothing but the code."""

Lines = dict[int, list[str]]


def steady() -> None:
    """Has hypothesis not mind how busy the machine is, as the tests' own conftest does."""
    settings.register_profile("mutants", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("mutants")


@dataclass
class Reach:
    """What the tests do. A test function is one test, whatever it is given."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Of those that pass, by their ids, in all."""
    lines: dict[str, Lines] = field(default_factory=lambda: defaultdict(dict))
    """Module's path → line → ids of the tests that run it, or AT_IMPORT."""

    def add(self, found: dict[str, Any]) -> None:
        seconds = found["seconds"]
        self.seconds |= seconds
        for module, lines in found["lines"].items():
            mine = self.lines[module]
            for line, tests in lines.items():
                passing = [test for test in tests if test in seconds or test == AT_IMPORT]
                mine.setdefault(int(line), []).extend(passing)

    def of(self, module: str, line: int) -> list[str]:
        """The tests of a line: those of the folder that mirrors the module's first, then the quickest."""
        lines = self.lines.get(module, {})
        # What is folded into a constant has no line: it runs with the one before.
        ran = next((each for each in range(line, max(line - 12, 0), -1) if each in lines), line)
        tests = set(lines.get(ran, ()))
        if AT_IMPORT in tests or not tests:
            tests |= {test for each in lines.values() for test in each}
        tests.discard(AT_IMPORT)
        mirror = f"tests/{os.path.dirname(module).partition('/')[2]}/"
        return sorted(tests, key=lambda test: (not test.startswith(mirror), self.seconds[test], test))


class Contexts:
    """A pytest plugin: tells coverage whose turn it is, and times each test."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self._measured = measured
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        name = function_of(item.nodeid)
        self._measured.switch_context(name)
        began = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began
            self._measured.switch_context(AT_IMPORT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(function_of(report.nodeid))


def function_of(test: str) -> str:
    """A test's id without what it was given, which may be what a mutant changes."""
    return test.partition("[")[0]


def trace(test_file: str, out: Path) -> None:
    """Runs one test file and writes what its tests reach; for a process of its own."""
    steady()
    measured = coverage.Coverage(data_file=None, include=[f"{ROOT}/kvbench/*"], config_file=False)
    measured.start()
    plugin = Contexts(measured)
    pytest.main([test_file, *OPTIONS, f"--timeout={DEADLINE_S}"], plugins=[plugin])
    measured.stop()
    data = measured.get_data()
    lines = {
        os.path.relpath(path, ROOT): data.contexts_by_lineno(path)
        for path in data.measured_files()
        if path.startswith(f"{ROOT}/")
    }
    unused = plugin.failed | {test for test, took in plugin.seconds.items() if took > SLOW_S}
    seconds = {test: took for test, took in plugin.seconds.items() if test not in unused}
    hashes = {module: digest([ROOT / module]) for module in (*lines, test_file)}
    written = {"seconds": seconds, "lines": lines, "unused": sorted(unused), "hashes": hashes}
    out.with_suffix(".new").write_text(json.dumps(written))
    out.with_suffix(".new").replace(out)


def digest(paths: Sequence[Path]) -> str:
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def test_files(places: Sequence[str]) -> list[str]:
    found = [ROOT / place for place in places]
    files = [each for path in found for each in ([path] if path.is_file() else path.rglob("test_*.py"))]
    return sorted({path.relative_to(ROOT).as_posix() for path in files})


def is_new(out: Path) -> bool:
    """Whether a map is there, and of the modules and the test file as they are."""
    try:
        hashes = json.loads(out.read_text())["hashes"]
        return all(digest([ROOT / module]) == known for module, known in hashes.items())
    except (OSError, ValueError, KeyError):
        return False


def reach(places: Sequence[str], jobs: int) -> Reach:
    """What the tests of these places reach; those whose map is old are run."""
    folder = BUILD / "reach"
    folder.mkdir(parents=True, exist_ok=True)

    def one(test_file: str) -> dict[str, Any]:
        out = folder / f"{test_file.replace('/', '.')}.json"
        if not is_new(out):
            out.unlink(missing_ok=True)
            began = time.monotonic()
            words = [sys.executable, "-m", "tools.mutants.reach", test_file, str(out)]
            environment = {**os.environ, "HYPOTHESIS_STORAGE_DIRECTORY": str(BUILD / "hypothesis")}
            done = subprocess.run(
                words, cwd=ROOT, env=environment, capture_output=True, timeout=FILE_DEADLINE_S, check=False
            )
            if not out.exists():
                raise SystemExit(f"{test_file}: {done.stdout.decode()[-2000:]}{done.stderr.decode()[-2000:]}")
            print(f"reach of {test_file} ({time.monotonic() - began:.0f} s)", flush=True)
        written: dict[str, Any] = json.loads(out.read_text())
        return written

    found = Reach()
    with ThreadPoolExecutor(jobs) as pool:
        for written in pool.map(one, test_files(places)):
            found.add(written)
            if unused := ", ".join(written["unused"]):
                print(f"not used, as they fail, are skipped or take over {SLOW_S} s: {unused}")
    return found


if __name__ == "__main__":
    trace(sys.argv[1], Path(sys.argv[2]))
