"""Plan → deploy → ask → trial → gate → tell → store: the whole of ``kvbench sweep`` and ``kvbench bench``."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench import connectors
from kvbench.core.load.traces import TracedRequest, figures, request_rate
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import Deployment
from kvbench.errors import EXIT_FAILED, EXIT_OK, EXIT_SLO_NOT_MET, InputError, KvbenchError, StoreError
from kvbench.hosts import environment
from kvbench.launchers.agents.wire import HostLostError
from kvbench.launchers.parts.ports import with_ports_at
from kvbench.launchers.placement.placement import Places
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.overrides import Wish, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings, process_specs, unusable
from kvbench.planning.trace_files import load_trace, trace_summary
from kvbench.results.run import CellResult
from kvbench.results.same_conditions import ELSEWHERE, host_differences
from kvbench.results.store import RunStore
from kvbench.sweep.cell import CellRunner, Fixed, Knowledge
from kvbench.sweep.display import Display, Watcher
from kvbench.sweep.new_run import create_store
from kvbench.sweep.strategies import common_rates
from kvbench.sweep.trial.output_check import check_prompts, greedy_outputs
from kvbench.sweep.trial.trial import TrialRunner


def command(wish: Wish, output: Path, console: Console) -> int:
    """Run a sweep (or one rate), write its report, print its table; returns the exit code."""
    scenario, source = resolve(wish)
    plan = plan_of(scenario)
    require_gpus(plan)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = _fixed(wish, trace)
    kind = "sweep" if fixed is None else "bench"
    store = create_store(output, scenario, source, plan, kind, {} if fixed is None else asdict(fixed))
    if scenario.workload.trace:
        store.update(trace=trace_summary(scenario.workload.trace, figures(trace)))
    return carry_out(
        store, len(plan.cells), console, partial(Sweep, scenario, plan, store, fixed=fixed, trace=trace)
    )


def carry_out(store: RunStore, cells: int, console: Console, sweep_of: Callable[[Display], Sweep]) -> int:
    """Run a sweep to its end, write its report, print its table; returns the exit code.

    ``cells``: how many are left to measure. Of a run that ends too soon it is said how to go on with it.
    """
    from kvbench.report import report

    console.print(f"run folder: {store.path}", markup=False)
    try:
        with store, Display(console, cells) as display:
            results = sweep_of(display).run()
    except BaseException:
        # What ended the run is what is to be told, not that its report cannot be written either.
        with suppress(KvbenchError, OSError):
            report.command([store.path], console)
        console.print(f"to go on with it: {resume_words(store.manifest['kind'], store.path)}", markup=False)
        raise
    report.command([store.path], console)
    if any(result.status == "failed" for result in results):
        words = resume_words(store.manifest["kind"], store.path)
        console.print(f"to measure the failed cells once more: {words}", markup=False)
    return exit_code(results)


def resume_words(kind: str, path: Path) -> str:
    """The command that goes on with a run."""
    return f"kvbench {'bench' if kind == 'bench' else 'sweep'} --resume {shlex.quote(str(path))}"


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


def scratch_prefix(path: Path) -> str:
    """How a run's temporary folders begin: short, for the sockets in them; known, for a kill leaves them."""
    return f"kvbench-{path.name[-6:]}-"


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
        self._past = store.past
        self._knowledge = Knowledge({}, {}, store.past)
        self._run_tag = store.run_tag
        self._results: list[CellResult] = []
        self._processes: dict[str, dict[str, Any]] = store.processes() if store.resumed else {}

    def run(self) -> list[CellResult]:
        """All cells, in the plan's order; each result is stored as soon as it is there.

        Raises LaunchError if one of the scenario's hosts cannot be reached at the beginning.
        """
        with Places(self._scenario, self._run_tag, self._watcher.stage) as self._places:
            self._reach_hosts()
            return self._run()

    def _reach_hosts(self) -> None:
        """Connects to all hosts at once; what they are is put into the run folder."""
        if not self._places.far:
            return
        where = ", ".join(self._scenario.deployment.hosts) or self._scenario.deployment.launcher
        self._watcher.stage(f"connecting to {where}")
        self._places.open()
        self._scenario = self._places.scenario
        hosts = self._places.environments()
        if self._past.hosts:
            self._compare_hosts(hosts)
            return
        here = environment.describe()
        self._store.write_environment({**here, "hosts": hosts})
        names = [here.get("hostname"), *(each.get("hostname") for each in hosts.values())]
        self._store.update(hosts=list(dict.fromkeys(str(name) for name in names)))

    def _compare_hosts(self, hosts: Mapping[str, Any]) -> None:
        """Raises StoreError if hosts are not what they were when the run began, unless that was forced."""
        differs = host_differences(self._past.hosts, hosts)
        if differs and not self._past.forced:
            raise StoreError(
                f"{self._store.path} was begun on other hosts:\n  " + "\n  ".join(differs),
                hint="go on where it began, or go on all the same with --force, which marks the run",
            )
        if differs:
            self._store.resumed_elsewhere(differs, ELSEWHERE)
            for each in differs:
                self._watcher.note(f"not as it was: {each}")

    def _run(self) -> list[CellResult]:
        for note in engine_warnings(self._scenario):
            self._watcher.note(note)
        external = self._scenario.deployment.engine == "external"
        last: DeploymentPlan | None = None
        for deployment in self._plan.deployments:
            if external and deployment.reference_only:
                continue
            left = self._recall(deployment)
            if not left and not self._teaches(deployment):
                continue
            if not self._skip(deployment):
                self._measure(deployment)
                last = deployment
        self._equal_round(but=last)
        return self._results

    def _recall(self, planned: DeploymentPlan) -> list[Cell]:
        """Takes over what the folder has of a deployment; returns the cells that are still to be measured.

        Deployment by deployment, so that a cell learns from those before it and no others, as it would have
        in a run without a break.
        """
        left = []
        for cell in self._plan.cells_of(planned.label):
            if not self._past.finished(cell):
                left.append(cell)
                continue
            results = self._past.results[cell]
            self._results += results
            for result in results:
                rate = (result.answer or {}).get("max_request_rate")
                if result.main and result.status == "done" and rate is not None:
                    self._knowledge.rates[cell] = rate
        if planned.label == self._plan.reference:
            for (label, input_len), outputs in self._past.outputs.items():
                if label == planned.label:
                    self._knowledge.reference[input_len] = outputs
        return left

    def _teaches(self, planned: DeploymentPlan) -> bool:
        """Whether a deployment without cells of its own still has outputs to give that others need."""
        if planned.label != self._plan.reference:
            return False
        others = [cell for cell in self._plan.cells if cell.connector != planned.label]
        return any(
            cell.input_len not in self._knowledge.reference and not self._past.finished(cell)
            for cell in others
        )

    def _skip(self, deployment: DeploymentPlan) -> bool:
        problem = (
            self._places.unusable(deployment) if self._places.far else unusable(self._scenario, deployment)
        )
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
        left = [cell for cell in self._plan.cells_of(planned.label) if not self._past.finished(cell)]
        while True:
            try:
                return self._measure_cells(planned, left)
            except StoreError:
                raise  # without the folder no cell can go on
            except (KvbenchError, OSError) as error:
                self._store.require_room()  # a process that cannot write its log may die of that
                message, hint = (
                    (error.message, error.hint) if isinstance(error, KvbenchError) else (str(error), "")
                )
                self._watcher.note(f"{planned.label} failed: {message}")
                # A lost host may be back: its next cells get a deployment of their own, if one can start.
                failed = left[:1] if isinstance(error, HostLostError) else list(left)
                for cell in failed:
                    left.remove(cell)
                    self._finish(CellResult(cell, "failed", reason=message, hint=hint))
                if not left:
                    return None

    def _measure_cells(self, planned: DeploymentPlan, left: list[Cell]) -> None:
        """Measures the cells of one deployment, each of which is then no longer among ``left``."""
        with ExitStack() as stack:
            deployment = self._bring_up(planned, stack)
            if planned.reference_only or not left:
                self._learn_reference(deployment)
            runner = self._cell_runner(deployment, planned)
            while left:
                is_reference = planned.label == self._plan.reference
                self._finish(*runner.run(left[0], is_reference=is_reference))
                left.pop(0)
            if planned is self._plan.deployments[-1]:
                self._at_equal_rates(planned, runner)

    def _bring_up(self, planned: DeploymentPlan, stack: ExitStack, round_: str = "") -> Deployment:
        scratch = tempfile.TemporaryDirectory(prefix=scratch_prefix(self._store.path))
        specs_dir = Path(stack.enter_context(scratch))
        session = f"session-{self._store.resumed + 1}" if self._store.resumed else ""
        folder = "-".join(filter(None, (planned.label, round_, session)))
        self._launcher = self._places.launcher(planned, self._store.logs / folder, specs_dir)
        planned = with_ports_at(planned, self._scenario.deployment, self._launcher)
        self._record_processes(planned)
        count = len(planned.instances)
        if self._scenario.deployment.engine != "external":  # which nobody starts, nor counts
            self._watcher.stage(f"{planned.label}: starting {count} engine{'s' * (count > 1)}")
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
            if length in self._knowledge.reference:
                continue
            prompts = check_prompts(self._scenario.seed, length, self._scenario.model.vocab_size)
            outputs = greedy_outputs(deployment.complete, prompts, workload.output_len)
            self._knowledge.reference[length] = outputs
            self._store.add_outputs(deployment.plan.label, length, outputs)

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

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """Labels of the deployments that hand KV over."""
        return frozenset(
            each.label for each in self._plan.deployments if connectors.get(each.connector).disaggregated
        )

    def _finish(self, *results: CellResult) -> None:
        """Stores the results of one cell, the main one last: where it stands, the others are."""
        self._results += results
        for result in reversed(results):
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
            except StoreError:
                raise
            except KvbenchError as error:
                self._store.require_room()
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
            if not self._past.tried(cell, "equal_rate")
        ]

    def _at_equal_rates(self, planned: DeploymentPlan, runner: CellRunner) -> None:
        for cell, rate in self._equal_cells(planned):
            runner.at_rate(cell, rate)
