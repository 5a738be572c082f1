"""The work that every peer gets, what came of it, commands with a deadline whose CPU time is counted, and the
peers' environments: .venv-peers/<name>, each made once from the package registry.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.core.plan.processes import unproxied
from tools.bench import ROOT

FIRST_TOKEN_S = 0.05
GAP_S = 0.01
OUTPUT_LEN = 128
INPUT_LEN = 32
DURATION_S = FIRST_TOKEN_S + (OUTPUT_LEN - 1) * GAP_S
MODEL = "exact"
SEED = 1
GRACE_S = 3.0
POLL_S = 0.05
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class PeerError(Exception):
    """A peer cannot be had or run here: the reason, as it is listed."""


@dataclass(frozen=True)
class Work:
    """Open-loop Poisson load: ``rate`` requests a second keep ``streams`` of them open on average."""

    streams: int
    rate: float
    requests: int

    @property
    def tokens(self) -> int:
        return self.requests * OUTPUT_LEN


def work_for(streams: int, seconds: float) -> Work:
    rate = streams / DURATION_S
    return Work(streams, round(rate, 3), max(1, round(rate * seconds)))


START_UP = Work(1, 10.0, 2)
"""Next to nothing: what it costs is the start."""


@dataclass
class Outcome:
    """What a client reported, in ms. ``gaps_are``: gaps between tokens, or each request's mean of them.

    ``hidden_ms``: by how much it sent later than it meant to, where it reports it and leaves it out of TTFT.
    """

    ttft_ms: list[float]
    itl_ms: list[float]
    completed: int
    failed: int
    gaps_are: str = "gaps"
    hidden_ms: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cost:
    """Wall-clock and CPU seconds of a command with all its descendants."""

    wall_s: float
    cpu_s: float


def run_command(
    argv: Sequence[object], folder: Path, deadline_s: float, env: Mapping[str, str] | None = None
) -> Cost:
    """Runs a command in ``folder``, in its own session. Raises PeerError if it fails or takes too long."""
    # Descendants that outlive their parents come to us, so that their CPU time is counted, too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / "output.log"
    wanted = {**os.environ, **(env or {})}
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with log_path.open("ab") as log:
        try:
            process = subprocess.Popen(
                [str(word) for word in argv],
                cwd=folder,
                # All servers are on loopback, where no proxy of ours can send a client.
                env={**wanted, **unproxied(wanted, ["127.0.0.1", "localhost"])},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"{argv[0]}: {error.strerror}") from error
    status = None
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(deadline_s)
    finally:
        _end_group(process)
    after, wall_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - began
    if status is None:
        raise PeerError(f"not done after {deadline_s:.0f} s: {last_words(log_path)}")
    if status != 0:
        raise PeerError(f"it failed (status {status}): {last_words(log_path)}")
    return Cost(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the command's own process group, and wait for it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                if process.poll() is None or os.waitpid(-process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(POLL_S)
                continue
            return


def last_words(path: Path) -> str:
    """The end of a log: its last line that names an error, or its last line at all."""
    with contextlib.suppress(OSError):
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["it said nothing"])[-1][:200]
    return "it left no output"


FOLDER: Path = ROOT / ".venv-peers"
VLLM: Path = ROOT / ".venv-vllm"
SHIM = ROOT / "kvbench" / "engines" / "vllm_cpu_shim"
PIP_DEADLINE_S = 1500.0
STEP_DEADLINE_S = 180.0
VLLM_DEADLINE_S = 3600.0

TORCH = "torch==2.13.0"
"""Installed first: with it there, no CUDA build comes along."""
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "httpx": (
        ("httpx==0.28.1", "fastapi==0.165.0", "uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0"),
    ),
    "vllm-router": (("vllm-router==0.1.17",),),
    "aiperf": (("aiperf==0.13.0",),),
    "guidellm": ((TORCH,), ("guidellm==0.8.1",)),
}
TOKENIZER_REPO = "kvbench/words"
HF_HOME = FOLDER / "hf-home"
_REVISION = "0" * 40
TOKENIZER = HF_HOME / "hub" / "models--kvbench--words" / "snapshots" / _REVISION
"""Laid out like the cache of a download, since one peer takes a name only and another a folder."""


def python_of(name: str) -> Path:
    return (VLLM if name == "vllm" else FOLDER / name) / "bin" / "python"


def set_up(name: str, say: Callable[[str], None]) -> None:
    if name == "vllm":
        _set_up_vllm(say)
        return
    folder, stamp = FOLDER / name, FOLDER / name / "kvbench-setup.json"
    wanted = {"python": sys.version, "packages": [list(group) for group in PACKAGES[name]]}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(stamp.read_text()) == wanted:
            return
    say(f"setting up .venv-peers/{name}: {', '.join(word for group in PACKAGES[name] for word in group)}")
    shutil.rmtree(folder, ignore_errors=True)
    logs = FOLDER / "logs" / name
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = base if base.exists() else Path(sys.executable)
    run_command([python, "-m", "venv", "--without-pip", folder], logs, STEP_DEADLINE_S)
    pip = [sys.executable, "-m", "pip", "--python", python_of(name), "--disable-pip-version-check"]
    for group in PACKAGES[name]:
        run_command(
            [*pip, "--no-input", "install", "--quiet", *group], logs, PIP_DEADLINE_S, {"PIP_USER": "0"}
        )
    stamp.write_text(json.dumps(wanted) + "\n")


def _set_up_vllm(say: Callable[[str], None]) -> None:
    if python_of("vllm").exists():
        return
    say("setting up .venv-vllm, as make vllm-cpu does")
    script = ROOT / "tools" / "setup_vllm.py"
    run_command([sys.executable, script], FOLDER / "logs" / "vllm", VLLM_DEADLINE_S)


def make_tokenizer(name: str) -> None:
    if (TOKENIZER / "tokenizer.json").exists():
        return
    unfinished = TOKENIZER.with_name("unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import make_tiny_model; "
        "make_tiny_model.make_tokenizer(Path(sys.argv[2]))"
    )
    command = [python_of(name), "-c", code, ROOT / "tools", unfinished]
    run_command(command, FOLDER / "logs" / "tokenizer", STEP_DEADLINE_S, {"HF_HUB_OFFLINE": "1"})
    unfinished.rename(TOKENIZER)
    main = TOKENIZER.parent.parent / "refs" / "main"
    main.parent.mkdir(exist_ok=True)
    main.write_text(_REVISION)


def version_of(name: str, package: str) -> str:
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [python_of(name), "-c", code, package],
            capture_output=True,
            text=True,
            timeout=STEP_DEADLINE_S,
            env={**os.environ, "PYTHONPATH": ""},
        )
        return done.stdout.strip()
    return ""
