"""``python -m tools.random_systems.judge --seed develop``: the product's search on the drawn systems.

Each system is searched as ``kvbench simulate --system`` does it, with all that a user's search has: first
latency, trials, drains, waits and limits. Its answer is compared with the true rate. It asserts nothing.
Of the seed ``release`` no search is shown by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .. import truth as truths
from ..family import SEEDS, SIZES, draw, seed_of
from .figures import figures, notes, table_of
from .jobs import SearchJob
from .judged import Judged
from .many import rows_of

COUNT = 30
"""Systems of a seed that has no name."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _chosen(arguments)
    numbers = range(chosen.first_system, chosen.first_system + chosen.count)
    known = truths.known(chosen.truths or truths.path_of(chosen.seed))
    drawn = {index: draw(seed_of(chosen.seed), index) for index in numbers}
    judgeable = {index: known[each.fingerprint] for index, each in drawn.items() if each.fingerprint in known}
    # All systems by the first seed, then by the next: what is broken off is of all kinds.
    jobs = [
        SearchJob(chosen.seed, index, true, chosen.run_seed + more, chosen.limit_s)
        for more in range(chosen.searches)
        for index, true in judgeable.items()
    ]
    judged = []
    for row in rows_of(jobs, chosen.workers, chosen.rows):
        each = Judged.from_json(row)
        judged.append(each)
        if chosen.seed != "release":
            print(line_of(each), flush=True)
        elif len(judged) % 50 == 0:
            print(f"{len(judged)} of {len(jobs)} searches", flush=True)
    if judged:
        show(judged, chosen)
    if len(judgeable) < len(drawn):
        missing = len(drawn) - len(judgeable)
        print(
            f"{missing} systems have no true rate yet: python -m tools.random_systems --truth computes them"
        )
    return 0


def line_of(each: Judged) -> str:
    """One search as it ends."""
    ratio = "" if each.ratio is None else f" {each.ratio:.3f} of the truth"
    held = "" if each.holds is None else ", in" if each.holds else ", not in the interval"
    return f"{each.name} {each.kind} {each.run_seed}: {each.outcome}{ratio}{held}, {each.trials} trials"


def show(judged: Sequence[Judged], chosen: argparse.Namespace) -> None:
    """Prints the table, and writes its figures where that is asked for."""
    found = figures(judged, chosen.every_kind)
    caption = f"{chosen.seed}: {len({each.name for each in judged})} systems, 5 / 50 / 95 % of found / true"
    Console(width=None if sys.stdout.isatty() else 190).print(table_of(found, caption))
    for note in notes(found[-1]):
        print(note)
    if chosen.figures:
        data = {"seed": chosen.seed, "kinds": [each.to_json() for each in found]}
        chosen.figures.write_text(json.dumps(data, indent=1) + "\n")


def _chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_systems.judge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="develop", help=f"of the family: {', '.join(SEEDS)} (develop)")
    parser.add_argument("--first-system", type=int, default=0, metavar="N", help="from system N on (0)")
    parser.add_argument("--count", type=int, help="so many systems (all that follow)")
    parser.add_argument("--searches", type=int, default=1, metavar="N", help="of each system (1)")
    parser.add_argument("--run-seed", type=int, default=1, help="the first of the searches' own (1)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="real seconds of one search (300)")
    parser.add_argument(
        "--rows", type=Path, help="keep each search's row there, and go on with what is there"
    )
    parser.add_argument("--figures", type=Path, help="write the table as JSON there")
    parser.add_argument("--every-kind", action="store_true", help="by all that a system is, not its lead")
    parser.add_argument("--truths", type=Path, help="the file of true rates, instead of the seed's own")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    try:
        seed_of(chosen.seed)
    except ValueError as error:
        parser.error(str(error))
    if chosen.count is None:
        chosen.count = max(SIZES.get(chosen.seed, COUNT) - chosen.first_system, 0)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
