"""``kvbench chaos SCENARIO``: run a fixed rate, inject faults by a seeded plan, report the cost of each.

Each fault is one trial on a fresh deployment, so effects do not overlap. The manifest stores the plan
(``asked.faults``) before the start, for resume and repeat. ``--lab`` creates two hosts as network namespaces
and continues in host A as a child process. Only the process to isolate runs in host B, reached via the lab's
NICs. A partition drops all their packets; other NIC faults affect one NIC."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Final

from rich.console import Console

from kvbench.core.chaos_soak.fault_cost import FaultCost
from kvbench.core.chaos_soak.fault_plan import (
    LAB_KINDS,
    FaultTimes,
    PlannedFault,
    WantedFault,
    faults_of,
    plan_faults,
    usual_faults,
)
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.processes import ProcessSpec
from kvbench.core.records import Cell, Method, TrialRecord
from kvbench.core.scenario.hosts import RemoteHost, Roles
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment, with_ports_at
from kvbench.errors import EXIT_INTERRUPTED, EXIT_OK, InputError, KvbenchError, StoreError
from kvbench.files import scratch
from kvbench.hosts.lab.lab import Lab
from kvbench.hosts.procfs import wait_while
from kvbench.launchers.base import Launcher
from kvbench.launchers.local import LocalLauncher, LocalPlace, LocalProcess
from kvbench.launchers.parts.sockets import free_ports
from kvbench.planning.overrides import CliOptions
from kvbench.report.tables.table import json_text
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.bench import create_store
from kvbench.sweep.chaos_soak.constant_rate import (
    CellRate,
    FixedRatePlan,
    FixedRateRun,
    HeldOptions,
    open_unfinished_run,
    rates_in,
    with_canaries,
    with_length,
)
from kvbench.sweep.chaos_soak.fault_trial import FaultTrial
from kvbench.sweep.chaos_soak.strikes import target_counts
from kvbench.sweep.deployed import DeployedBench, scratch_prefix

INSIDE_ENV: Final = "KVBENCH_FAULT_LAB"
"""Set in the child process: name of the lab; the child runs in its host A."""
STOP_S: Final = 60.0
"""Longest wait for the interrupted child process to end its run, in seconds."""
_SHAPE: Final = re.compile(r"(?P<nics>\d{1,2})(?:x(?P<rate>\d+(?:\.\d+)?[kmgt]?bit))?")
MAIN, ALONE = "A", "B"


@dataclass(frozen=True)
class FaultPlace:
    """Lab to run in. ``status``: exit code of the child process that did the run instead."""

    lab: Lab | None = None
    status: int | None = None


@contextmanager
def fault_lab(lab_text: str, console: Console) -> Iterator[FaultPlace]:
    """Create the lab of ``--lab``, or none if empty. Raises InputError, LabError."""
    running_in = os.environ.get(INSIDE_ENV, "")
    if not lab_text:
        yield FaultPlace()
        return
    if running_in:
        yield FaultPlace(Lab.standing(running_in))
        return
    shape = _SHAPE.fullmatch(lab_text.strip())
    if shape is None:
        raise InputError(f"--lab {lab_text!r} is invalid", hint="number of NICs and their rate: 2 or 2x1gbit")
    with Lab.up(int(shape["nics"]), shape["rate"] or "1gbit") as lab:
        console.print(f"lab {lab.plan.name}: {lab.describe()}", markup=False)
        yield FaultPlace(status=_rerun_in_lab(lab))


def _rerun_in_lab(lab: Lab) -> int:
    """Run this command in host A and return its exit code. Waits for it after an interrupt, too."""
    command = [*lab.prefix(MAIN), sys.executable, "-m", "kvbench.cli", *sys.argv[1:]]
    nics = ",".join(nic["name"] for nic in lab.nics(MAIN))
    # UCX uses every device, including each host's loopback, which reaches no other host.
    env = {"UCX_NET_DEVICES": nics, **os.environ, INSIDE_ENV: lab.plan.name}
    process = subprocess.Popen(command, env=env)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        wait_while(lambda: process.poll() is None, STOP_S, 0.05)
        return EXIT_INTERRUPTED
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class _HostAPlace(LocalPlace):
    """This machine as seen from host B of a lab: its addresses are not local."""

    def __init__(self, near: str) -> None:
        self._address = near

    def require_free(self, address: str, ports: Sequence[tuple[str, int]]) -> None:
        return None  # no other process is in that host

    def free_ports(self, address: str, counts: Sequence[int]) -> list[int]:
        return free_ports(self._address, counts)


class LabLauncher(LocalLauncher):
    """Starts processes in host A, and those named ``alone`` in host B."""

    def __init__(self, run_tag: str, log_dir: Path, spec_dir: Path, lab: Lab, alone: frozenset[str]) -> None:
        super().__init__(run_tag, log_dir, spec_dir)
        self._lab = lab
        self._alone = alone

    def start(self, spec: ProcessSpec, *, piped: bool = False) -> LocalProcess:
        if spec.name not in self._alone:
            return super().start(spec, piped=piped)
        inside = replace(spec, argv=(*self._lab.prefix(ALONE), *spec.argv))
        process = super().start(inside, piped=piped)
        process.spec = spec  # for a restart
        return process

    def place_of(self, name: str) -> LocalPlace:
        address = self._lab.plan.address("A", 0)
        return _HostAPlace(address) if name in self._alone else LocalPlace()


def isolated_processes(fault: PlannedFault, planned: DeploymentPlan) -> frozenset[str]:
    """Names of the processes for host B: the one to isolate, or D's for NIC faults."""
    if fault.target == "metadata":
        raise InputError("the metadata service cannot be isolated", hint="kill or freeze it")
    if fault.target == "router":
        return frozenset(["router"])
    role = "prefill" if fault.target == "prefill" else "decode"
    return frozenset(instance.name for instance in planned.instances if instance.role == role)


