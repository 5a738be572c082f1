"""``kvbench launch``: bring one deployment up and keep it until Ctrl-C."""

from __future__ import annotations

import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import shell_script
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import EXIT_OK, InputError, MissingLibraryError
from kvbench.launchers.base import Launcher
from kvbench.launchers.parts.ports import with_ports, with_ports_at
from kvbench.launchers.placement.placement import Places
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings, process_specs, unusable
from kvbench.planning.profiling import nsys_override

WATCH_S = 0.2


def command(
    scenario_name: str,
    connector: str | None,
    overrides: Sequence[str],
    console: Console,
    *,
    nsys: bool = False,
) -> int:
    """Print the URLs once everything is ready, then wait. Raises ProcessDiedError if a process ends."""
    profiled = (nsys_override(),) if nsys else ()
    cli = CliOptions(scenario_name, (*overrides, *profiled), (connector,) if connector else ())
    scenario, _ = resolve(cli)
    plan = plan_of(scenario)
    planned = _chosen(plan)
    require_gpus(replace(plan, deployments=(planned,)))
    with Places(scenario, f"launch-{secrets.token_hex(4)}", partial(console.print, markup=False)) as places:
        places.open()
        return _keep_up(places, planned, console)


def _keep_up(places: Places, planned: DeploymentPlan, console: Console) -> int:
    """Brings a deployment up and keeps it until Ctrl-C."""
    scenario = places.scenario
    problem = places.unusable(planned) if places.far else unusable(scenario, planned)
    if problem is not None:
        raise MissingLibraryError(f"{planned.connector} cannot run here: {problem.reason}", hint=problem.fix)
    folder = Path(tempfile.mkdtemp(prefix="kvbench-launch-"))
    launcher = places.launcher(planned, folder / "logs", folder / "specs")
    planned = with_ports_at(planned, scenario.deployment, launcher)
    for note in engine_warnings(scenario):
        console.print(f"note: {note}", markup=False)
    with RunningDeployment(scenario, planned, launcher) as deployment:
        try:
            _print_endpoints(deployment, launcher, console)
            while True:
                deployment.check_alive()
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            console.print("stopping", markup=False)
    profiles = sorted(launcher.log_dir.glob("*.nsys-rep"))
    for path in profiles:
        console.print(f"profile: {path}", markup=False)
    if not profiles:
        shutil.rmtree(
            folder, ignore_errors=True
        )  # after trouble the logs stay, with the error that names them
    return EXIT_OK


def _print_endpoints(deployment: RunningDeployment, launcher: Launcher, console: Console) -> None:
    console.print(f"ready after {deployment.ready_s:.2f} s: {deployment.plan.label}", markup=False)
    console.print(f"  requests  {deployment.endpoints.base_url}/v1/completions", markup=False)
    for name, url in deployment.endpoints.metrics_urls.items():
        console.print(f"  {name:<9} {url} (pid {deployment.pids()[name]})", markup=False)
    console.print(f"  logs      {launcher.log_dir}", markup=False)
    console.print("Ctrl-C stops it", markup=False)


def print_commands(
    scenario_name: str, connector: str | None, overrides: Sequence[str], *, nsys: bool = False
) -> int:
    """Print the shell commands of every process of a deployment, in the order of start. Starts nothing."""
    profiled = (nsys_override(),) if nsys else ()
    cli = CliOptions(scenario_name, (*overrides, *profiled), (connector,) if connector else ())
    scenario, _ = resolve(cli)
    deployment = scenario.deployment
    if not deployment.engine_options.starts_processes:
        raise InputError("an external server is started by somebody else: there is no command to print")
    planned = _chosen(plan_of(scenario))
    elsewhere = deployment.several_hosts
    planned = with_ports(planned, "127.0.0.1" if elsewhere else deployment.host)
    print(f"# {planned.label}: {len(planned.instances)} instance(s), start them in this order")
    for note in engine_warnings(scenario):
        print(f"# note: {note}")
    for spec in process_specs(scenario, planned, Path(".")):
        if elsewhere and spec.argv[0] == sys.executable:
            spec = replace(spec, argv=("python3", *spec.argv[1:]))
        if elsewhere and "PYTHONPATH" in spec.env:
            print(f"\n# PYTHONPATH is this machine's; on {spec.host} name kvbench's folder there")
        print(f"\n{shell_script(spec)}")
    return EXIT_OK


def _chosen(plan: Plan) -> DeploymentPlan:
    """The first deployment that is not there for its reference outputs only."""
    for each in plan.deployments:
        if not each.reference_only:
            return each
    raise InputError("the scenario has no connector to launch")
