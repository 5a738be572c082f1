"""Hosts of a run's processes: this machine, a scenario's hosts, or nodes of Slurm or Ray. Nodes of a
scheduler are treated as hosts named by the scenario."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.scenario.hosts import RayOptions, RemoteHost, Roles, SlurmOptions
from kvbench.core.scenario.scenario import Deployment, Scenario
from kvbench.errors import InputError, KvbenchError, Problem
from kvbench.hosts.server_access import secret_values, variables
from kvbench.launchers.base import Launcher
from kvbench.launchers.local import LocalLauncher

if TYPE_CHECKING:  # it imports httpx, which takes 0.1 s
    from kvbench.launchers.agents.channel import Channel
    from kvbench.launchers.agents.remote import Fleet

Notify = Callable[[str], None]


class ChosenNodes(Protocol):
    @property
    def hosts(self) -> Mapping[str, tuple[str, ...]]:
        """Role → nodes."""

    def address(self, host: str, /) -> str:
        """Address of a node by the scheduler. Raises LaunchError."""


class Nodes(ChosenNodes, Protocol):
    """Nodes of a scheduler: ``SlurmJob`` or ``RayNodesOf``."""

    def open(self) -> None:
        """Allocate the nodes and set ``hosts``. Raises LaunchError."""

    def channel(self, host: str, command: str, /) -> Channel:
        """Run a shell command on a node. Raises LaunchError."""

    def close(self) -> None:
        """Release the nodes."""


def allocated(scenario: Scenario, run_tag: str, notify: Notify) -> tuple[Scenario, Fleet]:
    """Return the scenario with its hosts, and their fleet, which releases the nodes when closed. ``notify``:
    reports reasons to wait. Raises LaunchError."""
    from kvbench.launchers.agents.remote import Fleet

    nodes = _nodes(scenario.deployment, run_tag, notify)
    try:
        nodes.open()
        deployment = placed_on(scenario.deployment, nodes)
    except BaseException:
        nodes.close()
        raise
    placed = scenario.model_copy(update={"deployment": deployment})
    return placed, Fleet(deployment, run_tag, nodes.channel, nodes.close)


def _nodes(deployment: Deployment, run_tag: str, notify: Notify) -> Nodes:
    loadgen_only = not deployment.engine_options.starts_processes
    if deployment.launcher == "slurm":
        from kvbench.launchers.slurm import SlurmJob

        instances = (deployment.prefill.instances, deployment.decode.instances)
        options = deployment.slurm or SlurmOptions()
        return SlurmJob(options, instances, run_tag, notify, loadgen_only=loadgen_only)
    from kvbench.launchers.ray import RayNodesOf

    return RayNodesOf(deployment.ray or RayOptions(), run_tag, notify, loadgen_only=loadgen_only)


def placed_on(deployment: Deployment, nodes: ChosenNodes) -> Deployment:
    """Set these nodes as the deployment's hosts."""
    options: SlurmOptions | RayOptions = deployment.ray or RayOptions()
    if deployment.launcher == "slurm":
        options = deployment.slurm or SlurmOptions()
    roles_of: dict[str, list[str]] = {}
    for role, names in nodes.hosts.items():
        for name in names:
            roles_of.setdefault(name, []).append(role)
    hosts = {
        name: RemoteHost(address=nodes.address(name), **_host_options(options, roles))
        for name, roles in roles_of.items()
    }
    return deployment.model_copy(update={"hosts": hosts, "roles": Roles.model_validate(dict(nodes.hosts))})


def _host_options(options: SlurmOptions | RayOptions, roles: list[str]) -> dict[str, Any]:
    """A node's options by its roles: the first given one counts."""
    values: dict[str, Any] = {}
    if isinstance(options, SlurmOptions):
        # Slurm's nodes usually share files; Ray's actors use their own Python first.
        values["python"] = options.python or sys.executable
        everywhere = {"nics": options.nics, "devices": options.devices}
    else:
        values |= {"python": options.python} if options.python else {}
        values["env"] = dict(options.env)
        everywhere = {}
    if options.workdir:
        values["workdir"] = options.workdir
    for name in ("nics", "devices"):
        by_role = [getattr(wanted, name) for role in roles if (wanted := getattr(options, role, None))]
        values[name] = next(filter(None, by_role), everywhere.get(name, ()))
    return values


