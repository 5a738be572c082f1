"""``make test-gpu``: each check in a process of its own with a deadline; none hangs, or spoils another.

A JSON line for each check (name, status, seconds, figures, text), with ``--out`` to a file too; then a table.
Exit codes: 0 nothing failed, 1 a check failed, 2 a name that no check has. Once ``--budget`` seconds are over
the rest is skipped. The processes of a check are ended with it, whatever they do.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from tools.bench import ROOT, arguments
from tools.gpu.checks import CHECKS
from tools.gpu.result import Check, Result

BUDGET_S: Final = 570.0
"""All of it, in a machine's ten minutes."""
LEAST_S: Final = 5.0
LAST_LINES: Final = 12
LINE_CHARS: Final = 400
ONE_CHECK: Final = "tools.gpu.one"


def run_one(check: Check, deadline_s: float, module: str = ONE_CHECK) -> Result:
    """A check's own result, or how its process ended without one."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvbench-gpu-") as folder:
        answer, log = Path(folder) / "result.json", Path(folder) / "log"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, check.name, str(answer), folder],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                stdout=stream,
                stderr=stream,
            )
        try:
            code = process.wait(deadline_s)
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            ended = f"its process gave no result ({how})"
        except subprocess.TimeoutExpired:
            ended = f"not done within {deadline_s:.0f} s"
        finally:
            _end(process)
        took_s = round(time.monotonic() - began, 2)
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(answer.read_text())
            return Result(check.name, found["status"], took_s, found["figures"], found["text"])
        lines = log.read_text(errors="replace").splitlines()
        said = [line[:LINE_CHARS] for line in lines if line.strip()]
        return Result(check.name, "failed", took_s, {"log": said[-LAST_LINES:]}, ended)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for target in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
            with contextlib.suppress(psutil.NoSuchProcess):
                target.kill()
    process.wait()


def results(checks: Sequence[Check], budget_s: float) -> Iterator[Result]:
    until = time.monotonic() + budget_s
    for check in checks:
        left = until - time.monotonic()
        if left < LEAST_S:
            yield Result(check.name, "skipped", 0.0, {}, f"the {budget_s:.0f} s of all checks are over")
        else:
            yield run_one(check, min(check.deadline_s, left))


def summary(found: Sequence[Result]) -> str:
    width = max((len(row.name) for row in found), default=0)
    lines = []
    for row in found:
        words = row.text or ", ".join(f"{k} {v}" for k, v in row.figures.items() if _short(v))
        first = words.splitlines()[0] if words else ""
        lines.append(f"{row.name:<{width}}  {row.status:<7}  {row.seconds:7.1f} s  {first[:150]}".rstrip())
    count = {status: sum(r.status == status for r in found) for status in ("ok", "failed", "skipped")}
    lines.append(", ".join(f"{number} {status}" for status, number in count.items()))
    return "\n".join(lines)


def _short(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and 0 < len(value) < 60)


def main(argv: Sequence[str] | None = None) -> int:
    given = arguments(
        "Checks that need a GPU, and the same ones without where there are any.",
        argv,
        out=(Path, "a file for the JSON lines"),
        only=((), "only this check; repeatable"),
        budget=(BUDGET_S, "seconds for all of it"),
    )
    known = [check.name for check in CHECKS]
    if unknown := [name for name in given.only if name not in known]:
        print(f"no check is called {', '.join(unknown)}; there are: {', '.join(known)}", file=sys.stderr)
        return 2
    found = []
    with given.out.open("w") if given.out else contextlib.nullcontext() as file:
        for result in results([c for c in CHECKS if c.name in (given.only or known)], given.budget):
            found.append(result)
            print(result.line(), flush=True)
            if file is not None:
                file.write(result.line() + "\n")
                file.flush()
    print(f"\n{summary(found)}", flush=True)
    return int(any(result.status == "failed" for result in found))


if __name__ == "__main__":
    sys.exit(main())
