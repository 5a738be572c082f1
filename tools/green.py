"""``tools/green.py``: does HEAD pass ``make test``? Standard library only.

``run -- COMMAND`` runs the test suite. If it passes on a clean tree whose HEAD does not change meanwhile, the
commit is written to ``last-green`` in git's common directory, which all worktrees share. ``check`` compares
HEAD with that commit: exit code 0 if it is the same, 1 if not.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

STAMP = "last-green"


def git(*words: str) -> str | None:
    """Return what a git command prints, or None if it fails or there is no git."""
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def stamp_file() -> Path | None:
    folder = git("rev-parse", "--git-common-dir")
    return Path(folder) / STAMP if folder else None


def clean_commit() -> str | None:
    """Return HEAD, or None if files differ from it or are not in it."""
    return git("rev-parse", "HEAD") if git("status", "--porcelain") == "" else None


def run(command: Sequence[str]) -> int:
    before = clean_commit()
    status = subprocess.run(command, check=False).returncode
    path = stamp_file()
    if status == 0 and path and before and clean_commit() == before and not os.environ.get("PYTEST_ADDOPTS"):
        path.write_text(before + "\n")
    return status


def check() -> int:
    head, path = git("rev-parse", "HEAD"), stamp_file()
    if head is None or path is None:
        print("This is no git repository.")
        return 1
    green = path.read_text().strip() if path.is_file() else ""
    if head == green:
        changed = "" if clean_commit() else " There are changes that are not committed."
        print(f"HEAD ({head[:10]}) has passed make test.{changed}")
        return 0
    print(f"HEAD ({head[:10]}) has not passed make test. Last commit that did: {green[:10] or 'none'}.")
    return 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"] and sys.argv[2:3] == ["--"] and sys.argv[3:]:
        sys.exit(run(sys.argv[3:]))
    if sys.argv[1:] == ["check"]:
        sys.exit(check())
    sys.exit("usage: green.py check | green.py run -- COMMAND")
