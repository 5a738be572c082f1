"""Deals the GPUs of a host out to the instances of a plan, and says where they are too few.

Hosts that agents reach have their GPUs in ``deployment.hosts.*.devices`` (launchers/agents/fleet.py); pods
get theirs from Kubernetes. Here it is about this machine, and about commands that are only printed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench import engines
from kvbench.core.plan.gpus import GpuNeed, GpuPool, dealt
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.hosts import devices
from kvbench.launchers.parts.sockets import is_free

VISIBLE = "CUDA_VISIBLE_DEVICES"
Listed = Sequence[Mapping[str, Any]] | None
"""GPUs as ``devices.gpus`` lists them: empty without nvidia-smi, None where it does not answer."""


def with_devices(plan: Plan) -> Plan:
    """The plan with the GPUs of each instance.

    Where this machine has too few they are numbered on, for commands that are printed for another one;
    ``require_gpus`` refuses to start that here.
    """
    needed = [_needs(plan.scenario, each) for each in plan.deployments]
    if not any(needed):
        return plan
    pool = pool_here(plan.scenario)
    found = []
    for planned, needs in zip(plan.deployments, needed, strict=True):
        try:
            found.append(_dealt(plan.scenario, planned, needs, pool))
        except InputError:
            found.append(_dealt(plan.scenario, planned, needs, None))
    return replace(plan, deployments=tuple(found))


def require_gpus(plan: Plan, listed: Listed = None) -> None:
    """Raises InputError with the counts where a deployment of this machine needs more GPUs than it has.

    ``listed``: the GPUs, where they are known already.
    """
    needed = [_needs(plan.scenario, each) for each in plan.deployments]
    if any(needed):
        pool = pool_here(plan.scenario, listed)
        for planned, needs in zip(plan.deployments, needed, strict=True):
            _dealt(plan.scenario, planned, needs, pool)


def pool_here(scenario: Scenario, listed: Listed = None) -> GpuPool | None:
    """The GPUs that processes here may use; None if that is not known, or the scenario is for elsewhere.

    What CUDA_VISIBLE_DEVICES names counts before what nvidia-smi lists, also if it names none.
    """
    deployment = scenario.deployment
    if deployment.several_hosts or deployment.hosts or not is_free(deployment.host, 0):
        return None
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        names = [word.strip() for word in visible.split(",")]
        # As in CUDA: what stands behind the first that does not exist is not seen.
        end = names.index("-1") if "-1" in names else len(names)
        return GpuPool(tuple(name for name in names[:end] if name), f"{VISIBLE} names")
    found = devices.gpus() if listed is None else listed
    return GpuPool(tuple(str(number) for number in range(len(found)))) if found else None


def _needs(scenario: Scenario, planned: DeploymentPlan) -> dict[str, GpuNeed]:
    """What each instance needs of the GPUs that are dealt out here; none where somebody else does that."""
    deployment = scenario.deployment
    engine = engines.get(deployment.engine)
    if deployment.hosts or deployment.launcher != "local":
        return {}
    needs = {
        each.name: engine.gpus(
            deployment.engine_options, each.role, each.rank, deployment.tensor_parallel_size
        )
        for each in planned.instances
    }
    return {name: need for name, need in needs.items() if need.count}


def _dealt(
    scenario: Scenario, planned: DeploymentPlan, needs: Mapping[str, GpuNeed], pool: GpuPool | None
) -> DeploymentPlan:
    """On each host by itself. Of GPUs that are not known, one who is alone there needs to be given none."""
    deployment = scenario.deployment
    if pool is not None and not pool.devices:
        return planned  # hidden from us on purpose
    hosts: dict[str, dict[str, GpuNeed]] = {}
    for name, need in needs.items():
        hosts.setdefault(deployment.address_of(name), {})[name] = need
    for mine in hosts.values():
        if pool is not None or len(mine) > 1:
            planned = dealt(planned, mine, pool, deployment.tensor_parallel_size)
    return planned
