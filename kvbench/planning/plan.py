"""``kvbench plan``: show what a sweep would do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from rich.console import Console

from kvbench import connectors, engines
from kvbench.core.findings.setups import unequal_ranks
from kvbench.core.fitted_table import Grid, columns_of
from kvbench.core.plan.plan import DeploymentPlan, InstancePlan, Plan, make_plan
from kvbench.core.plan.prospect import prospect_text
from kvbench.core.scenario.hosts import NODE
from kvbench.core.scenario.scenario import AGGREGATED, Scenario
from kvbench.core.units import duration_text, estimate_text
from kvbench.errors import EXIT_BAD_INPUT, EXIT_OK, InputError, Problem
from kvbench.hosts.devices import gpus, rdma
from kvbench.hosts.gpu_affinity import affinity_text, with_affinity
from kvbench.planning.gpu_dealing import with_devices
from kvbench.planning.obstacles import left_out, obstacles
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.process_specs import engine_warnings, placed_specs, profile_of, transport_findings


def plan_of(scenario: Scenario) -> Plan:
    """Plan a scenario with the installed connectors and its engine's information."""
    named = dict.fromkeys([AGGREGATED, *(choice.name for choice in scenario.connectors)])
    known = {name: connectors.get(name) for name in named}
    profiles, problems = {}, []
    for choice in scenario.connectors:
        try:
            profiles[choice.label] = profile_of(scenario, choice.name, choice.label)
        except InputError as error:  # ends the connector at its launch
            problems.append(f"{choice.label} cannot run: {error.message}; {error.hint}")
    launch_s = engines.get(scenario.deployment.engine).launch_s
    plan = make_plan(scenario, known, launch_s=launch_s, profiles=profiles)
    measured = [deployment.label for deployment in plan.deployments if not deployment.reference_only]
    unequal = [f"{rank.message}; {rank.advice}" for rank in unequal_ranks(plan.to_json(), measured)]
    return with_devices(replace(plan, notes=(*plan.notes, *problems, *engine_warnings(scenario), *unequal)))


def command(cli: CliOptions, console: Console, *, as_json: bool) -> int:
    """Print the plan, or JSON with every process's argv and environment; return ``EXIT_BAD_INPUT`` if a sweep
    could not start."""
    scenario, _ = resolve(cli)
    plan = plan_of(scenario)
    skipped, problems = left_out(scenario, plan), obstacles(scenario, plan, cli.scenario)
    code = EXIT_BAD_INPUT if problems else EXIT_OK
    if as_json:
        processes = {deployment.label: _processes(scenario, deployment) for deployment in plan.deployments}
        reasons = [{"what": problem.reason, "fix": problem.fix} for problem in problems]
        skips = {label: {"why": problem.reason, "fix": problem.fix} for label, problem in skipped.items()}
        whole = {**plan.to_json(), "processes": processes, "obstacles": reasons, "left_out": skips}
        print(json.dumps(whole, indent=2))
        return code
    _print_obstacles(plan, skipped, problems, console)
    _print_header(plan, console)
    width = console.width if console.is_terminal else None
    for title, grid in (("processes", _deployments(plan)), ("cells", _cells(plan))):
        console.print(f"{title}\n{grid.fitted(width).text()}\n", markup=False, soft_wrap=True)
    lengths = f"each length for {len({cell.connector for cell in plan.cells})} connectors"
    console.print(f"{len(plan.cells)} cells: {lengths}", markup=False)
    for note in (*plan.notes, *_of_this_machine(plan)):
        console.print(f"note: {note}", markup=False)
    _print_time(plan, skipped, console)
    if budget_s := scenario.search.budget_s:
        share = duration_text(budget_s / len(plan.cells))
        how = "the precision below assumes that all of it is near the result, and falls with its square root"
        console.print(f"budget: {share} of trials for each of {len(plan.cells)} cells; {how}", markup=False)
    if text := prospect_text(plan.prospects):
        console.print(f"precision: {text}", markup=False)
    console.print("nothing was started", markup=False)
    return code


