"""Honest trials on systems drawn at random, with the product's own planning, live rule, gates and verdicts.

Nothing runs: ``tools/random_systems`` answers, and its answers become records as an honest server's stream
would leave them, with usage, texts and events. What is an alarm: a gate that refuses, or warns of the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvbench.core.records import Finding, RequestRecord
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.methods import STEADY_GATES
from kvbench.planning.overrides import CliOptions, resolve
from kvbench.planning.plan import plan_of
from kvbench.sweep.simulated_trial import IDLE_CLIENT, simulated_load
from kvbench.sweep.system.answer_check import read_answer
from kvbench.sweep.system.replay import Replay
from kvbench.sweep.trial.judging import evidence_of, judged
from kvbench.sweep.trial.load_plan import PlannedTrial, TrialPlan
from kvbench.sweep.trial.load_progress import LoadResult
from kvbench.sweep.trial.trial import stop_grace_s
from tools.random_systems.family import draw
from tools.random_systems.serve import Session
from tools.random_systems.simulate import latency_s
from tools.random_systems.system import System

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
    """One trial on each of so many systems; each kind meets each load."""
    for index in range(count):
        system = draw(seed, index)
        yield honest_trial(system, LOADS[(index + index // 15) % len(LOADS)], index)


def honest_trial(system: System, load: float, number: int) -> HonestTrial:
    """An honest system under so much load. Half of the trials end by the live rule, the others whole."""
    scenario = _scenario(system)
    (cell,) = plan_of(scenario).cells
    alone_s = latency_s(system)
    plan = TrialPlan(
        cell, number + 1, load * system.capacity, "refine", searched=number % 2 == 0, latency_s=alone_s
    )
    trial = PlannedTrial.of(scenario, plan, ())
    asked = simulated_load(scenario, trial)
    told = {
        "type": "trial",
        "seed": plan.seed(scenario.seed),
        "starts_at_s": 60.0,
        "arrivals_s": list(asked.offsets_s),
        "input_len": list(asked.input_len),
        "output_len": list(asked.output_len),
    }
    line = Session(system).answer(json.dumps(told)) or ""
    answer = read_answer(line.encode(), asked.offsets_s)
    replayed = Replay(asked, answer, stop_grace_s(scenario)).run(trial.watch.progressed)
    records = as_streamed(system, replayed.load.records, number)
    result = LoadResult(records, replayed.load.reason, replayed.load.duration_s)
    evidence = replace(evidence_of(scenario, trial, result), client=IDLE_CLIENT)
    judgement = judged(scenario, trial, result, evidence)
    loud = [each for each in judgement.findings if each.level != "note"]
    return HonestTrial(
        system,
        load,
        len(records),
        judgement.verdict,
        tuple(each for each in loud if each.gate not in STEADY_GATES),
        tuple(each for each in loud if each.gate in STEADY_GATES),
    )


def _scenario(system: System) -> Scenario:
    slo, load = system.slo, system.workload
    cli = CliOptions(
        system="an honest one",
        input_len=str(load.input_len),
        output_len=load.output_len,
        ttft_ms=slo.ttft_ms,
        tpot_ms=slo.tpot_ms,
        attainment=None if slo.limits else slo.attainment,
        slo=slo.limits,
        overrides=(
            f"workload.burstiness={load.burstiness:.12g}",
            f"workload.request_timeout_s={max(60.0, PATIENCE * latency_s(system)):.0f}",
        ),
    )
    return resolve(cli)[0]


def as_streamed(system: System, records: list[RequestRecord], seed: int) -> list[RequestRecord]:
    """The records with what an honest server's streams tell besides their times."""
    rng = np.random.default_rng([seed, 4])
    stamps = "kernel" if system.workload.output_len == 1 or system.idle_tpot_s >= FASTEST_TOKEN_S else ""
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
