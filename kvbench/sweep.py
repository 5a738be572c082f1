"""Plan → deploy → ask → trial → gate → tell → store: the whole of ``kvbench sweep`` and ``kvbench bench``."""

from __future__ import annotations

import math
import secrets
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench import connectors, engines, environment
from kvbench.cell import CellRunner, Fixed, Knowledge
from kvbench.core.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell
from kvbench.core.scenario import Scenario
from kvbench.core.traces import TracedRequest, figures, request_rate
from kvbench.deployment import Deployment
from kvbench.equality import check_prompts, greedy_outputs
from kvbench.errors import EXIT_FAILED, EXIT_OK, EXIT_SLO_NOT_MET, InputError, KvbenchError
from kvbench.launchers.local import LocalLauncher
from kvbench.planning import plan_of
from kvbench.ports import with_ports
from kvbench.progress import Display, Watcher
from kvbench.provenance import SIMULATED
from kvbench.replay import load_trace, trace_summary
from kvbench.request import Wish, resolve
from kvbench.roster import engine_warnings, process_specs, unusable
from kvbench.runs import CellResult
from kvbench.store import RunInfo, RunStore
from kvbench.strategies import common_rates
from kvbench.trial import TrialRunner


def command(wish: Wish, output: Path, console: Console) -> int:
    """Run a sweep (or one rate), write its report, print its table; returns the exit code."""
    from kvbench import report

    scenario, source = resolve(wish)
    plan = plan_of(scenario)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = _fixed(wish, trace)
    store = create_store(output, scenario, source, plan, "sweep" if fixed is None else "bench")
    if scenario.workload.trace:
        store.update(trace=trace_summary(scenario.workload.trace, figures(trace)))
    console.print(f"run folder: {store.path}", markup=False)
    try:
        with store, Display(console, len(plan.cells)) as display:
            results = Sweep(scenario, plan, store, display, fixed, trace).run()
    finally:
        report.command([store.path], console)
    return exit_code(results)


def _fixed(wish: Wish, trace: Sequence[TracedRequest]) -> Fixed | None:
    """The one rate of ``bench``: that which was asked for, or a trace's own. None: it is searched for."""
    if wish.fixed_rate is None and not wish.replay:
        return None
    rate = wish.fixed_rate or request_rate(trace)
    if not math.isfinite(rate):
        raise InputError("all requests of the trace come at once; give the rate to replay it at: --rate")
    return Fixed(rate, wish.both_modes)


def exit_code(results: Sequence[CellResult]) -> int:
    """0 done · 1 a cell failed or was refused, or none could run · 3 measured, but no rate met the SLO."""
    measured = [result for result in results if result.status == "done"]
    if not measured or any(result.status in ("failed", "refused") for result in results):
        return EXIT_FAILED
    searched = [result.answer for result in measured if result.answer is not None]
    if searched and all(answer["max_request_rate"] is None for answer in searched):
        return EXIT_SLO_NOT_MET
    return EXIT_OK


def create_store(output: Path, scenario: Scenario, source: bytes, plan: Plan, kind: str) -> RunStore:
    """A new run folder with the plan and the machine in it. ``kind``: sweep, bench or simulate."""
    machine = environment.describe()
    engine = engines.get(scenario.deployment.engine)
    simulated = kind == "simulate"
    return RunStore.create(
        output,
        scenario.name,
        source,
        plan.to_json(),
        machine,
        RunInfo(
            kind=kind,
            argv=["kvbench", *(shlex.quote(word) for word in sys.argv[1:])],
            seed=scenario.seed,
            git=machine.get("git"),
            hosts=[str(machine.get("hostname"))],
            labels=(SIMULATED,) if simulated else engine.labels_of(scenario.deployment.engine_options),
        ),
    )


