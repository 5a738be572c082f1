"""``kvbench simulate --against``: the loads of a measured or imported run, offered to the simulator.

For each row of the run that the scenario is about (its connectors, lengths and tensor-parallel size) the same
number of requests is offered at the same rate on virtual time, and the figures stand side by side. Which
Poisson arrivals the row had is not known, so several are drawn: the simulated figure is their mean, beside
the least and the most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from kvbench.calibration import surroundings
from kvbench.celltables import table
from kvbench.core.arrivals import planned_offsets
from kvbench.core.loadrow import LoadRow
from kvbench.core.metrics import summarise
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.scenario import Scenario
from kvbench.core.simulated import Load, System
from kvbench.core.simulation import simulate
from kvbench.core.slo import Slo
from kvbench.errors import EXIT_OK, InputError
from kvbench.files import said_clearly, write_bytes, write_csv
from kvbench.loadrows import load_rows
from kvbench.planning import plan_of
from kvbench.provenance import SIMULATED, SIMULATED_WHY
from kvbench.request import Wish
from kvbench.roster import profile_of
from kvbench.runs import Run, load_run
from kvbench.serve_tables import serve_values
from kvbench.simulate import simulable
from kvbench.store import RunStore
from kvbench.sweep import create_store
from kvbench.tables import number
from kvbench.virtualtrial import VirtualDeployment, system_of

DRAWS: Final = 5
FIGURES: Final = (
    "duration_s",
    "request_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p90_ttft_ms",
    "mean_tpot_ms",
)
_WORDS: Final = ("duration", "req/s", "TTFT mean", "TTFT P50", "TTFT P90", "TPOT mean")


@dataclass(frozen=True)
class Held:
    """One figure of one row: what the row says, and what the simulation makes of it over its draws."""

    row: LoadRow
    figure: str
    told: float
    simulated: float
    least: float
    most: float

    @property
    def ratio(self) -> float:
        """Simulated / told."""
        return self.simulated / self.told

    def flat(self) -> dict[str, Any]:
        return {
            "connector": self.row.cell.connector,
            "input_len": self.row.cell.input_len,
            "request_rate": self.row.request_rate,
            "tp": self.row.axes.get("tp"),
            "nics": self.row.axes.get("nics"),
            "requests": self.row.requests,
            "figure": self.figure,
            "told": self.told,
            "simulated": self.simulated,
            "ratio": self.ratio,
            "least": self.least,
            "most": self.most,
            "source": self.row.origin,
        }


def rows_of(run: Run, scenario: Scenario) -> list[LoadRow]:
    """The loads of a run that the scenario is about. Raises InputError if there is none."""
    labels = {each.label for each in scenario.connectors}
    workload, ranks = scenario.workload, scenario.deployment.tensor_parallel_size
    rows = [
        row
        for row in load_rows(run, errors=False)
        if row.cell.connector in labels
        and row.cell.input_len in workload.input_len
        and row.cell.output_len == workload.output_len
        and row.axes.get("tp") in (None, ranks)
        and row.requests
        and row.request_rate
        and math.isfinite(row.request_rate)
    ]
    if not rows:
        raise InputError(
            f"{run.path} has no load with the connectors ({', '.join(sorted(labels))}), lengths and "
            f"tensor_parallel_size ({ranks}) of {scenario.name}",
            hint="give a run of `kvbench import`, or one of listed rates",
        )
    return rows


def arrivals(row: LoadRow, seed: int) -> list[float]:
    """Poisson arrivals, stretched to end at n / rate, as ``vllm bench serve`` does; seconds."""
    assert row.requests is not None
    assert row.request_rate is not None
    offsets = planned_offsets(row.request_rate, row.requests, 1.0, seed)
    return [float(each) for each in offsets * (row.requests / row.request_rate / offsets[-1])]


def held(
    row: LoadRow, system: System, timeout_s: float, seed: int, draws: int = DRAWS
) -> tuple[list[Held], TrialRecord, list[RequestRecord]]:
    """The row beside as many simulations as ``draws``; the trial and the requests of the first.

    Raises InputError for a request that never fits.
    """
    drawn: list[tuple[list[RequestRecord], float]] = []
    for draw in range(draws):
        load = Load.alike(arrivals(row, seed + draw), row.cell.input_len, row.cell.output_len, timeout_s)
        outcome = simulate(system, load)
        drawn.append((outcome.records, outcome.duration_s))
    trials = [_trial(row, records, duration_s) for records, duration_s in drawn]
    values = [serve_values(trial) for trial in trials]
    found = []
    for figure in FIGURES:
        told = row.get(figure)
        made = [float(each[figure]) for each in values if each[figure] is not None]
        if told and made:
            found.append(Held(row, figure, told, fmean(made), min(made), max(made)))
    return found, trials[0], drawn[0][0]


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


def command(wish: Wish, measured: Path, output: Path, console: Console) -> int:
    """Simulate a run's loads, print and store the comparison; returns the exit code."""
    from kvbench import report

    scenario, source = simulable(wish)
    run = load_run(measured)
    rows = rows_of(run, scenario)
    plan = plan_of(scenario)
    store = create_store(output, scenario, source, plan, "simulate")
    found: list[Held] = []
    with store:
        systems = dict(systems_of(scenario))
        for row in rows:
            mine, trial, records = held(
                row, systems[row.cell.connector], scenario.workload.request_timeout_s, scenario.seed
            )
            store.add_trial(trial, records)
            found += mine
            console.print(f"{row.place()}: simulated", markup=False)
    _write(store, run, scenario, found)
    report.write_report(store.path)
    _show(run, scenario, found, console)
    console.print(f"files: {store.path} (against.md, tables/against.csv, report.md, …)", markup=False)
    return EXIT_OK


