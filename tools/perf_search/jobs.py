"""Searches to run, and the figures of those that were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import truth as truths
from .pipeline import System
from .rivals import RULES, run_rule
from .trials import Found, hint_near, search

OURS = "kvbench"
WARM = "kvbench, warm start"
METHODS = (OURS, WARM, *RULES)
NOWHERE = ("above", "below")


@dataclass(frozen=True)
class Job:
    """One search."""

    method: str
    system: System
    truth: truths.Truth
    seed: int


@dataclass(frozen=True)
class Row:
    """The figures of one method on one system, or on all: found/true, trials, measuring time in latencies."""

    method: str
    system: str
    runs: int
    low: float
    median: float
    high: float
    within: float
    trials: float
    latencies: float
    converged: float
    """Share of runs that called their answer converged, of those with a rate to find."""
    right: float
    """Share of runs that said rightly that there is no rate to be found; nan where there is one."""

    def to_json(self) -> dict[str, float | int | str | None]:
        return {name: None if value != value else value for name, value in vars(self).items()}


def run_job(job: Job) -> Found:
    """One search, in whichever process."""
    if job.method in RULES:
        return run_rule(job.method, job.system, job.seed)
    hint = hint_near(job.system, job.truth.rate, job.seed) if job.method == WARM else None
    return search(job.system, job.seed, hint)


def is_right(job: Job, found: Found) -> bool:
    """Of a system without a rate to find: did it say so? A rival that is above the limits is not to blame."""
    if job.system.truth == "below":
        return found.rate is None
    if job.method in RULES:
        return found.rate is not None and found.rate >= 0.95 * job.system.max_rate
    return found.status == "censored"


def row_of(method: str, name: str, pairs: Sequence[tuple[Job, Found]]) -> Row:
    """The figures of some searches of one method."""
    numbers = [(job, found) for job, found in pairs if job.system.truth not in NOWHERE]
    others = [is_right(job, found) for job, found in pairs if job.system.truth in NOWHERE]
    ratio = np.array([(found.rate or 0.0) / job.truth.rate for job, found in numbers])
    low, median, high = np.percentile(ratio, [5, 50, 95]) if len(ratio) else [np.nan] * 3
    return Row(
        method,
        name,
        len(pairs),
        float(low),
        float(median),
        float(high),
        float((np.abs(ratio - 1) <= 0.05).mean()) if len(ratio) else np.nan,
        float(np.median([found.trials for _, found in pairs])),
        float(np.median([found.measured_s / job.truth.latency_s for job, found in pairs])),
        float(np.mean([found.status == "converged" for _, found in numbers])) if numbers else np.nan,
        float(np.mean(others)) if others else np.nan,
    )


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