class Sweep:
    """Measures every cell of a plan. One deployment's failure ends its own cells and no others."""

    def __init__(
        self,
        scenario: Scenario,
        plan: Plan,
        store: RunStore,
        watcher: Watcher,
        fixed: Fixed | None = None,
        trace: Sequence[TracedRequest] = (),
    ) -> None:
        self._scenario = scenario
        self._plan = plan
        self._store = store
        self._watcher = watcher
        self._fixed = fixed
        self._trace = trace
        self._knowledge = Knowledge({}, {})
        self._run_tag = f"{store.path.name}-{secrets.token_hex(4)}"
        self._results: list[CellResult] = []
        self._processes: dict[str, dict[str, Any]] = {}

    def run(self) -> list[CellResult]:
        """All cells, in the plan's order; each result is stored as soon as it is there."""
        for note in engine_warnings(self._scenario):
            self._watcher.note(note)
        external = self._scenario.deployment.engine == "external"
        last: DeploymentPlan | None = None
        for deployment in self._plan.deployments:
            if external and deployment.reference_only:
                continue
            if not self._skip(deployment):
                self._measure(deployment)
                last = deployment
        self._equal_round(but=last)
        return self._results

    def _skip(self, deployment: DeploymentPlan) -> bool:
        problem = unusable(self._scenario, deployment)
        if problem is None:
            return False
        self._store.skip_connector(deployment.label, problem.reason, problem.fix)
        self._watcher.note(f"{deployment.label} is skipped: {problem.reason}")
        if problem.fix:
            self._watcher.note(f"  mend: {problem.fix}")
        for cell in self._plan.cells_of(deployment.label):
            self._finish(CellResult(cell, "skipped", reason=problem.reason, hint=problem.fix))
        return True

    def _measure(self, planned: DeploymentPlan) -> None:
        left = list(self._plan.cells_of(planned.label))
        try:
            with ExitStack() as stack:
                deployment = self._bring_up(planned, stack)
                if planned.reference_only:
                    self._learn_reference(deployment)
                runner = self._cell_runner(deployment, planned)
                while left:
                    is_reference = planned.label == self._plan.reference
                    self._finish(*runner.run(left[0], is_reference=is_reference))
                    left.pop(0)
                if planned is self._plan.deployments[-1]:
                    self._at_equal_rates(planned, runner)
        except KvbenchError as error:
            self._watcher.note(f"{planned.label} failed: {error.message}")
            for cell in left:
                self._finish(CellResult(cell, "failed", reason=error.message, hint=error.hint))

    def _bring_up(self, planned: DeploymentPlan, stack: ExitStack, round_: str = "") -> Deployment:
        planned = with_ports(planned, self._scenario.deployment.host)
        specs_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        folder = f"{planned.label}-{round_}" if round_ else planned.label
        self._launcher = LocalLauncher(self._run_tag, self._store.logs / folder, specs_dir)
        self._record_processes(planned)
        self._watcher.stage(f"{planned.label}: starting {len(planned.instances)} instance(s)")
        deployment = stack.enter_context(Deployment(self._scenario, planned, self._launcher))
        self._watcher.stage(f"{planned.label}: ready after {deployment.ready_s:.1f} s")
        return deployment

    def _record_processes(self, planned: DeploymentPlan) -> None:
        if self._scenario.deployment.engine == "external":
            return
        specs = process_specs(self._scenario, planned, self._launcher.log_dir.absolute())
        self._processes[planned.label] = {spec.name: spec.to_json() for spec in specs}
        self._store.write_plan({**self._plan.to_json(), "processes": self._processes})

    def _learn_reference(self, deployment: Deployment) -> None:
        workload = self._scenario.workload
        for length in workload.input_len:
            prompts = check_prompts(self._scenario.seed, length, self._scenario.model.vocab_size)
            outputs = greedy_outputs(deployment.complete, prompts, workload.output_len)
            self._knowledge.reference[length] = outputs

    def _cell_runner(self, deployment: Deployment, planned: DeploymentPlan) -> CellRunner:
        trials = TrialRunner(
            self._scenario,
            deployment,
            self._store,
            self._launcher,
            self._watcher.trial_progress,
            self._trace,
        )
        return CellRunner(self._scenario, trials, self._knowledge, self._watcher, self._pairs, self._fixed)

    @property
    def _pairs(self) -> frozenset[str]:
        """Labels of the deployments that hand KV over."""
        return frozenset(
            each.label for each in self._plan.deployments if connectors.get(each.connector).disaggregated
        )

    def _finish(self, *results: CellResult) -> None:
        """Stores the results of one cell, the main one first."""
        self._results += results
        for result in results:
            self._store.put_cell(result)
        self._watcher.cell_finished(results[0])

    # -- one equal rate ---------------------------------------------------------------------------

    def _equal_round(self, but: DeploymentPlan | None) -> None:
        """Brings the deployments up once more and offers each cell the lowest rate found at its length.

        That rate is known only when all have been searched, and they run one after the other. The last one
        (``but``) was still up then and has been measured at it already.
        """
        for planned in reversed(self._plan.deployments):
            done = planned is but and planned is self._plan.deployments[-1]
            if done or not self._equal_cells(planned):
                continue
            try:
                with ExitStack() as stack:
                    deployment = self._bring_up(planned, stack, round_="equal-rate")
                    self._at_equal_rates(planned, self._cell_runner(deployment, planned))
            except KvbenchError as error:
                self._watcher.note(f"{planned.label} was not measured at an equal rate: {error.message}")

    def _equal_cells(self, planned: DeploymentPlan) -> list[tuple[Cell, float]]:
        search = self._scenario.search
        if not search.equal_rate or search.method != "sustained" or self._fixed is not None:
            return []
        rates = common_rates(self._knowledge.rates)
        cells = self._plan.cells_of(planned.label)
        return [
            (cell, rates[cell.input_len, cell.output_len])
            for cell in cells
            if cell in self._knowledge.rates and (cell.input_len, cell.output_len) in rates
        ]

    def _at_equal_rates(self, planned: DeploymentPlan, runner: CellRunner) -> None:
        for cell, rate in self._equal_cells(planned):
            runner.at_rate(cell, rate)
