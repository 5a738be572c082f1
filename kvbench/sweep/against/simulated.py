"""``kvbench simulate --against``: the loads of a measured or imported run, offered to the simulator.

For each row of the run that the scenario is about (its connectors, lengths and tensor-parallel size) the same
number of requests is offered at the same rate on virtual time, and the figures stand side by side. Where it
is not known which Poisson arrivals the row had, several are drawn: the simulated figure is their mean, beside
the least and the most. Where it is known (``simulate.arrivals``), that one sequence is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from kvbench.core.findings.load_row import LoadRow
from kvbench.core.metrics.metrics import summarise
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.simulation.data import SimulatedLoad, System
from kvbench.core.simulation.deployment import simulate
from kvbench.core.slo import Slo
from kvbench.errors import EXIT_OK
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.report.tables.vllm_bench import serve_values
from kvbench.results.provenance import SIMULATED, SIMULATED_WHY
from kvbench.results.run import load_run
from kvbench.sweep.against.deviation import (
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
from kvbench.sweep.new_run import create_store
from kvbench.sweep.simulate import simulable
from kvbench.sweep.simulated_trial import SimulatedDeployment, system_of

DRAWS: Final = 5


def compared(
    row: LoadRow, system: System, scenario: Scenario, draws: int = DRAWS
) -> tuple[list[Deviation], TrialRecord, list[RequestRecord]]:
    """The row beside its simulations, one per draw of the arrivals; the trial and requests of the first.

    Raises InputError for a request that never fits.
    """
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


def command(cli: CliOptions, measured: Path, output: Path, console: Console) -> int:
    """Simulate a run's loads, print and store the comparison; returns the exit code."""
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
            mine, trial, records = compared(row, systems[label_of(row, scenario)], scenario)
            store.add_trial(trial, records)
            found += mine
            console.print(f"{place_of(row)}: simulated", markup=False)
    how = f"{SIMULATED_WHY}. Each load of the run was offered on virtual time, {_draws(scenario)}."
    account = Account(run, scenario, found, SIMULATED, how)
    write_account(store.path, account)
    report.write_report(store.path)
    show(account, console)
    console.print(f"files: {store.path} (against.md, tables/against.csv, report.md, …)", markup=False)
    report.tell_program([load_run(store.path)], console)
    return EXIT_OK


def _draws(scenario: Scenario) -> str:
    if scenario.simulate.arrivals != "drawn":
        return "at the times at which vLLM's client sends with its default seed"
    return f"with {DRAWS} draws of its Poisson arrivals; the means stand here"


def systems_of(scenario: Scenario) -> Iterator[tuple[str, System]]:
    """What is simulated for each connector, by its label."""
    for planned in plan_of(scenario).deployments:
        if not planned.reference_only:
            yield planned.label, system_of(scenario, SimulatedDeployment.of(scenario, planned))
