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
from rich.table import Table

from .. import truth as truths
from ..family import SEEDS, SIZES, draw, seed_of
from .figures import Figures, figures, notes, table_of
from .jobs import SearchJob
from .judged import Judged
from .many import code_version, rows_of
from .rivals import RULES, RivalFigures, RivalFound, RivalJob, rival_table, rules_for
from .twins import MOST, TwinFigures, TwinJob, Twins, twin_figures, twin_table

COUNT = 30
"""Systems of a seed that has no name."""


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _chosen(arguments)
    numbers = range(chosen.first_system, chosen.first_system + chosen.count)
    known = truths.known(chosen.truths or truths.path_of(chosen.seed))
    drawn = {index: draw(seed_of(chosen.seed), index) for index in numbers}
    judgeable = {index: known[each.fingerprint] for index, each in drawn.items() if each.fingerprint in known}
    # All systems by the first seed, then by the next: what is broken off is of all kinds.
    seeds = range(chosen.run_seed, chosen.run_seed + chosen.searches)
    if chosen.twins:
        there = [index for index, true in judgeable.items() if true.exists]
        judge_pairs(
            [TwinJob(chosen.seed, each, run, chosen.limit_s) for run in seeds for each in there], chosen
        )
    elif chosen.rivals:
        rivals = [
            RivalJob(chosen.seed, index, true, run, chosen.limit_s, rule)
            for run in seeds
            for index, true in judgeable.items()
            for rule in rules_for(drawn[index])
        ]
        judge_rivals(rivals, chosen)
    else:
        jobs = [
            SearchJob(chosen.seed, index, true, run, chosen.limit_s, tuple(chosen.set))
            for run in seeds
            for index, true in judgeable.items()
        ]
        judge_searches(jobs, chosen)
    if len(judgeable) < len(drawn):
        missing = len(drawn) - len(judgeable)
        print(
            f"{missing} systems have no true rate yet: python -m tools.random_systems --truth computes them"
        )
    return 0


def judge_searches(jobs: Sequence[SearchJob], chosen: argparse.Namespace) -> None:
    """Each search beside the truth, and the figures of all."""
    judged = []
    for row in rows_of(jobs, chosen.workers, chosen.rows):
        each = Judged.from_json(row)
        judged.append(each)
        tell(line_of(each), chosen, len(judged), len(jobs))
    if judged:
        found = figures(judged, chosen.every_kind)
        systems = len({each.name for each in judged})
        show(table_of(found, f"{chosen.seed}: {systems} systems, 5 / 50 / 95 % of found / true"))
        for note in notes(found[-1]):
            print(note)
        write(found, chosen)


def judge_pairs(jobs: Sequence[TwinJob], chosen: argparse.Namespace) -> None:
    """Each pair of twins, and how many are in the wrong order."""
    twins = []
    for row in rows_of(jobs, chosen.workers, chosen.rows):
        each = Twins.from_json(row)
        twins.append(each)
        verdict = " (wrong)" if each.wrong else ""
        line = (
            f"{each.name} {each.kind} {each.number}: {each.form}, × {each.factor:.3f}: {each.told}{verdict}"
        )
        tell(line, chosen, len(twins), len(jobs))
    if twins:
        found = twin_figures(twins)
        show(twin_table(found, f"{chosen.seed}: times × 1/{1 + MOST:g} … {1 + MOST:g}"))
        write(found, chosen)


def judge_rivals(jobs: Sequence[RivalJob], chosen: argparse.Namespace) -> None:
    """Each search by another tool's rule, and the figures of each rule."""
    rows = []
    for row in rows_of(jobs, chosen.workers, chosen.rows):
        each = RivalFound(**{name: row[name] for name in RivalFound.__dataclass_fields__})
        rows.append(each)
        ratio = f"{each.found / each.true:.3f} of the truth" if each.found and each.true else "none"
        tell(f"{each.name} {each.kind} {each.rule}: {ratio}", chosen, len(rows), len(jobs))
    if rows:
        found = [RivalFigures.of(rule, [each for each in rows if each.rule == rule]) for rule in RULES]
        show(rival_table(found, f"{chosen.seed}; closed loops only where they are simulated"))
        write(found, chosen)


def tell(line: str, chosen: argparse.Namespace, done: int, jobs: int) -> None:
    """One result as it comes; of the release's only how many there are."""
    if chosen.seed != "release":
        print(line, flush=True)
    elif done % 50 == 0:
        print(f"{done} of {jobs}", flush=True)


def show(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 190).print(table)


def write(
    found: Sequence[Figures] | Sequence[TwinFigures] | Sequence[RivalFigures], chosen: argparse.Namespace
) -> None:
    """The table as JSON, where that is asked for."""
    if chosen.figures:
        data = {"seed": chosen.seed, "code": code_version(), "kinds": [each.to_json() for each in found]}
        chosen.figures.write_text(json.dumps(data, indent=1) + "\n")


def line_of(each: Judged) -> str:
    """One search as it ends."""
    ratio = "" if each.ratio is None else f" {each.ratio:.3f} of the truth"
    held = "" if each.holds is None else ", in" if each.holds else ", not in the interval"
    return f"{each.name} {each.kind} {each.run_seed}: {each.outcome}{ratio}{held}, {each.trials} trials"


def _chosen(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_systems.judge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="develop", help=f"of the family: {', '.join(SEEDS)} (develop)")
    parser.add_argument("--first-system", type=int, default=0, metavar="N", help="from system N on (0)")
    parser.add_argument("--count", type=int, help="so many systems (all that follow)")
    parser.add_argument("--searches", type=int, default=1, metavar="N", help="or pairs, of each system (1)")
    parser.add_argument("--run-seed", type=int, default=1, help="the first of the searches' own (1)")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="of each scenario")
    parser.add_argument("--twins", action="store_true", help="who is ahead of systems that hardly differ")
    parser.add_argument("--rivals", action="store_true", help="other tools' rules instead")
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
