"""``--against``: repeat the loads of a measured or imported run on servers (``bench``) or in simulation.

Each row of the run that matches the scenario (connector, lengths, tensor-parallel size) gives one load.
``bench`` sends it at the row's times, stretched by ``time_scale`` for a slower emulated engine; figures are
scaled back. ``simulate`` uses the row's Poisson arrivals if they are known (``simulate.arrivals``), else
several random sequences, and reports mean, minimum and maximum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench.core.findings.load_row import LoadRow
from kvbench.core.load.traces import TracedRequest, request_rate
from kvbench.core.metrics.metrics import summarise
from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Cell, RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.slo import Slo
from kvbench.errors import EXIT_OK, InputError, KvbenchError
from kvbench.planning.gpu_dealing import require_gpus
from kvbench.planning.obstacles import require_open_files
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.report import report
from kvbench.report.tables.vllm_bench import serve_values
from kvbench.results.provenance import SIMULATED, SIMULATED_WHY, Mark, mark_of
from kvbench.results.run import CellResult, RunFolder, load_run
from kvbench.sweep.bench import CellWork, Site, create_store
from kvbench.sweep.deployed import DeployedBench
from kvbench.sweep.deviation import (
    Account,
    Deviation,
    arrivals,
    deviations_of,
    label_of,
    place_of,
    prompt_len,
    rows_of,
    show,
    write_account,
)
from kvbench.sweep.display import Display, Watcher
from kvbench.sweep.simulate import simulable
from kvbench.sweep.simulated_trial import SimulatedDeployment, system_of
from kvbench.sweep.sweep import Sweep, exit_code

UNCHECKED = "outputs were not checked: only the loads of another run were sent"


ABSENT = "the other run has no such load"


def time_scale(scenario: Scenario) -> float:
    """Slowdown of the scenario's engine against the one it emulates; 1 for a real engine."""
    return scenario.deployment.engine_options.time_factor


def requests_of(row: LoadRow, scenario: Scenario) -> list[TracedRequest]:
    """Return the row's requests, at its times stretched by ``time_scale``; all prompts are fresh."""
    scale, tokens = time_scale(scenario), prompt_len(row)
    sent = arrivals(row, scenario.seed, scenario.simulate.arrivals)
    return [TracedRequest(offset_s * scale, tokens, row.cell.output_len) for offset_s in sent]


class RowBench(DeployedBench):
    """Deployments that run only the rows of another run, so they need no reference."""

    def gives_reference(self, planned: DeploymentPlan) -> bool:
        return False


@dataclass
class RowCells(CellWork):
    """Run each cell's rows on a site. ``trial_of``: row key → trial."""

    scenario: Scenario
    rows: Sequence[LoadRow]
    site: Site
    watcher: Watcher
    trial_of: dict[str, str]

    def run(self, cell: Cell, *, is_reference: bool) -> list[CellResult]:
        """Run one full-length trial for each row. Errors as for a site's ``run``."""
        self.site.prepare()
        try:
            records = [self._run_load(cell, number, row) for number, row in enumerate(self._rows_of(cell), 1)]
        finally:
            self.site.close()
        if not records:
            return [CellResult(cell, "skipped", reason=ABSENT, method="fixed", main=False)]
        if refused := [record for record in records if record.verdict == "invalid"]:
            words = f"{len(refused)} of {len(records)} loads were refused: {refused[0].reason}"
            return [CellResult(cell, "refused", reason=words, method="fixed", main=False)]
        return [CellResult(cell, "done", reason=UNCHECKED, method="fixed", main=False)]

    def _rows_of(self, cell: Cell) -> list[LoadRow]:
        return [
            row
            for row in self.rows
            if row.cell.input_len == cell.input_len and label_of(row, self.scenario) == cell.connector
        ]

    def _run_load(self, cell: Cell, number: int, row: LoadRow) -> TrialRecord:
        requests = tuple(requests_of(row, self.scenario))
        rate = request_rate(requests)
        plan = TrialPlan(cell, number, rate, "against", method="fixed", searched=False, requests=requests)
        record = self.site.run(plan)
        self.trial_of[row.key] = record.trial_id
        self.watcher.trial_finished(record)
        return record


def bench_against(cli: CliOptions, measured: Path, output: Path, console: Console) -> int:
    """Repeat a run's loads, print and store the comparison; return the exit code. Raises InputError if the
    run has no load for the scenario."""
    if cli.fixed_rate is not None or cli.replay or cli.both_modes:
        raise InputError(
            "--against uses the loads of a run; it does not accept --rate, --trace or --router-cost"
        )
    scenario, source = resolve(cli, sessions=False)
    run = load_run(measured)
    rows = rows_of(run, scenario)
    plan = plan_of(scenario)
    require_gpus(plan)
    require_open_files(scenario)
    store = create_store(output, scenario, source, plan, "bench")
    store.update(against={"run": run.run_id, "time_scale": time_scale(scenario)})
    console.print(f"run folder: {store.path}", markup=False)
    trial_of: dict[str, str] = {}
    try:
        with store, Display(console, store.path, len(plan.cells)) as display:
            bench = RowBench(scenario, plan, store, display)
            sweep = Sweep(
                scenario,
                replace(plan, prospects=()),  # nothing is searched for
                store,
                display,
                bench,
                lambda site, _: RowCells(scenario, rows, site, display, trial_of),
            )
            results = sweep.run()
    except BaseException:
        # The error that ended the run is reported, not a failing report.
        with suppress(KvbenchError, OSError):
            report.write_report(store.path)
        raise
    report.write_report(store.path)
    account = _account(run, scenario, rows, load_run(store.path), trial_of)
    if account.found:
        write_account(store.path, account)
        show(account, console)
    for result in results:
        if result.status != "done":
            console.print(f"{result.cell.key}: {result.status}: {result.reason}", markup=False)
    console.print(f"files: {store.path} (against.md, tables/against.csv, report.md, …)", markup=False)
    report.print_documents([load_run(store.path)], console)
    return exit_code(results)


