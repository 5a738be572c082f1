"""Shared by chaos runs and soaks: scenario, rates, canaries, and resource use of processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import psutil
from rich.console import Console

from kvbench import connectors
from kvbench.core.canaries.pool import SPARES, CanaryPool, pool_of_cell
from kvbench.core.plan.plan import DeploymentPlan, Plan
from kvbench.core.records import Cell, Method
from kvbench.core.scenario.scenario import Scenario
from kvbench.deployment.deployment import RunningDeployment
from kvbench.errors import EXIT_FAILED, EXIT_OK, InputError, KvbenchError, StoreError
from kvbench.hosts.procfs import family
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.obstacles import require_open_files
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.results.run import CellResult, RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.chaos_soak.strikes import kv_blocks
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.display import Silent, Watcher
from kvbench.sweep.sweep import run_and_report, skip_unusable
from kvbench.sweep.trial.canary_supply import right_answers
from kvbench.sweep.trial.kv_counters import FAMILIES

SHARE: Final = 0.7
"""Default fixed rate, as a share of the measured maximum: loaded enough to hurt, with room to catch up."""
CANARY_BUDGET_S: Final = 20.0
"""Longest time to query an aggregated server for reference outputs, in seconds."""
CANARY_SHARE: Final = 0.25
"""Share of canaries in a fault trial, which is short and may end early."""
DEADLINE_S: Final = 10.0
DEADLINE_TIMES: Final = 3.0
"""Default request deadline: DEADLINE_S seconds, or this multiple of the SLO's limit if longer."""


@dataclass(frozen=True)
class HeldOptions:
    """``rate``: requests per second of every cell; else ``share`` of the rates in the run ``found``.
    ``deadline_s``: of one request; None: default, or the scenario's if shorter."""

    rate: float | None = None
    share: float | None = None
    found: Path | None = None
    deadline_s: float | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.found is None):
            raise InputError(
                "give the fixed rate, or a run that measured a rate",
                hint="--rate 20, or --from RUN, whose rates are scaled by --share (0.7)",
            )
        if self.share is not None and self.found is None:
            raise InputError("--share scales a measured rate: add --from RUN")
        if self.share is not None and not 0 < self.share <= 2:
            raise InputError(f"--share is a share of the measured rate, such as 0.7, not {self.share:g}")


def fixed_rate_scenario(cli: CliOptions, options: HeldOptions) -> tuple[Scenario, bytes]:
    """Scenario with one input length and a deadline. Raises InputError if it does not fit."""
    scenario, source = resolve(cli, sessions=False)
    engine = scenario.deployment.engine_options
    if not engine.starts_processes or engine.simulator.command:
        raise InputError(
            "this run stops and starts processes, but kvbench did not start those of the scenario",
            hint="give a scenario whose engine kvbench starts (emulated, vllm)",
        )
    if scenario.workload.trace:
        raise InputError("a trace has its own arrivals, so it needs a fixed rate", hint="--rate")
    overrides = []
    if len(scenario.workload.input_len) > 1:
        overrides.append(f"workload.input_len=[{scenario.workload.input_len[0]}]")
    default_s = min(scenario.request_timeout_s, max(DEADLINE_S, DEADLINE_TIMES * scenario.allowed_s))
    deadline_s = default_s if options.deadline_s is None else options.deadline_s
    if options.deadline_s is not None and deadline_s < scenario.allowed_s:
        raise InputError(
            f"--deadline {deadline_s:g} is shorter than the {scenario.allowed_s:g} s that the SLO allows one "
            "request, so answers within the SLO would be cut off",
            hint="give at least that, omit it, or set a tighter SLO",
        )
    if deadline_s != scenario.request_timeout_s:
        overrides.append(f"workload.request_timeout_s={deadline_s:g}")
    return resolve(replace(cli, overrides=(*cli.overrides, *overrides))) if overrides else (scenario, source)


@dataclass(frozen=True)
class FixedRatePlan:
    """Plan of a chaos run or soak, before its folder exists. ``rates``: connector label → rate."""

    scenario: Scenario
    source: bytes
    plan: Plan
    cells: Sequence[Cell]
    rates: Mapping[str, float]

    @classmethod
    def of(cls, cli: CliOptions, options: HeldOptions) -> FixedRatePlan:
        """Create the plan. Raises InputError if it cannot run here."""
        scenario, source = fixed_rate_scenario(cli, options)
        plan = plan_of(scenario)
        require_gpus(plan)
        require_open_files(scenario)
        cells = fixed_rate_cells(plan)
        return cls(scenario, source, plan, cells, rates_of(options, cells))


