"""Transfer backends: one file per library, found by its name. ``check`` imports native libraries only in a
short-lived child, since an import may fail slowly or end the process."""

from __future__ import annotations

import json
import subprocess
import sys

from kvbench.core.plan.processes import TRANSFER_CHILD_MODULE
from kvbench.errors import Problem
from kvbench.plugins import OpenList
from kvbench.transfer.base import Backend

CHECK_DEADLINE_S = 15.0


_PARTS: OpenList[Backend] = OpenList(__name__, "transfer backend", "BACKEND", Backend)
names, get = _PARTS.names, _PARTS.get


def check(name: str, deadline_s: float = CHECK_DEADLINE_S) -> Problem | None:
    """Return what prevents a backend from running here. Imports native libraries in a child only."""
    backend = get(name)
    problem = backend.check()
    if problem is not None or backend.load is None:
        return problem
    command = [sys.executable, "-m", TRANSFER_CHILD_MODULE, "--check", name]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s
        )
    except subprocess.TimeoutExpired:
        return Problem(f"its import did not end within {deadline_s:g} s")
    last_lines = " | ".join(done.stderr.strip().splitlines()[-3:])
    if done.returncode < 0:
        return Problem(f"its import ended the process with signal {-done.returncode}: {last_lines}")
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Problem(f"its import ended with exit code {done.returncode}: {last_lines}")
    return Problem(answer["reason"], answer.get("fix", "")) if "reason" in answer else None
