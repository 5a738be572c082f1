"""``python -m tools.random_systems.judge --seed develop``: the product's search on the drawn systems.

Each system is searched by ``kvbench simulate --system``, with all that a user's search has: first latency,
trials, drains, waits and limits. Its answer is compared with the true rate. It asserts nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from . import truth as truths
from .family import SEEDS, draw, family, seed_of
from .system import System
from .truth import Truth

WITHIN = 0.05
ENDING_S = 20.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Judged:
    """What one search said. ``true``: of a system that drifts the rate at the search's end; 0: there is none.

    ``outcome`` is the search's (``converged``, ``exhausted``, …), or says why there was no answer.
    """

    name: str
    kind: str
    outcome: str
    true: float
    found: float | None = None
    lower: float | None = None
    upper: float | None = None
    trials: int = 0
    virtual_s: float = 0.0

    @property
    def ratio(self) -> float | None:
        return self.found / self.true if self.found and self.true else None

    @property
    def holds(self) -> bool | None:
        """Whether the interval holds the truth; None without a rate, or where no bound is known."""
        if self.ratio is None or self.lower is None:
            return None
        return self.lower <= self.true <= (self.upper if self.upper is not None else float("inf"))


def command_of(system: System, seed: str, index: int, run_seed: int, output: Path) -> list[str]:
    """The command line that a user would type for it."""
    player = [sys.executable, "-m", "tools.random_systems.serve", seed, str(index)]
    work = system.workload
    lengths = ["--input-len", str(work.input_len), "--output-len", str(work.output_len)]
    sets = ["--set", f"workload.burstiness={work.burstiness:g}", "--set", f"seed={run_seed}"]
    start = [sys.executable, "-m", "kvbench.cli", "simulate", "--system", shlex.join(player)]
    return [*start, *lengths, *system.slo.options(), *sets, "--output", str(output)]


def carried_out(command: Sequence[str], limit_s: float) -> bool:
    """Runs a command for at most so long; then ends it as Ctrl-C does, so that it ends what it started."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, cwd=ROOT, stdin=quiet, stdout=quiet, stderr=quiet) as process:
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
            return False
    return True


def judge(seed: str, run_seed: int, limit_s: float, pair: tuple[System, Truth], index: int) -> Judged:
    """Searches one system, for at most ``limit_s`` of real time."""
    system, true = pair
    name, kind = system.name, system.kinds[0]
    with tempfile.TemporaryDirectory(prefix="kvbench-judge-") as folder:
        command = command_of(system, seed, index, run_seed, Path(folder))
        if not carried_out(command, limit_s):
            return Judged(name, kind, "too long to simulate", true.rates[0])
        tables = list(Path(folder).glob("*/tables/summary.csv"))
        if not tables:
            return Judged(name, kind, "failed", true.rates[0])
        (row,) = csv.DictReader(tables[0].read_text().splitlines())
        lines = (tables[0].parents[1] / "trials.jsonl").read_text().splitlines()
    virtual_s = sum(float(json.loads(line)["duration_s"] or 0.0) for line in lines)
    rate, lower, upper = (
        float(row[key]) if row[key] else None for key in ("max_request_rate", "lower", "upper")
    )
    at_end = true.at(virtual_s) if true.exists else 0.0
    return Judged(
        name, kind, row["search"] or row["outcome"], at_end, rate, lower, upper, len(lines), virtual_s
    )


def table_of(judged: Sequence[Judged]) -> Table:
    """A row a kind, and all of them."""
    table = Table(title="found / true on drawn systems", caption="by kvbench simulate --system")
    for column in (
        "kind",
        "systems",
        "converged",
        "within 5 %",
        "5 %",
        "median",
        "95 %",
        "truth in interval",
    ):
        table.add_column(column, justify="left" if column == "kind" else "right", no_wrap=True)
    for kind in (*sorted({each.kind for each in judged}), "all"):
        mine = [each for each in judged if kind in (each.kind, "all")]
        ratios = sorted(each.ratio for each in mine if each.ratio is not None)
        sure = [each.ratio for each in mine if each.outcome == "converged" and each.ratio is not None]
        held = [each.holds for each in mine if each.holds is not None]
        near = sum(abs(ratio - 1) <= WITHIN for ratio in sure)
        ends = [f"{ratios[round(q * (len(ratios) - 1))]:.3f}" if ratios else "" for q in (0.05, 0.95)]
        middle = f"{median(ratios):.3f}" if ratios else ""
        shares = (f"{near} of {len(sure)}", ends[0], middle, ends[1], f"{sum(held)} of {len(held)}")
        table.add_row(kind, str(len(mine)), str(len(sure)), *shares)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_systems.judge", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seed", default="develop", help=f"of the family: {', '.join(SEEDS)} (develop)")
    parser.add_argument("--count", type=int, help="so many systems from the first on (all)")
    parser.add_argument("--run-seed", type=int, default=1, help="the searches' own (1)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="real seconds of one search (300)")
    parser.add_argument("--json", type=Path, help="write each system's row there, too")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args(arguments)
    seed, known = seed_of(chosen.seed), truths.known(truths.path_of(chosen.seed))
    systems = [draw(seed, index) for index in range(chosen.count or len(family(chosen.seed)))]
    judgeable = [(index, each) for index, each in enumerate(systems) if each.fingerprint in known]
    one = partial(judge, chosen.seed, chosen.run_seed, chosen.limit_s)
    with ThreadPoolExecutor(chosen.workers) as pool:
        pairs = [(each, known[each.fingerprint]) for _, each in judgeable]
        judged = []
        for each in pool.map(one, pairs, [index for index, _ in judgeable]):
            judged.append(each)
            ratio = "" if each.ratio is None else f" {each.ratio:.3f} of the truth"
            print(f"{each.name} {each.kind}: {each.outcome}{ratio}, {each.trials} trials", flush=True)
    if chosen.json:
        chosen.json.write_text("".join(json.dumps(asdict(each)) + "\n" for each in judged))
    Console(width=None if sys.stdout.isatty() else 120).print(table_of(judged))
    if len(judgeable) < len(systems):
        print(f"{len(systems) - len(judgeable)} systems have no true rate yet: --truth computes them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
