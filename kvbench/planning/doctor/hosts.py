"""``kvbench doctor --hosts``: check all hosts of a scenario and the data network between them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import Any, Final

from rich.console import Console
from rich.markup import escape

from kvbench.core.plan.plan import Plan
from kvbench.core.scenario.hosts import SlurmOptions
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError, KvbenchError, Problem
from kvbench.hosts.nics.choice import best_gid
from kvbench.hosts.version_rules import Check
from kvbench.launchers.agents.agent_client import AgentClient
from kvbench.launchers.agents.remote import Fleet
from kvbench.launchers.placement import fleet_with
from kvbench.planning.doctor.doctor import affinity_checks, folding_table, print_checks
from kvbench.planning.gpu_dealing import VISIBLE, remote_device_env
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import transport_findings

FREE_BYTES: Final = 2**30
"""GPU memory in use, in bytes, above which a GPU counts as busy."""
UNUSABLE_S: Final = 120.0
"""Longest check of a host's libraries, in seconds; each is loaded in its own process."""
NOTABLE_S: Final = 0.5
"""Clock offset worth reporting, in seconds: logs become hard to read, measurements are not affected."""


def command(
    scenario_name: str,
    overrides: tuple[str, ...],
    console: Console,
    *,
    as_json: bool = False,
    before: Sequence[Check] = (),
) -> int:
    """Print checks and the matrix; return 1 if a required one fails. ``before``: earlier checks."""
    scenario, _ = resolve(CliOptions(scenario_name, overrides))
    require_nodes(scenario, os.environ)
    say = partial(console.print, markup=False) if not as_json else partial(print, file=sys.stderr)
    scenario, standing = fleet_with(scenario, f"doctor-{secrets.token_hex(4)}", say)
    with standing as fleet:
        checks = [*before, *examine(scenario, plan_of(scenario), fleet)]
        pairs = measure_hosts(scenario, fleet)
        nic_pairs = measure_nics(scenario, fleet)
    checks += list(pair_checks({**pairs, **nic_pairs}))
    reach = {
        name: [{"from": source, "to": target, **way} for (source, target), way in found.items()]
        for name, found in {"hosts": pairs, "nics": nic_pairs}.items()
    }
    code = print_checks(checks, console, as_json=as_json, more={"reached": reach})
    if as_json:
        return code
    if pairs:
        console.print(matrix(pairs))
    if nic_pairs:
        console.print(nic_table(nic_pairs))
    return code


def require_nodes(scenario: Scenario, env: Mapping[str, str]) -> None:
    """Raise InputError if checking would have to wait in a scheduler's queue."""
    deployment = scenario.deployment
    if deployment.launcher != "slurm":
        return
    if not (deployment.slurm or SlurmOptions()).job and not env.get("SLURM_JOB_ID"):
        raise InputError(
            "doctor --hosts checks the nodes of a running Slurm job, and there is none",
            hint="allocate one with `salloc --no-shell …`, and name it: --set deployment.slurm.job=NUMBER",
        )


def examine(scenario: Scenario, plan: Plan, fleet: Fleet) -> list[Check]:
    """Check each host, and what must be equal on all."""
    checks = []
    try:
        fleet.require()
    except KvbenchError as error:
        checks.append(Check("hosts", "missing", error.message, error.hint))
    environments, gpus = fleet.environments(), fleet.gpus()
    checks += gpu_checks(scenario, plan, gpus)
    devices = {name: facts.get("rdma") or () for name, facts in environments.items()}
    checks += [
        Check("transport", "warn", finding.message, finding.advice)
        for finding in transport_findings(scenario, plan, devices)
    ]
    for name, agent in fleet.items():
        try:
            checks += list(_host(scenario, plan, name, agent, environments[name]))
            checks += list(connector_checks(scenario, plan, name, agent))
        except KvbenchError as error:
            checks.append(Check(name, "missing", error.message, error.hint))
    return [*checks, *_library_checks(environments)]


