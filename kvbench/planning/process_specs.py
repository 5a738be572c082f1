"""Commands of a deployment's processes, from a scenario and its plan. Engines may have a profiler prefix and
a trace file."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvbench import connectors, engines
from kvbench.connectors.base import Connector, Neighbours
from kvbench.core.findings.setups import transport_warnings
from kvbench.core.physics import ModelShape
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import ONE_THREAD_ENV, ROUTER_MODULE, ProcessSpec
from kvbench.core.records import Finding
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.scenario import Deployment, Scenario
from kvbench.engines.base import Instance, OptionsContext
from kvbench.errors import InputError, MissingLibraryError, Problem
from kvbench.planning.gpu_dealing import remote_device_env

LOGS: Final = "{logs}"
NAME: Final = "{name}"
PROFILER_GRACE_S: Final = 60.0
"""Seconds for a profiler to write its report, tens of them for a big program."""

# --trace-fork-before-exec and --cuda-graph-trace=node: as in vLLM's page on profiling.
NSYS: Final = (
    "nsys",
    "profile",
    "--trace=cuda,nvtx",
    "--trace-fork-before-exec=true",
    "--cuda-graph-trace=node",
    "--sample=none",
    "--force-overwrite=true",
    f"--output={LOGS}/{NAME}",
)


def observed(spec: ProcessSpec, role: str, wanted: Deployment, log_dir: Path | None) -> ProcessSpec:
    """Add the role's prefix and span file. ``log_dir`` None (plan): ``{logs}`` is the folder."""
    folder = LOGS if log_dir is None else str(log_dir)
    if wanted.trace and spec.spec is not None:
        from kvbench.processes.common.spans import SUFFIX  # it imports logging

        spec = replace(spec, spec={**spec.spec, "trace_path": f"{folder}/{spec.name}{SUFFIX}"})
    words: Sequence[str] = getattr(wanted.prefix, role, ())
    if not words:
        return spec
    prefix = tuple(word.replace(NAME, spec.name).replace(LOGS, folder) for word in words)
    profiled = Path(prefix[0]).name == NSYS[0]
    env = {**wanted.engine_options.profiler_env, **spec.env} if profiled else spec.env
    return replace(spec, argv=(*prefix, *spec.argv), env=env)


def nsys_override() -> str:
    """Return the ``--set`` that profiles every instance. Raises MissingLibraryError without nsys."""
    if shutil.which(NSYS[0]) is None:
        raise MissingLibraryError(
            "nsys is not installed here, or not on the PATH",
            hint="NVIDIA Nsight Systems has it; `kvbench export timeline` needs only deployment.trace=true",
        )
    words = {role: list(NSYS) for role in ("prefill", "decode", "aggregated")}
    return f"deployment.prefix={json.dumps(words)}"


def has_prefix(wanted: Deployment) -> bool:
    """Whether an instance has a prefix, which may need time to end."""
    return any(words for words in wanted.prefix.model_dump().values())


def profile_of(scenario: Scenario, connector: str, label: str) -> Connector:
    """Connector profile for the scenario's engine. Raises InputError if there is none for these ranks."""
    engine = engines.get(scenario.deployment.engine)
    version = engine.version(scenario.deployment.engine_options)
    options = scenario.connector_options(label)
    profile = connectors.get(connector).profile(version, options)
    if problem := profile.options_problem(options):
        raise InputError(f"{label}: {problem}")
    prefill, decode = (scenario.deployed(label).ranks_of(f"{role}-0") for role in ("prefill", "decode"))
    if profile.disaggregated and (problem := profile.ranks_problem(version, prefill, decode)):
        raise InputError(problem, hint="give deployment.prefill and deployment.decode the same ranks")
    return profile


