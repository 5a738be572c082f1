"""``kvbench simulate --against``: the loads of a measured or imported run, offered to the simulator.

For each row of the run that the scenario is about (its connectors, lengths and tensor-parallel size) the same
number of requests is offered at the same rate on virtual time, and the figures stand side by side. Where it
is not known which Poisson arrivals the row had, several are drawn: the simulated figure is their mean, beside
the least and the most. Where it is known (``simulate.arrivals``), that one sequence is offered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from kvbench.calibration import surroundings
from kvbench.celltables import table
from kvbench.core.ahead import level_text
from kvbench.core.arrivals import planned_offsets
from kvbench.core.loadrow import LoadRow
from kvbench.core.metrics import summarise
from kvbench.core.records import RequestRecord, TrialRecord
from kvbench.core.scenario import Scenario
from kvbench.core.simulated import Load, System
from kvbench.core.simulation import simulate
from kvbench.core.slo import Slo
from kvbench.core.suspicions import not_kept_up
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
OUTSIDE: Final = 0.10
"""Simulated and told are called the same up to so much, as a share of what is told."""
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

    @property
    def outside(self) -> bool:
        """Whether the two are further apart than what is called the same here."""
        return abs(self.ratio - 1) > OUTSIDE

    def flat(self) -> dict[str, Any]:
        return {
            "connector": self.row.cell.connector,
            "protocol": self.row.axes.get("protocol"),
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
            "outside": self.outside,
            "kept_up": not_kept_up(self.row) is None,
            "source": self.row.origin,
        }


def rows_of(run: Run, scenario: Scenario) -> list[LoadRow]:
    """The loads of a run that the scenario is about. Raises InputError if there is none."""
    labels = [each.label for each in scenario.connectors]
    workload, ranks = scenario.workload, scenario.deployment.tensor_parallel_size
    rows = [
        row
        for row in load_rows(run, errors=False)
        if label_of(row, scenario)
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


def label_of(row: LoadRow, scenario: Scenario) -> str:
    """Which connector of the scenario a row is of: by label, or by name with its protocol and NICs; or ""."""
    labels = {each.label for each in scenario.connectors}
    if row.cell.connector in labels:
        return row.cell.connector
    for each in scenario.connectors:
        devices = getattr(each.options, "device_name", None) or getattr(each.options, "devices", None) or ""
        nics = len([device for device in str(devices).split(",") if device])
        protocol = getattr(each.options, "protocol", None)
        if (each.name, protocol) == (row.cell.connector, row.axes.get("protocol")) and (
            row.axes.get("nics") == nics or not nics
        ):
            return each.label
    return ""


def arrivals(row: LoadRow, seed: int, kind: str = "drawn") -> list[float]:
    """When requests are sent, in seconds. *drawn*: Poisson arrivals, stretched to end at n / rate.

    *vllm*: the sequence of ``vllm bench serve`` with its default seed 0, stretched likewise. It comes from
    numpy's global generator, which its random data set does not use. *vllm-0.6*: that of
    ``benchmark_serving.py`` of that time, not stretched; the first request goes out at once.
    """
    assert row.requests is not None
    assert row.request_rate is not None
    if kind == "drawn":
        offsets = planned_offsets(row.request_rate, row.requests, 1.0, seed)
    else:
        offsets = np.cumsum(np.random.RandomState(0).exponential(1 / row.request_rate, row.requests))
    if kind == "vllm-0.6":
        return [0.0, *(float(each) for each in offsets[:-1])]
    return [float(each) for each in offsets * (row.requests / row.request_rate / offsets[-1])]


def held(
    row: LoadRow, system: System, scenario: Scenario, draws: int = DRAWS
) -> tuple[list[Held], TrialRecord, list[RequestRecord]]:
    """The row beside its simulations, one per draw of the arrivals; the trial and requests of the first.

    Raises InputError for a request that never fits.
    """
    drawn: list[tuple[list[RequestRecord], float]] = []
    kind = scenario.simulate.arrivals
    for draw in range(draws if kind == "drawn" else 1):
        sent = arrivals(row, scenario.seed + draw, kind)
        load = Load.alike(sent, prompt_len(row), row.cell.output_len, scenario.workload.request_timeout_s)
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


def prompt_len(row: LoadRow) -> int:
    """What the prompts really had, where the row tells their total: data sets are cut at whole lines."""
    total, n = row.get("total_input_tokens"), row.get("completed")
    return round(total / n) if total and n else row.cell.input_len


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
            mine, trial, records = held(row, systems[label_of(row, scenario)], scenario)
            store.add_trial(trial, records)
            found += mine
            console.print(f"{place_of(row)}: simulated", markup=False)
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
    header = ["row", "input", "offered req/s", *(f"{word} sim / told" for word in _WORDS)]
    lines = []
    for row in dict.fromkeys(each.row.key for each in found):
        mine = {each.figure: each for each in found if each.row.key == row}
        one = next(iter(mine.values())).row
        cells = [_cell(mine.get(figure)) for figure in FIGURES]
        lines.append([_row(one), f"{one.cell.input_len:,}", number(one.request_rate), *cells])
    return header, lines


def _cell(each: Held | None) -> str:
    if each is None:
        return "–"
    return f"{number(each.simulated)} / {number(each.told)} = {_ratio(each)}"


def _ratio(each: Held) -> str:
    return f"{each.ratio:.2f}" + (" !" if each.outside else "")


def place_of(row: LoadRow) -> str:
    """``mooncake rdma, 2 NICs, tp 4 at 1,024, 6 req/s``: a row in words, with all that it is told by."""
    way = level_text("protocol", row) if row.axes.get("protocol") else ""
    tp = f"tp {row.axes['tp']:g}" if isinstance(row.axes.get("tp"), (int, float)) and way else ""
    more = ", ".join(word for word in (way, tp) if word)
    return row.place().replace(" at ", f" {more} at ", 1) if more else row.place()


def off(found: Sequence[Held], *, kept_up: bool | None = None) -> list[str]:
    """What is outside, the worst first. ``kept_up``: only of rows that kept up, or of those that did not."""
    mine = [each for each in found if kept_up in (None, not_kept_up(each.row) is None)]
    wrong = sorted((each for each in mine if each.outside), key=lambda each: -abs(each.ratio - 1))
    return [
        f"{place_of(each.row)}: {each.figure} {each.ratio - 1:+.0%}; told {number(each.told)}, simulated "
        + (
            f"{number(each.least)} to {number(each.most)} over the draws of the arrivals"
            if each.least < each.most
            else number(each.simulated)
        )
        for each in wrong
    ]


def _row(row: LoadRow) -> str:
    """Its connector, protocol, NICs and ranks, and whether it kept up with its load."""
    name = place_of(row).split(" at ", 1)[0]
    return name if not_kept_up(row) is None else f"{name} (saturated)"


def _draws(scenario: Scenario) -> str:
    if scenario.simulate.arrivals != "drawn":
        return "at the times at which vLLM's client sends with its default seed"
    return f"with {DRAWS} draws of its Poisson arrivals; the means stand here"


def _told_off(found: Sequence[Held]) -> Iterator[tuple[str, list[str]]]:
    """Headings, and what is outside: first of the rows that a model of a steady state can be held to."""
    kept, not_kept = off(found, kept_up=True), off(found, kept_up=False)
    steady = sum(not_kept_up(each.row) is None for each in found)
    if steady:
        yield f"More than {OUTSIDE:.0%} off ({len(kept)} of {steady} cells; marked !):", kept
    if steady < len(found):
        heading = (
            f"More than {OUTSIDE:.0%} off in rows that did not keep up, whose latencies depend on how "
            f"long the load lasted ({len(not_kept)} of {len(found) - steady} cells):"
        )
        yield heading, not_kept


def _write(store: RunStore, run: Run, scenario: Scenario, found: Sequence[Held]) -> None:
    parts = [
        f"# {scenario.name} against {run.path.name} ({SIMULATED})",
        f"> **{SIMULATED.title()}**: {SIMULATED_WHY}. Each load of the run was offered on virtual time, "
        f"{_draws(scenario)}.",
        scenario.description.strip(),
        table(*lines_of(found)),
        *("\n".join([heading, "", *(f"- {line}" for line in lines)]) for heading, lines in _told_off(found)),
    ]
    with said_clearly(store.path):
        (store.path / "tables").mkdir(exist_ok=True)
        write_csv(store.path / "tables/against.csv", [each.flat() for each in found])
        write_bytes(store.path / "against.md", ("\n\n".join(part for part in parts if part) + "\n").encode())


def _show(run: Run, scenario: Scenario, found: Sequence[Held], console: Console) -> None:
    title = f"\n{SIMULATED.upper()} · {scenario.name} against {run.path.name}: simulated / told"
    console.print(title, style="bold", markup=False)
    shown = Table("row", "input", "offered", *_WORDS)
    for row in dict.fromkeys(each.row.key for each in found):
        mine = {each.figure: each for each in found if each.row.key == row}
        one = next(iter(mine.values())).row
        cells = [_ratio(mine[figure]) if figure in mine else "–" for figure in FIGURES]
        shown.add_row(_row(one), f"{one.cell.input_len:,}", number(one.request_rate), *cells)
    console.print(shown)
    for heading, lines in _told_off(found):
        console.print(heading, style="bold", markup=False)
        for line in lines:
            console.print(f"  • {line}", markup=False)
    console.print(f"why, as {scenario.name} says: {' '.join(scenario.description.split())}", markup=False)