def lab_scenario(scenario: Scenario, lab: Lab, alone: frozenset[str]) -> Scenario:
    """Put the scenario's roles on the lab's hosts, with the addresses of the first NIC."""
    hosts = {
        MAIN: RemoteHost(address=lab.plan.address("A", 0)),
        ALONE: RemoteHost(address=lab.plan.address("B", 0)),
    }
    roles = {name.partition("-")[0] for name in alone}
    hosts_by_role = {role: ALONE if role in roles else MAIN for role in ("prefill", "decode", "router")}
    placed = Roles(
        prefill=((hosts_by_role["prefill"],),),
        decode=((hosts_by_role["decode"],),),
        router=(hosts_by_role["router"],),
        loadgen=(MAIN,),
    )
    update = {"hosts": hosts, "roles": placed}
    return scenario.model_copy(update={"deployment": scenario.deployment.model_copy(update=update)})


@contextmanager
def running_in_lab(
    scenario: Scenario, planned: DeploymentPlan, store: RunStore, lab: Lab, fault: PlannedFault
) -> Iterator[tuple[Scenario, Launcher, RunningDeployment]]:
    """Run a deployment on the lab's hosts; yields its scenario, launcher and processes."""
    alone = isolated_processes(fault, planned)
    inside = lab_scenario(scenario, lab, alone)
    with scratch(scratch_prefix(store.path), store.path.name) as specs:
        folder = store.logs / f"{planned.label}-{fault.number:02d}"
        launcher = LabLauncher(store.run_tag, folder, specs, lab, alone)
        open_ports = replace(
            planned,
            router_port=None if planned.router_port is None else 0,
            instances=tuple(
                replace(instance, port=0, side_port=None if instance.side_port is None else 0)
                for instance in planned.instances
            ),
            service_ports=tuple(0 for _ in planned.service_ports),
        )
        chosen = with_ports_at(open_ports, inside.deployment, launcher)
        with RunningDeployment(inside, chosen, launcher) as deployment:
            yield inside, launcher, deployment


@dataclass(frozen=True)
class ChaosOptions:
    """Options of a chaos run. ``faults``: empty means all possible ones; ``lab``: lab to run in."""

    held: HeldOptions
    faults: tuple[str, ...] = ()
    times: FaultTimes = field(default_factory=FaultTimes)
    repeats: int = 1
    lab: Lab | None = None


def command(cli: CliOptions, chaos: ChaosOptions, output: Path, console: Console, *, only_plan: bool) -> int:
    """Inject all faults, write and print the report; return the exit code. ``only_plan``: print the plan
    only. Raises InputError for impossible faults."""
    held = FixedRatePlan.of(cli, chaos.held)
    scenario, plan, rates = held.scenario, held.plan, held.rates
    faults = planned_faults(scenario, plan, held.cells, chaos)
    rows = {label: [fault.to_json() for fault in planned] for label, planned in faults.items()}
    if only_plan:
        _print_plan(faults, rates, console)
        return EXIT_OK
    lab = None if chaos.lab is None else chaos.lab.record()
    more = {"faults": rows, "rates": rates, "lab": lab}
    store = create_store(output, scenario, held.source, plan, "chaos", more)
    if lab is not None:
        store.update(labels=[*store.manifest["labels"], "lab"])
    return ChaosRun(scenario, plan, store, rates, faults, chaos.lab).carry_out(console)


def resume_run(path: Path, console: Console, *, force: bool, lab: Lab | None = None) -> int:
    """Resume a chaos run: run the planned faults that have no trial. Raises InputError, StoreError."""
    run = open_unfinished_run(path, "chaos", console)
    if run is None:
        return EXIT_OK
    saved = run.manifest.get("asked") or {}
    if saved.get("lab") and lab is None:
        raise InputError(f"{path} was run in a lab", hint="resume with --lab")
    try:
        faults, rates = {label: faults_of(rows) for label, rows in saved["faults"].items()}, rates_in(saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path}/manifest.json has no plan of faults: {error}", hint="start a new run"
        ) from error
    again = resume.reopen(path, force=force)
    console.print(f"{len(run.all_trials)} faults are kept", markup=False)
    return ChaosRun(again.scenario, again.plan, again.store, rates, faults, lab).carry_out(console)