def rates_of(options: HeldOptions, cells: Sequence[Cell]) -> dict[str, float]:
    """Return connector label → fixed rate. Raises InputError if the run lacks one."""
    if options.rate is not None:
        return {cell.connector: options.rate for cell in cells}
    assert options.found is not None
    run, share = load_run(options.found), SHARE if options.share is None else options.share
    rates = {}
    for cell in cells:
        answers = [measured.answer for measured in run.cells if measured.cell == cell and measured.answer]
        rate = next((answer.get("max_request_rate") for answer in answers), None)
        if not rate:
            known = ", ".join(
                measured.cell.key for measured in run.cells if (measured.answer or {}).get("max_request_rate")
            )
            raise InputError(
                f"{options.found} has no rate for {cell.key}",
                hint=f"it has: {known or 'none'}; choose by --connector, --input-len and --output-len",
            )
        rates[cell.connector] = round(share * float(rate), 4)
    return rates


def fixed_rate_cells(plan: Plan) -> tuple[Cell, ...]:
    """Cells of P/D pairs. Raises InputError if there is none."""
    cells = tuple(cell for cell in plan.cells if connectors.get(_connector(plan, cell)).disaggregated)
    if not cells:
        raise InputError("the scenario has no P/D pair", hint="name one with --connector")
    return cells


def _connector(plan: Plan, cell: Cell) -> str:
    return next(planned.connector for planned in plan.deployments if planned.label == cell.connector)


def with_canaries(scenario: Scenario, requests: float, pool: CanaryPool | None) -> Scenario:
    """Set the number of canaries for a trial of ``requests``: limited by reference outputs and share."""
    share = scenario.checks.canary_share
    if not share or pool is None:
        return scenario
    most = max(0.0, len(pool) - SPARES) / max(1.0, requests)
    checks = scenario.checks.model_copy(update={"canary_share": max(share, min(CANARY_SHARE, most))})
    return scenario.model_copy(update={"checks": checks})


def with_length(scenario: Scenario, seconds: float, rate: float) -> Scenario:
    least = max(1, int(rate * seconds))
    search = {"trial_s": seconds, "max_trial_s": None, "min_requests": least, "max_requests": 10_000_000}
    return scenario.model_copy(update={"search": scenario.search.model_copy(update=search)})


def _pool_for(run: FixedRateRun, scenario: Scenario, bench: DeployedBench, cell: Cell) -> CanaryPool | None:
    """Return reference outputs of an aggregated server, queried once per run, or None with a note."""
    plan, store, watcher = run.plan, run.store, run.watcher
    label = plan.reference_of(cell.connector)
    if (known := pool_of_cell(store.earlier.canaries, cell, label)) is not None:
        return known
    planned = next((candidate for candidate in plan.deployments if candidate.label == label), None)
    problem = None if planned is None else bench.problem(planned)
    if planned is None or problem is not None:
        why = problem.reason if problem is not None else "the plan has none"
        watcher.note(f"outputs are not checked: there is no aggregated server ({why})")
        return None
    with bench.running(planned, "reference") as (_, deployment):
        watcher.stage(f"{label}: querying reference outputs of canaries at {cell.input_len} tokens")
        served_cell = replace(cell, connector=label)
        checks = scenario.checks.model_copy(update={"canary_share": CANARY_SHARE})
        sampled = scenario.model_copy(update={"checks": checks}) if scenario.checks.canary_share else scenario
        exact = scenario.deployment.engine_options.repeats_exactly
        pool = right_answers(
            sampled, deployment, label, served_cell, CANARY_BUDGET_S, proof="reference", scored=not exact
        )
    if pool is not None:
        store.add_canaries(pool)
        store.earlier = replace(store.earlier, canaries={**store.earlier.canaries, pool.key: pool})
    return pool


@dataclass(frozen=True)
class CellRate:
    """A cell's fixed rate, and the reference outputs of its canaries, if known."""

    cell: Cell
    rate: float
    pool: CanaryPool | None = None


