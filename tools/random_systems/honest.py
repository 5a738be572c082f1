"""``python -m tools.random_systems.honest``: honest trials on drawn systems; none may raise an alarm.

Planning, live rule, gates and verdicts come from kvbench. No server runs: the times of simulate.py become the
records that an honest server's stream would leave, with usage, texts and events. An alarm is a finding that
rejects a trial or accuses the server. A load that is too high or a trial that is too short is no alarm.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from kvbench.core.load.workers import LoadResult
from kvbench.core.records import Finding, RequestRecord
from kvbench.core.search.judging import PlannedTrial, SiteReadings, judge
from kvbench.core.search.load_plan import TrialPlan
from kvbench.core.search.methods import STEADY_GATES
from kvbench.planning.overrides import resolve
from kvbench.planning.plan import plan_of
from kvbench.sweep.simulated_trial import IDLE_CLIENT, simulated_load
from kvbench.sweep.simulator_process import read_answer
from kvbench.sweep.system import Replay
from kvbench.sweep.trial.trial import stop_grace_s
from tools.bench import arguments

from .family import draw
from .judge.search import options_of
from .serve import Session
from .simulate import latency_s
from .system import System

SEED: Final = 60_406
"""Seed of the family; no search is judged by its systems."""
LOADS: Final = (0.3, 0.6, 0.85, 1.0, 1.3)
"""Loads as shares of the system's capacity, used in turn: from mostly idle to overloaded."""
FASTEST_TOKEN_S: Final = 2e-4
"""Shortest realistic TPOT, in seconds. A faster stream looks like a buffered response."""
PATIENCE: Final = 100.0
"""Client timeout, as a multiple of the idle latency; a slower request counts as failed."""
TEXT_BYTES: Final = 4.5
"""Mean length of an English token, in bytes; the value of each response varies around it."""


@dataclass(frozen=True)
class HonestTrial:
    """``load``: share of the capacity. ``alarms``: server faults; ``others``: about the load."""

    system: System
    load: float
    requests: int
    verdict: str
    alarms: tuple[Finding, ...]
    others: tuple[Finding, ...]


def honest_trials(count: int, seed: int = SEED) -> Iterator[HonestTrial]:
    for index in range(count):
        system = draw(seed, index)
        yield honest_trial(system, LOADS[(index + index // 15) % len(LOADS)], index)


def honest_trial(system: System, load: float, number: int) -> HonestTrial:
    """Run one trial of an honest system. Half of the trials end by the live rule, the others in full."""
    idle_latency_s = latency_s(system)
    timeout = f"workload.request_timeout_s={max(60.0, PATIENCE * idle_latency_s):.0f}"
    scenario, _ = resolve(options_of(system, 0, (timeout,)))
    (cell,) = plan_of(scenario).cells
    plan = TrialPlan(
        cell, number + 1, load * system.capacity, "refine", searched=number % 2 == 0, latency_s=idle_latency_s
    )
    trial = PlannedTrial.of(scenario, plan, ())
    offered = simulated_load(scenario, trial)
    message = {"type": "trial", "seed": plan.seed(scenario.seed), "starts_at_s": 60.0}
    message |= {"input_len": list(offered.input_len), "output_len": list(offered.output_len)}
    message["arrivals_s"] = list(offered.offsets_s)
    response = Session(system).answer(json.dumps(message)) or ""
    answer = read_answer(response.encode(), offered.offsets_s)
    replayed = Replay(offered, answer, stop_grace_s(scenario)).run(trial.watch.progressed)
    records = streamed_records(system, replayed.load.records, number)
    result = LoadResult(records, replayed.load.reason, replayed.load.duration_s)
    record = judge(scenario, trial, result, SiteReadings({"client": IDLE_CLIENT}))
    # Above the capacity, requests run into the client's deadline.
    load_gates = STEADY_GATES | ({"failed_requests"} if load > 1 else set())
    alarms, others = (
        tuple(f for f in record.findings if f.level != "note" and (f.gate in load_gates) is about_load)
        for about_load in (False, True)
    )
    return HonestTrial(system, load, len(records), record.verdict, alarms, others)


def streamed_records(system: System, records: list[RequestRecord], seed: int) -> list[RequestRecord]:
    rng = np.random.default_rng([seed, 4])
    slow_enough = system.workload.output_len == 1 or system.idle_tpot_s >= FASTEST_TOKEN_S
    stamps: Literal["", "kernel"] = "kernel" if slow_enough else ""
    return [
        replace(
            record,
            stamps=stamps,
            prompt_tokens=record.input_len if record.ok else None,
            text_crc=int(rng.integers(2**32)) if record.ok else None,
            text_bytes=round(record.output_len * rng.uniform(0.7, 1.3) * TEXT_BYTES) if record.ok else None,
            first_event_s=record.first_token_s,
        )
        for record in records
    ]


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(
        (__doc__ or "").splitlines()[0],
        given,
        count=(200, "trials, each on a system of its own"),
        seed=(SEED, "of the family"),
    )
    wrong = 0
    verdicts: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for trial in honest_trials(chosen.count, chosen.seed):
        wrong += bool(trial.alarms)
        verdicts[trial.verdict] += 1
        counts.update(f"{finding.gate} ({finding.level})" for finding in trial.others)
        for finding in trial.alarms:
            print(f"{trial.system.name} at {trial.load:.0%}: ALARM by {finding.gate}: {finding.message}")
    print(
        f"{chosen.count} honest trials on random systems: {wrong} alarms; "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        + "; findings about the load: "
        + (", ".join(f"{count} × {gate}" for gate, count in counts.most_common()) or "none")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
