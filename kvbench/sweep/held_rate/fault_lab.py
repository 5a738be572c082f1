"""A network of its own for a chaos run: two hosts as namespaces, and on the second the process to cut off.

``kvbench chaos --lab`` sets a lab up and goes on inside its host A, as a process that it waits for: so
everything but the process in host B is started there, and reaches B by the lab's NICs alone. To partition a
process is to lose all packets of these; one NIC's faults leave the others.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench.core.held_rate.fault_plan import PlannedFault
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.scenario.hosts import FarHost, Roles
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import EXIT_INTERRUPTED, InputError
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.scratch import scratch
from kvbench.launchers.base import Launcher
from kvbench.launchers.local import Here, LocalLauncher, LocalProcess
from kvbench.launchers.parts.ports import with_ports_at
from kvbench.launchers.parts.sockets import free_ports
from kvbench.results.store import RunStore
from kvbench.sweep.deployed import scratch_prefix

INSIDE_ENV: Final = "KVBENCH_FAULT_LAB"
"""Name of the lab in whose host A this process already is."""
STOP_S: Final = 60.0
"""So long may the process inside take to end its run when it is interrupted."""
_SHAPE: Final = re.compile(r"(?P<nics>\d{1,2})(?:x(?P<rate>\d+(?:\.\d+)?[kmgt]?bit))?")
MAIN, ALONE = "A", "B"


@dataclass(frozen=True)
class FaultPlace:
    """Where a chaos run goes on. ``status``: it has gone on elsewhere, and ended so."""

    lab: Lab | None = None
    status: int | None = None


@contextmanager
def fault_lab(words: str, console: Console) -> Iterator[FaultPlace]:
    """The lab that ``--lab`` asks for; without words none. Raises InputError, LabError."""
    inside = os.environ.get(INSIDE_ENV, "")
    if not words:
        yield FaultPlace()
        return
    if inside:
        yield FaultPlace(Lab.standing(inside))
        return
    shape = _SHAPE.fullmatch(words.strip())
    if shape is None:
        raise InputError(f"--lab {words!r} is no lab", hint="NICs, and what each carries: 2 or 2x1gbit")
    with Lab.up(int(shape["nics"]), shape["rate"] or "1gbit") as lab:
        console.print(f"lab {lab.plan.name}: {lab.describe()}", markup=False)
        yield FaultPlace(status=_go_on_inside(lab))


def _go_on_inside(lab: Lab) -> int:
    """This very command in host A; its exit code. An interrupt reaches it, too, and it is waited for."""
    command = [*lab.prefix(MAIN), sys.executable, "-m", "kvbench.cli", *sys.argv[1:]]
    nics = ",".join(each["name"] for each in lab.nics(MAIN))
    # UCX takes every device that it sees, the loopback of each host among them, which leads nowhere.
    env = {"UCX_NET_DEVICES": nics, **os.environ, INSIDE_ENV: lab.plan.name}
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + STOP_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return EXIT_INTERRUPTED
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class _LabHere(Here):
    """This machine as host B of a lab sees it: its addresses are not this process's own."""

    def __init__(self, near: str) -> None:
        self._near = near

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        return None  # nobody else is in that host

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return free_ports(self._near, counts)


class LabLauncher(LocalLauncher):
    """Starts processes in host A, where this process is, and those named ``alone`` in host B."""

    def __init__(self, run_tag: str, log_dir: Path, spec_dir: Path, lab: Lab, alone: frozenset[str]) -> None:
        super().__init__(run_tag, log_dir, spec_dir)
        self._lab = lab
        self._alone = alone

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> LocalProcess:
        if spec.name not in self._alone:
            return super().start(spec, piped=piped)
        inside = replace(spec, argv=(*self._lab.prefix(ALONE), *spec.argv))
        process = super().start(inside, piped=piped)
        process.spec = spec  # by which it may be started again
        return process

    def far(self, name: str) -> Here:
        near = self._lab.plan.address("A", 0)
        return _LabHere(near) if name in self._alone else Here()


def alone_in_lab(fault: PlannedFault, planned: DeploymentPlan) -> frozenset[str]:
    """The names of the processes in host B: the one to cut off; D's where it is a NIC that fails."""
    if fault.target == "metadata":
        raise InputError("the metadata service cannot be cut off by itself yet", hint="kill or freeze it")
    if fault.target == "router":
        return frozenset(["router"])
    role = "prefill" if fault.target == "prefill" else "decode"
    return frozenset(each.name for each in planned.instances if each.role == role)


def lab_scenario(scenario: Scenario, lab: Lab, alone: frozenset[str]) -> Scenario:
    """The scenario with its roles on the lab's hosts, by the addresses of the first NIC."""
    hosts = {
        MAIN: FarHost(address=lab.plan.address("A", 0)),
        ALONE: FarHost(address=lab.plan.address("B", 0)),
    }
    roles = {name.partition("-")[0] for name in alone}
    seats = {role: ALONE if role in roles else MAIN for role in ("prefill", "decode", "router")}
    placed = Roles(
        prefill=((seats["prefill"],),),
        decode=((seats["decode"],),),
        router=(seats["router"],),
        loadgen=(MAIN,),
    )
    update = {"hosts": hosts, "roles": placed}
    return scenario.model_copy(update={"deployment": scenario.deployment.model_copy(update=update)})


@contextmanager
def running_in_lab(
    scenario: Scenario,
    planned: DeploymentPlan,
    store: RunStore,
    lab: Lab,
    fault: PlannedFault,
) -> Iterator[tuple[Scenario, Launcher, RunningDeployment]]:
    """A deployment on the lab's hosts from start to stop, with the scenario that it has there."""
    alone = alone_in_lab(fault, planned)
    inside = lab_scenario(scenario, lab, alone)
    with scratch(scratch_prefix(store.path), store.path.name) as specs:
        folder = store.logs / f"{planned.label}-{fault.number:02d}"
        launcher = LabLauncher(store.run_tag, folder, specs, lab, alone)
        open_ports = replace(
            planned,
            router_port=None if planned.router_port is None else 0,
            instances=tuple(
                replace(each, port=0, side_port=None if each.side_port is None else 0)
                for each in planned.instances
            ),
            service_ports=tuple(0 for _ in planned.service_ports),
        )
        chosen = with_ports_at(open_ports, inside.deployment, launcher)
        with RunningDeployment(inside, chosen, launcher) as deployment:
            yield inside, launcher, deployment