def _print_obstacles(
    plan: Plan, skipped: Mapping[str, Problem], problems: Sequence[Problem], console: Console
) -> None:
    """Print first what prevents a start, and what would be skipped."""
    lines = [("cannot start: ", problem) for problem in problems]
    lines += [(f"left out: {label}: ", problem) for label, problem in skipped.items()]
    for heading, problem in lines:
        console.print(f"{heading}{problem.reason}", markup=False, style="yellow")
        if problem.fix:
            console.print(f"  fix: {problem.fix}", markup=False)
    if set(skipped) >= {planned.label for planned in plan.deployments}:
        console.print("nothing would be measured", markup=False, style="yellow")
    if lines:
        console.print()


def _print_time(plan: Plan, skipped: Mapping[str, Problem], console: Console) -> None:
    scenario = plan.scenario
    kept = tuple(connector for connector in scenario.connectors if connector.label not in skipped)
    if skipped and kept:
        plan = plan_of(scenario.model_copy(update={"connectors": kept}))
    if not kept:
        return
    without = f", without {', '.join(skipped)}" if skipped else ""
    whole = estimate_text(plan.lower_s, plan.upper_s)
    console.print(f"\nestimated time: {whole}{without}", markup=False)
    for part in plan.time:
        console.print(f"  {part.name:<20} {estimate_text(part.lower_s, part.upper_s)}", markup=False)
    not_in_it = [_WAITS[scenario.deployment.launcher]] if scenario.deployment.launcher in _WAITS else []
    if scenario.deployment.engine_options.served_from:
        not_in_it.append("downloading the model")
    if not_in_it:
        console.print(f"  not included: {', '.join(not_in_it)}", markup=False)


_WAITS: Final = {"ssh": "reaching the hosts", "slurm": "waiting for Slurm's job", "ray": "waiting for nodes"}


def _of_this_machine(plan: Plan) -> Iterator[str]:
    """Warn about TCP next to RDMA, and show GPU locations, for a local plan."""
    if plan.scenario.deployment.launcher != "local":
        return
    for finding in transport_findings(plan.scenario, plan, {"": rdma()}):
        yield f"{finding.message}; {finding.advice}"
    dealt = {
        device
        for planned in plan.deployments
        for instance in planned.instances
        for device in instance.devices
    }
    for card in (with_affinity(gpus()) or ()) if dealt else ():
        if card["index"] in dealt:
            yield f"GPU {card['index']}: {affinity_text(card)}"


def render(cli: CliOptions, words: Sequence[str]) -> None:
    """Print the deployment's manifests. ``words``: NAME=VALUE of ``K8sOptions``."""
    from kvbench.planning.kubernetes import options_from, render_manifests

    scenario, _ = resolve(cli)
    print(render_manifests(plan_of(scenario), options_from(words)), end="")


def _processes(scenario: Scenario, deployment: DeploymentPlan) -> list[dict[str, Any]]:
    with suppress(InputError):
        specs, placeholders = placed_specs(scenario, deployment)
        more = {"placeholders": list(placeholders)} if placeholders else {}
        return [{**spec.printed(), **more} for spec in specs]
    return []


def _print_header(plan: Plan, console: Console) -> None:
    scenario = plan.scenario
    slos, search = scenario.slo.by_tier(), scenario.search
    deployment = scenario.deployment
    console.print(f"scenario   {scenario.name}", markup=False)
    model = scenario.model
    served = deployment.engine_options.server.base_url
    what = f"{model.name}, {model.kv_dtype} KV, {_ranks(scenario)}"
    served_model = f"{model.served_model_name} at {served}, by {scenario.load.endpoint}"
    console.print(f"model      {served_model if served else what}", markup=False)
    console.print(f"engine     {deployment.engine}, {_engines(plan)}", markup=False)
    for heading, (tier, slo) in zip(["SLO", *[""] * len(slos)], slos.items(), strict=False):
        console.print(f"{heading:<10} {tier + ': ' if tier else ''}{slo.text()}", markup=False)
    rates = f" at {', '.join(f'{rate:g}' for rate in search.rates)} req/s" if search.rates else ""
    burst = ", and burst" if search.compare_burst else ""
    console.print(f"method     {search.method}{rates}{burst}", markup=False)
    console.print(f"seed       {scenario.seed}\n", markup=False)


