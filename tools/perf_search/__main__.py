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
from pathlib import Path

from tools.bench import table

from . import truth as truths
from .rivals import RULES
from .systems import SYSTEMS
from .trials import METHODS, OURS, WARM, Job, Row, rows_of, run_job, truth_of

GOALS = "goals: median within ±1 %, 95 % of runs within ±5 %, at most 6 trials and 60 latencies (medians)"


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    cells: list[list[str]] = []
    sections: list[int] = []
    before = ""
    for row in rows:
        name = row.system if row.system != before else ""
        if name:
            sections.append(len(cells))
        before = row.system
        hard = " (hard)" if name in SYSTEMS and SYSTEMS[name].hard else ""
        shown = [f"{value:.3f}" if value == value else "" for value in (row.low, row.median, row.high)]
        shares = (row.within, row.converged, row.right)
        within, converged, right = (f"{value:.0%}" if value == value else "" for value in shares)
        spent = (f"{row.trials:g}", f"{row.latencies:.0f}")
        cells.append([name + hard, row.method, *shown, within, *spent, converged, right])
    titles = "5 %|median|95 %|within 5 %|trials|latencies|converged|right"
    print(table("system|rule", titles, cells, "found / true rate on virtual systems", GOALS, sections[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.perf_search", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="searches of each system by kvbench (200)")
    parser.add_argument("--warm-seeds", type=int, default=50, help="those with a warm start (50)")
    parser.add_argument("--rival-seeds", type=int, default=20, help="those by each other rule (20)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--systems", nargs="*", choices=sorted(SYSTEMS), metavar="NAME", help="not all of them"
    )
    parser.add_argument("--methods", nargs="*", choices=METHODS, metavar="RULE", help="not all of them")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, too")
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
        chosen.json.write_text(json.dumps([row.to_json() for row in rows], indent=1))


if __name__ == "__main__":
    main()
