"""Sweeps on virtual systems for half an hour, with faults at random: ``make soak``. Nothing may grow.

Trials raise errors, are refused, or are cut off together with their run, which is then resumed. Resident
memory, descriptors and threads are sampled. Exit code 1 if memory grows by more than 5 % after the warm-up,
if descriptors or threads grow at all, if a trial reads back otherwise than it was recorded, or if fewer than
1,000 trials were recorded.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import psutil

from kvbench.core.plan.plan import DeploymentPlan
from kvbench.core.records import Finding, TrialRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.load_plan import TrialPlan
from kvbench.errors import ProcessDiedError
from kvbench.planning.overrides import CliOptions
from kvbench.planning.plan import plan_of
from kvbench.results.run import load_run
from kvbench.results.store import RunStore
from kvbench.sweep import resume
from kvbench.sweep.bench import Site, create_store
from kvbench.sweep.display import Silent
from kvbench.sweep.simulate import SimulatedBench, simulable
from kvbench.sweep.sweep import searching_sweep
from tools.bench import arguments, conclude, table, workplace

SETS: Final = (
    *("connectors=[aggregated,tcp,nixl]", "workload.input_len=[64,128,192,256,384,512]"),
    *("search.trial_s=0.5", "search.max_trial_s=0.5", "search.min_requests=20", "search.max_trials=6"),
    *("search.precision=0.2", "search.equal_rate=true"),
)
WARM_UP: Final = 0.25
"""Share of the time after which memory may not grow any more: caches and arenas fill first."""
MOST_GROWTH: Final = 0.05
LEAST_TRIALS: Final = 1000
SAMPLE_S: Final = 1.0
FAULTS: Final = (("error", 0.004), ("cut off", 0.006), ("refused", 0.05))
"""What happens to a trial, and how often."""


class CutOff(BaseException):
    """Stands for a kill: nothing of kvbench catches it."""


class Sample(NamedTuple):
    """Figures of this process: seconds since the start, resident bytes, open descriptors, threads."""

    at_s: float
    rss: int
    descriptors: int
    threads: int


@dataclass
class Soak:
    chance: random.Random
    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    recorded: dict[str, str] = field(default_factory=dict)
    trials: int = 0
    sweeps: int = 0
    cells: int = 0
    differing: int = 0
    process: psutil.Process = field(default_factory=psutil.Process)

    def fault(self) -> str:
        drawn = self.chance.random()
        for name, share in FAULTS:
            if drawn < share:
                self.faults[name] += 1
                return name
            drawn -= share
        return ""

    def sample(self) -> None:
        at_s = time.monotonic() - self.began
        if not self.samples or at_s - self.samples[-1].at_s >= SAMPLE_S:
            own = self.process
            self.samples.append(Sample(at_s, own.memory_info().rss, own.num_fds(), own.num_threads()))


class SoakedSite:
    """A simulated site to whose trials faults happen."""

    def __init__(self, soak: Soak, site: Site, store: _Refusing) -> None:
        self._soak, self._site, self._store = soak, site, store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site, name)

    def run(self, plan: TrialPlan) -> TrialRecord:
        fault = self._soak.fault()
        if fault == "error":
            raise ProcessDiedError("decode-0 has ended with status 1", hint="planted by the soak")
        if fault == "cut off":
            raise CutOff
        self._store.refusing = fault == "refused"
        record = self._site.run(plan)
        record = _refused(record) if fault == "refused" else record
        self._soak.recorded[f"{self._store.path.name}/{record.trial_id}"] = digest(record)
        self._soak.trials += 1
        self._soak.sample()
        return record


class SoakedBench(SimulatedBench):
    """A simulated bench to whose trials faults happen."""

    def __init__(self, soak: Soak, scenario: Scenario, store: RunStore) -> None:
        self._soak, self._refusing = soak, _Refusing(store)
        super().__init__(scenario, self._refusing)  # type: ignore[arg-type]

    @contextmanager
    def up(self, planned: DeploymentPlan, round_: str = "") -> Iterator[Site]:
        with super().up(planned, round_) as site:
            yield SoakedSite(self._soak, site, self._refusing)


class _Refusing:
    """A store that, while it is ``refusing``, takes each trial as one that a gate has refused."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self.refusing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add_trial(self, trial: TrialRecord, requests: Sequence[Any] = ()) -> None:
        self._store.add_trial(_refused(trial) if self.refusing else trial, requests)


