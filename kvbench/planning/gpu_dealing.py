"""GPU requests and supplies for ``core.plan.gpus.deal``, local or remote. Kubernetes assigns GPUs to pods
itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from kvbench import engines
from kvbench.core.plan.gpus import GpuNeed, GpuPool, GpuWant, deal, pool_of
from kvbench.core.plan.plan import DeploymentPlan, InstancePlan, Plan
from kvbench.core.scenario.deployment_section import Deployment
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.hosts import devices
from kvbench.launchers.parts.sockets import is_free

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
Listed = Sequence[Mapping[str, Any]] | None
"""GPUs by ``devices.gpus``: empty without nvidia-smi, None without a response."""


def with_devices(plan: Plan) -> Plan:
    """Add each instance's GPUs to the plan. Missing ones are numbered on, for commands printed for another
    machine; ``require_gpus`` prevents a start. Remote hosts: ``remote_device_env``."""
    wanted = [_local_wants(plan.scenario, deployment) for deployment in plan.deployments]
    if not any(wanted):
        return plan
    pool = local_pool(plan.scenario)
    found = []
    for planned, wants in zip(plan.deployments, wanted, strict=True):
        try:
            dealt = _deal_local(planned.label, wants, pool)
        except InputError:
            dealt = _deal_local(planned.label, wants, None)
        instances = (
            replace(instance, devices=dealt.get(instance.name, instance.devices))
            for instance in planned.instances
        )
        found.append(replace(planned, instances=tuple(instances)))
    return replace(plan, deployments=tuple(found))


def require_gpus(plan: Plan, listed: Listed = None) -> None:
    """Raise InputError if a deployment's hosts have too few GPUs. ``listed``: local ones, if known."""
    wanted = [_local_wants(plan.scenario, deployment) for deployment in plan.deployments]
    if any(wanted):
        pool = local_pool(plan.scenario, listed)
        for planned, wants in zip(plan.deployments, wanted, strict=True):
            _deal_local(planned.label, wants, pool)
    for planned in plan.deployments if plan.scenario.deployment.hosts else ():
        remote_device_env(plan.scenario, planned)


def local_pool(scenario: Scenario, listed: Listed = None) -> GpuPool | None:
    """GPUs for local processes, or None if unknown or not local."""
    deployment = scenario.deployment
    if deployment.several_hosts or deployment.hosts or not is_free(deployment.host, 0):
        return None
    visible = os.environ.get(VISIBLE)
    found = listed if listed is not None or visible is not None else devices.gpus()
    return pool_of(visible, len(found or ()))


def remote_device_env(
    scenario: Scenario,
    planned: DeploymentPlan,
    answers: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    numbered: bool = False,
) -> dict[str, dict[str, str]]:
    """Return process → environment with its GPUs on ``deployment.hosts``.

    A host's ``devices`` are dealt, even to an engine without need; else the GPUs its agent sees under Slurm
    or Ray (``answers`` to ``gpus``, by host). ``numbered``: unknown GPUs are numbered from 0, for printed
    commands. Raises InputError with counts if there are too few."""
    deployment = scenario.deployed(planned.label)
    if not deployment.hosts or not deployment.engine_options.starts_processes:
        return {}
    pools: dict[str, GpuPool | None] = {}
    for name, host in deployment.hosts.items():
        answer = (answers or {}).get(name)
        if host.devices:
            pools[name] = GpuPool(tuple(map(str, host.devices)), f"the devices of host {name} are")
        elif answer is not None:
            pools[name] = pool_of(answer.get("visible"), len(answer.get("used_bytes") or ()), name)
        elif numbered:
            pools[name] = None
    wants = [
        want
        for instance in planned.instances
        for want in _remote_wants(deployment, instance)
        if want.host in pools
    ]
    dealt = deal(planned.label, wants, pools)
    return {process: {VISIBLE: ",".join(numbers)} for process, numbers in dealt.items()}


def _remote_wants(deployment: Deployment, instance: InstancePlan) -> Iterator[GpuWant]:
    """Yield an instance's request on each of its hosts."""
    need = _need(deployment, instance)
    nodes = deployment.nodes_of(instance.name)
    for number, host in enumerate(nodes):
        count = need.count
        if not count and deployment.hosts[host].devices:
            count = deployment.ranks_of(instance.name).gpus
        if count:
            process = f"{instance.name}{NODE}{number}" if number else instance.name
            yield GpuWant(process, instance.role, host, replace(need, count=count // len(nodes)))


def _need(deployment: Deployment, instance: InstancePlan) -> GpuNeed:
    ranks = deployment.ranks_of(instance.name)
    engine = engines.get(deployment.engine)
    return engine.gpus(deployment.engine_options, instance.role, instance.rank, ranks)


def _local_wants(scenario: Scenario, planned: DeploymentPlan) -> list[GpuWant]:
    """GPU requests of each local instance; empty if another system assigns GPUs."""
    deployment = scenario.deployed(planned.label)
    if deployment.hosts or deployment.launcher != "local":
        return []
    wants = [
        GpuWant(
            instance.name, instance.role, deployment.address_of(instance.name), _need(deployment, instance)
        )
        for instance in planned.instances
    ]
    return [want for want in wants if want.need.count]


def _deal_local(label: str, wants: Sequence[GpuWant], pool: GpuPool | None) -> dict[str, tuple[str, ...]]:
    return deal(label, wants, {want.host: pool for want in wants})
