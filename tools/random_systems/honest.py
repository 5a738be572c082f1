"""``python -m tools.random_systems.honest``: honest trials on drawn systems; none may raise an alarm.

Planning, live rule, gates and verdicts are the product's own. Nothing runs: the answers of simulate.py become
records as an honest server's stream would leave them, with usage, texts and events. An alarm is a gate that
refuses a trial, or warns of the server; not one that finds the load too high, or the trial too short.
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
"""Of the family: none of those that a search is judged by."""
LOADS: Final = (0.3, 0.6, 0.85, 1.0, 1.3)
"""Of the system's capacity, in turn: where it idles, near it, at it and above."""
FASTEST_TOKEN_S: Final = 2e-4
"""A faster system stands for no model, and nobody could tell what it sends from a buffered answer."""
PATIENCE: Final = 100.0
"""Latencies that a client waits: more, and what is late has failed, as of any server that is slow."""
TEXT_BYTES: Final = 4.5
"""Of a token of English, about; each answer's own number is drawn around it."""


@dataclass(frozen=True)
class HonestTrial:
    """``load``: of its capacity. ``alarms``: findings that accuse the server; ``others``: of the load."""

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
    """An honest system under so much load. Half of the trials end by the live rule, the others whole."""
    alone_s = latency_s(system)
    patience = f"workload.request_timeout_s={max(60.0, PATIENCE * alone_s):.0f}"
    scenario, _ = resolve(options_of(system, 0, (patience,)))
    (cell,) = plan_of(scenario).cells
    plan = TrialPlan(
        cell, number + 1, load * system.capacity, "refine", searched=number % 2 == 0, latency_s=alone_s
    )
    trial = PlannedTrial.of(scenario, plan, ())
    asked = simulated_load(scenario, trial)
    told = {"type": "trial", "seed": plan.seed(scenario.seed), "starts_at_s": 60.0}
    told |= {"input_len": list(asked.input_len), "output_len": list(asked.output_len)}
    told["arrivals_s"] = list(asked.offsets_s)
    line = Session(system).answer(json.dumps(told)) or ""
    answer = read_answer(line.encode(), asked.offsets_s)
    replayed = Replay(asked, answer, stop_grace_s(scenario)).run(trial.watch.progressed)
    records = as_streamed(system, replayed.load.records, number)
    result = LoadResult(records, replayed.load.reason, replayed.load.duration_s)
    record = judge(scenario, trial, result, SiteReadings({"client": IDLE_CLIENT}))
    # Above the capacity, requests run into the client's deadline.
    of_load = STEADY_GATES | ({"failed_requests"} if load > 1 else set())
    alarms, others = (
        tuple(each for each in record.findings if each.level != "note" and (each.gate in of_load) is wanted)
        for wanted in (False, True)
    )
    return HonestTrial(system, load, len(records), record.verdict, alarms, others)


def as_streamed(system: System, records: list[RequestRecord], seed: int) -> list[RequestRecord]:
    rng = np.random.default_rng([seed, 4])
    slow_enough = system.workload.output_len == 1 or system.idle_tpot_s >= FASTEST_TOKEN_S
    stamps: Literal["", "kernel"] = "kernel" if slow_enough else ""
    return [
        replace(
            each,
            stamps=stamps,
            prompt_tokens=each.input_len if each.ok else None,
            text_crc=int(rng.integers(2**32)) if each.ok else None,
            text_bytes=round(each.output_len * rng.uniform(0.7, 1.3) * TEXT_BYTES) if each.ok else None,
            first_event_s=each.first_token_s,
        )
        for each in records
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
    for each in honest_trials(chosen.count, chosen.seed):
        wrong += bool(each.alarms)
        verdicts[each.verdict] += 1
        counts.update(f"{finding.gate} ({finding.level})" for finding in each.others)
        for finding in each.alarms:
            print(f"{each.system.name} at {each.load:.0%}: ALARM by {finding.gate}: {finding.message}")
    print(
        f"{chosen.count} honest trials on random systems: {wrong} alarms; "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
        + "; findings about the load: "
        + (", ".join(f"{count} × {gate}" for gate, count in counts.most_common()) or "none")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
