"""The native transfer libraries, each optional: the wheel, and the system libraries it is linked against.

A step returns None, or why it could not be done.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from setup_base import CHECK_DEADLINE_S, PYTHON, VENV, SetupError, last_line, pinned, pip, run, say

NATIVE = VENV / "lib" / "kvbench-native"
"""Where kvbench's mooncake backend looks for system libraries that the machine lacks."""

APT_STATE = VENV / "apt"
APT_DEADLINE_S = 300.0
APT_ENV = {"DEBIAN_FRONTEND": "noninteractive"}

MOONCAKE_WHEELS = {"cuda": "mooncake-transfer-engine", "non-cuda": "mooncake-transfer-engine-non-cuda"}
NIXL_WHEEL = "nixl-cu12"

NVIDIA_DRIVER = (
    "/proc/driver/nvidia/version",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
)

# What Mooncake's extension modules are linked against and do not bring along, in loading order,
# with the packages that have it on Debian and its relatives (the second name: after the 64-bit
# time_t transition, where the first is only a virtual package, which cannot be downloaded).
SYSTEM_LIBRARIES = {
    "libnl-3.so.200": ("libnl-3-200", "libnl-3-200t64"),
    "libnl-route-3.so.200": ("libnl-route-3-200", "libnl-route-3-200t64"),
    "libibverbs.so.1": ("libibverbs1", "libibverbs1t64"),
    "libnuma.so.1": ("libnuma1", "libnuma1t64"),
    "libcurl.so.4": ("libcurl4", "libcurl4t64"),
}

# Run by .venv's Python: loads what the system has, else the unpacked copy, and prints what neither has.
_LOAD = f"""
import ctypes, pathlib
for name in {list(SYSTEM_LIBRARIES)!r}:
    copies = sorted(pathlib.Path({str(NATIVE)!r}).rglob(name))
    for candidate in (name, *copies):
        try:
            ctypes.CDLL(str(candidate), mode=ctypes.RTLD_GLOBAL)
            break
        except OSError:
            continue
    else:
        print(name)
"""


def wanted_mooncake() -> str:
    """Which Mooncake wheel: the CUDA one does not import without NVIDIA's driver library."""
    chosen = os.environ.get("KVBENCH_MOONCAKE", "")
    if chosen not in ("", "none", *MOONCAKE_WHEELS):
        raise SetupError(f"KVBENCH_MOONCAKE={chosen!r} is not one of {', '.join(MOONCAKE_WHEELS)}, none")
    return chosen or ("cuda" if any(map(os.path.exists, NVIDIA_DRIVER)) else "non-cuda")


def install_mooncake() -> str | None:
    """One Mooncake wheel, never both: they own the same import name."""
    kind = wanted_mooncake()
    if kind == "none":
        return "KVBENCH_MOONCAKE=none asked for it to be left out"
    if kind == "cuda":
        problem = install_mooncake_wheel("cuda") or mooncake_problem()
        if problem is None:
            return None
        # kvbench itself moves host memory only, and for that the other wheel does as well.
        say(f"Mooncake's CUDA wheel cannot be used here ({problem}); taking the one without CUDA")
    return install_mooncake_wheel("non-cuda") or mooncake_problem()


def install_mooncake_wheel(kind: str) -> str | None:
    wheel = MOONCAKE_WHEELS[kind]
    say(f"installing Mooncake ({wheel})")
    other = MOONCAKE_WHEELS["non-cuda" if kind == "cuda" else "cuda"]
    if "Successfully uninstalled" in pip("uninstall", "-y", other)[1]:
        # The two own the same files, so a copy of this one that was there before is damaged now.
        pip("uninstall", "-y", wheel)
    status, output = pip("install", "-c", "constraints.txt", pinned(wheel))
    return f"pip could not install {wheel}: {last_line(output)}" if status else None


def mooncake_problem() -> str | None:
    missing = missing_libraries()
    if missing:
        provide_libraries(missing)
    status, output = run([PYTHON, "-c", f"{_LOAD}\nimport mooncake.engine"], CHECK_DEADLINE_S)
    return f"it does not import: {last_line(output)}" if status else None