def systems_of(scenario: Scenario) -> Iterator[tuple[str, System]]:
    """What is simulated for each connector, by its label."""
    for planned in plan_of(scenario).deployments:
        if planned.reference_only:
            continue
        connector = profile_of(scenario, planned.connector, planned.label)
        backend = connector.transfer_backend if connector.disaggregated else ""
        around = surroundings(scenario, planned.label, backend)
        yield planned.label, system_of(scenario, VirtualDeployment.of(planned, connector, around))


# --- how it is told --------------------------------------------------------------------------------


def lines_of(found: Sequence[Held]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a row each, in each figure's cell simulated / told."""
    header = ["connector", "input", "offered req/s", *(f"{word} sim / told" for word in _WORDS)]
    lines = []
    for row in dict.fromkeys(each.row.key for each in found):
        mine = {each.figure: each for each in found if each.row.key == row}
        one = next(iter(mine.values())).row
        cells = [_cell(mine.get(figure)) for figure in FIGURES]
        lines.append([one.cell.connector, f"{one.cell.input_len:,}", number(one.request_rate), *cells])
    return header, lines


def _cell(each: Held | None) -> str:
    return "–" if each is None else f"{number(each.simulated)} / {number(each.told)} = {each.ratio:.2f}"


def off(found: Sequence[Held], most: float = 0.10) -> list[str]:
    """What is further off than ``most``, the worst first."""
    wrong = sorted(
        (each for each in found if abs(each.ratio - 1) > most), key=lambda each: -abs(each.ratio - 1)
    )
    return [
        f"{each.row.place()}: {each.figure} {each.ratio - 1:+.0%}; told {number(each.told)}, simulated "
        f"{number(each.least)} to {number(each.most)} over the draws of the arrivals"
        for each in wrong
    ]


def _write(store: RunStore, run: Run, scenario: Scenario, found: Sequence[Held]) -> None:
    wrong = off(found)
    parts = [
        f"# {scenario.name} against {run.path.name} ({SIMULATED})",
        f"> **{SIMULATED.title()}**: {SIMULATED_WHY}. Each load of the run was offered on virtual time, "
        f"with {DRAWS} draws of its Poisson arrivals; the means stand here.",
        scenario.description.strip(),
        table(*lines_of(found)),
        "\n".join(["More than 10 % off:", "", *(f"- {line}" for line in wrong)])
        if wrong
        else "No figure is more than 10 % off.",
    ]
    with said_clearly(store.path):
        (store.path / "tables").mkdir(exist_ok=True)
        write_csv(store.path / "tables/against.csv", [each.flat() for each in found])
        write_bytes(store.path / "against.md", ("\n\n".join(part for part in parts if part) + "\n").encode())


def _show(run: Run, scenario: Scenario, found: Sequence[Held], console: Console) -> None:
    title = f"\n{SIMULATED.upper()} · {scenario.name} against {run.path.name}: simulated / told"
    console.print(title, style="bold", markup=False)
    shown = Table("connector", "input", "offered", *_WORDS)
    for row in dict.fromkeys(each.row.key for each in found):
        mine = {each.figure: each for each in found if each.row.key == row}
        one = next(iter(mine.values())).row
        cells = [f"{mine[figure].ratio:.2f}" if figure in mine else "–" for figure in FIGURES]
        shown.add_row(one.cell.connector, f"{one.cell.input_len:,}", number(one.request_rate), *cells)
    console.print(shown)
    for line in off(found):
        console.print(f"  • {line}", markup=False)
