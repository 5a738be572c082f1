"""``kvbench simulate --splits``: how many of the instances should prefill, and how many decode?

Each split of each P/D connector is a deployment of its own in one simulated run, searched as any other; an
aggregated server is compared as so many independent servers behind a router that takes them in turn. The
best split of an input length is the one with the highest rate per GPU. Everything is written into the run
folder: ``splits.json`` and ``splits.md`` beside the usual report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from kvbench import connectors
from kvbench.core.plan.plan import DeploymentPlan, InstancePlan, Plan, Role
from kvbench.core.records import SCHEMA_VERSION
from kvbench.core.scenario.scenario import Scenario
from kvbench.errors import InputError
from kvbench.files import said_clearly, write_bytes, write_json
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.results.provenance import SIMULATED
from kvbench.results.run import RunFolder, load_run
from kvbench.results.store import RunStore
from kvbench.sweep.calibration import measured_run
from kvbench.sweep.display import Display, Silent, Watcher
from kvbench.sweep.new_run import create_store
from kvbench.sweep.simulate import SimulatedBench, simulable
from kvbench.sweep.split_answers import Prediction, Split, markdown, predictions, show
from kvbench.sweep.sweep import Sweep, exit_code, searching_sweep

_SPLIT: Final = re.compile(r"(\d{1,2}):(\d{1,2})")
MOST_SPLITS: Final = 64


@dataclass(frozen=True)
class Choice:
    """What was asked on the command line: listed splits, or a number of instances; print JSON only?"""

    splits: str | None = None
    gpus: int | None = None
    as_json: bool = False


def wanted_splits(choice: Choice) -> list[Split]:
    """The splits to compare, without repetition. Raises InputError for what is none."""
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
    """The plan with a deployment for each connector and split, and what each of its labels stands for.

    An aggregated server is compared with as many servers as the splits have instances.
    Raises InputError if there are too many, or no connector that splits.
    """
    plan = plan_of(scenario)
    meaning: dict[str, tuple[str, Split]] = {}
    deployments, cells = [], []
    for planned in plan.deployments:
        if planned.reference_only:
            continue
        pair = connectors.get(planned.connector).disaggregated
        sizes = sorted({split.instances for split in splits})
        for split in splits if pair else [Split(0, size) for size in sizes]:
            label = f"{planned.label}-{split.text.replace(' ', '-')}"
            meaning[label] = (planned.label, split)
            deployments.append(_deployment(planned, label, split))
            cells += [replace(cell, connector=label) for cell in plan.cells_of(planned.label)]
    if not any(split.prefill for _, split in meaning.values()):
        raise InputError(
            "the scenario has no connector with prefill and decode apart",
            hint="add one: --connector nixl, for example",
        )
    if len(deployments) > MOST_SPLITS:
        raise InputError(
            f"{len(deployments)} splits and connectors are too many for one comparison; {MOST_SPLITS} is the "
            "most",
            hint="name fewer --splits, or one --connector",
        )
    reference = deployments[0].label
    return replace(
        plan, deployments=tuple(deployments), cells=tuple(cells), reference=reference, references={}
    ), meaning


def _deployment(planned: DeploymentPlan, label: str, split: Split) -> DeploymentPlan:
    counts: list[tuple[Role, int]] = [("prefill", split.prefill), ("decode", split.decode)]
    if not split.prefill:
        counts = [("aggregated", split.decode)]
    instances = tuple(
        InstancePlan(f"{role}-{rank}", role, rank, 0, None) for role, count in counts for rank in range(count)
    )
    return replace(planned, label=label, instances=instances, router_port=0, service_ports=())


def command(cli: CliOptions, choice: Choice, output: Path, console: Console, like: Path | None = None) -> int:
    """Simulate every split, print and store the comparison; returns the exit code."""
    from kvbench.report import report

    ready = _ready(cli, choice, output, like)
    scenario, store = ready.scenario, ready.store
    quiet = Console(stderr=True, quiet=choice.as_json)
    with store, Display(quiet if choice.as_json else console, len(ready.plan.cells)) as display:
        results = ready.sweep(display).run()
    run, found = ready.found()
    data: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "run": run.run_id,
        "labels": [SIMULATED],
        "splits": [asdict(each) for each in found],
    }
    with said_clearly(store.path):
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
    """Simulate every split without a word; ``output`` is where the run folder is put."""
    ready = _ready(cli, choice, output, like)
    with ready.store:
        ready.sweep(Silent()).run()
    return ready.found()[1]


@dataclass(frozen=True)
class _Ready:
    """All that the simulation of splits is made of. ``meaning``: label → connector and split."""

    scenario: Scenario
    plan: Plan
    meaning: Mapping[str, tuple[str, Split]]
    store: RunStore
    measured: RunFolder | None

    def sweep(self, watcher: Watcher) -> Sweep:
        labels = {label: connector for label, (connector, _) in self.meaning.items()}
        bench = SimulatedBench(self.scenario, self.store, measured=self.measured, labels=labels)
        return searching_sweep(self.scenario, self.plan, self.store, watcher, bench)

    def found(self) -> tuple[RunFolder, list[Prediction]]:
        run = load_run(self.store.path)
        return run, predictions(run, self.meaning, self.scenario)


def _ready(cli: CliOptions, choice: Choice, output: Path, like: Path | None) -> _Ready:
    splits = wanted_splits(choice)
    scenario, source = simulable(cli)
    # Splits have little in common: none is offered the rate of another, nor starts from it.
    alone = scenario.search.model_copy(update={"equal_rate": False})
    scenario = scenario.model_copy(update={"search": alone})
    measured = None if like is None else measured_run(like)
    plan, meaning = split_plan(scenario, splits)
    store = create_store(output, scenario, source, plan, "simulate")
    return _Ready(scenario, plan, meaning, store, measured)
