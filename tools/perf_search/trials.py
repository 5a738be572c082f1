"""Run one search on virtual time, with the live rule fed as by a generator's progress lines; and the figures
of many searches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvbench.core.search.ceiling import plan_saturation
from kvbench.core.search.live_config import CriterionTarget, Decision, LiveConfig, trial_length_s
from kvbench.core.search.search import Hint, Probe, RateSearch, SearchLimits, TrialFigures
from kvbench.core.search.sequential_trial import LiveTrial

from . import truth as truths
from .pipeline import Found, Outcomes, System, offsets, run_open
from .rivals import RULES, run_rule

BEAT_S: Final = 0.25
START_CONCURRENCY: Final = 4.0
"""Concurrency at a search's start rate, as in a sweep."""


def drive(trial: LiveTrial, outcomes: Outcomes, system: System) -> Decision:
    """Feed a trial in beats, with each result at the time and in the order in which it becomes known."""
    late = outcomes.ttft_s > system.ttft_s
    hopeless_s = outcomes.arrived_s + trial.config.hopeless_s
    known = np.minimum(np.where(late, outcomes.arrived_s + system.ttft_s, outcomes.end_s), hopeless_s)
    load = outcomes.load(system)
    order = np.argsort(known, kind="stable")
    times = known[order]
    firsts = np.sort(outcomes.first_s)
    values = [(1.0,) if good else (0.0,) for good in (load <= 1.0).tolist()]
    margins = [(margin,) for margin in load.tolist()]
    ttft = outcomes.ttft_s.tolist()
    at, t_s = 0, 0.0
    last_s = float(known.max()) + 10 * BEAT_S
    while t_s <= last_s:
        t_s += BEAT_S
        stop = int(np.searchsorted(times, t_s, side="right"))
        # The TTFT of a late request is not known yet.
        fresh = [
            (index, values[index], margins[index], None if late[index] else ttft[index])
            for index in order[at:stop].tolist()
        ]
        at = stop
        sent = int(np.searchsorted(outcomes.arrived_s, t_s, side="right"))
        waiting = sent - int(np.searchsorted(firsts, t_s, side="right"))
        decision = trial.feed(t_s, fresh, waiting, sent)
        if decision is not None:
            return decision
    raise AssertionError(f"the live rule has not decided after {t_s:.0f} s, when all is known")


def live_trial(
    system: System, probe: Probe, latency_s: float, rng: np.random.Generator, clock_s: float = 0.0
) -> tuple[Decision, Outcomes]:
    """Run one trial at the probe's rate; return the live rule's decision and the results of all requests."""
    seconds = trial_length_s(probe.rate, latency_s, probe.least_s)
    at = offsets(system, probe.rate, seconds, rng)
    outcomes = run_open(system, at, rng, clock_s)
    config = LiveConfig(
        at,
        probe.rate,
        latency_s,
        ttft_limit_s=system.ttft_s,
        full_length=probe.full_length,
        least_s=probe.least_s,
        confirms=probe.purpose == "confirm" or probe.full_length,
        hopeless_s=system.ttft_s + (system.tokens - 1) * system.tpot_s,
    )
    live = LiveTrial(config, [CriterionTarget("share", system.attainment, system.ttft_s)])
    return drive(live, outcomes, system), outcomes


def search(system: System, seed: int, hint: Hint | None = None) -> Found:
    rng = np.random.default_rng([11, seed])
    latency_s, clock_s = system.idle_s, 0.0
    start = min(max(START_CONCURRENCY / latency_s, system.min_rate), system.max_rate)
    limits = SearchLimits(start, system.min_rate, system.max_rate, attainment=system.attainment)
    finder = RateSearch(limits, hint, ceiling=True)
    while (probe := finder.ask()) is not None:
        if probe.purpose == "ceiling":
            measured = _ceiling(system, probe, rng, clock_s)
            finder.tell(probe.rate, "undecided", measured)
            clock_s += measured.duration_s
            continue
        decision, outcomes = live_trial(system, probe, latency_s, rng, clock_s)
        finder.tell(probe.rate, decision.verdict, decision.measured)
        clock_s += decision.at_s
        done = outcomes.end_s <= decision.at_s
        if decision.verdict != "missed" and done.any():
            latency_s = float(np.median(outcomes.e2el_s[done]))
    answer = finder.answer()
    bounds = (answer.lower, answer.upper)
    return Found(answer.max_request_rate, answer.status, answer.trials, clock_s, bounds)


