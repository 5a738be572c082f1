"""``kvbench simulate``: the sweep on virtual time. The same plan, search and gates; no waiting.

In place of a deployment there is ``core.simulation``; a trial's records are judged, stored and reported as
measured ones are, and are marked *simulated* everywhere.
"""

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
from kvbench.sweep.sweep import Sweep, carry_out, searching_sweep
from kvbench.sweep.system import SystemBench


class SimulatedBench:
    """Puts a simulation in the place of each deployment.

    ``measured``: a run to take KV links and overheads from. ``labels``: which connector of the scenario a
    deployment's label stands for, where it is not the connector's own; such deployments differ in size, so
    none learns from another where its rate may lie. ``trace``: what trials replay, if the scenario has one.
    """

    def __init__(
        self,
        scenario: Scenario,
        store: RunStore,
        trace: Sequence[TracedRequest] = (),
        measured: RunFolder | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._scenario = scenario
        self._store = store
        self._trace = trace
        self._measured = measured
        self._labels = labels or {}
        wanted = scenario.workload.sessions
        self._source = session_source(wanted) if wanted is not None else None
        self._fitted: dict[str, Any] = dict(store.manifest.get("fitted_with") or {})
        self._around: dict[str, str] = dict(store.manifest.get("simulated_with") or {})

    @property
    def alike(self) -> bool:
        return not self._labels

    def open(self) -> AbstractContextManager[Scenario]:
        return nullcontext(self._scenario)

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return False  # nothing is compared with its outputs

    def problem(self, planned: DeploymentPlan) -> None:
        """Nothing is in the way of a simulation."""

    def up(self, planned: DeploymentPlan, round_: str = "") -> AbstractContextManager[Site]:
        label = self._labels.get(planned.label, "")
        deployment = SimulatedDeployment.of(self._scenario, planned, label, self._measured)
        self._around[planned.label] = _words(deployment.around, deployment.connector.disaggregated)
        self._store.update(simulated_with=self._around)
        profile = fitted_profile(self._scenario.at(label or planned.label))
        if profile is not None:
            self._fitted[planned.label] = profile.reach()
            self._store.update(fitted_with=self._fitted)
        return nullcontext(SimulatedSite(self._scenario, deployment, self._store, self._trace, self._source))


def _words(around: Surroundings, moves: bool) -> str:
    over = around.overheads
    link = f"{around.link.gb_per_s:g} GB/s and {around.link.latency_ms:g} ms a transfer, " if moves else ""
    turns = f", {over.turn_ms:g} ms turn, {over.arrival_ms:g} ms at arrival" if moves else ""
    return f"{link}{over.router_ms:g} ms router, {over.front_end_ms:g} ms front end{turns} ({around.source})"


def simulable(cli: CliOptions) -> tuple[Scenario, bytes]:
    """The scenario of CLI options, if it can be simulated. Raises InputError if not."""
    scenario, source = _resolved(cli)
    if scenario.deployment.engine_options.simulator.command:
        raise InputError(
            "somebody else's system is asked for its rate alone: it has no splits, no links and no loads of "
            "others to compare",
            hint="leave --like, --splits, --gpus and --against out",
        )
    require_simulable(scenario)
    return scenario, source


def _resolved(cli: CliOptions) -> tuple[Scenario, bytes]:
    if cli.base_url is not None:
        raise InputError("a server behind a URL cannot be simulated", hint="name a scenario")
    return resolve(cli)


def require_simulable(scenario: Scenario) -> None:
    """Raises InputError for a scenario of which too little is known."""
    if not scenario.deployment.engine_options.starts_processes or not scenario.model.shape.known:
        raise InputError(
            f"the {scenario.deployment.engine} engine with a model of unknown shape cannot be simulated",
            hint="use a scenario with the emulated engine or vllm",
        )
    timing_of(scenario)


def command(
    cli: CliOptions, output: Path, console: Console, like: Path | None = None, *, verbose: bool = False
) -> int:
    """Simulate a sweep, write its report, print its table; returns the exit code.

    ``like``: a measured run whose KV links and overheads are taken. ``verbose``: as in ``carry_out``. Raises
    InputError for a scenario that cannot be simulated.
    """
    ready = _ready(cli, output, like)
    left = TimeLeft(ready.plan, paced=False) if ready.fixed is None else None
    return carry_out(ready.store, len(ready.plan.cells), console, ready.sweep, left, verbose=verbose)


def simulated(cli: CliOptions, output: Path, like: Path | None = None) -> Path:
    """Simulate a sweep, silently and without a report; returns its run folder. Errors as in ``command``."""
    ready = _ready(cli, output, like)
    with ready.store:
        ready.sweep(Silent()).run()
    return ready.store.path


@dataclass(frozen=True)
class _Ready:
    """All that a simulated sweep is made of."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    trace: list[TracedRequest]
    fixed: Fixed | None
    measured: RunFolder | None

    def sweep(self, watcher: Watcher) -> Sweep:
        bench: Bench = SimulatedBench(self.scenario, self.store, self.trace, self.measured)
        if self.scenario.deployment.engine_options.simulator.command:
            bench = SystemBench(self.scenario, self.store, self.trace)
        return searching_sweep(self.scenario, self.plan, self.store, watcher, bench, self.fixed)


def _ready(cli: CliOptions, output: Path, like: Path | None) -> _Ready:
    scenario, source = _resolved(cli) if like is None else simulable(cli)
    simulator = scenario.deployment.engine_options.simulator
    if simulator.command and scenario.workload.sessions is not None:
        raise InputError(
            "somebody else's simulator is asked for single requests, and the scenario asks for sessions",
            hint="leave workload.sessions out, or --system",
        )
    if simulator.command:
        require_there(simulator)
    else:
        require_simulable(scenario)
    measured = None if like is None else measured_run(like)
    plan = plan_of(scenario)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = Fixed(cli.fixed_rate) if cli.fixed_rate else None
    asked = {**(asdict(fixed) if fixed else {}), "like": None if like is None else str(like.absolute())}
    once = bool(simulator.command) or scenario.workload.sessions is not None
    # What a system carries from trial to trial is lost with its process, so nobody can go on with its run;
    # nor with one of sessions, whose corpus may be another by then.
    store = create_store(output, scenario, source, plan, "simulate", None if once else asked)
    return _Ready(scenario, plan, store, trace, fixed, measured)
