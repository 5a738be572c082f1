"""``python -m tools.random_systems.judge --seed develop``: the product's search on the drawn systems.

Each system is searched as by ``kvbench simulate --system``, with first latency, trials, drains, waits and
limits. The answer is compared with the true rate, without a verdict. For the seeds named ``release``, the
program shows no single search.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import arguments
from tools.jobs import Job, code_version, rows_of

from .. import truth as truths
from ..family import SEEDS, SIZES, draw, seed_of
from .figures import figures, table_of
from .rivals import RivalFound, RivalJob, rival_figures, rival_table, rules_for
from .search import Judged, SearchJob
from .twins import Pair, PairJob, pair_figures, pair_table

COUNT = 30
"""Number of systems of a seed without a name."""


def run(row: Any, count: Any, show: Any, jobs: Sequence[Job], chosen: argparse.Namespace) -> None:
    """Run the jobs; print each row, then the figures of all; write the figures to a file if requested."""
    code = code_version("random_systems")
    rows = []
    for found in rows_of(jobs, chosen.workers, code, chosen.rows):
        rows.append(row.from_json(found))
        # Show only the number of a release's rows.
        if not chosen.seed.startswith("release"):
            print(rows[-1], flush=True)
        elif len(rows) % 50 == 0:
            print(f"{len(rows)} of {len(jobs)}", flush=True)
    if rows:
        figures = count(rows)
        print(show(figures, chosen.title))
        if chosen.figures:
            data = {"seed": chosen.seed, "code": code, "kinds": figures}
            chosen.figures.write_text(json.dumps(data, indent=1) + "\n")


def main(given: Sequence[str] | None = None) -> int:
    chosen = _chosen(given)
    numbers = range(chosen.first_system, chosen.first_system + chosen.count)
    known = truths.known(chosen.truths or truths.path_of(chosen.seed))
    drawn = {index: draw(seed_of(chosen.seed), index) for index in numbers}
    judgeable = {index: known[one.fingerprint] for index, one in drawn.items() if one.fingerprint in known}
    # All systems by the first seed, then by the next, so that an interrupted run covers all kinds.
    runs = range(chosen.run_seed, chosen.run_seed + chosen.searches)
    pairs = [(run_seed, index, true) for run_seed in runs for index, true in judgeable.items()]
    chosen.title = f"{chosen.seed}: {len(judgeable)} systems"
    seed, limit_s, sets = chosen.seed, chosen.limit_s, tuple(chosen.set)
    jobs: list[Any]
    if chosen.twins:
        jobs = [PairJob(seed, i, true, run_seed, limit_s) for run_seed, i, true in pairs if true.exists]
        run(Pair, pair_figures, pair_table, jobs, chosen)
    elif chosen.rivals:
        jobs = [
            RivalJob(seed, i, true, run_seed, limit_s, rule)
            for run_seed, i, true in pairs
            for rule in rules_for(drawn[i])
        ]
        run(RivalFound, rival_figures, rival_table, jobs, chosen)
    else:
        jobs = [SearchJob(seed, i, true, run_seed, limit_s, sets) for run_seed, i, true in pairs]
        run(Judged, lambda rows: figures(rows, chosen.every_kind), table_of, jobs, chosen)
    if len(judgeable) < len(drawn):
        missing = len(drawn) - len(judgeable)
        print(
            f"{missing} systems have no true rate yet: python -m tools.random_systems --truth computes them"
        )
    return 0


def _chosen(given: Sequence[str] | None) -> argparse.Namespace:
    chosen: argparse.Namespace = arguments(
        (__doc__ or "").splitlines()[0],
        given,
        seed=("develop", f"of the family: {', '.join(SEEDS)}, or a number"),
        first_system=(0, "from which system on"),
        count=(int, "how many systems (all that follow)"),
        searches=(1, "or pairs, of each system"),
        run_seed=(1, "the first of the searches' own"),
        set=((), "PATH=VALUE of each scenario, repeatable"),
        twins=(False, "who is ahead of systems that hardly differ"),
        rivals=(False, "other tools' rules instead"),
        limit_s=(300.0, "real seconds of one search"),
        rows=(Path, "keep each search's row there, and go on with what is there"),
        figures=(Path, "write the table as JSON there"),
        every_kind=(False, "by all that a system is, not its lead"),
        truths=(Path, "the file of true rates, instead of the seed's own"),
        workers=(os.cpu_count() or 1, "processes"),
    )
    try:
        seed_of(chosen.seed)
    except ValueError as error:
        sys.exit(str(error))
    if chosen.count is None:
        chosen.count = max(SIZES.get(chosen.seed, COUNT) - chosen.first_system, 0)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
