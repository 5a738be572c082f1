"""``kvbench sweep`` and ``kvbench bench``. The last line printed is the most useful next command."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench.core.canaries.pool import CanaryPool
from kvbench.core.load.traces import TracedRequest, figures, request_rate
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.plan.prospect import prospect_text
from kvbench.core.records import HELD_METHODS, Cell, Outputs
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.units import estimate_text
from kvbench.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_SLO_NOT_MET,
    InputError,
    KvbenchError,
    Problem,
    StoreError,
)
from kvbench.launchers.agents.channel import HostLostError
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.load_files import load_trace, trace_summary
from kvbench.planning.obstacles import require_open_files, require_start
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.planning.process_specs import engine_warnings
from kvbench.report.terminal import print_text
from kvbench.results.run import CellResult, load_run
from kvbench.results.store import RunStore
from kvbench.sweep.bench import Bench, CellWork, CellWorkOf, Knowledge, Site, TrialBudget, create_store
from kvbench.sweep.cell import Fixed, searched_cells
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.display import Display, TimeLeft, Watcher, next_step
from kvbench.sweep.otlp import OtlpWatcher, meter
from kvbench.sweep.strategies import common_rates

EQUAL: Final = "equal_rate"


def command(cli: CliOptions, output: Path, console: Console, otlp: str = "", *, verbose: bool = False) -> int:
    """Run a sweep or one rate, write and print the report; return the exit code. ``otlp``: collector for live
    metrics, if any. ``verbose``: as in ``carry_out``."""
    scenario, source = resolve(cli)
    if scenario.deployment.engine_options.simulator.command:
        raise InputError(
            "the scenario's engine is a simulator's command, which answers on virtual time only",
            hint="kvbench simulate takes the scenario, or --system COMMAND",
        )
    plan = plan_of(scenario)
    require_gpus(plan)
    trace = load_trace(scenario.workload.trace) if scenario.workload.trace else []
    fixed = _fixed_load(cli, scenario, trace)
    require_open_files(scenario, *((fixed.rate, fixed.concurrency) if fixed is not None else ()))
    require_start(scenario, plan, cli.scenario)
    kind = "sweep" if fixed is None else "bench"
    settings = {} if fixed is None else asdict(fixed)
    # A run of sessions cannot be resumed: their corpus may have changed.
    final = scenario.workload.sessions is not None
    store = create_store(output, scenario, source, plan, kind, None if final else settings)
    left = TimeLeft(plan) if fixed is None else None
    if scenario.workload.trace:
        store.update(trace=trace_summary(scenario.workload.trace, figures(trace)))
    sweep_of = partial(deployed_sweep, scenario, plan, store, fixed=fixed, trace=trace)
    planned = f"{estimate_text(plan.lower_s, plan.upper_s)} by the plan" if left else ""
    carried_out = partial(
        carry_out, store, len(plan.cells), console, left=left, planned=planned, verbose=verbose
    )
    if not otlp:
        return carried_out(sweep_of)
    with meter(otlp, store.path.name, scenario.name) as otel_meter:
        return carried_out(lambda display: sweep_of(OtlpWatcher(display, otel_meter)))


def carry_out(
    store: RunStore,
    cells: int,
    console: Console,
    sweep_of: Callable[[Display], Sweep],
    left: TimeLeft | None = None,
    planned: str = "",
    *,
    verbose: bool = False,
) -> int:
    """Run a sweep, report, and print the next useful command; return the exit code."""
    results = run_and_report(
        store,
        cells,
        console,
        lambda display: sweep_of(display).run(),
        left=left,
        planned=planned,
        verbose=verbose,
    )
    print_text(console, next_step(load_run(store.path), _how_to_resume(store)))
    return exit_code(results)


def run_and_report(
    store: RunStore,
    cells: int,
    console: Console,
    work: Callable[[Display], Sequence[CellResult]],
    *,
    left: TimeLeft | None = None,
    planned: str = "",
    verbose: bool = False,
) -> Sequence[CellResult]:
    """Run to the end, write and print the report. However it ends, the folder is readable and the last line
    shows the resume command. ``cells``: number left to measure; ``left``, ``planned``: as for ``Display``.
    ``verbose``: also print trials, gates and caveats."""
    from kvbench.report import report
    from kvbench.report.sections.requests import subject_lines

    for line in subject_lines(load_run(store.path)):
        print_text(console, line)
    if not console.is_terminal:
        print_text(console, f"run folder: {store.path}")
    kind = store.manifest["kind"]
    brief = not verbose and kind != "bench"
    try:
        with store, Display(console, store.path, cells, left, planned, verbose=verbose) as display:
            results = work(display)
    except BaseException as error:
        if isinstance(error, KvbenchError) and not store.resumed and store.remove_if_empty():
            raise
        # The error that ended the run is reported, not a failing report.
        with suppress(KvbenchError, OSError):
            report.command([store.path], console, brief=brief)
        if words := _how_to_resume(store):
            print_text(console, f"to resume it: {words}")
        raise
    if kind == "bench":
        report.report_load(store.path, console)
    else:
        report.command([store.path], console, brief=brief)
    return results


def _how_to_resume(store: RunStore) -> str:
    known = store.manifest.get("asked") is not None
    return resume_words(store.manifest["kind"], store.path) if known else ""


def resume_words(kind: str, path: Path) -> str:
    command_name = kind if kind in ("bench", *HELD_METHODS) else "sweep"
    return f"kvbench {command_name} --resume {shlex.quote(str(path))}"


def _fixed_load(cli: CliOptions, scenario: Scenario, trace: Sequence[TracedRequest]) -> Fixed | None:
    """Load of ``bench``: a closed loop, a rate, or a trace's own rate; None: search."""
    if cli.concurrency is not None and scenario.workload.sessions is not None:
        raise InputError(
            "--concurrency applies to single requests: sessions start open loop, and turns wait for answers",
            hint="give a rate of requests: --rate, sessions/s times the requests of a session",
        )
    if cli.concurrency is not None:
        duration_s = cli.duration_s or (0.0 if cli.num_requests else scenario.search.trial_s)
        return Fixed(0.0, False, cli.concurrency, cli.num_requests or 0, duration_s)
    if cli.fixed_rate is None and not cli.replay:
        return None
    rate = cli.fixed_rate or request_rate(trace)
    if not math.isfinite(rate):
        raise InputError("all requests of the trace arrive at once; give a replay rate: --rate")
    return Fixed(rate, cli.both_modes)