def engine_warnings(scenario: Scenario) -> list[str]:
    """Settings that the engine ignores or that harm."""
    chosen = {}
    for choice in scenario.connectors:
        with suppress(InputError):  # one that the engine lacks is reported by ``unusable``
            chosen[choice.label] = (profile_of(scenario, choice.name, choice.label), choice.options)
    deployment = scenario.deployment
    per_request_s = scenario.slo.main().e2el_ms(scenario.workload.output_len) / 1e3
    rate = scenario.search.start_rate
    setting = OptionsContext(
        connectors=chosen,
        hosts=frozenset(deployment.host_of(role) for role in ("prefill", "decode")),
        max_concurrency=None if rate is None else rate * per_request_s / deployment.decode.instances,
    )
    warnings = list(engines.get(deployment.engine).warnings(deployment.engine_options, setting))
    return [*_exposed(scenario), *_all_devices(scenario), *warnings]


def transport_findings(
    scenario: Scenario, plan: Plan, devices: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Finding]:
    """Find transports that a real engine's NICs support badly. ``devices``: host → listed devices. Local
    processes inherit this one's environment."""
    options = scenario.deployment.engine_options
    if not (options.starts_processes and options.chooses_transport):
        return []
    inherited = dict(os.environ) if scenario.deployment.launcher == "local" else {}
    found: list[Finding] = []
    for planned in plan.deployments:
        if connectors.get(planned.connector).disaggregated:
            specs: list[ProcessSpec] = []
            with suppress(InputError):  # one that the engine lacks is reported by ``unusable``
                specs = process_specs(scenario, planned)
            commands = [(spec.argv, {**inherited, **spec.env}) for spec in specs if spec.name != "router"]
            found += transport_warnings(planned.label, commands, devices)
    return found


def _all_devices(scenario: Scenario) -> Iterator[str]:
    """Warn if hosts name NICs and Mooncake, which takes them from its own option alone, uses all."""
    deployment = scenario.deployment
    named = dict.fromkeys(nic for host in deployment.used_hosts.values() for nic in host.nics)
    if deployment.slurm is not None:
        named |= dict.fromkeys(deployment.slurm.nics)
    for choice in scenario.connectors if named and deployment.engine_options.chooses_transport else ():
        options = choice.options
        if not (options.reads_nic_variables or options.requested_nics or options.requested_protocol == "tcp"):
            yield (
                f"{choice.label} uses all RDMA devices, not the hosts' nics ({', '.join(named)}): Mooncake "
                "takes them from its option device_name only"
            )


def _exposed(scenario: Scenario) -> list[str]:
    """Warn if a server listens on more than loopback."""
    deployment = scenario.deployment
    if not deployment.engine_options.starts_processes:
        return []
    hosts = dict.fromkeys(deployment.host_of(role) for role in ("", "prefill", "decode"))
    if deployment.hosts:
        hosts = dict.fromkeys(host.address for host in deployment.used_hosts.values())
    open_to = [host for host in hosts if not is_loopback(host)]
    if not open_to:
        return []
    return [
        f"engines and router listen on {', '.join(open_to)}: any client of that address can send requests "
        "and read /metrics, as no key is required (deployment.host)"
    ]


