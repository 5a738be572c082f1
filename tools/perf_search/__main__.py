"""How true and how fast is the search, beside other tools' rules? ``make perf-search``. It judges nothing.

Virtual systems whose highest rate is known (systems.py) are searched with kvbench's own search and live rule,
and with rules written from the descriptions of others (rivals.py), on the same simulated pipelines.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from . import truth as truths
from .pipeline import System
from .rivals import RULES, run_rule
from .systems import SYSTEMS
from .trials import Found, hint_near, search

OURS = "kvbench"
WARM = "kvbench, warm start"
METHODS = (OURS, WARM, *RULES)
GOALS = "goals: median within ±1 %, 95 % of runs within ±5 %, at most 6 trials and 60 latencies (medians)"


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
    numbers = [(job, found) for job, found in pairs if job.system.truth in ("md1", "runs")]
    others = [is_right(job, found) for job, found in pairs if job.system.truth in ("above", "below")]
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
        float(np.mean(others)) if others else np.nan,
    )


def rows_of(jobs: Sequence[Job], results: Sequence[Found]) -> list[Row]:
    """A row for each method and system, then one for each method over all systems that are not hard."""
    pairs = list(zip(jobs, results, strict=True))
    methods = list(dict.fromkeys(job.method for job in jobs))
    names = list(dict.fromkeys(job.system.name for job in jobs))
    rows = [
        row_of(method, name, [p for p in pairs if (p[0].method, p[0].system.name) == (method, name)])
        for name in names
        for method in methods
    ]
    for method in methods:
        fair = [pair for pair in pairs if pair[0].method == method and not pair[0].system.hard]
        if fair:
            rows.append(row_of(method, "all", fair))
    return rows


def table_of(rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    table = Table(title="found / true rate on virtual systems", caption=GOALS)
    for column in ("system", "rule"):
        table.add_column(column, no_wrap=True)
    for column in ("5 %", "median", "95 %", "within 5 %", "trials", "latencies", "right"):
        table.add_column(column, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.system != before:
            table.add_section()
        name = row.system if row.system != before else ""
        if name in SYSTEMS and SYSTEMS[name].hard:
            name += " (hard)"
        before = row.system
        shown = [f"{value:.3f}" if value == value else "" for value in (row.low, row.median, row.high)]
        within, right = (f"{value:.1%}" if value == value else "" for value in (row.within, row.right))
        table.add_row(name, row.method, *shown, within, f"{row.trials:g}", f"{row.latencies:.0f}", right)
    return table


def truth_of(system: System) -> truths.Truth:
    """As kept, or computed anew for a system that was changed."""
    kept = truths.known().get(truths.fingerprint(system))
    return kept if kept is not None else truths.compute(system)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.perf_search", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="searches of each system by kvbench (200)")
    parser.add_argument("--rival-seeds", type=int, help="searches of each system by each other rule (seeds)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--systems", nargs="*", choices=sorted(SYSTEMS), metavar="NAME", help="not all of them"
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, metavar="RULE", help="not all of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", metavar="PATH", help="write the rows there, too")
    parser.add_argument("--truth", action="store_true", help="compute and keep the true rates, and end")
    chosen = parser.parse_args()
    systems = [SYSTEMS[name] for name in chosen.systems or SYSTEMS]
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        if chosen.truth:
            everything = list(SYSTEMS.values())
            found = pool.map(truths.compute, everything, chunksize=1)
            truths.keep({system.name: (system, true) for system, true in zip(everything, found, strict=True)})
            return
        true = dict(zip((each.name for each in systems), pool.map(truth_of, systems), strict=True))
        seeds = {
            True: chosen.seeds,
            False: chosen.seeds if chosen.rival_seeds is None else chosen.rival_seeds,
        }
        jobs = [
            Job(method, system, true[system.name], chosen.first_seed + seed)
            for system in systems
            for method in chosen.methods or METHODS
            for seed in range(seeds[method not in RULES])
        ]
        start = time.monotonic()
        results = pool.map(run_job, jobs, chunksize=4)
    rows = rows_of(jobs, results)
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table_of(rows))
    console.print(f"{len(jobs)} searches in {time.monotonic() - start:.0f} s, {chosen.workers} processes")
    if chosen.json:
        with open(chosen.json, "w", encoding="utf-8") as file:
            json.dump([row.to_json() for row in rows], file, indent=1)


if __name__ == "__main__":
    main()
