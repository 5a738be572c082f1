"""``kvbench launch``: start one deployment until Ctrl-C. ``kvbench runs ps`` and ``stop``: handle processes
of runs, also on a scenario's hosts."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench import files as scratch_folders
from kvbench.core.fitted_table import FittedColumn, Grid, columns_of
from kvbench.core.load.prompts import tokenizer_files
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import shell_script
from kvbench.deployment.deployment import RunningDeployment, with_ports, with_ports_at
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError, MissingLibraryError
from kvbench.files import keep, scratch, write_json
from kvbench.launchers.agents.remote import CODE, Fleet
from kvbench.launchers.base import Launcher
from kvbench.launchers.parts import tagged
from kvbench.launchers.parts.sockets import is_local
from kvbench.launchers.placement import Places, fleet_of
from kvbench.planning.gpu_dealing import remote_device_env, require_gpus
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings, nsys_override, placed_specs, unplannable, unusable

WATCH_S = 0.2


def command(
    scenario_name: str,
    connector: str | None,
    overrides: Sequence[str],
    console: Console,
    *,
    nsys: bool = False,
) -> int:
    """Start, print the URLs, and wait. Raises ProcessDiedError if a process ends."""
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
    """Run a deployment until Ctrl-C."""
    scenario = places.scenario
    problem = (
        (unplannable(scenario, planned) or places.unusable(planned))
        if places.remote
        else unusable(scenario, planned)
    )
    if problem is not None:
        raise MissingLibraryError(f"{planned.connector} cannot run here: {problem.reason}", hint=problem.fix)
    # After an error the logs stay, as the error names them.
    with scratch("kvbench-launch-", kept_after_trouble=True) as folder:
        _keep_up_in(folder, places, planned, console)
    return EXIT_OK


def _keep_up_in(folder: Path, places: Places, planned: DeploymentPlan, console: Console) -> None:
    scenario = places.scenario
    env = remote_device_env(scenario, planned, places.gpus())
    launcher = places.launcher(folder / "logs", folder / "specs", env)
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
    if profiles:
        keep(folder)


def _print_endpoints(deployment: RunningDeployment, launcher: Launcher, console: Console) -> None:
    console.print(f"ready after {deployment.ready_s:.2f} s: {deployment.plan.label}", markup=False)
    console.print(f"  requests  {deployment.endpoints.base_url}/v1/completions", markup=False)
    for name, url in deployment.endpoints.metrics_urls.items():
        pid = f"pid {deployment.pids()[name]}" if name in deployment.pids() else "not started here"
        console.print(f"  {name:<9} {url} ({', '.join([pid, *side_ports(deployment, name)])})", markup=False)
    console.print(f"  logs      {launcher.log_dir}", markup=False)
    console.print("Ctrl-C stops it", markup=False)


def side_ports(deployment: RunningDeployment, name: str) -> list[str]:
    """Describe an instance's side ports: Mooncake's bootstrap server, or side channel."""
    ports = next(
        (instance.all_side_ports for instance in deployment.plan.instances if instance.name == name), ()
    )
    if not ports:
        return []
    what = "bootstrap port" if deployment.connector.needs_bootstrap else "side port"
    return [f"{what} {ports[0]}" if len(ports) == 1 else f"{what}s {ports[0]} to {ports[-1]}"]


def write_tokenizer(scenario_name: str, overrides: Sequence[str], folder: Path, console: Console) -> None:
    """Write a tokenizer for the emulated engine. Raises InputError for a real engine."""
    scenario, _ = resolve(CliOptions(scenario_name, tuple(overrides)))
    deployment = scenario.deployment
    if not deployment.engine_options.models_compute:
        raise InputError(
            f"the {deployment.engine} engine has its model's tokenizer",
            hint="give your client the model's name",
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = tokenizer_files(scenario.model.vocab_size, deployment.engine_options.longest_request)
    for name, content in files.items():
        write_json(folder / name, content)
    console.print(f"tokenizer: {folder}", markup=False, soft_wrap=True)


def print_commands(
    scenario_name: str, connector: str | None, overrides: Sequence[str], *, nsys: bool = False
) -> int:
    """Print shell commands of a deployment's processes in start order, without starting them."""
    profiled = (nsys_override(),) if nsys else ()
    cli = CliOptions(scenario_name, (*overrides, *profiled), (connector,) if connector else ())
    scenario, _ = resolve(cli)
    deployment = scenario.deployment
    if not deployment.engine_options.starts_processes:
        raise InputError("kvbench does not start an external server, so there is no command to print")
    plan = plan_of(scenario)
    planned = _chosen(plan)
    elsewhere = deployment.launcher != "local" or deployment.several_hosts or not is_local(deployment.host)
    planned = with_ports(planned, "127.0.0.1" if elsewhere else deployment.host)
    print(f"# {planned.label}: {len(planned.instances)} instance(s), start them in this order")
    for note in engine_warnings(scenario):
        print(f"# note: {note}")
    try:
        require_gpus(replace(plan, deployments=(planned,)))
    except InputError as error:
        print(f"# note: {error.message}: these commands are for a machine with more")
    specs, placeholders = placed_specs(scenario, planned, Path("."))
    if placeholders:
        print(
            f"# {', '.join(placeholders)}: placeholders for the addresses of nodes that "
            f"{deployment.launcher} chooses; replace them by your nodes'"
        )
    for spec in specs:
        if elsewhere:
            host = next((node for node in deployment.hosts.values() if node.address == spec.host), None)
            python = (host.python if host else "") or "python3"
            spec = replace(spec, argv=tuple(python if word == sys.executable else word for word in spec.argv))
        print(f"\n{shell_script(spec, CODE if elsewhere else '')}")
    return EXIT_OK


