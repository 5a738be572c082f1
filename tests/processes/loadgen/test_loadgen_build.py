"""What an installation brings: the compiled hot paths where that can be, and all else either way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
EXTENSIONS = {
    name + sysconfig.get_config_var("EXT_SUFFIX")
    for name in (
        "kvbench/processes/loadgen/sockets/_reads",
        "kvbench/processes/http1/_heads",
        "kvbench/processes/http1/_splice",
    )
}

needs_setuptools = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="the build needs setuptools 77 (make setup)"
)


def wheel_of(folder: Path, compiler: str) -> set[str]:
    """The files in a wheel that is built from a copy of this checkout, with that C compiler."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("kvbench", "scenarios", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    code = "import setuptools.build_meta as build; print(build.build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "CC": compiler}, capture_output=True,
        text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        return set(wheel.namelist())


def wanted() -> set[str]:
    """All of the package with its templates, and the bundled scenarios within it."""
    files = [
        path for path in (ROOT / "kvbench").rglob("*") if path.suffix in (".py", ".pyi", ".typed", ".yaml")
    ]
    files += (ROOT / "kvbench" / "report" / "templates").iterdir()
    scenarios = [f"kvbench/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "scenarios").iterdir()]
    return {path.relative_to(ROOT).as_posix() for path in files} | set(scenarios)


def packaged(names: set[str]) -> set[str]:
    return {name for name in names if ".dist-info/" not in name}


@needs_setuptools
def test_without_a_compiler_everything_else_is_installed(tmp_path: Path) -> None:
    assert packaged(wheel_of(tmp_path, "/nonexistent/cc")) == wanted()


@needs_setuptools
@pytest.mark.skipif(
    shutil.which("cc") is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="there is no C compiler, or no header of Python's",
)
def test_with_a_compiler_the_hot_paths_are_compiled(tmp_path: Path) -> None:
    assert packaged(wheel_of(tmp_path, "cc")) == wanted() | EXTENSIONS
