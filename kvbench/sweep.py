"""Plan → deploy → ask → trial → gate → tell → store: the whole of ``kvbench sweep`` and ``kvbench bench``."""

from __future__ import annotations

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
from kvbench.cell import CellRunner, Knowledge
from kvbench.core.plan import DeploymentPlan, Plan
from kvbench.core.scenario import Scenario
from kvbench.deployment import Deployment
from kvbench.equality import check_prompts, greedy_outputs
from kvbench.errors import EXIT_FAILED, EXIT_OK, EXIT_SLO_NOT_MET, KvbenchError
from kvbench.launchers.local import LocalLauncher
from kvbench.planning import plan_of
from kvbench.ports import with_ports
from kvbench.progress import Display, Watcher
from kvbench.request import Wish, resolve
from kvbench.roster import engine_warnings, process_specs, unusable
from kvbench.runs import CellResult
from kvbench.store import RunInfo, RunStore
from kvbench.trial import TrialRunner


def command(wish: Wish, output: Path, console: Console) -> int:
    """Run a sweep (or one rate), write its report, print its table; returns the exit code."""
    from kvbench import report

    scenario, source = resolve(wish)
    plan = plan_of(scenario)
    store = create_store(output, scenario, source, plan, "bench" if wish.fixed_rate else "sweep")
    console.print(f"run folder: {store.path}", markup=False)
    try:
        with store, Display(console, len(plan.cells)) as display:
            results = Sweep(scenario, plan, store, display, wish.fixed_rate).run()
    finally:
        report.command([store.path], console)
    return exit_code(results)


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
    """A new run folder with the plan and the machine in it."""
    machine = environment.describe()
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
            labels=engines.get(scenario.deployment.engine).labels,
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
        fixed_rate: float | None = None,
    ) -> None:
        self._scenario = scenario
        self._plan = plan
        self._store = store
        self._watcher = watcher
        self._fixed_rate = fixed_rate
        self._knowledge = Knowledge({}, {})
        self._run_tag = f"{store.path.name}-{secrets.token_hex(4)}"
        self._results: list[CellResult] = []
        self._processes: dict[str, dict[str, Any]] = {}

    def run(self) -> list[CellResult]:
        """All cells, in the plan's order; each result is stored as soon as it is there."""
        for note in engine_warnings(self._scenario):
            self._watcher.note(note)
        external = self._scenario.deployment.engine == "external"
        for deployment in self._plan.deployments:
            if external and deployment.reference_only:
                continue
            if not self._skip(deployment):
                self._measure(deployment)
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
                    result = runner.run(left[0], is_reference=is_reference)
                    self._finish(result)
                    left.pop(0)
        except KvbenchError as error:
            self._watcher.note(f"{planned.label} failed: {error.message}")
            for cell in left:
                self._finish(CellResult(cell, "failed", reason=error.message, hint=error.hint))

    def _bring_up(self, planned: DeploymentPlan, stack: ExitStack) -> Deployment:
        planned = with_ports(planned, self._scenario.deployment.host)
        specs_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvbench-")))
        self._launcher = LocalLauncher(self._run_tag, self._store.logs / planned.label, specs_dir)
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
            self._scenario, deployment, self._store, self._launcher, self._watcher.trial_progress
        )
        pairs = frozenset(
            each.label for each in self._plan.deployments if connectors.get(each.connector).disaggregated
        )
        return CellRunner(self._scenario, trials, self._knowledge, self._watcher, pairs, self._fixed_rate)

    def _finish(self, result: CellResult) -> None:
        self._results.append(result)
        self._store.put_cell(result)
        self._watcher.cell_finished(result)