def _ranks(scenario: Scenario) -> str:
    """Ranks as ``TP 8``, ``P TP 4, D TP 8``, or ``TP 1, TP 2`` for several sizes."""
    texts = []
    for label in dict.fromkeys(connector.label for connector in scenario.connectors):
        deployed = scenario.deployed(label)
        prefill, decode = (deployed.ranks_of(f"{role}-0").text() for role in ("prefill", "decode"))
        texts.append(prefill if prefill == decode else f"P {prefill}, D {decode}")
    return ", ".join(dict.fromkeys(texts))


def _engines(plan: Plan) -> str:
    """Engines per kind of deployment: ``1P1D against 2 engines without P/D``."""
    deployment = plan.scenario.deployment
    if not deployment.engine_options.starts_processes:
        simulated = deployment.engine_options.simulator.command
        return f"as the simulator has: {simulated}" if simulated else "as many as the URL has"
    measured = [planned.instances for planned in plan.deployments if not planned.reference_only]
    whole = next((instances for instances in measured if instances[0].role == "aggregated"), ())
    pair = f"{deployment.prefill.instances}P{deployment.decode.instances}D"
    parts = [pair] * any(instances[0].role != "aggregated" for instances in measured)
    parts += [f"{len(whole)} engine{'s' * (len(whole) > 1)} without P/D"] * bool(whole)
    return " against ".join(parts)


def _deployments(plan: Plan) -> Grid:
    dealt = any(instance.devices for planned in plan.deployments for instance in planned.instances)
    rows: list[list[str]] = []
    none = [""] * dealt
    for deployment in plan.deployments:
        label = (
            f"{deployment.label} (reference outputs only)" if deployment.reference_only else deployment.label
        )
        for instance in deployment.instances:
            nodes = plan.scenario.deployment.nodes_of(instance.name)
            where = f" on {nodes[0]}" if nodes else ""
            given = [",".join(instance.devices)] * dealt
            rows.append([label, f"{instance.name}{where}", _port(instance.port), _ports(instance), *given])
            for number, host in enumerate(nodes[1:], 1):
                meeting = f"meets at {_port(instance.group_port)}"
                rows.append(["", f"{instance.name}{NODE}{number} on {host}", meeting, "", *none])
            label = ""
        if deployment.service_ports:
            rows.append(
                ["", "helpers", ", ".join(dict.fromkeys(map(_port, deployment.service_ports))), "", *none]
            )
        if deployment.router_port is not None:
            count = plan.scenario.deployment.router_processes
            name = f"router × {count}" if count > 1 else "router"
            rows.append(["", name, _port(deployment.router_port), "", *none])
    return Grid(columns_of("deployment|process|port|side port" + "|GPUs" * dealt), rows)


def _cells(plan: Plan) -> Grid:
    rows = [
        [
            str(size.input_len),
            str(plan.scenario.workload.output_len),
            f"{size.wire_bytes / 1e6:.2f} MB",
            str(size.descriptors),
        ]
        for size in plan.kv
    ]
    workload = plan.scenario.workload
    if not rows:  # nothing more is known about a server's model
        rows = [[str(length), str(workload.output_len), "–", "–"] for length in workload.input_len]
    return Grid(columns_of("", "input_len|output_len|KV per request|descriptors"), rows)


def _ports(instance: InstancePlan) -> str:
    first, more = _port(instance.side_port), instance.side_ports - 1
    if not first or not more:
        return first
    return f"{first} to {_port(instance.all_side_ports[-1])}" if instance.side_port else f"{more + 1} {first}"


def _port(port: int | None) -> str:
    if port is None:
        return ""
    return str(port) if port else "any free"
