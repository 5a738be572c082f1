"""A scenario's hosts where a scheduler chooses them: nodes of Slurm or Ray, as if it had named them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvbench.core.scenario.hosts import FarHost, RayOptions, Roles, SlurmOptions
from kvbench.core.scenario.scenario import Deployment, Scenario
from kvbench.launchers.agents.channel import Channel
from kvbench.launchers.agents.fleet import Fleet

Tell = Callable[[str], None]


class Nodes(Protocol):
    """What a scheduler has given: ``SlurmJob`` or ``RayNodesOf``."""

    hosts: Mapping[str, tuple[str, ...]]
    """Role → its nodes."""

    def open(self) -> None:
        """Get them; ``hosts`` is known then. Raises LaunchError."""

    def channel(self, host: str, command: str, /) -> Channel:
        """A shell command on a node. Raises LaunchError."""

    def address(self, host: str, /) -> str:
        """The node's address, as the scheduler knows it. Raises LaunchError."""

    def close(self) -> None:
        """Give them back."""


def allocated(scenario: Scenario, run_tag: str, tell: Tell) -> tuple[Scenario, Fleet]:
    """The scenario with its hosts filled in, and the fleet that reaches them.

    ``tell`` hears what is waited for. The fleet gives the nodes back when it is closed. Raises LaunchError.
    """
    nodes = _nodes(scenario.deployment, run_tag, tell)
    try:
        nodes.open()
        deployment = placed_on(scenario.deployment, nodes)
    except BaseException:
        nodes.close()
        raise
    placed = scenario.model_copy(update={"deployment": deployment})
    return placed, Fleet(deployment, run_tag, nodes.channel, nodes.close)


def _nodes(deployment: Deployment, run_tag: str, tell: Tell) -> Nodes:
    loadgen_only = not deployment.engine_options.starts_processes
    if deployment.launcher == "slurm":
        from kvbench.launchers.slurm import SlurmJob

        instances = (deployment.prefill.instances, deployment.decode.instances)
        options = deployment.slurm or SlurmOptions()
        return SlurmJob(options, instances, run_tag, tell, loadgen_only=loadgen_only)
    from kvbench.launchers.ray import RayNodesOf

    return RayNodesOf(deployment.ray or RayOptions(), run_tag, tell, loadgen_only=loadgen_only)


def placed_on(deployment: Deployment, nodes: Nodes) -> Deployment:
    """The deployment with these nodes as its hosts."""
    options: SlurmOptions | RayOptions = deployment.ray or RayOptions()
    if deployment.launcher == "slurm":
        options = deployment.slurm or SlurmOptions()
    roles_of: dict[str, list[str]] = {}
    for role, names in nodes.hosts.items():
        for name in names:
            roles_of.setdefault(name, []).append(role)
    hosts = {
        name: FarHost(address=nodes.address(name), **_host_options(options, roles))
        for name, roles in roles_of.items()
    }
    return deployment.model_copy(update={"hosts": hosts, "roles": Roles.model_validate(dict(nodes.hosts))})


def _host_options(options: SlurmOptions | RayOptions, roles: list[str]) -> dict[str, Any]:
    """What the scenario says of a node by its roles: the first that says something counts."""
    values: dict[str, Any] = {}
    if isinstance(options, SlurmOptions):
        # Slurm's nodes share their files as a rule; Ray's actors put their own Python first.
        values["python"] = options.python or sys.executable
        everywhere = {"nics": options.nics, "devices": options.devices}
    else:
        values |= {"python": options.python} if options.python else {}
        values["env"] = dict(options.env)
        everywhere = {}
    if options.workdir:
        values["workdir"] = options.workdir
    for name in ("nics", "devices"):
        own = [getattr(wanted, name) for role in roles if (wanted := getattr(options, role, None))]
        values[name] = next(filter(None, own), everywhere.get(name, ()))
    return values
