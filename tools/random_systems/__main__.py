"""``python -m tools.random_systems --seed develop``: the drawn systems, and their true rates.

``--truth`` computes the missing true rates (minutes to an hour of one core for a whole seed). Those of the
release seeds and of other numbers are stored in results/, not in the repository.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvbench.processes.transfer_worker.child import die_with_parent
from tools.bench import arguments, table

from . import truth as truths
from .family import SEEDS, SIZES, draw, seed_of
from .system import Disturbances, System

CALM = Disturbances()


def table_of(systems: Sequence[System], known: Mapping[str, truths.Truth]) -> str:
    """Return a table with one row per system; the truth is empty if it is not computed yet."""
    rows = []
    for system in systems:
        true, form, changes = known.get(system.fingerprint), system.service, system.disturbances
        service = f"{form.form} {form.spread or '':.4}".strip() + ", mixed" * (len(form.mixture) > 1)
        shown = {name: v for name, v in vars(changes).items() if name != "pause_every_s" or changes.pause_s}
        disturbed = [f"{name} {value:.3g}" for name, value in shown.items() if value != getattr(CALM, name)]
        figures = [system.workload.burstiness, system.idle_ttft_s(), system.capacity]
        rows.append(
            [
                *(system.name, system.kinds[0], system.discipline, service, ", ".join(disturbed)),
                *(system.slo.text(), true.how if true else "", str(system.servers)),
                *(f"{value:.3g}" for value in figures),
                *((_rate(true), f"{true.slope:.3g}") if true else ("", "")),
            ]
        )
    left = "system|kind|discipline|service|disturbed by|SLO|how"
    caption = "true: requests per second (± 1 standard error), at first"
    text: str = table(left, "servers|burst|idle s|capacity|true|slope", rows, "drawn systems", caption)
    return text


def _rate(true: truths.Truth) -> str:
    error = f" ± {true.error:.2%}" if true.error else ""
    return f"{true.rates[0]:.4g}{error}" if true.exists else "none"


def compute(systems: Sequence[System], path: Path, workers: int) -> None:
    kept = truths.known(path)
    missing = [system for system in systems if system.fingerprint not in kept]
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(workers, die_with_parent, (os.getpid(),)) as pool:
        for system, true in zip(missing, pool.imap(truths.compute, missing), strict=True):
            truths.keep({**truths.known(path), system.fingerprint: true}, path)
            # Print no details of a release's systems.
            shown = f": {_rate(true)} by {true.how}, {true.seconds:.0f} s"
            print(system.name + ("" if system.name.startswith("release-") else shown), flush=True)


def main(given: Sequence[str] | None = None) -> int:
    chosen = arguments(
        (__doc__ or "").splitlines()[0],
        given,
        seed=("develop", f"{', '.join(SEEDS)}, or a number"),
        count=(int, "how many systems (those of a named seed, 30 of a number)"),
        truth=(False, "compute the true rates that are not kept yet"),
        path=(Path, "where they are kept, instead of there"),
        workers=(os.cpu_count() or 1, "processes"),
    )
    try:
        seed = seed_of(chosen.seed)
    except ValueError as error:
        sys.exit(str(error))
    systems = [draw(seed, index) for index in range(chosen.count or SIZES.get(chosen.seed, 30))]
    path = chosen.path or truths.path_of(chosen.seed)
    if chosen.truth:
        compute(systems, path, chosen.workers)
    else:
        print(table_of(systems, truths.known(path)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
