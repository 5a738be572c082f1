"""What the parts of set-up share: where things are, how a command is run, and pip. Standard library only."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOG = VENV / "kvbench-setup.log"
CONSTRAINTS = ROOT / "constraints.txt"

PIP_DEADLINE_S = 1200.0
CHECK_DEADLINE_S = 60.0


class SetupError(Exception):
    """A step failed: what and where, and what to do."""


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def run(
    command: Sequence[object], deadline_s: float, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> tuple[int, str]:
    """A command's exit status and output, which also goes to the log. It never waits for input."""
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=deadline_s,
            env={**os.environ, **(env or {})},
            cwd=cwd,
        )
        status, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, printed = 124, (error.stdout or b"") + f"\nnot done after {deadline_s:g} s".encode()
    except OSError as error:
        status, printed = 127, f"{argv[0]}: {error.strerror}".encode()
    output = printed.decode("utf-8", "replace")
    if VENV.is_dir():
        with LOG.open("a") as log:
            log.write(f"$ {' '.join(argv)}\n{output}\n[exit status {status}]\n\n")
    return status, output


def tail(output: str, lines: int = 6) -> str:
    """The last lines of a command's output that say something: its errors, if it names any."""
    kept = [line for line in output.splitlines() if line.strip()]
    errors = [line for line in kept if line.lower().startswith(("error", "e:"))]
    return "\n".join(f"    {line}" for line in (errors or kept)[-lines:])


def last_line(output: str) -> str:
    return tail(output, 1).strip() or "it printed nothing"


def pip(*arguments: str) -> tuple[int, str]:
    command = [PYTHON, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    return run(command, PIP_DEADLINE_S, {"PIP_USER": "0"})


def pinned(name: str) -> str:
    """``name==version`` as the constraints file has it."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.split("==")[0] == name:
            return line.split(";")[0].strip()
    raise SetupError(f"{CONSTRAINTS} has no line for {name}")