def _refused(record: TrialRecord) -> TrialRecord:
    finding = Finding("soak", "invalid", "refused by the soak", "nothing to do")
    if finding in record.findings:
        return record
    return replace(record, verdict="invalid", reason=finding.message, findings=[*record.findings, finding])


def digest(record: TrialRecord) -> str:
    text = json.dumps(record.to_json(), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def one_sweep(soak: Soak, results: Path) -> None:
    """One sweep with another seed: gone on with until no fault has broken it off and no cell has failed."""
    cli = CliOptions("quickstart", (*SETS, f"seed={soak.sweeps + 1}"))
    scenario, source = simulable(cli)
    plan = plan_of(scenario)
    store = create_store(results, scenario, source, plan, "simulate", {})
    path = store.path
    while True:
        sweep = searching_sweep(scenario, plan, store, Silent(), SoakedBench(soak, scenario, store))
        try:
            with store:
                sweep.run()
        except CutOff:
            soak.faults["opened again"] += 1
        if resume.is_complete(load_run(path)):
            break
        store = RunStore.reopen(path)
        resume.take_over(store, scenario, None)
    run = load_run(path)
    for record in run.all_trials:
        soak.differing += soak.recorded.pop(f"{path.name}/{record.trial_id}", "") != digest(record)
    soak.differing += len(soak.recorded)
    soak.recorded.clear()
    soak.sweeps += 1
    soak.cells += len(run.cells)
    shutil.rmtree(path)
    gc.collect()


def judged(soak: Soak, seconds: float) -> list[str]:
    warm = [sample for sample in soak.samples if sample.at_s >= seconds * WARM_UP]
    quarter = max(1, len(warm) // 4)
    first, last = warm[:quarter], warm[-quarter:]
    wrong = []
    growth = median(sample.rss for sample in last) / median(sample.rss for sample in first) - 1
    if growth > MOST_GROWTH:
        wrong.append(f"resident memory has grown by {growth:.1%}")
    for name in ("descriptors", "threads"):
        before, after = (max(getattr(sample, name) for sample in part) for part in (first, last))
        if after > before:
            wrong.append(f"{name} have grown from {before} to {after}")
    if soak.differing:
        wrong.append(f"{soak.differing} trials read back otherwise than they were recorded")
    if soak.trials < LEAST_TRIALS:
        wrong.append(f"only {soak.trials} trials were recorded, {LEAST_TRIALS} asked")
    return wrong


def main() -> int:
    options = arguments(__doc__, minutes=(30.0, "to go on"), seed=(1, "of the faults"))
    os.nice(5)
    soak, seconds = Soak(random.Random(options.seed)), options.minutes * 60
    with workplace("soak") as (folder, _):
        while time.monotonic() - soak.began < seconds:
            one_sweep(soak, folder)
    rows = [
        [f"{sample.at_s:.0f} s", f"{sample.rss / 1e6:.1f} MB", str(sample.descriptors), str(sample.threads)]
        for sample in soak.samples[:: max(1, len(soak.samples) // 10)]
    ]
    print(table("", "at|RSS|descriptors|threads", rows))
    facts = {
        "sweeps, cells, trials": f"{soak.sweeps}, {soak.cells}, {soak.trials}",
        "faults": ", ".join(f"{name} {count}" for name, count in sorted(soak.faults.items())) or "none",
        "read back equal": f"all but {soak.differing}" if soak.differing else "all",
    }
    return int(conclude(facts, judged(soak, seconds)))


if __name__ == "__main__":
    sys.exit(main())
