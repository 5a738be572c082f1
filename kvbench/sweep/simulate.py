"""``kvbench simulate``: a sweep with the same plan, search and gates, on virtual time.

``core.simulation`` replaces the deployment; records are judged, stored and reported as usual, and marked
*simulated*."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.core.load.traces import TracedRequest
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.load_files import load_trace, session_source
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import RunFolder
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Bench, Site, create_store
from kvbench.sweep.calibration import Surroundings, measured_run
from kvbench.sweep.cell import Fixed
from kvbench.sweep.display import Silent, TimeLeft, Watcher
from kvbench.sweep.simulated_trial import SimulatedDeployment, SimulatedSite, fitted_profile, timing_of
from kvbench.sweep.simulator_process import require_there
from kvbench.sweep.sweep import Sweep, carry_out, deployed_sweep, searching_sweep
from kvbench.sweep.system import SystemBench


@dataclass
class SimulatedBench(Bench):
    """Simulates each deployment. ``measured``: run that gives KV links and overheads. ``labels``: a
    deployment's label → connector of the scenario, if they differ; such deployments differ in size, so none
    hints at another's rate. ``trace``: requests to replay, if any."""

    scenario: Scenario
    store: RunStore
    trace: Sequence[TracedRequest] = ()
    measured: RunFolder | None = None
    labels: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        wanted = self.scenario.workload.sessions
        self._source = session_source(wanted) if wanted is not None else None
        self._fitted: dict[str, Any] = dict(self.store.manifest.get("fitted_with") or {})
        self._around: dict[str, str] = dict(self.store.manifest.get("simulated_with") or {})

    @property
    def alike(self) -> bool:
        return not self.labels

    def open(self) -> AbstractContextManager[Scenario]:
        return nullcontext(self.scenario)

    def up(self, planned: DeploymentPlan, round_: str = "") -> AbstractContextManager[Site]:
        label = (self.labels or {}).get(planned.label, "")
        deployment = SimulatedDeployment.of(self.scenario, planned, label, self.measured)
        self._around[planned.label] = _words(deployment.around, deployment.connector.disaggregated)
        self.store.update(simulated_with=self._around)
        if (profile := fitted_profile(self.scenario.at(label or planned.label))) is not None:
            self._fitted[planned.label] = profile.reach()
            self.store.update(fitted_with=self._fitted)
        return nullcontext(SimulatedSite(self.scenario, deployment, self.store, self.trace, self._source))


def _words(around: Surroundings, moves: bool) -> str:
    over = around.overheads
    link = f"{around.link.gb_per_s:g} GB/s and {around.link.latency_ms:g} ms a transfer, " if moves else ""
    turns = f", {over.turn_ms:g} ms turn, {over.arrival_ms:g} ms at arrival" if moves else ""
    return f"{link}{over.router_ms:g} ms router, {over.front_end_ms:g} ms front end{turns} ({around.source})"


def simulable(cli: CliOptions) -> tuple[Scenario, bytes]:
    """Scenario of CLI options. Raises InputError if it cannot be simulated."""
    scenario, source = _resolve(cli)
    if scenario.deployment.engine_options.simulator.command:
        raise InputError(
            "only the rate of an external system is simulated, without splits, links or loads to compare",
            hint="omit --like, --splits, --gpus and --against",
        )
    require_simulable(scenario)
    return scenario, source


def _resolve(cli: CliOptions) -> tuple[Scenario, bytes]:
    if cli.base_url is not None:
        raise InputError("a server behind a URL cannot be simulated", hint="name a scenario")
    return resolve(cli)


def require_simulable(scenario: Scenario) -> None:
    """Raise InputError if too little is known of a scenario."""
    if not scenario.deployment.engine_options.starts_processes or not scenario.model.shape.known:
        raise InputError(
            f"the {scenario.deployment.engine} engine with a model of unknown shape cannot be simulated",
            hint="use a scenario with the emulated engine or vllm",
        )
    timing_of(scenario)


def command(
    cli: CliOptions, output: Path, console: Console, like: Path | None = None, *, verbose: bool = False
) -> int:
    """Simulate a sweep, write and print its report; return the exit code. ``like``: measured run that gives
    KV links and overheads. ``verbose``: as in ``carry_out``. Raises InputError if it cannot be simulated."""
    ready = _ready(cli, output, like)
    left = TimeLeft(ready.plan, paced=False) if ready.fixed is None else None
    return carry_out(ready.store, len(ready.plan.cells), console, ready.sweep, left, verbose=verbose)


def simulated(cli: CliOptions, output: Path, like: Path | None = None) -> Path:
    """Simulate a sweep without output; return its run folder. Errors as in ``command``."""
    ready = _ready(cli, output, like)
    with ready.store:
        ready.sweep(Silent()).run()
    return ready.store.path


@dataclass(frozen=True)
class ReadySweep:
    """A sweep with an open run folder, new or resumed; the rest is for ``SimulatedBench``."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    trace: Sequence[TracedRequest] = ()
    fixed: Fixed | None = None
    measured: RunFolder | None = None
    labels: Mapping[str, str] | None = None

    @property
    def left(self) -> int:
        return sum(not self.store.earlier.finished(cell) for cell in self.plan.cells)

    def sweep(self, watcher: Watcher) -> Sweep:
        if self.store.manifest["kind"] != "simulate":
            return deployed_sweep(self.scenario, self.plan, self.store, watcher, self.fixed, self.trace)
        bench: Bench = SimulatedBench(self.scenario, self.store, self.trace, self.measured, self.labels)
        if self.scenario.deployment.engine_options.simulator.command:
            bench = SystemBench(self.scenario, self.store, self.trace)
        return searching_sweep(self.scenario, self.plan, self.store, watcher, bench, self.fixed)


def _ready(cli: CliOptions, output: Path, like: Path | None) -> ReadySweep:
    scenario, source = _resolve(cli) if like is None else simulable(cli)
    simulator = scenario.deployment.engine_options.simulator
    if simulator.command and scenario.workload.sessions is not None:
        raise InputError(
            "an external simulator accepts single requests, but the scenario has sessions",
            hint="omit workload.sessions, or --system",
        )
    if simulator.command:
        require_there(simulator)
    else:
        require_simulable(scenario)
    measured = None if like is None else measured_run(like)
    plan = plan_of(scenario)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = Fixed(cli.fixed_rate) if cli.fixed_rate else None
    settings = {**(asdict(fixed) if fixed else {}), "like": None if like is None else str(like.absolute())}
    final = bool(simulator.command) or scenario.workload.sessions is not None
    # A system's state is lost with its process, so its run cannot be resumed;
    # nor can one of sessions, whose corpus may have changed.
    store = create_store(output, scenario, source, plan, "simulate", None if final else settings)
    return ReadySweep(scenario, plan, store, trace, fixed, measured)