def is_loopback(host: str) -> bool:
    """Whether an address, or localhost, is loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _neighbours(scenario: Scenario, plan: DeploymentPlan) -> Neighbours:
    where = scenario.deployment.address_of

    def addresses(role: str) -> tuple[str, ...]:
        return tuple(
            f"{where(instance.name)}:{instance.side_port}"
            for instance in plan.instances
            if instance.role == role and instance.side_port
        )

    services = tuple(f"{where('router')}:{port}" for port in plan.service_ports)
    return Neighbours(addresses("prefill"), addresses("decode"), services)


def instances(scenario: Scenario, plan: DeploymentPlan) -> list[Instance]:
    """Engine instances of a deployment, prefill first."""
    shape: ModelShape = scenario.kv_shape
    deployed = scenario.deployed(plan.label)
    neighbours = _neighbours(scenario, plan)
    longest = scenario.workload.longest
    return [
        Instance(
            name=process.name,
            role=process.role,
            rank=process.rank,
            host=scenario.deployment.address_of(process.name),
            port=process.port,
            side_port=process.side_port,
            engine_id=f"{plan.label}-{process.name}",
            model=shape,
            served_model_name=scenario.model.served_model_name,
            ranks=deployed.ranks_of(process.name),
            wire_ranks=deployed.wire_ranks
            if process.role != "aggregated"
            else deployed.ranks_of(process.name).tensor,
            max_tokens_per_request=longest,
            neighbours=neighbours,
            nodes=tuple(
                scenario.deployment.hosts[name].address for name in scenario.deployment.nodes_of(process.name)
            ),
            group_port=process.group_port,
            devices=process.devices,
        )
        for process in plan.instances
    ]


def process_specs(scenario: Scenario, plan: DeploymentPlan, log_dir: Path | None = None) -> list[ProcessSpec]:
    """Processes of a deployment in start order: helpers, prefill, decode, router. ``log_dir``: of their logs;
    None for a plan."""
    engine = engines.get(scenario.deployment.engine)
    connector = profile_of(scenario, plan.connector, plan.label)
    options = scenario.connector_options(plan.label)
    engine_options = scenario.deployment.engine_options
    members = instances(scenario, plan)
    services_at = scenario.deployment.address_of("router")
    specs = connector.services(options, services_at, plan.service_ports)
    for member in members:
        specs += engine.processes(member, connector, options, engine_options)
    if plan.router_port is not None:
        specs.append(_router_spec(scenario, plan))
    roles = {member.name: member.role for member in members}
    addresses = [services_at, *(address for member in members for address in (member.host, *member.nodes))]
    unproxied = tuple(dict.fromkeys([*addresses, "localhost", "127.0.0.1"]))
    return [
        replace(
            observed(spec, roles.get(spec.name.partition(NODE)[0], ""), scenario.deployment, log_dir),
            beside=unproxied,
        )
        for spec in specs
    ]


def placed_specs(
    scenario: Scenario, plan: DeploymentPlan, log_dir: Path | None = None, *, dealt: bool = True
) -> tuple[list[ProcessSpec], tuple[str, ...]]:
    """Return processes as launched, with environment, NICs and GPUs of their hosts; also the placeholders for
    nodes of a scheduler. ``dealt``: False if another system, such as Kubernetes, assigns GPUs."""
    scenario, placeholders = with_placeholders(scenario)
    hosts = scenario.deployment.hosts
    specs = process_specs(scenario, plan, log_dir)
    if not hosts:
        return specs, ()
    gpus = remote_device_env(scenario, plan, numbered=True) if dealt else {}
    placed = []
    for spec in specs:
        host = hosts[scenario.deployment.host_name(spec.name)]
        variables = {**(ONE_THREAD_ENV if spec.one_thread else {}), **spec.env}
        env = {**host.env, **variables, **gpus.get(spec.name, {})}
        placed.append(replace(spec, env=env, host=host.address, nics=host.nics))
    return placed, placeholders


@dataclass(frozen=True)
class _Unknown:
    """Future nodes of a scheduler: one per instance, named after it."""

    hosts: Mapping[str, tuple[str, ...]]

    def address(self, host: str) -> str:
        return host


def with_placeholders(scenario: Scenario) -> tuple[Scenario, tuple[str, ...]]:
    """Put placeholders for nodes that Slurm or Ray will choose; also return their names."""
    deployment = scenario.deployment
    if deployment.launcher not in ("slurm", "ray") or deployment.hosts:
        return scenario, ()
    counts = {"prefill": deployment.prefill.instances, "decode": deployment.decode.instances}
    nodes = {
        role: tuple(f"{role.upper()}-NODE-{number}" for number in range(count))
        for role, count in counts.items()
    }
    from kvbench.launchers.placement import placed_on  # it imports ssl

    first = nodes["prefill"][:1]
    unknown = _Unknown({**nodes, "router": first, "loadgen": first})
    placed = scenario.model_copy(update={"deployment": placed_on(deployment, unknown)})
    return placed, (*nodes["prefill"], *nodes["decode"])


def dispatch_spec(scenario: Scenario, plan: DeploymentPlan) -> dict[str, Any] | None:
    """Request routing to P and D as JSON, for the router, or the load generator in direct mode. Keys:
    connector, version, options, prefill (empty without P/D), decode. None for a single engine and for
    external servers."""
    if plan.router_port is None or not scenario.deployment.engine_options.starts_processes:
        return None
    members = instances(scenario, plan)
    connector = profile_of(scenario, plan.connector, plan.label)
    bootstrap = scenario.connector_options(plan.label).bootstrap_address
    if bootstrap and "://" not in bootstrap:
        bootstrap = f"http://{bootstrap}"
    prefill = [
        {
            "url": member.url,
            "bootstrap_url": (bootstrap or member.bootstrap_url) if connector.needs_bootstrap else "",
            "side_address": member.side_address,
            **({"data_parallel_size": member.ranks.data} if member.ranks.data > 1 else {}),
            **(
                {
                    "engine_ids": list(member.rank_engine_ids),
                    "side_addresses": list(member.rank_side_addresses),
                    "tensor_parallel_size": member.ranks.tensor,
                    "pipeline_parallel_size": member.ranks.pipeline,
                }
                if connector.needs_engine_id
                else {}
            ),
        }
        for member in members
        if member.role == "prefill"
    ]
    engine, routing = engines.get(scenario.deployment.engine), scenario.deployment.routing
    return {
        "connector": plan.connector,
        "version": engine.version(scenario.deployment.engine_options),
        "options": scenario.connector_options(plan.label).model_dump(mode="json"),
        **({"routing": routing} if routing != "session" else {}),
        "prefill": prefill,
        "decode": [
            {"url": member.url, "side_address": member.side_address}
            for member in members
            if member.role != "prefill"
        ],
    }


def _router_spec(scenario: Scenario, plan: DeploymentPlan) -> ProcessSpec:
    host = scenario.deployment.address_of("router")
    lie = engines.get(scenario.deployment.engine).router_lie(scenario.deployment.engine_options)
    processes = scenario.deployment.router_processes
    spec = {
        "host": host,
        "port": plan.router_port,
        "request_timeout_s": scenario.request_timeout_s,
        "bootstrap_timeout_s": scenario.deployment.ready_timeout_s,
        **(dispatch_spec(scenario, plan) or {}),
        **({"processes": processes} if processes > 1 else {}),
        **({"lie": lie} if lie else {}),
    }
    return ProcessSpec(
        name="router",
        argv=(sys.executable, "-m", ROUTER_MODULE),
        spec=spec,
        ready_url=f"http://{host}:{plan.router_port}/health",
        port=plan.router_port or 0,
    )


def several_hosts_problem() -> InputError:
    return InputError(
        "the scenario uses other hosts, but the local launcher starts processes on this machine only",
        hint="name the hosts in deployment.hosts with launcher: ssh; or print the commands with "
        "`kvbench launch --print`, run them there, and measure with --base-url",
    )


def unusable(scenario: Scenario, plan: DeploymentPlan) -> Problem | None:
    """Return why a deployment cannot run here, with a hint, or None."""
    deployment = scenario.deployment
    options = deployment.engine_options
    if deployment.launcher == "local" and deployment.several_hosts and options.starts_processes:
        error = several_hosts_problem()
        return Problem(error.message, error.hint)
    engine = engines.get(deployment.engine)
    return engine.check(connectors.get(plan.connector), options) or unplannable(scenario, plan)


def unplannable(scenario: Scenario, plan: DeploymentPlan) -> Problem | None:
    """Return why a deployment cannot run anywhere: no such connector, or ranks do not fit."""
    try:
        profile_of(scenario, plan.connector, plan.label)
    except InputError as error:
        return Problem(error.message, error.hint)
    return None
