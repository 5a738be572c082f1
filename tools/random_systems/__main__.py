"""``python -m tools.random_systems --seed develop --list``: the drawn systems, and their true rates.

``--truth`` computes the true rates that are not kept yet (minutes to an hour of a core for a whole seed).
Those of the release seed and of other numbers are kept in results/, not in the repository.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from kvbench.processes.transfer_worker.child import die_with_parent
from tools.bench import table

from . import truth as truths
from .family import SEEDS, draw, family, seed_of
from .system import System


def table_of(systems: Sequence[System], known: Mapping[str, truths.Truth]) -> str:
    """A row a system; the truth is empty where it has not been computed."""
    rows = []
    for system in systems:
        true = known.get(system.fingerprint)
        service = system.service.form + (f" {system.service.spread:.2g}" if system.service.spread else "")
        if len(system.service.mixture) > 1:
            service += ", mixed"
        words = (
            system.name,
            system.kinds[0],
            system.discipline,
            service,
            _disturbed(system),
            system.slo.text(),
        )
        how, rate, slope = ("", "", "") if true is None else (true.how, _rate(true), f"{true.slope:.3g}")
        figures = (system.workload.burstiness, 2), (system.idle_ttft_s(), 3), (system.capacity, 3)
        shown = [f"{value:.{digits}g}" for value, digits in figures]
        rows.append([*words, how, str(system.servers), *shown, rate, slope])
    left = "system|kind|discipline|service|disturbed by|SLO|how"
    caption = "true: requests per second (± 1 standard error), at first"
    text: str = table(left, "servers|burst|idle s|capacity|true|slope", rows, "drawn systems", caption)
    return text


def _rate(true: truths.Truth) -> str:
    if not true.exists:
        return "none"
    error = f" ± {true.error:.2%}" if true.error else ""
    return f"{true.rates[0]:.4g}{error}"


def _disturbed(system: System) -> str:
    own = system.disturbances
    parts = []
    if own.pause_s:
        parts.append(f"pauses {own.pause_s:.2g}/{own.pause_every_s:.2g} s")
    if own.warmup_factor != 1:
        parts.append(f"warm-up × {own.warmup_factor:.3g}")
    if own.drift:
        parts.append(f"drift {own.drift:.2%}/min")
    if own.tenants:
        parts.append(f"co-tenants {own.tenants:.0%}")
    if own.noise:
        parts.append(f"noise {own.noise:.1%}")
    return ", ".join(parts)


def compute(systems: Sequence[System], path: Path, workers: int, again: bool = False) -> None:
    """Computes and keeps the truths that are not kept, or all, each as soon as it is there."""
    kept = truths.known(path)
    missing = [each for each in systems if again or each.fingerprint not in kept]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(workers, die_with_parent, (os.getpid(),)) as pool:
        for system, true in zip(
            missing, pool.imap(partial(truths.compute_again, kept), missing), strict=True
        ):
            truths.keep({**truths.known(path), system.fingerprint: true}, path)
            # Of the release's systems nothing is shown one by one unless it is asked for.
            shown = f": {_rate(true)} by {true.how}, {true.seconds:.0f} s"
            print(system.name + ("" if system.name.startswith("release-") else shown), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_systems", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="develop", help=f"{', '.join(SEEDS)}, or a number (develop)")
    parser.add_argument("--count", type=int, help="so many systems (those of a named seed, 30 of a number)")
    parser.add_argument("--list", action="store_true", help="print them as a table")
    parser.add_argument("--kinds", action="store_true", help="print how many there are of each kind")
    parser.add_argument("--json", action="store_true", help="print each as a line of JSON")
    parser.add_argument("--truth", action="store_true", help="compute the true rates that are not kept yet")
    parser.add_argument("--again", action="store_true", help="with --truth: all, from where they were before")
    parser.add_argument("--path", type=Path, help="where they are kept, instead of there")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    try:
        seed = seed_of(chosen.seed)
    except ValueError as error:
        parser.error(str(error))
    many = chosen.count or (len(family(chosen.seed)) if chosen.seed in SEEDS else 30)
    systems = [draw(seed, index) for index in range(many)]
    path = chosen.path or truths.path_of(chosen.seed)
    if chosen.truth:
        compute(systems, path, chosen.workers, chosen.again)
    known = truths.known(path)
    if chosen.json:
        for each in systems:
            true = known.get(each.fingerprint)
            print(json.dumps({**each.to_json(), "truth": None if true is None else true.to_json()}))
    if chosen.kinds:
        for kind, count in Counter(kind for each in systems for kind in each.kinds).most_common():
            print(f"{count:4d} {kind}")
    if chosen.list or not (chosen.json or chosen.kinds or chosen.truth):
        print(table_of(systems, known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