def planned_faults(
    scenario: Scenario, plan: Plan, cells: Sequence[Cell], options: ChaosOptions
) -> dict[str, list[PlannedFault]]:
    """Plan the faults of each pair, by its label. Raises InputError for impossible ones."""
    wanted = [WantedFault.parse(text) for text in options.faults]
    for fault in wanted:
        if fault.kind in LAB_KINDS and options.lab is None:
            raise InputError(
                f"{fault.text}: kvbench may drop packets only in a lab's network",
                hint="--lab runs the deployment on two separate hosts (network namespaces)",
            )
    deployment = scenario.deployment
    if deployment.launcher != "local" and any(fault.kind == "freeze" for fault in wanted):
        raise InputError("freeze works on local processes only", hint="kill and restart work anywhere")
    found = {}
    for cell in cells:
        planned = next(candidate for candidate in plan.deployments if candidate.label == cell.connector)
        counts = target_counts(planned, options.lab)
        usual = [
            fault
            for fault in usual_faults(counts, lab=options.lab is not None)
            if deployment.launcher == "local" or fault.kind != "freeze"
        ]
        times = replace(options.times, ready_s=deployment.ready_timeout_s)
        found[cell.connector] = plan_faults(wanted or usual, counts, times, options.repeats, scenario.seed)
    return found


@dataclass(frozen=True)
class ChaosRun(FixedRateRun):
    """Injects the faults of all pairs that have no trial yet."""

    method: ClassVar[Method] = "chaos"
    faults: Mapping[str, Sequence[PlannedFault]]
    lab: Lab | None = None

    def pair(
        self, bench: DeployedBench, planned: DeploymentPlan, held: CellRate, done: set[str]
    ) -> KvbenchError | None:
        problems: list[KvbenchError] = []
        for fault in self.faults[planned.label]:
            if f"{held.cell.key}-chaos-{fault.number:02d}" in done:
                continue
            self.watcher.stage(f"{planned.label}: {fault.name}, repeat {fault.repeat}")
            try:
                record = self._run_fault(bench, planned, held, fault)
            except StoreError:
                raise
            except KvbenchError as error:
                self.store.require_room()
                self.watcher.note(f"{planned.label}: {fault.name} could not be measured: {error.message}")
                problems.append(error)
                continue
            self.watcher.trial_finished(record)
            self.watcher.stage(f"{planned.label}: {fault_text(record)}")
        return problems[0] if problems else None

    def _run_fault(
        self, bench: DeployedBench, planned: DeploymentPlan, held: CellRate, fault: PlannedFault
    ) -> TrialRecord:
        requests = held.rate * fault.most_s
        scenario = with_canaries(with_length(self.scenario, fault.most_s, held.rate), requests, held.pool)
        if self.lab is not None:
            with running_in_lab(scenario, planned, self.store, self.lab, fault) as (inside, launcher, pair):
                trial = FaultTrial(inside, held, self.store, self.watcher, self.lab)
                return trial.run(fault, launcher, pair)
        trial = FaultTrial(scenario, held, self.store, self.watcher)
        with bench.running(planned, f"{fault.number:02d}") as (launcher, pair):
            return trial.run(fault, launcher, pair)


def fault_text(record: TrialRecord) -> str:
    """``restart prefill: back after 1.3 s, 12 lost, 0 hung, 0 late; goodput lost 14 requests``."""
    found = record.summary["chaos"]
    cost = FaultCost.from_json(found["cost"])
    back = "never back" if cost.back_s is None else f"back after {cost.back_s:.1f} s"
    fates = ", ".join(f"{cost.fates[fate]} {fate}" for fate in ("lost", "hung", "late"))
    return f"{found['name']}: {back}, {fates}; goodput lost {cost.goodput_lost:.0f} requests"


def _print_plan(
    faults: Mapping[str, Sequence[PlannedFault]], rates: Mapping[str, float], console: Console
) -> None:
    if console.stderr:
        rows = {label: [fault.to_json() for fault in planned] for label, planned in faults.items()}
        sys.stdout.write(json_text({"faults": rows, "rates": dict(rates)}))
        return
    for label, planned in faults.items():
        seconds = sum(fault.most_s for fault in planned)
        console.print(
            f"{label}: {len(planned)} faults at {rates[label]:g} req/s, {seconds / 60:.1f} minutes at most",
            markup=False,
        )
        for fault in planned:
            down = f", undone after {fault.down_s:g} s" if fault.down_s else ""
            console.print(
                f"  {fault.number:3}  repeat {fault.repeat}  {fault.kind} {fault.process}"
                f" at {fault.at_s:.2f} s{down}, watched for {fault.after_s:g} s",
                markup=False,
            )