def connector_checks(scenario: Scenario, plan: Plan, name: str, agent: AgentClient) -> Iterator[Check]:
    deployment = scenario.deployment
    for planned in plan.deployments:
        if name not in {
            host for instance in planned.instances for host in deployment.nodes_of(instance.name)
        }:
            continue
        problem = agent.ask(
            "unusable",
            UNUSABLE_S,
            engine=deployment.engine,
            connector=planned.connector,
            options=deployment.engine_options.model_dump_json(),
        )
        found = Problem(str(problem["reason"]), str(problem.get("fix", ""))) if problem else None
        detail = f"the {deployment.engine} engine there can run it"
        yield Check.unless(found, f"{name} {planned.label}", detail)


def _host(
    scenario: Scenario, plan: Plan, name: str, agent: AgentClient, environment: Mapping[str, Any]
) -> Iterator[Check]:
    hello, deployment = agent.hello, scenario.deployment
    host = deployment.hosts[name]
    yield Check(name, "ok", f"kvbench {hello['version']}, Python {hello['python']}, {hello['cores']} cores")
    offset_s = float(hello["unix_s"]) - agent.seen_unix_s
    fix = "timestamps in logs will differ; results are not affected"
    yield Check.of(f"{name} clock", abs(offset_s) <= NOTABLE_S, f"{offset_s:+.3f} s from here", fix)
    nics = {str(device["name"]): device for device in environment.get("nics") or ()}
    devices = {str(device.get("name")) for device in environment.get("rdma") or ()}
    for nic in host.nics:
        present = nic in nics or nic in devices
        down = present and nics.get(nic, {}).get("operstate") == "down"
        finding = (
            "is down" if down else "is there" if present else f"is not among {', '.join([*nics, *devices])}"
        )
        yield Check.of(f"{name} {nic}", present and not down, f"NIC {nic} {finding}", bad="missing")
    yield from gid_checks(name, environment)
    yield from _ports(scenario, plan, name, agent)
    model = deployment.engine_options.served_from
    if model.startswith(("/", "~")):
        exists = agent.ask("exists", path=model)["exists"]
        detail = f"{model} {'' if exists else 'is not there'}"
        yield Check.of(f"{name} model", exists, detail, bad="missing")
    used = {int(index): int(used_bytes) for index, used_bytes in agent.ask("gpus")["used_bytes"].items()}
    busy = [index for index in host.devices or used if used.get(index, 0) > FREE_BYTES]
    missing = [index for index in host.devices if index not in used]
    if used or missing:
        state = f"GPUs not there: {missing}" if missing else f"in use: {busy}" if busy else "all free"
        yield Check(f"{name} GPUs", "missing" if missing else "warn" if busy else "ok", state)
    yield from affinity_checks(environment.get("gpus"), name)