def missing_libraries() -> list[str]:
    status, output = run([PYTHON, "-c", _LOAD], CHECK_DEADLINE_S)
    return [] if status else [line for line in output.split() if line in SYSTEM_LIBRARIES]


def provide_libraries(missing: Sequence[str]) -> None:
    """System libraries: by apt where one may, otherwise unpacked into .venv."""
    if not shutil.which("apt-get"):
        say(f"{', '.join(missing)} not found, and there is no apt-get; use this system's package manager")
        return
    packages = ", ".join(SYSTEM_LIBRARIES[name][0] for name in missing)
    if may_apt_install():
        say(f"installing {packages} with apt-get")
        problem = apt_install([SYSTEM_LIBRARIES[name][0] for name in missing])
        if problem is None:
            return
        say(f"apt-get install did not work ({problem})")
    say(f"unpacking {packages} into .venv/lib/kvbench-native")
    for name in missing:
        problem = unpack_first(SYSTEM_LIBRARIES[name])
        if problem:
            say(f"could not get {name}: {problem}")
    shutil.rmtree(APT_STATE, ignore_errors=True)


def may_apt_install() -> bool:
    opted_out = os.environ.get("KVBENCH_NO_APT_INSTALL", "") not in ("", "0")
    return os.geteuid() == 0 and shutil.which("apt-get") is not None and not opted_out


def apt_install(packages: Sequence[str]) -> str | None:
    """``apt-get install``; when that does not go, the same again with fresh package lists."""
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    status, output = run(command, APT_DEADLINE_S, APT_ENV)
    if status:
        run(["apt-get", "update"], APT_DEADLINE_S, APT_ENV)
        status, output = run(command, APT_DEADLINE_S, APT_ENV)
    return last_line(output) if status else None


def unpack_first(names: Sequence[str]) -> str | None:
    """Downloads and unpacks the first of these packages that can be had.

    A fresh image has no package lists, and without root none can be fetched to their usual place:
    then .venv gets lists of its own.
    """
    own_lists = private_apt(APT_STATE)
    problem: str | None = "there is no such package"
    for options in ([], own_lists):
        if options and not any((APT_STATE / "lists").glob("*Packages*")):
            run(["apt-get", *options, "update"], APT_DEADLINE_S)
        for name in names:
            folder = APT_STATE / name
            folder.mkdir(exist_ok=True)
            problem = download(name, options, folder) or unpack(folder, NATIVE)
            if problem is None:
                return None
    return problem


def private_apt(state: Path) -> list[str]:
    """Options that make apt-get keep its lists and its cache in a folder of ours."""
    options = []
    for key, path in (("State::lists", state / "lists"), ("Cache", state / "cache")):
        (path / "partial").mkdir(parents=True, exist_ok=True)
        options += ["-o", f"Dir::{key}={path}"]
    (state / "cache" / "archives" / "partial").mkdir(parents=True, exist_ok=True)
    return options


def download(name: str, options: Sequence[str], folder: Path) -> str | None:
    """Fetches a package into a folder. As root apt would hand the work to a user who cannot write there."""
    command = ["apt-get", *options, "-o", "APT::Sandbox::User=root", "download", name]
    status, output = run(command, APT_DEADLINE_S, cwd=folder)
    return last_line(output) if status else None


def unpack(folder: Path, target: Path) -> str | None:
    """Unpacks each .deb of a folder; nothing is run or registered."""
    packages = sorted(folder.glob("*.deb"))
    target.mkdir(parents=True, exist_ok=True)
    for package in packages:
        status, output = run(["dpkg-deb", "-x", package, target], APT_DEADLINE_S)
        if status:
            return last_line(output)
    return None if packages else f"nothing was downloaded to {folder}"


def install_nixl() -> str | None:
    """The wheel alone: it declares torch and CUDA, which moving host memory does not need."""
    say(f"installing NIXL ({NIXL_WHEEL}, without the torch and CUDA packages that it declares)")
    status, output = pip("install", "--no-deps", pinned(NIXL_WHEEL))
    return f"pip could not install {NIXL_WHEEL}: {last_line(output)}" if status else None
