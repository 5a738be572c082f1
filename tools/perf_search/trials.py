"""One search on virtual time: the live rule is fed as a generator's progress lines would feed it. Then the
figures of many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvbench.core.search.ceiling import plan_flood
from kvbench.core.search.live_config import CriterionTarget, Decision, LiveConfig, trial_length_s
from kvbench.core.search.search import Hint, Probe, RateSearch, SearchLimits, TrialFigures
from kvbench.core.search.sequential_trial import LiveTrial

from . import truth as truths
from .pipeline import Found, Outcomes, System, offsets, run_open
from .rivals import RULES, run_rule

BEAT_S: Final = 0.25
START_CONCURRENCY: Final = 4.0
"""As the sweep does: a search starts where this many requests would be under way."""


def drive(trial: LiveTrial, outcomes: Outcomes, system: System) -> Decision:
    """Feed a whole trial in beats, as late and as much out of order as it would be known."""
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
        upto = int(np.searchsorted(times, t_s, side="right"))
        # Of one that is late, no more is known yet than that.
        fresh = [
            (index, values[index], margins[index], None if late[index] else ttft[index])
            for index in order[at:upto].tolist()
        ]
        at = upto
        sent = int(np.searchsorted(outcomes.arrived_s, t_s, side="right"))
        waiting = sent - int(np.searchsorted(firsts, t_s, side="right"))
        decision = trial.feed(t_s, fresh, waiting, sent)
        if decision is not None:
            return decision
    raise AssertionError(f"the live rule has not decided after {t_s:.0f} s, when all is known")


def live_trial(
    system: System, probe: Probe, latency_s: float, rng: np.random.Generator, clock_s: float = 0.0
) -> tuple[Decision, Outcomes]:
    """One trial at the probe's rate: the live rule's decision, and what became of all that was planned."""
    seconds = trial_length_s(probe.rate, latency_s, probe.least_s)
    at = offsets(system, probe.rate, seconds, rng)
    outcomes = run_open(system, at, rng, clock_s)
    config = LiveConfig(
        at,
        probe.rate,
        latency_s,
        ttft_limit_s=system.ttft_s,
        thorough=probe.thorough,
        least_s=probe.least_s,
        confirms=probe.purpose == "confirm" or probe.thorough,
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
    """A flood, and what was completed until that was known well enough."""
    flood = plan_flood(probe.rate, system.idle_s, system.burstiness, int(rng.integers(2**32)))
    ends, t_s = np.sort(run_open(system, flood.offsets_s, rng, clock_s).end_s), BEAT_S
    while not flood.is_over(ends[: int(np.searchsorted(ends, t_s, side="right"))], t_s):
        t_s += BEAT_S
    return flood.measured(ends, t_s)


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
    # A trusted hint that is off by up to 20 %, as a neighbouring cell's would be.
    off = math.exp(float(np.random.default_rng([17, job.seed]).uniform(-0.2, 0.2)))
    rate = min(max(job.truth.rate * off, job.system.min_rate), job.system.max_rate)
    return search(job.system, job.seed, Hint(rate))


def is_right(job: Job, found: Found) -> bool:
    """Of a system without a rate to find: did it say so? A rival that is above the limits is not to blame."""
    if job.system.truth == "below":
        return found.rate is None
    if job.method in RULES:
        return found.rate is not None and found.rate >= 0.95 * job.system.max_rate
    return found.status == "censored"


def row_of(method: str, name: str, pairs: Sequence[tuple[Job, Found]]) -> Row:
    """Return one method's figures on one system, or on all; None where there is nothing to count.

    ``converged``: share of runs that called their answer so, where there is a rate; ``held``: share of
    intervals with the true rate; ``right``: share that said rightly that there is none.
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
    """A row for each method and system, then one for each method over all systems."""
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
    """As kept, or computed anew for a system that was changed."""
    kept = truths.known().get(truths.fingerprint(system))
    return kept if kept is not None else truths.compute(system)