@dataclass(frozen=True)
class FixedRateRun(ABC):
    """Measures, pair by pair, what the folder of a chaos run or soak lacks."""

    method: ClassVar[Method]
    scenario: Scenario
    plan: Plan
    store: RunStore
    rates: Mapping[str, float]
    watcher: Watcher = field(default_factory=Silent, kw_only=True)

    def carry_out(self, console: Console) -> int:
        """Run to the end, write and print the report; return the exit code."""
        results = run_and_report(
            self.store, len(self.rates), console, lambda display: replace(self, watcher=display).run()
        )
        return EXIT_FAILED if any(result.status == "failed" for result in results) else EXIT_OK

    def run(self) -> list[CellResult]:
        """Measure all pairs, one result each. Raises StoreError, LaunchError."""
        scenario, results = self.measured_scenario(), []
        bench = DeployedBench(scenario, self.plan, self.store, self.watcher)
        done = {trial.trial_id for trial in load_run(self.store.path).all_trials}
        with bench.open():
            for planned in self.plan.deployments:
                if planned.label not in self.rates or skip_unusable(bench, planned, self.store, self.watcher):
                    continue
                results.append(self._result(bench, scenario, planned, done))
                self.store.put_cell(results[-1])
                self.watcher.cell_finished(results[-1])
        return results

    def measured_scenario(self) -> Scenario:
        return self.scenario

    @abstractmethod
    def pair(
        self, bench: DeployedBench, planned: DeploymentPlan, held: CellRate, done: set[str]
    ) -> KvbenchError | None:
        """Measure one pair; return an error that did not stop it. Raises KvbenchError."""

    def _result(
        self, bench: DeployedBench, scenario: Scenario, planned: DeploymentPlan, done: set[str]
    ) -> CellResult:
        cell = next(candidate for candidate in self.plan.cells if candidate.connector == planned.label)
        result = CellResult(cell, "done", method=self.method, main=False)
        try:
            pool = _pool_for(self, scenario, bench, cell)
            error = self.pair(bench, planned, CellRate(cell, self.rates[planned.label], pool), done)
        except StoreError:
            raise
        except KvbenchError as raised:
            self.store.require_room()
            self.watcher.note(f"{planned.label} failed: {raised.message}")
            error = raised
        return replace(result, status="failed", reason=error.message, hint=error.hint) if error else result


def open_unfinished_run(path: Path, kind: str, console: Console) -> RunFolder | None:
    """Return the run to resume, or None (report printed) if it is complete. Raises InputError."""
    run = load_run(path)
    if run.manifest.get("kind") != kind:
        raise InputError(f"{path} is a run of kind {run.manifest.get('kind')}, not {kind}")
    return None if resume.nothing_left(run, console) else run


def rates_in(manifest_plan: Mapping[str, object]) -> dict[str, float]:
    """Read the fixed rates of a manifest's ``asked``. Raises KeyError, TypeError or ValueError."""
    rates = manifest_plan["rates"]
    if not isinstance(rates, Mapping):
        raise TypeError("rates")
    return {str(label): float(rate) for label, rate in rates.items()}


@dataclass(frozen=True)
class ProcessHoldings:
    """Resources of a process with its children: KV ``blocks`` in use, requests whose KV ``expired``, and
    requests ``served`` since start."""

    pid: int = 0
    rss_bytes: int = 0
    descriptors: int = 0
    threads: int = 0
    blocks: float | None = None
    pool: int | None = None
    block_tokens: int | None = None
    expired: float | None = None
    served: float | None = None


@dataclass(frozen=True)
class Holdings:
    """Resources of all live processes, by name."""

    of: Mapping[str, ProcessHoldings] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: asdict(process) for name, process in self.of.items()}


def holdings(deployment: RunningDeployment) -> Holdings:
    """Read the current resources; a process that does not answer has no blocks."""
    pages = deployment.metrics()
    found = {}
    for process in deployment.processes:
        if process.poll() is not None:
            continue
        page = pages.get(process.name)
        known = kv_blocks(page)
        expired = [page.total(name) for family in FAMILIES for name in family.expired] if page else []
        counted = [count for count in expired if count is not None]
        size = page.label("vllm:cache_config_info", "block_size") if page else ""
        found[process.name] = ProcessHoldings(
            process.pid,
            **_of_family(process.pid),
            blocks=None if known is None else round(known[0], 3),
            pool=None if known is None else known[1],
            block_tokens=int(size) if size.isdecimal() else None,
            expired=max(counted, default=None),
            served=None if page is None else page.total("vllm:request_success_total"),
        )
    return Holdings(found)


def _of_family(pid: int) -> dict[str, int]:
    """Sum figures over a process and its children on this machine; zeros for a remote one."""
    sums = {"rss_bytes": 0, "descriptors": 0, "threads": 0}
    for member in family(pid):
        try:
            process = psutil.Process(member)
            with process.oneshot():
                sums["rss_bytes"] += process.memory_info().rss
                sums["descriptors"] += process.num_fds()
                sums["threads"] += process.num_threads()
        except psutil.Error:
            continue
    return sums


def stranded_blocks(before: Holdings, after: Holdings) -> dict[str, float]:
    """Blocks still in use after all requests ended, minus those before, by process; positive ones only."""
    stranded = {}
    for name, now in after.of.items():
        earlier = before.of.get(name, ProcessHoldings())
        if now.blocks is not None and (extra := now.blocks - (earlier.blocks or 0.0)) > 0.5:
            stranded[name] = round(extra)
    return dict(stranded)


def grown_bytes(before: Holdings, after: Holdings) -> dict[str, int]:
    """Memory growth of each process that was not restarted, in bytes."""
    return {
        name: process.rss_bytes - before.of[name].rss_bytes
        for name, process in after.of.items()
        if name in before.of and before.of[name].pid == process.pid
    }
