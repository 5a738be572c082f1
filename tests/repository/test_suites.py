"""Which suite a test belongs to, what a run reports at its end, and the stamp of a commit that passed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import kvbench
from suites import CodeSearch

ROOT = Path(__file__).parents[2]

TESTS = """
import os, subprocess, sys
import pytest

@pytest.fixture
def engine():
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_pure(): pass
def test_looks_up(): subprocess
def test_real(engine): pass

@pytest.mark.core
def test_core(engine): pass

def test_hidden():
    words = [sys.executable, "-m", "kvbench.cli", "--version"]
    getattr(__import__("sub" + "process"), "r" + "un")(words)

def test_flaky(tmp_path_factory):
    mark = tmp_path_factory.getbasetemp() / "seen"
    if not mark.exists():
        mark.touch()
        raise AssertionError
"""


def calls_a_helper() -> None:
    kvbench("--help")


def calls_a_caller() -> None:
    (lambda: calls_a_helper())()


def only_names_it() -> object:
    return subprocess.TimeoutExpired


class Recursive:
    def method(self) -> Recursive:
        return Recursive().method()


@pytest.mark.parametrize(
    ("function", "starts"),
    [(calls_a_helper, True), (calls_a_caller, True), (only_names_it, False), (Recursive, False)],
)
def test_a_start_is_found_through_helpers(function: Callable[..., object], starts: bool) -> None:
    assert CodeSearch().starts_processes([function]) == starts


def test_the_core_has_at_most_40_tests(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if item.get_closest_marker("core")]
    assert len(items) <= 40
    assert all(item.get_closest_marker("real") for item in items)


def pytest_run(folder: Path, *words: str) -> str:
    """Run pytest with this project's conftest in another folder; return what it printed."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  real:\n  core:\n  native:\n  fault:\n")
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *words]
    paths = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'support'}"
    done = subprocess.run(
        ["env", f"PYTHONPATH={paths}", *command], cwd=folder, capture_output=True, text=True, timeout=170
    )
    return done.stdout


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_a_run_reports_hidden_starts_flaky_tests_and_the_slowest(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    printed = pytest_run(tmp_path, "--reruns", "2", *workers)
    assert "test_hidden starts processes and lacks the marker `real`" in printed
    assert "flaky: test_some.py::test_flaky failed 1 × and then passed" in printed
    assert "slowest tests:" in printed
    assert "load average at start and end: " in printed
    assert printed.splitlines()[-1].startswith("=")


def test_the_default_suite_takes_the_core_and_what_starts_nothing(tmp_path: Path) -> None:
    printed = pytest_run(tmp_path, "-v", "-m", "core or not real", "--deselect", "test_some.py::test_hidden")
    passed = [line.split()[0] for line in printed.splitlines() if " PASSED " in line]
    assert passed == [f"test_some.py::{name}" for name in ("test_core", "test_pure", "test_looks_up")]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


def green(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = ["env", "-u", "PYTEST_ADDOPTS", sys.executable, str(ROOT / "tools" / "green.py"), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_pass_is_noted_for_all_worktrees(repository: Path) -> None:
    assert green(repository, "check").returncode == 1
    assert green(repository, "run", "--", "true").returncode == 0
    assert (repository / ".git" / "last-green").read_text() == git(repository, "rev-parse", "HEAD")
    git(repository, "worktree", "add", "-q", str(repository / "other"))
    assert green(repository / "other", "check").returncode == 0


@pytest.mark.parametrize(
    "command",
    [("false",), ("touch", "new"), ("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q")],
)
def test_what_failed_or_changed_the_tree_is_not_noted(repository: Path, command: tuple[str, ...]) -> None:
    more = ("--allow-empty", "-m", "second") if command[0] == "git" else ()
    done = green(repository, "run", "--", *command, *more)
    assert done.returncode == (1 if command == ("false",) else 0)
    assert not (repository / ".git" / "last-green").exists()
    assert green(repository, "check").returncode == 1


def test_a_tree_that_is_not_clean_is_not_noted(repository: Path) -> None:
    (repository / "new").touch()
    assert green(repository, "run", "--", "true").returncode == 0
    assert not (repository / ".git" / "last-green").exists()