def _chosen(plan: Plan) -> DeploymentPlan:
    """First deployment that is not for reference outputs only."""
    for deployment in plan.deployments:
        if not deployment.reference_only:
            return deployment
    raise InputError("the scenario has no connector to launch")


LOCAL = ""
MAX_COMMAND = 100


def ps(scenario: str | None, overrides: Sequence[str], console: Console, *, as_json: bool = False) -> int:
    """List the processes of all runs, also on a scenario's hosts."""
    with _reached(scenario, overrides, console) as (fleet, failed):
        rows = list(_found(fleet))
    if as_json:
        console.file.write(json.dumps({"processes": rows}, indent=2) + "\n")
    elif not rows:
        console.print("no process of a run is left", markup=False)
    else:
        _print(rows, console)
    return EXIT_FAILED if failed else EXIT_OK


def stop(
    tag: str, scenario: str | None, overrides: Sequence[str], console: Console, *, everything: bool
) -> int:
    """End the processes of one run or all, and remove their local temporary folders."""
    if bool(tag) == everything:
        raise InputError("name the run to stop, or use --all", hint="`kvbench runs ps` lists them")
    with _reached(scenario, overrides, console) as (fleet, failed):
        rows = [row for row in _found(fleet) if everything or str(row["tag"]).startswith(tag)]
        for host in dict.fromkeys(row["host"] for row in rows):
            wanted = [(row["pid"], row["tag"]) for row in rows if row["host"] == host]
            ended = (
                tagged.end(wanted) if host == LOCAL else int(fleet[host].ask("end", wanted=wanted)["ended"])
            )
            console.print(f"{host or 'here'}: {ended} process(es) ended", markup=False)
    # This includes folders of processes that have just ended.
    folders = [
        folder for folder, owner in scratch_folders.left() if everything or (owner and owner.startswith(tag))
    ]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        console.print(f"here: {folder} removed", markup=False)
    if not rows and not folders:
        console.print("no such process is running", markup=False)
    return EXIT_FAILED if failed else EXIT_OK


@contextmanager
def _reached(
    scenario: str | None, overrides: Sequence[str], console: Console
) -> Iterator[tuple[Fleet | dict[str, Any], bool]]:
    """Yield agents on reachable hosts, and whether any is unreachable."""
    if scenario is None:
        yield {}, False
        return
    wanted, _ = resolve(CliOptions(scenario, tuple(overrides)))
    if not wanted.deployment.hosts:
        yield {}, False
        return
    with fleet_of(wanted, f"ps-{secrets.token_hex(4)}") as fleet:
        failed = False
        try:
            fleet.require()
        except KvbenchError as error:
            console.print(f"not reached: {error.message}", markup=False, style="yellow")
            failed = True
        yield fleet, failed


def _found(fleet: Fleet | dict[str, Any]) -> Iterator[dict[str, Any]]:
    run_tags = {fleet.run_tag} if isinstance(fleet, Fleet) else set()
    seen = set()
    for process in tagged.tagged(run_tags):
        seen.add(process.pid)
        yield {"host": LOCAL, **vars(process)}
    for name, agent in fleet.items():
        # An agent that sees this process is on this machine, and so are all that it lists.
        answer = agent.ask("tagged", but=sorted(run_tags))
        for row in answer["found"]:
            if answer["boot_id"] != boot_id() or row["pid"] not in seen:
                yield {"host": name, **row}


def boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def _print(rows: Sequence[dict[str, Any]], console: Console) -> None:
    cells = [
        [
            row["tag"],
            row["host"] or "here",
            f"{row['pid']}",
            f"{row['age_s']:.0f}",
            row["command"][:MAX_COMMAND],
        ]
        for row in rows
    ]
    columns = [*columns_of("run|host", "pid|age (s)"), FittedColumn("command", "left", rank=1)]
    fitted = Grid(columns, cells, ruled=False).fitted(console.width if console.is_terminal else None)
    console.print(fitted.text(), markup=False, soft_wrap=True)
