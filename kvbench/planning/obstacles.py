"""Quick checks that a plan can start; `kvbench plan` prints the results first. Includes the limit of open
files."""

from __future__ import annotations

import math
import os
import resource
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvbench import connectors, engines, transfer
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.scenario.hosts import RemoteHost
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError, LaunchError, Problem
from kvbench.launchers.parts.sockets import is_free, is_local
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.process_specs import unusable

LEAST_STREAMS: Final = 64
"""Fewest connections that the load generator opens before a trial (``LoadSpec.expected_streams``)."""
OTHER_FILES: Final = 64
"""Open files of a process besides its streams."""


def few_open_files(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> Problem | None:
    """Return why the hard limit of open files is too low, or None. ``rate``: requests per second, 0 for a
    search. Processes raise their soft limit themselves; other hosts have their own limits."""
    if scenario.deployment.several_hosts:
        return None
    needed = open_files_needed(scenario, rate, concurrency)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return None
    return Problem(
        f"a process may open {hard} files and sockets (ulimit -Hn), the planned load needs {needed}",
        f"raise the hard limit (`ulimit -Hn {needed}` as root, LimitNOFILE= of a service, or "
        f"`--ulimit nofile={needed}` of a container), or reduce the load",
    )


def open_files_needed(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> int:
    """Open files of the busiest process: kvbench's router has each stream on both sides. At a rate, the SLO
    limits the requests in flight."""
    in_flight = min(math.ceil(rate * scenario.allowed_s), scenario.search.max_requests)
    streams = concurrency or max(LEAST_STREAMS, in_flight)
    sides = 2 if scenario.deployment.engine_options.starts_processes else 1
    return sides * streams + OTHER_FILES


def require_open_files(scenario: Scenario, rate: float = 0.0, concurrency: int = 0) -> None:
    """Raise LaunchError if ``few_open_files`` finds a problem."""
    if (problem := few_open_files(scenario, rate, concurrency)) is not None:
        raise LaunchError(problem.reason, hint=problem.fix)


REACH_S: Final = 1.0
SSH_PORT: Final = 22
MOST_NAMED: Final = 8


def obstacles(scenario: Scenario, plan: Plan, named: str) -> list[Problem]:
    """Return problems with open files, GPUs, Slurm, Ray, hosts and ports, without starting anything.
    ``named``: scenario as named by the user, for a `kvbench doctor` hint."""
    files = few_open_files(scenario)
    first = [files] if files is not None else []
    if not scenario.deployment.engine_options.starts_processes:
        return first
    launcher = scenario.deployment.launcher
    if launcher in ("slurm", "ray"):
        missing = scheduler_problem(launcher)
        look = iter([missing] if missing else [])
    else:
        look = _ports(scenario, plan) if launcher == "local" else _hosts(scenario, named)
    return [*first, *_gpus(plan), *look]


def scheduler_problem(launcher: str) -> Problem | None:
    """Return why Slurm or Ray is unavailable on this machine, or None."""
    from kvbench.launchers import ray, slurm

    if launcher == "slurm":
        reason, fix = slurm.problem(), "start kvbench on a login node of the cluster"
    else:
        reason, fix = ray.problem(), "pip install ray, in the cluster's version"
    return Problem(reason, fix) if reason else None


def require_start(scenario: Scenario, plan: Plan, named: str) -> None:
    """Raise LaunchError with every problem, before a run folder is created."""
    if problems := obstacles(scenario, plan, named):
        reasons = "\n  ".join(problem.reason for problem in problems)
        fixes = "\n  ".join(problem.fix for problem in problems if problem.fix)
        raise LaunchError(f"cannot start: {reasons}", hint=fixes)


def left_out(scenario: Scenario, plan: Plan) -> dict[str, Problem]:
    """Return label → reason of connectors that a sweep here skips."""
    deployment = scenario.deployment
    if deployment.launcher != "local" or not deployment.engine_options.starts_processes:
        return {}
    found = {planned.label: _lacks(scenario, planned) for planned in plan.deployments}
    return {label: problem for label, problem in found.items() if problem is not None}


def _lacks(scenario: Scenario, planned: DeploymentPlan) -> Problem | None:
    options, connector = scenario.deployment.engine_options, connectors.get(planned.connector)
    if not options.models_compute:
        return unusable(scenario, planned)
    if connector.kv_connector and not connector.transfer_backend:
        return engines.get(scenario.deployment.engine).check(connector, options)
    return transfer.get(connector.transfer_backend).check() if connector.transfer_backend else None


def _gpus(plan: Plan) -> Iterator[Problem]:
    try:
        require_gpus(plan)
    except InputError as error:
        yield Problem(error.message, error.hint)


def _ports(scenario: Scenario, plan: Plan) -> Iterator[Problem]:
    if used := ports_in_use(scenario, plan)[0]:
        more = f" and {len(used) - MOST_NAMED} more" if len(used) > MOST_NAMED else ""
        yield Problem(
            f"ports in use: {', '.join(map(str, used[:MOST_NAMED]))}{more}",
            "end what listens there, or use free ports: --set deployment.base_port=0",
        )


def ports_in_use(scenario: Scenario, plan: Plan) -> tuple[list[int], list[str]]:
    """Return the plan's ports in use, and the hosts with ports that cannot be checked from here."""
    where, wanted = scenario.deployment.address_of, set[tuple[str, int]]()
    for planned in plan.deployments:
        wanted |= {(where("router"), port) for port in (*planned.service_ports, planned.router_port or 0)}
        for instance in planned.instances:
            wanted |= {(where(instance.name), port) for port in instance.ports_on(0, 1)}
    wanted = {(host, port) for host, port in wanted if port}
    remote = {host for host, _ in wanted if not is_local(host)}
    used = {port for host, port in wanted if host not in remote and not is_free(host, port)}
    return sorted(used), sorted(remote)


def _hosts(scenario: Scenario, named: str) -> Iterator[Problem]:
    """Find ssh hosts that refuse connections; hosts that ~/.ssh/config may redefine are left to ssh."""
    if scenario.deployment.launcher != "ssh" or Path("~/.ssh/config").expanduser().is_file():
        return
    hosts = {name: host for name, host in scenario.deployment.used_hosts.items() if not host.ssh.config}
    if not hosts:
        return
    from concurrent.futures import ThreadPoolExecutor  # it imports logging, for hosts over ssh only

    with ThreadPoolExecutor(len(hosts)) as together:
        answers = list(together.map(_unreached, hosts, hosts.values()))
    for name, why in zip(hosts, answers, strict=True):
        if why:
            yield Problem(f"host {name} is unreachable: {why}", f"see `kvbench doctor {shlex.quote(named)}`")


def _unreached(name: str, host: RemoteHost) -> str:
    address = host.ssh.host or name, host.ssh.port or SSH_PORT
    try:
        with socket.create_connection(address, REACH_S):
            return ""
    except socket.gaierror:
        return f"{address[0]} cannot be resolved here"
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else os.strerror(error.errno or 0)
        return f"{address[0]}:{address[1]}: {why}"
