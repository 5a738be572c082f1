"""Compare pairs of similar systems: does kvbench rank the faster one first?

Both are searched with the same options and compared as by ``kvbench compare``. A pair without a significant
difference ("?"), or with a search that did not converge, has no order; any order of two equal systems is
wrong. The second system needs no truth: a system with longer times has a lower maximum rate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from kvbench.files import scratch
from kvbench.report.side_by_side import compared_runs
from kvbench.results.run import RunFolder
from tools.jobs import Row, fast_folder

from ..family import seed_of
from ..system import System
from .figures import ALL, Columns, Figures, counted, figure_table, share
from .search import DrawnJob, TooLongError, failure, searched

Form = Literal["slower or faster", "equal, other dice", "equal, other load"]
FORMS: Final[Sequence[Form]] = (
    "slower or faster",
    "equal, other dice",
    "slower or faster",
    "equal, other load",
)
"""Forms, used in turn. "Dice": work, noise and co-tenants of the system. "Load": the arrivals."""
MOST_DIFFERENCE: Final = 0.1
"""Largest relative difference between the times of the two systems."""
OTHER_LOAD: Final = 1_000_003
"""Distance of the run seeds of two systems whose arrivals differ."""
NO_DIFFERENCE: Final = "?"
NO_ANSWER: Final = "no answer"
NO_END: Final = "a search did not converge"


@dataclass(frozen=True)
class Pair(Row):  # type: ignore[misc]
    """Result of one pair. ``factor``: times of B / times of A. ``truly``: the faster one, "" if equal.

    ``told``: kvbench's result: A, B, "?", or why it compares nothing. ``rates``: both measured rates.
    """

    name: str
    kind: str
    form: Form
    number: int
    factor: float
    truly: str
    told: str
    rates: tuple[float | None, float | None] = (None, None)
    real_s: float = 0.0

    @property
    def ordered(self) -> bool:
        return self.told in ("A", "B")

    @property
    def wrong(self) -> bool:
        return self.ordered and self.told != self.truly

    def __str__(self) -> str:
        verdict = " (wrong)" if self.wrong else ""
        return (
            f"{self.name} {self.kind} {self.number}: {self.form}, × {self.factor:.3f}: {self.told}{verdict}"
        )


@dataclass(frozen=True)
class PairJob(DrawnJob):
    """Compare a family's system with a similar one, with at most ``limit_s`` of real time per search."""

    @property
    def key(self) -> str:
        return f"twins {self.seed} {self.index} {self.run_seed}"

    def row(self) -> dict[str, Any]:
        rng = np.random.default_rng([seed_of(self.seed), self.index, self.run_seed, 3])
        form = FORMS[(self.index + self.run_seed) % len(FORMS)]
        factor = 1.0
        if form == "slower or faster":
            factor = math.exp(math.log1p(MOST_DIFFERENCE) * float(rng.uniform(-1, 1)))
        pair = compare_pair(self.system, form, factor, self.run_seed, self.limit_s)
        row: dict[str, Any] = pair.to_json()
        return row


def slower(system: System, factor: float) -> System:
    batch = system.batch
    if batch is not None:
        batch = replace(batch, **_times(batch, factor, "step_s", "sequence_s", "token_s"))
    return replace(system, batch=batch, **_times(system, factor, "prefill_s", "token_s", "slope_s"))


def _times(part: object, factor: float, *names: str) -> dict[str, Any]:
    return {name: getattr(part, name) * factor for name in names}


def compare_pair(system: System, form: Form, factor: float, run_seed: int, limit_s: float) -> Pair:
    """Search a system and its counterpart, and compare the runs by kvbench's rule."""
    start = time.perf_counter()
    truly = "" if factor == 1.0 else "A" if factor > 1.0 else "B"
    pair = Pair(system.name, system.kinds[0], form, run_seed, factor, truly, "")
    other_seed = run_seed + OTHER_LOAD if form == "equal, other load" else run_seed
    with scratch("kvbench-twins-", parent=fast_folder()) as folder:
        try:
            runs = [
                searched(system, run_seed, folder, limit_s),
                searched(slower(system, factor), other_seed, folder, limit_s, dice=1),
            ]
        except TooLongError:
            result = "too long to simulate"
        except Exception as error:
            result = failure(error)
        else:
            result = who_is_ahead(runs)
            found = [(cell.answer or {}).get("max_request_rate") for run in runs for cell in run.cells[:1]]
            pair = replace(pair, rates=(found[0], found[1]) if len(found) == 2 else (None, None))
    return replace(pair, told=result, real_s=round(time.perf_counter() - start, 3))


def who_is_ahead(runs: Sequence[RunFolder]) -> str:
    """Return kvbench's result for two runs: A, B, "?", or the reason for none: ``NO_ANSWER``, ``NO_END``."""
    # Runs whose loads differ only in the seed are compared on request: ``force``.
    pairs = compared_runs(runs, force=True).searched
    if len(pairs) != 1:
        return NO_ANSWER
    if pairs[0].unconverged:
        return NO_END
    if pairs[0].ratio is None:
        return NO_DIFFERENCE
    return pairs[0].ahead.rpartition("@")[2]


_COLUMNS: Final[Columns] = {
    "pairs": lambda row: str(row["pairs"]),
    "with two answers": lambda row: counted(row, "answered", "pairs"),
    "in an order": lambda row: counted(row, "ordered", "answered"),
    "in the wrong one": lambda row: counted(row, "wrong", "ordered"),
}


def pair_figures(pairs: Sequence[Pair]) -> list[Figures]:
    """Count by form, by kind and overall: pairs, with two answers, in an order, in the wrong order."""

    def counts(kind: str, some: Sequence[Pair]) -> Figures:
        ordered, wrong = sum(pair.ordered for pair in some), sum(pair.wrong for pair in some)
        answered = ordered + sum(pair.told == NO_DIFFERENCE for pair in some)
        found = {"kind": kind, "pairs": len(some), "answered": answered, "ordered": ordered, "wrong": wrong}
        return {**found, "wrong_share": share(wrong, ordered)}

    names = (*sorted({pair.form for pair in pairs}), *sorted({pair.kind for pair in pairs}))
    groups = ((name, [pair for pair in pairs if name in (pair.form, pair.kind)]) for name in names)
    return [*(counts(*group) for group in groups), counts(ALL, pairs)]


def pair_table(found: Sequence[Figures], about: str) -> str:
    sections = [len({row["kind"] for row in found} & set(FORMS)), len(found) - 1]
    caption = f"{about}; times × 1/{1 + MOST_DIFFERENCE:g} … {1 + MOST_DIFFERENCE:g}"
    return figure_table("kind", _COLUMNS, found, "who is ahead of twins", caption, sections)