def _ceiling(system: System, probe: Probe, rng: np.random.Generator, clock_s: float) -> TrialFigures:
    """Run a saturation probe until its throughput is precise enough."""
    probe_plan = plan_saturation(probe.rate, system.idle_s, system.burstiness, int(rng.integers(2**32)))
    ends, t_s = np.sort(run_open(system, probe_plan.offsets_s, rng, clock_s).end_s), BEAT_S
    while not probe_plan.is_over(ends[: int(np.searchsorted(ends, t_s, side="right"))], t_s):
        t_s += BEAT_S
    return probe_plan.measured(ends, t_s)


OURS = "kvbench"
WARM = "kvbench, warm start"
METHODS = (OURS, WARM, *RULES)
NOWHERE = ("above", "below")
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    method: str
    system: System
    truth: truths.Truth
    seed: int


def run_job(job: Job) -> Found:
    if job.method in RULES:
        return run_rule(job.method, job.system, job.seed)
    if job.method != WARM:
        return search(job.system, job.seed)
    # A trusted hint with an error of up to 20 %, as from a neighbouring cell.
    off = math.exp(float(np.random.default_rng([17, job.seed]).uniform(-0.2, 0.2)))
    rate = min(max(job.truth.rate * off, job.system.min_rate), job.system.max_rate)
    return search(job.system, job.seed, Hint(rate))


def is_right(job: Job, found: Found) -> bool:
    """Return whether a search reports correctly that its limits contain no rate; a rival may exceed them."""
    if job.system.truth == "below":
        return found.rate is None
    if job.method in RULES:
        return found.rate is not None and found.rate >= 0.95 * job.system.max_rate
    return found.status == "censored"


def row_of(method: str, name: str, pairs: Sequence[tuple[Job, Found]]) -> Row:
    """Return one method's figures on one system, or on all; None where there is nothing to count.

    ``converged``: share of converged runs, among those with a rate; ``held``: share of intervals that contain
    the true rate; ``right``: share of correct runs, among those without a rate.
    """
    numbers = [(job, found) for job, found in pairs if job.system.truth not in NOWHERE]
    others = [is_right(job, found) for job, found in pairs if job.system.truth in NOWHERE]
    ratio = np.array([(found.rate or 0.0) / job.truth.rate for job, found in numbers])
    bounds = [(*found.bounds, job.truth.rate) for job, found in numbers if found.bounds]
    held = [(lower or 0.0) <= rate <= (upper or math.inf) for lower, upper, rate in bounds]
    low, median, high = np.percentile(ratio, [5, 50, 95]).tolist() if numbers else [None] * 3
    return {
        "method": method,
        "system": name,
        "runs": len(pairs),
        "low": low,
        "median": median,
        "high": high,
        "within": float((np.abs(ratio - 1) <= 0.05).mean()) if numbers else None,
        "trials": float(np.median([found.trials for _, found in pairs])),
        "seconds": float(np.median([found.measured_s for _, found in pairs])),
        "latencies": float(np.median([found.measured_s / job.truth.latency_s for job, found in pairs])),
        "converged": float(np.mean([found.status == "converged" for _, found in numbers]))
        if numbers
        else None,
        "held": float(np.mean(held)) if held else None,
        "right": float(np.mean(others)) if others else None,
    }


def rows_of(jobs: Sequence[Job], results: Sequence[Found]) -> list[Row]:
    """Return a row per method and system, then a row per method over all systems."""
    pairs = list(zip(jobs, results, strict=True))
    methods = list(dict.fromkeys(job.method for job in jobs))
    names = list(dict.fromkeys(job.system.name for job in jobs))
    rows = [
        row_of(method, name, [p for p in pairs if (p[0].method, p[0].system.name) == (method, name)])
        for name in names
        for method in methods
    ]
    return rows + [row_of(method, "all", [p for p in pairs if p[0].method == method]) for method in methods]


def truth_of(system: System) -> truths.Truth:
    """Return the stored truth; compute it if the system was changed."""
    kept = truths.known().get(truths.fingerprint(system))
    return kept if kept is not None else truths.compute(system)