def exit_code(results: Sequence[CellResult]) -> int:
    """0 done · 1 a cell failed or was refused, or none could run · 3 measured, but no rate met the SLO."""
    measured = [result for result in results if result.status == "done"]
    if not measured or any(result.status in ("failed", "refused") for result in results):
        return EXIT_FAILED
    searched = [result.answer for result in measured if result.answer is not None]
    if searched and all(answer["max_request_rate"] is None for answer in searched):
        return EXIT_SLO_NOT_MET
    return EXIT_OK


def searching_sweep(
    scenario: Scenario,
    plan: Plan,
    store: RunStore,
    watcher: Watcher,
    bench: Bench,
    fixed: Fixed | None = None,
) -> Sweep:
    """Create a sweep that searches for rates, or runs ``fixed``, on any bench."""
    if fixed is not None:
        plan = replace(plan, prospects=())  # no search: no precision to forecast
    return Sweep(scenario, plan, store, watcher, bench, searched_cells(scenario, plan, watcher, fixed))


def deployed_sweep(
    scenario: Scenario,
    plan: Plan,
    store: RunStore,
    watcher: Watcher,
    fixed: Fixed | None = None,
    trace: Sequence[TracedRequest] = (),
) -> Sweep:
    bench = DeployedBench(scenario, plan, store, watcher, trace, fixed)
    return searching_sweep(scenario, plan, store, watcher, bench, fixed)


def skip_unusable(bench: Bench, planned: DeploymentPlan, store: RunStore, watcher: Watcher) -> Problem | None:
    """Return why a deployment cannot start here, and note it; None if it can."""
    problem = bench.problem(planned)
    if problem is not None:
        store.skip_connector(planned.label, problem.reason, problem.fix)
        watcher.note(f"{planned.label} is skipped: {problem.reason}")
        if problem.fix:
            watcher.note(f"  fix: {problem.fix}")
    return problem


