"""``kvbench simulate``: the sweep on virtual time. The same plan, search and gates; no waiting.

In place of a deployment there is ``core.simulation``; a trial's records are judged, stored and reported as
measured ones are, and are marked *simulated* everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.core.load.traces import TracedRequest
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import profile_of
from kvbench.planning.trace_files import load_trace
from kvbench.results.run import Run
from kvbench.results.store import RunStore
from kvbench.sweep.calibration import Surroundings, measured_run, surroundings
from kvbench.sweep.cell import CellRunner, Fixed, Knowledge
from kvbench.sweep.display import Silent, Watcher
from kvbench.sweep.new_run import create_store
from kvbench.sweep.simulated_trial import VirtualDeployment, VirtualTrials, timing_of
from kvbench.sweep.sweep import Sweep, carry_out
from kvbench.sweep.trial.output_check import Equality


class VirtualCells(CellRunner):
    """Cells whose outputs need no check, since there are none."""

    def _check_outputs(self, cell: Cell, is_reference: bool) -> tuple[float, Equality | None, str]:
        assert isinstance(self._trials, VirtualTrials)
        return self._trials.latency_s(cell), None, ""


class VirtualSweep(Sweep):
    """Simulates every cell of a plan.

    ``measured``: a run to take KV links and overheads from. ``labels``: which connector of the scenario a
    deployment's label stands for, where it is not the connector's own; such deployments differ in size, so
    none learns from another where its rate may lie.
    """

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        store: RunStore,
        watcher: Watcher,
        fixed: Fixed | None = None,
        trace: list[TracedRequest] | None = None,
    ) -> None:
        super().__init__(scenario, plan, store, watcher, fixed, trace or [])
        self.measured: Run | None = None
        self.labels: Mapping[str, str] = {}
        self._around: dict[str, str] = dict(store.manifest.get("simulated_with") or {})

    def _skip(self, deployment: DeploymentPlan) -> bool:
        return deployment.reference_only  # nothing is compared with its outputs

    def _teaches(self, planned: DeploymentPlan) -> bool:
        return False

    def _bring_up(self, planned: DeploymentPlan, stack: ExitStack, round_: str = "") -> Any:
        label = self.labels.get(planned.label, planned.label)
        if self.labels:
            self._knowledge = Knowledge({}, {}, self._past)
        connector = profile_of(self._scenario, planned.connector, label)
        backend = connector.transfer_backend if connector.disaggregated else ""
        around = surroundings(self._scenario, label, backend, self.measured)
        self._around[planned.label] = _words(around, connector.disaggregated)
        self._store.update(simulated_with=self._around)
        return VirtualDeployment.of(planned, connector, around)

    def _cell_runner(self, deployment: Any, planned: DeploymentPlan) -> CellRunner:
        trials = VirtualTrials(self._scenario, deployment, self._store, self._trace)
        return VirtualCells(self._scenario, trials, self._knowledge, self._watcher, self._pairs, self._fixed)


def _words(around: Surroundings, moves: bool) -> str:
    over = around.overheads
    link = f"{around.link.gb_per_s:g} GB/s and {around.link.latency_ms:g} ms a transfer, " if moves else ""
    turns = f", {over.turn_ms:g} ms turn, {over.arrival_ms:g} ms at arrival" if moves else ""
    return f"{link}{over.router_ms:g} ms router, {over.front_end_ms:g} ms front end{turns} ({around.source})"


def simulable(cli: CliOptions) -> tuple[Scenario, bytes]:
    """The scenario of CLI options, if it can be simulated. Raises InputError if not."""
    if cli.base_url is not None:
        raise InputError("a server behind a URL cannot be simulated", hint="name a scenario")
    scenario, source = resolve(cli)
    if not scenario.deployment.engine_options.starts_processes or not scenario.model.shape.known:
        raise InputError(
            f"the {scenario.deployment.engine} engine with a model of unknown shape cannot be simulated",
            hint="use a scenario with the emulated engine or vllm",
        )
    timing_of(scenario)
    return scenario, source


def command(cli: CliOptions, output: Path, console: Console, like: Path | None = None) -> int:
    """Simulate a sweep, write its report, print its table; returns the exit code.

    ``like``: a measured run whose KV links and overheads are taken. Raises InputError for a scenario that
    cannot be simulated.
    """
    ready = _ready(cli, output, like)
    return carry_out(ready.store, len(ready.plan.cells), console, ready.sweep)


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
    measured: Run | None

    def sweep(self, watcher: Watcher) -> VirtualSweep:
        sweep = VirtualSweep(self.scenario, self.plan, self.store, watcher, self.fixed, self.trace)
        sweep.measured = self.measured
        return sweep


def _ready(cli: CliOptions, output: Path, like: Path | None) -> _Ready:
    scenario, source = simulable(cli)
    measured = None if like is None else measured_run(like)
    plan = plan_of(scenario)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = Fixed(cli.fixed_rate) if cli.fixed_rate else None
    asked = {**(asdict(fixed) if fixed else {}), "like": None if like is None else str(like.absolute())}
    store = create_store(output, scenario, source, plan, "simulate", asked)
    return _Ready(scenario, plan, store, trace, fixed, measured)