def gpu_checks(scenario: Scenario, plan: Plan, answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Check GPUs per process of the largest deployment, or report the missing number."""
    most = max(plan.deployments, key=lambda deployment: len(deployment.instances))

    def dealt() -> str:
        given = remote_device_env(scenario, most, answers)
        return "; ".join(f"{name}: {env[VISIBLE]}" for name, env in given.items())

    check = Check.tried("gpus", dealt)
    if check.detail:
        yield check


def gid_checks(name: str, environment: Mapping[str, Any]) -> Iterator[Check]:
    """Check the address (GID) of each RDMA port."""
    for device in environment.get("rdma") or ():
        for port in device.get("ports") or ():
            gid = best_gid(port) if port.get("gids") else None
            label = f"{name} {device['name']}:{port['port']}"
            if gid is None:
                fix = "check that its link is up and its interface has an address"
                yield Check(label, "warn", "it has no GID", fix)
            else:
                kind = f", {gid['type']}" if gid.get("type") else ""
                yield Check(label, "ok", f"GID {gid['index']} is {gid['gid']}{kind}")


def _ports(scenario: Scenario, plan: Plan, name: str, agent: AgentClient) -> Iterator[Check]:
    """Check the plan's ports at the host's address."""
    deployment = scenario.deployment
    wanted = {
        port
        for part in plan.deployments
        for instance in part.instances
        for nodes in [deployment.nodes_of(instance.name)]
        for node, host in enumerate(nodes)
        if host == name
        for port in instance.ports_on(node, len(nodes))
    }
    if deployment.roles.host_of("router") == name:
        wanted |= {port for part in plan.deployments for port in (part.router_port or 0, *part.service_ports)}
    wanted -= {0}
    address = deployment.hosts[name].address

    def bound() -> str:
        agent.ask("require_free", address=address, ports=[["the plan", port] for port in sorted(wanted)])
        probed = agent.ask("free_ports", address=address, counts=[1])["ports"]
        return f"{len(wanted) or len(probed)} can be bound at {address}"

    yield Check.tried(f"{name} ports", bound)


def _library_checks(environments: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
    """Compare library versions across hosts."""
    libraries = {name: environment.get("libraries") or {} for name, environment in environments.items()}
    differ = []
    for library in dict.fromkeys(key for versions in libraries.values() for key in versions):
        versions = {name: packages.get(library) for name, packages in libraries.items()}
        if len(set(versions.values())) > 1:
            listing = ", ".join(f"{name}: {version or 'none'}" for name, version in versions.items())
            differ.append(f"{library} ({listing})")
    if len(libraries) > 1:
        detail = "not the same: " + "; ".join(differ) if differ else "the same on all hosts"
        yield Check.of("libraries", not differ, detail, "install the same on all hosts")


def measure_hosts(scenario: Scenario, fleet: Fleet) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (from, to) → round trip and bytes per second, or the problem; one pair at a time."""
    hosts = scenario.deployment.hosts
    return {
        (one, other): _measure(fleet[one], hosts[one].address, fleet[other], hosts[other].address)
        for one, other in permutations(fleet, 2)
    }


def measure_nics(scenario: Scenario, fleet: Fleet) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the same per NIC, paired by position, for hosts with several."""
    hosts = scenario.deployment.hosts
    addresses = {}
    for name, agent in fleet.items():
        if len(hosts[name].nics) > 1 and not agent.lost:
            answer = agent.ask("nics", kind="tcp", names=list(hosts[name].nics))
            addresses[name] = {str(nic["name"]): str(nic["address"]) for nic in answer["usable"]}
    found = {}
    for source, target in permutations(addresses, 2):
        for local, remote in zip(addresses[source].items(), addresses[target].items(), strict=False):
            key = (f"{source}/{local[0]}", f"{target}/{remote[0]}")
            found[key] = _measure(fleet[source], local[1], fleet[target], remote[1])
    return found


def _measure(client: AgentClient, local_address: str, server: AgentClient, address: str) -> dict[str, Any]:
    """Measure round trip and bytes per second between two addresses, or return the problem."""
    try:
        port = server.ask("listen", address=address)["port"]
        return client.ask("call", own=local_address, address=address, port=port)
    except KvbenchError as error:
        return {"error": error.message}


def nic_table(pairs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Any:
    rows = [(escape(source), escape(target), *_figures(found)) for (source, target), found in pairs.items()]
    return folding_table(("NIC", "to", "round trip", "one TCP flow"), rows)


def _figures(found: Mapping[str, Any]) -> tuple[str, str]:
    if "error" in found:
        return "[red]no[/red]", ""
    return f"{found['rtt_s'] * 1e3:.2f} ms", f"{found['bytes_per_s'] / 1e9:.2f} GB/s"


def pair_checks(pairs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Iterator[Check]:
    for (source, target), found in pairs.items():
        if "error" in found:
            fix = "check firewalls, and that each address is in the data network"
            yield Check(f"{source} → {target}", "missing", f"not reached: {found['error']}", fix)


def matrix(pairs: Mapping[tuple[str, str], Mapping[str, Any]]) -> Any:
    """Matrix of connections from row to column: round trip and a plain TCP flow."""
    names = list(dict.fromkeys(source for source, _ in pairs))
    rows = [
        [
            escape(source),
            *(
                ", ".join(filter(None, _figures(pairs[source, target]))) if (source, target) in pairs else "–"
                for target in names
            ),
        ]
        for source in names
    ]
    return folding_table(("from \\ to", *map(escape, names)), rows)
