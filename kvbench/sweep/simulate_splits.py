"""``kvbench simulate --splits``: find the best division of instances into prefill and decode.

Each split of each P/D connector is a deployment in one simulated run; the aggregated baseline is independent
servers behind a round-robin router. The best split of an input length has the highest rate per GPU.
``splits.json`` and ``splits.md`` list all."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench import connectors
from kvbench.core.findings.rate_change import LEVEL
from kvbench.core.metrics.limit import LIMIT_SHORT
from kvbench.core.plan.plan import DeploymentPlan, InstancePlan, Plan, Role
from kvbench.core.records import SCHEMA_VERSION
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.files import store_errors, write_bytes, write_json
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.report.tables.result import Row, summary_table
from kvbench.report.tables.table import MISSING, markdown_table, number, of_texts, percent
from kvbench.report.terminal import print_table
from kvbench.results.provenance import SIMULATED, SIMULATED_WHY
from kvbench.results.run import RunFolder, load_run
from kvbench.sweep.bench import create_store
from kvbench.sweep.calibration import measured_run
from kvbench.sweep.display import Display, Silent
from kvbench.sweep.simulate import ReadySweep, simulable
from kvbench.sweep.sweep import exit_code


@dataclass(frozen=True)
class Split:
    """``prefill`` × P and ``decode`` × D; with ``prefill`` 0 the number of aggregated servers."""

    prefill: int
    decode: int

    @property
    def instances(self) -> int:
        return self.prefill + self.decode

    @property
    def text(self) -> str:
        return f"{self.prefill}P{self.decode}D" if self.prefill else f"{self.decode} servers"


@dataclass(frozen=True)
class Prediction:
    """Result of one split at one input length, in requests per second; ``best`` within its input length."""

    connector: str
    split: str
    prefill: int
    decode: int
    gpus: int
    input_len: int
    output_len: int
    outcome: str
    max_request_rate: float | None
    lower: float | None
    upper: float | None
    goodput_per_gpu: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    tpot_ms_p50: float | None
    slo_attainment: float | None
    limit: str
    limit_evidence: str
    best: bool = False
    mark: str = ""
    """"unfit" or "extrapolated": then no split of this length is called the best."""


def predictions(
    run: RunFolder, splits: Mapping[str, tuple[str, Split]], scenario: Scenario
) -> list[Prediction]:
    """Return one prediction per split and input length, in plan order; the best rate per GPU is marked."""
    found = [
        _prediction(row, *splits[row.cell.connector], scenario)
        for row in summary_table(run)
        if row.cell.connector in splits
    ]
    best = {
        lengths: max(
            split.goodput_per_gpu or 0.0 for split in found if (split.input_len, split.output_len) == lengths
        )
        for lengths in {(split.input_len, split.output_len) for split in found}
    }
    marked = {(split.input_len, split.output_len) for split in found if split.mark}
    return [
        replace(
            split,
            best=lengths not in marked
            and bool(split.goodput_per_gpu)
            and split.goodput_per_gpu == best[lengths],
        )
        for split in found
        for lengths in [(split.input_len, split.output_len)]
    ]


def _prediction(row: Row, connector: str, split: Split, scenario: Scenario) -> Prediction:
    deployed = scenario.deployed(connector)
    prefill, last = (deployed.ranks_of(f"{role}-0").gpus for role in ("prefill", "decode"))
    if not split.prefill:
        last = deployed.ranks_of("aggregated-0").gpus
    rate, gpus = row.answer.max_request_rate, split.prefill * prefill + split.decode * last
    # Share within the SLO at its rate; the answer guarantees at least the target.
    share = row.values["slo_attainment"]
    return Prediction(
        connector=connector,
        split=split.text,
        prefill=split.prefill,
        decode=split.decode,
        gpus=gpus,
        input_len=row.cell.input_len,
        output_len=row.cell.output_len,
        outcome=row.outcome,
        max_request_rate=rate,
        lower=row.answer.lower,
        upper=row.answer.upper,
        mark=row.answer.mark,
        goodput_per_gpu=None if rate is None else rate * (1.0 if share is None else share) / gpus,
        ttft_ms_p50=row.values["ttft_ms_p50"],
        ttft_ms_p99=row.values["ttft_ms_p99"],
        tpot_ms_p50=row.values["tpot_ms_p50"],
        slo_attainment=share,
        limit=row.limit,
        limit_evidence=row.limit_evidence,
    )


HEADER: Final = (
    "connector",
    "split",
    "GPUs",
    f"max rate (req/s) [{LEVEL * 100:g} %]",
    "per GPU",
    "met (%)",
    "TTFT P50 / P99 (ms)",
    "TPOT P50 (ms)",
    "limit",
)


def cells_of(row: Prediction) -> list[str]:
    """Prediction as table cells; HEADER has the columns."""
    interval = ""
    if row.max_request_rate is not None:
        interval = f" [{number(row.lower)}, {MISSING if row.upper is None else number(row.upper)}]"
    rate = row.outcome if row.max_request_rate is None else number(row.max_request_rate)
    return [
        row.connector,
        row.split + (" ← best" if row.best else ""),
        f"{row.gpus}",
        ("≥ " if row.outcome == "at_least" else "") + rate + interval + (f" {row.mark}" if row.mark else ""),
        number(row.goodput_per_gpu),
        percent(row.slo_attainment),
        f"{number(row.ttft_ms_p50)} / {number(row.ttft_ms_p99)}",
        number(row.tpot_ms_p50),
        LIMIT_SHORT.get(row.limit, MISSING),
    ]


def markdown(scenario: Scenario, found: Sequence[Prediction]) -> str:
    """Comparison as Markdown, one table per input length."""
    parts = [
        f"# {scenario.name}: splits of prefill and decode ({SIMULATED})",
        f"> **{SIMULATED.title()}**: {SIMULATED_WHY}. SLO: {scenario.slo.main().text()}.",
        "`per GPU` is the rate of requests that meet the SLO, divided by all GPUs of the split; the highest "
        "of an input length is the best. `limit` is what limits it above the rate.",
    ]
    for length in dict.fromkeys(row.input_len for row in found):
        rows = [row for row in found if row.input_len == length]
        parts += [
            f"## {length:,} in, {rows[0].output_len:,} out",
            markdown_table(HEADER, map(cells_of, rows)),
        ]
        limits = [
            f"- {row.connector} {row.split}: {row.limit_evidence}" for row in rows if row.limit_evidence
        ]
        if limits:
            parts.append("\n".join(["What limits each:", "", *limits]))
    return "\n\n".join(parts) + "\n"


def show(scenario: Scenario, found: Sequence[Prediction], console: Console) -> None:
    title = f"{SIMULATED.upper()} · {scenario.name} · {scenario.slo.main().text()}"
    console.print(f"\n{title}", style="bold", markup=False)
    for length in dict.fromkeys(row.input_len for row in found):
        cells = [[*cells_of(row), "best" * row.best] for row in found if row.input_len == length]
        console.print(f"{length:,} in", style="bold", markup=False)
        print_table(console, of_texts("", [*HEADER, ""], cells))
        for row in found:
            if row.input_len == length and row.best and row.limit_evidence:
                console.print(f"best: {row.connector} {row.split}; {row.limit_evidence}", markup=False)


_SPLIT: Final = re.compile(r"(\d{1,2}):(\d{1,2})")
MOST_SPLITS: Final = 64


@dataclass(frozen=True)
class Choice:
    """Command-line choice: a list of splits, or a number of instances; JSON output."""

    splits: str | None = None
    gpus: int | None = None
    as_json: bool = False


def wanted_splits(choice: Choice) -> list[Split]:
    """Splits to compare, without repetition. Raises InputError for invalid ones."""
    splits = []
    for word in (choice.splits or "").split(",") if choice.splits is not None else ():
        match = _SPLIT.fullmatch(word.strip())
        if match is None or not (1 <= int(match[1]) <= 64 and 1 <= int(match[2]) <= 64):
            raise InputError(
                f"--splits takes pairs of numbers from 1 to 64 such as 1:1,1:2,2:1, not {word.strip()!r}",
                hint="the first number is of prefill instances, the second of decode instances",
            )
        splits.append(Split(int(match[1]), int(match[2])))
    if choice.gpus is not None:
        splits += [Split(prefill, choice.gpus - prefill) for prefill in range(1, choice.gpus)]
    return list(dict.fromkeys(splits))


def split_plan(scenario: Scenario, splits: Sequence[Split]) -> tuple[Plan, dict[str, tuple[str, Split]]]:
    """Plan one deployment per connector and split; also return label → (connector, split). The aggregated
    baseline has as many servers as the splits have instances. Raises InputError for too many splits, or
    without a P/D connector."""
    plan = plan_of(scenario)
    split_of: dict[str, tuple[str, Split]] = {}
    deployments, cells = [], []
    for planned in plan.deployments:
        if planned.reference_only:
            continue
        pair = connectors.get(planned.connector).disaggregated
        sizes = sorted({split.instances for split in splits})
        for split in splits if pair else [Split(0, size) for size in sizes]:
            label = f"{planned.label}-{split.text.replace(' ', '-')}"
            split_of[label] = (planned.label, split)
            deployments.append(_deployment(planned, label, split))
            cells += [replace(cell, connector=label) for cell in plan.cells_of(planned.label)]
    if not any(split.prefill for _, split in split_of.values()):
        raise InputError(
            "the scenario has no connector with separate prefill and decode",
            hint="add one: --connector nixl, for example",
        )
    if len(deployments) > MOST_SPLITS:
        raise InputError(
            f"{len(deployments)} splits and connectors are too many for one comparison (limit {MOST_SPLITS})",
            hint="name fewer --splits, or one --connector",
        )
    reference = deployments[0].label
    return replace(
        plan, deployments=tuple(deployments), cells=tuple(cells), reference=reference, references={}
    ), split_of


def _deployment(planned: DeploymentPlan, label: str, split: Split) -> DeploymentPlan:
    counts: list[tuple[Role, int]] = [("prefill", split.prefill), ("decode", split.decode)]
    if not split.prefill:
        counts = [("aggregated", split.decode)]
    instances = tuple(
        InstancePlan(f"{role}-{rank}", role, rank, 0, None) for role, count in counts for rank in range(count)
    )
    return replace(planned, label=label, instances=instances, router_port=0, service_ports=())


def command(cli: CliOptions, choice: Choice, output: Path, console: Console, like: Path | None = None) -> int:
    """Simulate all splits, print and store the comparison; return the exit code."""
    from kvbench.report import report

    ready, splits = _ready(cli, choice, output, like)
    scenario, store = ready.scenario, ready.store
    quiet = Console(stderr=True, quiet=choice.as_json)
    shown = quiet if choice.as_json else console
    with store, Display(shown, store.path, len(ready.plan.cells)) as display:
        results = ready.sweep(display).run()
    run = load_run(store.path)
    found = predictions(run, splits, scenario)
    data: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "run": run.run_id,
        "labels": [SIMULATED],
        "splits": [asdict(prediction) for prediction in found],
    }
    with store_errors(store.path):
        write_json(store.path / "splits.json", data)
        write_bytes(store.path / "splits.md", markdown(scenario, found).encode())
    report.write_report(store.path)
    if choice.as_json:
        print(json.dumps(data, indent=2))
    else:
        show(scenario, found, console)
        console.print(f"files: {store.path} (splits.md, splits.json, report.md, …)", markup=False)
    return exit_code(results)


def predicted(cli: CliOptions, choice: Choice, output: Path, like: Path | None = None) -> list[Prediction]:
    """Simulate all splits without output; ``output``: parent of the run folder."""
    ready, splits = _ready(cli, choice, output, like)
    with ready.store:
        ready.sweep(Silent()).run()
    return predictions(load_run(ready.store.path), splits, ready.scenario)


def _ready(
    cli: CliOptions, choice: Choice, output: Path, like: Path | None
) -> tuple[ReadySweep, Mapping[str, tuple[str, Split]]]:
    """Prepare the simulation; also return label → connector and split."""
    splits = wanted_splits(choice)
    scenario, source = simulable(cli)
    # Splits differ too much: no split is run at another's rate or starts from it.
    search = scenario.search.model_copy(update={"equal_rate": False})
    scenario = scenario.model_copy(update={"search": search})
    measured = None if like is None else measured_run(like)
    plan, split_of = split_plan(scenario, splits)
    store = create_store(output, scenario, source, plan, "simulate")
    labels = {label: connector for label, (connector, _) in split_of.items()}
    return ReadySweep(scenario, plan, store, measured=measured, labels=labels), split_of