@dataclass
class Sweep:
    """Measures every cell of a plan. A failed deployment ends only its own cells."""

    scenario: Scenario
    plan: Plan
    store: RunStore
    watcher: Watcher
    bench: Bench
    work_of: CellWorkOf

    def __post_init__(self) -> None:
        self._earlier = self.store.earlier
        budget = TrialBudget.of(self.scenario, self.plan)
        self._knowledge = Knowledge({}, {}, self.store.earlier, budget=budget)
        self._references: dict[str, dict[int, Outputs]] = {}
        """Deployment label → input length → reference outputs."""
        self._pools: dict[str, dict[tuple[str, int, int], CanaryPool]] = {}
        """Reference label → reference outputs of canaries for all compared deployments."""
        self._results: list[CellResult] = []
        self._incomplete: list[str] = []
        """Failures in the round at equal rates, which no cell's result shows."""

    def run(self) -> list[CellResult]:
        """Measure all cells in plan order. Raises LaunchError for an unreachable host."""
        with self.bench.open() as scenario:
            for note in engine_warnings(scenario):
                self.watcher.note(note)
            if text := prospect_text(self.plan.prospects):
                self.watcher.note(text, caveat=True)
            last: DeploymentPlan | None = None
            for deployment in self.plan.deployments:
                left = self._load_stored(deployment)
                if not left and not self._gives_reference(deployment):
                    continue
                if not self._skip(deployment, left) and self._measure(deployment):
                    last = deployment
            self._equal_round(last=last)
            if self._incomplete or self.store.manifest.get("incomplete"):
                self.store.update(incomplete=self._incomplete)
            return self._results

    def _load_stored(self, planned: DeploymentPlan) -> list[Cell]:
        """Load a deployment's stored results; return its unfinished cells. Done per deployment, so a cell
        learns only from earlier ones, as without an interruption."""
        left = []
        for cell in self.plan.cells_of(planned.label):
            if not self._earlier.finished(cell):
                left.append(cell)
                continue
            results = self._earlier.results[cell]
            self._results += results
            for (of, how), records in self._earlier.trials.items():
                if of == cell and how != EQUAL:
                    self._knowledge.budget.left_s -= sum(record.duration_s for record in records)
            for result in results:
                if result.main:
                    self._knowledge.budget.end(result)
                rate = (result.answer or {}).get("max_request_rate")
                if result.main and result.status == "done" and rate is not None:
                    self._knowledge.rates[cell] = rate
        if self._is_reference(planned):
            for (label, input_len), outputs in self._earlier.outputs.items():
                if label == planned.label:
                    self._true_outputs(planned)[input_len] = outputs
        for key, pool in self._earlier.canaries.items():
            if pool.label == planned.label:
                self._known_answers(planned)[key] = pool
        return left

    def _is_reference(self, planned: DeploymentPlan) -> bool:
        return self.plan.reference_of(planned.label) == planned.label

    def _true_outputs(self, planned: DeploymentPlan) -> dict[int, Outputs]:
        """Return input length → reference outputs for a deployment."""
        return self._references.setdefault(self.plan.reference_of(planned.label), {})

    def _known_answers(self, planned: DeploymentPlan) -> dict[tuple[str, int, int], CanaryPool]:
        return self._pools.setdefault(self.plan.reference_of(planned.label), {})

    def _gives_reference(self, planned: DeploymentPlan) -> bool:
        """Whether a deployment without open cells still has to give reference outputs or canaries."""
        if not self._is_reference(planned) or not self.bench.gives_reference(planned):
            return False
        known, answers = self._true_outputs(planned), self._known_answers(planned)
        canaries = self.scenario.checks.canary_share > 0 and self.scenario.workload.sessions is None
        # A connector with its own canaries began after the reference's had failed; it keeps its own.
        canaries = canaries and all(
            pool.label == planned.label or self.plan.reference_of(pool.label) != planned.label
            for pool in self._earlier.canaries.values()
        )
        return any(
            cell.input_len not in known
            or (canaries and (planned.label, cell.input_len, cell.output_len) not in answers)
            for cell in self.plan.cells
            if cell.connector != planned.label and self.plan.reference_of(cell.connector) == planned.label
            if not self._earlier.finished(cell)
        )

    def _skip(self, deployment: DeploymentPlan, left: Sequence[Cell]) -> bool:
        problem = skip_unusable(self.bench, deployment, self.store, self.watcher)
        if problem is None:
            return False
        for cell in left:
            self._finish(CellResult(cell, "skipped", reason=problem.reason, hint=problem.fix))
        return True

    def _measure(self, planned: DeploymentPlan) -> bool:
        """Measure a deployment's open cells; return whether it ran to the end."""
        left = [cell for cell in self.plan.cells_of(planned.label) if not self._earlier.finished(cell)]
        while True:
            try:
                self._measure_cells(planned, left)
                return True
            except StoreError:
                raise  # no cell can continue without the folder
            except (KvbenchError, OSError) as error:
                self.store.require_room()  # a process that cannot write its log may die of that
                message, hint = (
                    (error.message, error.hint) if isinstance(error, KvbenchError) else (str(error), "")
                )
                self.watcher.note(f"{planned.label} failed: {message}")
                # A lost host may be back: its next cells get a new deployment, if it starts.
                failed = left[:1] if isinstance(error, HostLostError) else list(left)
                for cell in failed:
                    left.remove(cell)
                    self._finish(CellResult(cell, "failed", reason=message, hint=hint))
                if not left:
                    return False

    def _measure_cells(self, planned: DeploymentPlan, left: list[Cell]) -> None:
        with self.bench.up(planned) as site:
            if planned.reference_only or not left:
                self._learn_reference(planned, site, self._true_outputs(planned))
            known = self._knowledge_of(planned)
            if not self.bench.alike:
                known = Knowledge({}, {}, self._earlier, budget=known.budget)
            work = self.work_of(site, known)
            while left:
                self._finish(*work.run(left[0], is_reference=self._is_reference(planned)))
                left.pop(0)
            self._search_further(planned, work)
            if planned is self.plan.deployments[-1]:
                self._at_equal_rates(planned, site)

    def _search_further(self, planned: DeploymentPlan, work: CellWork) -> None:
        """Give unused time of a connector's cells to those with an open comparison, while it runs."""
        main = [result for result in self._results if result.cell.connector == planned.label and result.main]
        cells = [result.cell for result in main if result.status == "done"]
        for cell, seconds in self._knowledge.budget.spare_parts(cells):
            if results := work.further(cell, seconds):
                self._results = [result for result in self._results if result.cell != cell]
                self._keep(results)

    def _knowledge_of(self, planned: DeploymentPlan) -> Knowledge:
        """Knowledge for a deployment's cells at their start."""
        answers = self._known_answers(planned)
        return replace(
            self._knowledge,
            reference=self._true_outputs(planned),
            canaries=answers,
            reference_label=self.plan.reference_of(planned.label),
        )

    def _learn_reference(self, planned: DeploymentPlan, site: Site, known: dict[int, Outputs]) -> None:
        for length in self.scenario.workload.input_len:
            if length not in known:
                outputs = site.outputs(length)
                if outputs is not None:
                    known[length] = outputs
        answers = self._knowledge_of(planned)
        for cell in self.plan.cells:
            probe = replace(cell, connector=planned.label)
            if self.plan.reference_of(cell.connector) == planned.label and not answers.right_answers(probe):
                answers.learn_answers(site.watch_answers(probe, None))

    def _finish(self, *results: CellResult) -> None:
        self._keep(results)
        self.watcher.cell_finished(results[0])

    def _keep(self, results: Sequence[CellResult]) -> None:
        """Store the results of one cell, the main one last: it marks the cell as complete."""
        self._results += results
        for result in reversed(results):
            self.store.put_cell(result)
        self._knowledge.budget.end(results[0])

    # -- one equal rate ---------------------------------------------------------------------------

    def _equal_round(self, last: DeploymentPlan | None) -> None:
        """Restart the deployments and measure each cell at the lowest rate found for its length, which is
        known only after all searches. ``last``: the last deployment that ran to the end; if it is the plan's
        last one, its trials are done."""
        for planned in reversed(self.plan.deployments):
            done = planned is last and planned is self.plan.deployments[-1]
            if done or not self._equal_cells(planned):
                continue
            try:
                with self.bench.up(planned, round_="equal-rate") as site:
                    self._at_equal_rates(planned, site)
            except StoreError:
                raise
            except KvbenchError as error:
                self.store.require_room()
                self._incomplete.append(f"{planned.label} was not measured at an equal rate: {error.message}")
                self.watcher.note(self._incomplete[-1])

    def _equal_cells(self, planned: DeploymentPlan) -> list[tuple[Cell, float]]:
        search = self.scenario.search
        if not search.equal_rate or search.method != "sustained":
            return []
        rates = common_rates(self._knowledge.rates)
        cells = self.plan.cells_of(planned.label)
        return [
            (cell, rates[cell.input_len, cell.output_len])
            for cell in cells
            if cell in self._knowledge.rates and (cell.input_len, cell.output_len) in rates
            if not self._is_done_at(cell, rates[cell.input_len, cell.output_len])
        ]

    def _is_done_at(self, cell: Cell, rate: float) -> bool:
        """Return whether the newest equal-rate trial has this rate. A failed cell that succeeds in a resumed
        run may lower it for all."""
        return any(
            math.isclose(trial.request_rate, rate, rel_tol=1e-9)
            for trial in self._earlier.tried(cell, EQUAL)[-1:]
        )

    def _at_equal_rates(self, planned: DeploymentPlan, site: Site) -> None:
        """Run one full-length trial per cell, with the same requests for every connector."""
        for cell, rate in self._equal_cells(planned):
            key = f"equal-{cell.lengths_key}"
            number = len(self._earlier.tried(cell, EQUAL)) + 1
            plan = TrialPlan(
                cell,
                number,
                rate,
                "equal_rate",
                paired_with=1 if number > 1 else 0,  # the same prompts as for connectors with a single trial
                method=EQUAL,
                searched=False,
                seed_key=key,
            )
            if (answers := self._knowledge_of(planned).right_answers(cell)) is not None:
                site.watch_answers(cell, answers)
            try:
                record = site.run(plan)
            finally:
                site.close()
            self.watcher.trial_finished(record)