class Places:
    """Context manager for shared resources of a run's launchers, such as connections. ``scenario``: with all
    hosts after ``open``. ``notify``: reports reasons to wait."""

    def __init__(
        self, scenario: Scenario, run_tag: str, notify: Callable[[str], None] = lambda words: None
    ) -> None:
        self.scenario = scenario
        self.run_tag = run_tag
        self._notify = notify
        self._fleet: Fleet | None = None

    def open(self) -> None:
        if self.scenario.deployment.launcher == "local" or self._fleet is not None:
            return
        self.scenario, fleet = fleet_with(self.scenario, self.run_tag, self._notify)
        try:
            fleet.require()
        except BaseException:
            fleet.close()
            raise
        self._fleet = fleet
        self.scenario = self._with_version(self.scenario, fleet)

    def launcher(
        self, log_dir: Path, spec_dir: Path, env: Mapping[str, Mapping[str, str]] | None = None
    ) -> Launcher:
        """Return a deployment's launcher; lost hosts are reconnected. ``env``: process name → variables on
        other hosts, such as GPUs. Raises LaunchError."""
        if self._fleet is None:
            return LocalLauncher(self.run_tag, log_dir, spec_dir)
        secrets = secret_values(variables(self.scenario.deployment.engine_options.server.access))
        launcher = self._fleet.launcher(log_dir, env)
        return launcher.with_secrets("loadgen", secrets)

    def environments(self) -> dict[str, Any]:
        return {} if self._fleet is None else self._fleet.environments()

    def gpus(self) -> dict[str, Any]:
        if self._fleet is None:
            return {}
        with contextlib.suppress(KvbenchError):  # its start will show it
            self._fleet.require()
        return self._fleet.gpus()

    def unusable(self, planned: DeploymentPlan) -> Problem | None:
        """Return why a deployment cannot run on its hosts, or None, also for this machine."""
        deployment = self.scenario.deployment
        if self._fleet is None or not deployment.engine_options.starts_processes:
            return None
        try:
            self._fleet.require()
        except KvbenchError:
            return None  # its start will show it
        for instance in planned.instances:
            for host in deployment.nodes_of(instance.name):
                problem = self._fleet[host].ask(
                    "unusable",
                    120.0,
                    engine=deployment.engine,
                    connector=planned.connector,
                    options=deployment.engine_options.model_dump_json(),
                )
                if problem:
                    return Problem(f"{host}: {problem['reason']}", str(problem.get("fix", "")))
        return None

    def close(self) -> None:
        if self._fleet is not None:
            self._fleet.close()
            self._fleet = None

    @property
    def remote(self) -> bool:
        return self.scenario.deployment.launcher != "local"

    def _with_version(self, scenario: Scenario, fleet: Mapping[str, Any]) -> Scenario:
        """Set the engine's version to the prefill host's, if not given. The version selects connector
        profiles, and this machine's engine may differ."""
        deployment = scenario.deployment
        options = deployment.engine_options
        if not options.asks_version:
            return scenario
        host = deployment.roles.host_of("prefill-0")
        request = {"engine": deployment.engine, "options": options.model_dump_json()}
        try:
            version = str(fleet[host].ask("engine_version", 150.0, **request)["version"])
        except KvbenchError:
            return scenario  # ``unusable`` reports the problem
        updated = deployment.model_copy(update={"engine_options": options.with_version(version)})
        return scenario.model_copy(update={"deployment": updated})

    def __enter__(self) -> Places:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def fleet_with(
    scenario: Scenario, run_tag: str, notify: Callable[[str], None] = lambda words: None
) -> tuple[Scenario, Fleet]:
    """Return the scenario with all hosts, and their unconnected fleet. Waits for a scheduler's nodes; closing
    the fleet releases them. Raises InputError for a scenario without remote hosts, LaunchError."""
    if scenario.deployment.launcher == "local":
        raise InputError(
            "the scenario names no hosts", hint="deployment.launcher: ssh with deployment.hosts (docs/ssh.md)"
        )
    if scenario.deployment.launcher == "ssh":
        return scenario, fleet_of(scenario, run_tag)
    return allocated(scenario, run_tag, notify)


def fleet_of(scenario: Scenario, run_tag: str) -> Fleet:
    """Hosts of a scenario, not yet connected."""
    from kvbench.launchers.agents.remote import Fleet
    from kvbench.launchers.ssh import SshConnections, connector

    deployment = scenario.deployment
    connections = SshConnections()
    reach = connector(lambda name: deployment.hosts[name].ssh, connections)
    return Fleet(deployment, run_tag, reach, connections.close)
