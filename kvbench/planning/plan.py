"""``kvbench plan``: what a sweep would do, without doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from kvbench import connectors, engines
from kvbench.core.plan.plan import DeploymentPlan, InstancePlan, Plan, make_plan
from kvbench.core.plan.prospect_text import prospect_text
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.gpu_dealing import require_gpus, with_devices
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.process_specs import engine_warnings, process_specs, profile_of


def plan_of(scenario: Scenario) -> Plan:
    """The plan of a scenario, with the connectors that are there and what its engine says about it."""
    known = {name: connectors.get(name) for name in connectors.names()}
    profiles = {}
    for choice in scenario.connectors:
        with suppress(InputError):  # the engine lacks it: reported when it is to be launched
            profiles[choice.label] = profile_of(scenario, choice.name, choice.label)
    launch_s = engines.get(scenario.deployment.engine).launch_s
    plan = make_plan(scenario, known, launch_s=launch_s, profiles=profiles)
    return with_devices(replace(plan, notes=(*plan.notes, *engine_warnings(scenario))))


def command(cli: CliOptions, console: Console, *, as_json: bool) -> None:
    """Print the plan: for people, or as JSON with every process's argv and environment."""
    scenario, _ = resolve(cli)
    plan = plan_of(scenario)
    require_gpus(plan)
    if as_json:
        processes = {each.label: _processes(scenario, each) for each in plan.deployments}
        print(json.dumps({**plan.to_json(), "processes": processes}, indent=2))
        return
    _print_header(plan, console)
    console.print(_deployments_table(plan))
    console.print(_cells_table(plan))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"\nestimated time: {_minutes(plan.lower_s)} to {_minutes(plan.upper_s)}", markup=False)
    for part in plan.time:
        console.print(f"  {part.name:<20} {_minutes(part.lower_s)} to {_minutes(part.upper_s)}", markup=False)
    if text := prospect_text(plan.prospects):
        console.print(f"precision: {text}", markup=False)
    console.print("nothing was started", markup=False)


def render(cli: CliOptions, words: Sequence[str]) -> None:
    """Print the manifests of the scenario's deployment. ``words``: NAME=VALUE of ``K8sOptions``."""
    from kvbench.planning.kubernetes import rendered
    from kvbench.planning.kubernetes_pods import options_from

    scenario, _ = resolve(cli)
    print(rendered(plan_of(scenario), options_from(words)), end="")


def _processes(scenario: Scenario, deployment: DeploymentPlan) -> list[dict[str, Any]]:
    """A deployment's processes; none if the engine has no such connector, which the launch reports."""
    with suppress(InputError):
        return [spec.to_json() for spec in process_specs(scenario, deployment)]
    return []


def _print_header(plan: Plan, console: Console) -> None:
    scenario = plan.scenario
    slos, search = scenario.slo.by_tier(), scenario.search
    deployment = scenario.deployment
    console.print(f"scenario   {scenario.name}", markup=False)
    model, ranks = scenario.model, deployment.tensor_parallel_size
    console.print(f"model      {model.name}, {model.kv_dtype} KV, TP {ranks}", markup=False)
    console.print(f"engine     {deployment.engine}, {_engines(plan)}", markup=False)
    for heading, (tier, slo) in zip(["SLO", *[""] * len(slos)], slos.items(), strict=False):
        console.print(f"{heading:<10} {tier + ': ' if tier else ''}{slo.text()}", markup=False)
    rates = f" at {', '.join(f'{rate:g}' for rate in search.rates)} req/s" if search.rates else ""
    beside = ", burst beside it" if search.compare_burst else ""
    console.print(f"method     {search.method}{rates}{beside}", markup=False)
    console.print(f"seed       {scenario.seed}\n", markup=False)


def _engines(plan: Plan) -> str:
    """How many engines each kind of deployment has: ``1P1D against 2 engines without P/D``."""
    deployment = plan.scenario.deployment
    if not deployment.engine_options.starts_processes:
        simulated = deployment.engine_options.simulator.command
        return f"as the simulator has: {simulated}" if simulated else "as many as there are behind the URL"
    measured = [each.instances for each in plan.deployments if not each.reference_only]
    whole = next((mine for mine in measured if mine[0].role == "aggregated"), ())
    words = [f"{deployment.prefill}P{deployment.decode}D"] * any(m[0].role != "aggregated" for m in measured)
    words += [f"{len(whole)} engine{'s' * (len(whole) > 1)} without P/D"] * bool(whole)
    return " against ".join(words)


def _deployments_table(plan: Plan) -> Table:
    table = Table("deployment", "process", "port", "side port", title="processes", title_justify="left")
    for each in plan.deployments:
        label = f"{each.label} (reference outputs only)" if each.reference_only else each.label
        for instance in each.instances:
            nodes = plan.scenario.deployment.nodes_of(instance.name)
            where = f" on {nodes[0]}" if nodes else ""
            table.add_row(label, f"{instance.name}{where}", _port(instance.port), _ports(instance))
            for number, host in enumerate(nodes[1:], 1):
                meeting = f"meets at {_port(instance.group_port)}"
                table.add_row("", f"{instance.name}{NODE}{number} on {host}", meeting, "")
            label = ""
        if each.service_ports:
            table.add_row("", "helpers", ", ".join(dict.fromkeys(map(_port, each.service_ports))), "")
        if each.router_port is not None:
            count = plan.scenario.deployment.router_processes
            table.add_row("", f"router × {count}" if count > 1 else "router", _port(each.router_port), "")
    return table


def _cells_table(plan: Plan) -> Table:
    table = Table(
        "input_len", "output_len", "KV per request", "descriptors", title="cells", title_justify="left"
    )
    for each in plan.kv:
        table.add_row(
            str(each.input_len),
            str(plan.scenario.workload.output_len),
            f"{each.wire_bytes / 1e6:.2f} MB",
            str(each.descriptors),
        )
    table.caption = (
        f"{len(plan.cells)} cells: each length for {len({cell.connector for cell in plan.cells})} connectors"
    )
    return table


def _ports(instance: InstancePlan) -> str:
    """Its side ports: one, or the first and the last of a range."""
    first, more = _port(instance.side_port), instance.side_ports - 1
    if not first or not more:
        return first
    return f"{first} to {_port(instance.all_side_ports[-1])}" if instance.side_port else f"{more + 1} {first}"


def _port(port: int | None) -> str:
    if port is None:
        return ""
    return str(port) if port else "any free"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
