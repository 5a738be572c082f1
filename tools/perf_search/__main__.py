"""How true and how fast is the search, beside other tools' rules? ``make perf-search``. It judges nothing.

Virtual systems with known maximum rates (systems.py) are searched with kvbench's search and live rule, and
with rules written from other tools' descriptions (rivals.py), on the same simulated pipelines.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tools.bench import arguments, table

from . import truth as truths
from .rivals import RULES
from .systems import SYSTEMS
from .trials import METHODS, OURS, WARM, Job, Row, rows_of, run_job, truth_of

GOALS = "goals: median within ±1 %, 95 % of runs within ±5 %, at most 6 trials and 60 latencies (medians)"


def show(rows: Sequence[Row]) -> None:
    forms = {"low": ".3f", "median": ".3f", "high": ".3f", "within": ".0%", "trials": "g", "seconds": ".0f"}
    forms |= {"latencies": ".0f", "converged": ".0%", "held": ".0%", "right": ".0%"}
    first = [not index or rows[index - 1]["system"] != row["system"] for index, row in enumerate(rows)]
    cells = [
        [
            row["system"] + " (hard)" * (row["system"] in SYSTEMS and SYSTEMS[row["system"]].hard)
            if new
            else "",
            row["method"],
            *("" if row[name] is None else format(row[name], form) for name, form in forms.items()),
        ]
        for row, new in zip(rows, first, strict=True)
    ]
    sections = [index for index, new in enumerate(first) if new and index]
    titles = "5 %|median|95 %|within 5 %|trials|seconds|latencies|converged|truth in interval|right"
    print(table("system|rule", titles, cells, "found / true rate on virtual systems", GOALS, sections))


def main() -> None:
    chosen = arguments(
        (__doc__ or "").splitlines()[0],
        seeds=(200, "searches of each system by kvbench"),
        warm_seeds=(50, "those with a warm start"),
        rival_seeds=(20, "those by each other rule"),
        first_seed=(0, "of the searches"),
        systems=([], f"not all of {', '.join(SYSTEMS)}"),
        methods=([], f"not all of {', '.join(METHODS)}"),
        workers=(os.cpu_count() or 1, "processes"),
        json=(Path, "write the rows there, too"),
        truth=(False, "compute and keep the true rates, and end"),
    )
    systems = [SYSTEMS[name] for name in chosen.systems or SYSTEMS]
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        if chosen.truth:
            everything = list(SYSTEMS.values())
            found = pool.map(truths.compute, everything, chunksize=1)
            truths.keep(dict(zip(map(truths.fingerprint, everything), found, strict=True)))
            return
        true = dict(zip((system.name for system in systems), pool.map(truth_of, systems), strict=True))
        seeds = dict.fromkeys(RULES, chosen.rival_seeds) | {OURS: chosen.seeds, WARM: chosen.warm_seeds}
        jobs = [
            Job(method, system, true[system.name], chosen.first_seed + seed)
            for system in systems
            for method in chosen.methods or METHODS
            for seed in range(seeds[method])
        ]
        start = time.monotonic()
        results = pool.map(run_job, jobs, chunksize=4)
    rows = rows_of(jobs, results)
    show(rows)
    print(f"{len(jobs)} searches in {time.monotonic() - start:.0f} s, {chosen.workers} processes")
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