def _account(
    reported: RunFolder,
    scenario: Scenario,
    rows: Sequence[LoadRow],
    measured: RunFolder,
    trial_of: Mapping[str, str],
) -> Account:
    """Compare each row with its trial; void trials are left out."""
    trials = {trial.trial_id: trial for trial in measured.all_trials if trial.verdict != "invalid"}
    scale = time_scale(scenario)
    found = []
    for row in rows:
        trial = trials.get(trial_of.get(row.key, ""))
        if trial is not None:
            found += deviations_of(row, [serve_values(trial)], scale)
    mark = mark_of(measured)
    return Account(reported, scenario, found, mark.word if mark else "measured", _sent(scenario, scale, mark))


def _sent(scenario: Scenario, scale: float, mark: Mark | None) -> str:
    known = scenario.simulate.arrivals != "drawn"
    when = "at which vLLM's client sends with its default seed" if known else "of a new random sequence"
    slower = (
        f" The engine ran {scale:g} times slower, with arrivals stretched likewise. Times are shown "
        f"divided by {scale:g}, rates multiplied by it."
        if scale != 1
        else ""
    )
    return f"{f'{mark.why}. ' if mark else ''}Each load of the run was sent at times {when}.{slower}"


DRAWS: Final = 5


def compared(
    row: LoadRow, system: System, scenario: Scenario, draws: int = DRAWS
) -> tuple[list[Deviation], TrialRecord, list[RequestRecord]]:
    """Simulate a row once per arrival sequence; also return the first trial's requests."""
    drawn: list[tuple[list[RequestRecord], float]] = []
    kind = scenario.simulate.arrivals
    for draw in range(draws if kind == "drawn" else 1):
        sent = arrivals(row, scenario.seed + draw, kind)
        load = SimulatedLoad.alike(sent, prompt_len(row), row.cell.output_len, scenario.request_timeout_s)
        outcome = simulate(system, load)
        drawn.append((outcome.records, outcome.duration_s))
    trials = [_trial(row, records, duration_s) for records, duration_s in drawn]
    return deviations_of(row, [serve_values(trial) for trial in trials]), trials[0], drawn[0][0]


def _trial(row: LoadRow, records: Sequence[RequestRecord], duration_s: float) -> TrialRecord:
    assert row.request_rate is not None
    summary = summarise(records, Slo(), row.request_rate, duration_s).to_json()
    return TrialRecord(
        trial_id=row.key,
        cell=row.cell,
        request_rate=row.request_rate,
        seed=0,
        verdict="measured",
        reason="",
        purpose="against",
        duration_s=duration_s,
        summary=summary,
        engine={"source": {"file": row.origin}},
        labels=[SIMULATED],
        method="fixed",
    )


def simulate_against(cli: CliOptions, measured: Path, output: Path, console: Console) -> int:
    """Simulate a run's loads, print and store the comparison; return the exit code."""
    from kvbench.report import report

    scenario, source = simulable(cli)
    run = load_run(measured)
    rows = rows_of(run, scenario)
    plan = plan_of(scenario)
    store = create_store(output, scenario, source, plan, "simulate")
    found: list[Deviation] = []
    with store:
        systems = dict(systems_of(scenario))
        for row in rows:
            deviations, trial, records = compared(row, systems[label_of(row, scenario)], scenario)
            store.add_trial(trial, records)
            found += deviations
            console.print(f"{place_of(row)}: simulated", markup=False)
    how = f"{SIMULATED_WHY}. Each load of the run was simulated {_draws(scenario)}."
    account = Account(run, scenario, found, SIMULATED, how)
    write_account(store.path, account)
    report.write_report(store.path)
    show(account, console)
    console.print(f"files: {store.path} (against.md, tables/against.csv, report.md, …)", markup=False)
    report.print_documents([load_run(store.path)], console)
    return EXIT_OK


def _draws(scenario: Scenario) -> str:
    if scenario.simulate.arrivals != "drawn":
        return "at the times at which vLLM's client sends with its default seed"
    return f"with {DRAWS} Poisson arrival sequences; the table shows the means"


def systems_of(scenario: Scenario) -> Iterator[tuple[str, System]]:
    """Yield each connector's label and simulated system."""
    for planned in plan_of(scenario).deployments:
        if not planned.reference_only:
            yield planned.label, system_of(scenario, SimulatedDeployment.of(scenario, planned))
