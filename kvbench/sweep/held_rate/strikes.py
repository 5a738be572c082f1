"""Doing faults to a deployment that runs, and undoing them. Only ever what kvbench itself has started.

A strike has a beginning and an end; both return at once or within a deadline of their own. Whatever it was
in the middle of, ``undo`` leaves nothing stopped, nothing asked for, and no rule in any network.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Final, Protocol

from kvbench.core.held_rate.fault_plan import FaultTarget, PlannedFault
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import InputError
from kvbench.hosts.lab.faults import heal, place
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.procfs import family
from kvbench.launchers.base import Process
from kvbench.sweep.held_rate.kv_hogs import DecodeFlood, OrphanedKv

SLOW_SHARE: Final = 0.02
"""What a slowed NIC of a lab still carries of its rate."""


class Strike(Protocol):
    """One fault that is done to a deployment."""

    def begin(self) -> str:
        """Do it; in words, what was done. Raises KvbenchError where it cannot be."""

    def undo(self, *, ending: bool = False) -> None:
        """Take it back, as far as that can be. Safe to call twice, and without a beginning.

        ``ending``: the deployment is about to be stopped, so that nothing is started any more.
        """


class _Kill:
    """SIGKILL to the process and its group."""

    def __init__(self, deployment: RunningDeployment, name: str, *, again: bool) -> None:
        self._deployment = deployment
        self._name = name
        self._again = again
        self._done = False

    def begin(self) -> str:
        process = self._deployment.process(self._name)
        pid = process.pid
        process.kill()
        self._done = True
        return f"{self._name} {pid} was killed"

    def undo(self, *, ending: bool = False) -> None:
        if self._again and self._done and not ending:
            self._again = False
            self._deployment.start_again(self._name)


class _Freeze:
    """SIGSTOP to the process and its children, and SIGCONT."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._stopped: list[int] = []

    def begin(self) -> str:
        self._stopped = family(self._process.pid)
        for pid in self._stopped:
            _signal(pid, signal.SIGSTOP)
        return f"{self._process.name} {self._process.pid} was stopped, with {len(self._stopped) - 1} children"

    def undo(self, *, ending: bool = False) -> None:
        stopped, self._stopped = self._stopped, []
        if self._process.poll() is None:
            for pid in reversed(stopped):
                _signal(pid, signal.SIGCONT)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


class _LabFault:
    """Faults of the lab's NICs: of one, or of all that lead to the host where a process is alone."""

    def __init__(self, lab: Lab, kind: str, nics: list[int], amount: str = "") -> None:
        self._lab = lab
        self._kind = kind
        self._nics = nics
        self._amount = amount
        self._placed: list[int] = []

    def begin(self) -> str:
        words = []
        for nic in self._nics:
            words.append(place(self._lab, self._kind, nic, self._amount).words())
            self._placed.append(nic)
        return "; ".join(words)

    def undo(self, *, ending: bool = False) -> None:
        while self._placed:
            heal(self._lab, self._kind, self._placed.pop())


def struck_name(fault: PlannedFault, planned: DeploymentPlan, names: list[str]) -> str:
    """The name of the process that a fault is done to. ``names``: of all processes. Raises InputError."""
    if fault.target == "metadata":
        own = {each.name for each in planned.instances} | {"router"}
        helpers = [name for name in names if name not in own]
        if fault.index < len(helpers):
            return helpers[fault.index]
        raise InputError(f"{planned.label} has no metadata service of its own")
    if fault.process not in names:
        raise InputError(f"{planned.label} has no {fault.process}", hint=f"it has {', '.join(names)}")
    return fault.process


def target_counts(planned: DeploymentPlan, lab: Lab | None = None) -> dict[FaultTarget, int]:
    """How many of each target a deployment has, before it is started."""
    roles = [each.role for each in planned.instances]
    return {
        "prefill": roles.count("prefill"),
        "decode": roles.count("decode"),
        "router": int(planned.router_port is not None),
        "metadata": int(bool(planned.service_ports)),
        "nic": 0 if lab is None else lab.plan.nics,
    }


def strike_of(
    fault: PlannedFault,
    deployment: RunningDeployment,
    lab: Lab | None,
    orphans: Callable[[PlannedFault], OrphanedKv | DecodeFlood],
) -> Strike:
    """How a fault is done. ``orphans``: who takes up KV. Raises InputError for what cannot be done here."""
    if fault.kind in ("lease", "pool"):
        return orphans(fault)
    if fault.kind in ("partition", "pull", "slow"):
        if lab is None:
            raise InputError(
                f"{fault.name}: there is no network here whose packets kvbench may lose",
                hint="--lab puts the deployment between two hosts of its own (network namespaces)",
            )
        alone = fault.target != "nic"
        nics = list(range(lab.plan.nics)) if alone else [fault.index]
        rate = f"{lab.plan.bits_per_s * SLOW_SHARE / 1e6:g}mbit" if fault.kind == "slow" else ""
        return _LabFault(lab, fault.kind, nics, rate)
    name = struck_name(fault, deployment.plan, list(deployment.pids()))
    if fault.kind == "freeze":
        return _Freeze(deployment.process(name))
    return _Kill(deployment, name, again=fault.kind == "restart")
