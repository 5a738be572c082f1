"""Description of this machine before a run, as a JSON-able dict. Unreadable values are null; nothing raises.
Devices are read from sysfs and procfs under a root folder, so that recorded trees of other machines work too.
Versions of libraries are read without importing them."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvbench.hosts.devices import cgroup_folders, children, gpus, nics, output_of, rdma, read
from kvbench.hosts.gpu_affinity import with_affinity
from kvbench.hosts.version_rules import version_of
from kvbench.version import __version__

GIT_DEADLINE_S: Final = 5.0

ENV_PREFIXES: Final = ("MC_", "UCX_", "NCCL_", "VLLM_")
"""Prefixes of variables that change a transfer library or an engine; recorded in full."""
SECRET_WORDS: Final = ("KEY", "TOKEN", "SECRET", "PASSW", "CREDENTIAL", "AUTH")
WITHHELD: Final = "(not recorded)"

LIBRARIES: Final = (
    "kvbench",
    "numpy",
    "uvloop",
    "httptools",
    "httpx",
    "pydantic",
    "pyarrow",
    "pandas",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "vllm",
    "torch",
)

T = TypeVar("T")


def describe(
    root: Path = Path("/"), environ: Mapping[str, str] | None = None, code: Path | None = None
) -> dict[str, Any]:
    """Return machine, devices, libraries, settings and load. ``code`` is the folder of kvbench's checkout."""
    parts: dict[str, Callable[[], Any]] = {
        "kvbench": lambda: __version__,
        "hostname": lambda: read(root / "proc/sys/kernel/hostname"),
        "os": lambda: os_name(root),
        "kernel": lambda: read(root / "proc/sys/kernel/osrelease"),
        "python": python,
        "cpu": lambda: cpu(root),
        "memory": lambda: memory(root),
        "load_average": lambda: load_average(root),
        "nics": lambda: nics(root),
        "rdma": lambda: rdma(root),
        "gpus": lambda: with_affinity(gpus(), root),
        "libraries": versions,
        "env": lambda: recorded_env(os.environ if environ is None else environ),
        "git": lambda: git_state(code or Path(__file__).resolve().parents[2]),
    }
    return {name: attempt(part) for name, part in parts.items()}


def attempt(part: Callable[[], T]) -> T | None:
    """Return the result of ``part``, or None: a description must never fail a run."""
    try:
        return part()
    except Exception:
        return None


# Machine


def python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
    }


def os_name(root: Path) -> str | None:
    """Return the distribution's full name, such as ``Debian GNU/Linux 12 (bookworm)``."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', read(root / "etc/os-release") or "", re.MULTILINE)
    return found.group(1) if found else None


def cpu(root: Path) -> dict[str, Any]:
    """Return model, logical cores, usable cores, NUMA nodes, cgroup limit and governors."""
    info = read(root / "proc/cpuinfo") or ""
    model = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", info, re.MULTILINE)
    cores = len(re.findall(r"^processor\s*:", info, re.MULTILINE))
    folders = children(root / "sys/devices/system/cpu")
    governors = {read(folder / "cpufreq/scaling_governor") for folder in folders} - {None}
    nodes = children(root / "sys/devices/system/node")
    return {
        "model": model.group(1) if model else None,
        "cores": cores or None,
        "usable_cores": len(os.sched_getaffinity(0)) if root == Path("/") else None,
        "numa_nodes": {
            node.name: read(node / "cpulist") for node in nodes if re.fullmatch(r"node\d+", node.name)
        },
        "cgroup_limit": cgroup_cpu_limit(root),
        "governor": ", ".join(sorted(filter(None, governors))) or None,
    }


def cgroup_cpu_limit(root: Path) -> float | None:
    """Return the smallest core limit of this process's cgroup and its parents, if any."""
    base = root / "sys/fs/cgroup"
    # A parent's limit applies too.
    limits = [_quota((read(folder / "cpu.max") or "").split()) for folder in cgroup_folders(root)]
    first_version = (read(base / "cpu/cpu.cfs_quota_us"), read(base / "cpu/cpu.cfs_period_us"))
    limits.append(_quota([value for value in first_version if value]))
    return min((limit for limit in limits if limit), default=None)


def _quota(words: list[str]) -> float | None:
    """Return the cores of ``quota period`` (µs); a quota of ``max`` or -1 is no limit."""
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit():
        return None
    return round(int(words[0]) / int(words[1]), 3)


def memory(root: Path) -> dict[str, Any]:
    info = read(root / "proc/meminfo") or ""
    kib = {name: int(amount) for name, amount in re.findall(r"^(\w+):\s+(\d+) kB", info, re.MULTILINE)}
    return {
        "total_bytes": kib["MemTotal"] * 1024 if "MemTotal" in kib else None,
        "available_bytes": kib["MemAvailable"] * 1024 if "MemAvailable" in kib else None,
    }


def load_average(root: Path = Path("/")) -> list[float] | None:
    """Return the number of runnable processes, averaged over 1, 5 and 15 minutes."""
    words = (read(root / "proc/loadavg") or "").split()[:3]
    return [float(word) for word in words] or None


# Software


def versions() -> dict[str, str | None]:
    """Return the versions of relevant libraries; null if not installed."""
    return {name: version_of(name) for name in LIBRARIES}


def recorded_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the allowed variables, without secrets (by name) and without logins in addresses."""
    kept = {}
    for name in sorted(environ):
        if name.startswith(ENV_PREFIXES):
            secret = any(word in name.upper() for word in SECRET_WORDS)
            kept[name] = WITHHELD if secret else re.sub(r"(?<=://)[^/@\s]+@", "", environ[name])
    return kept


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return the code's commit, and whether tracked files were changed; null outside a checkout."""
    if not (folder / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    commit = output_of([*git, "rev-parse", "HEAD"], GIT_DEADLINE_S)
    if commit is None:
        return None
    status = output_of([*git, "status", "--porcelain", "--untracked-files=no"], GIT_DEADLINE_S)
    return {"commit": commit.strip(), "dirty": None if status is None else bool(status.strip())}
