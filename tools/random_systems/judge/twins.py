"""Two systems that hardly differ: is the right one said to be ahead, if one is?

Both are searched with the same options, and compared as ``kvbench compare`` does it. A pair that cannot be
told apart ("?"), or of which a search did not converge, is in no order; of equal twins whichever order is
told is wrong. Which of two is truly ahead needs no truth of the second: a system all of whose times are
longer holds a lower rate.
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
"""In turn. Dice are all that is drawn in the system: work, noise, co-tenants. The load is the arrivals."""
MOST: Final = 0.1
"""All times of one are up to so much longer or shorter than the other's."""
OTHER_LOAD: Final = 1_000_003
"""Between the run seeds of two twins whose arrivals differ."""
UNTOLD: Final = "?"
NO_ANSWER: Final = "no answer"
NO_END: Final = "a search did not converge"


@dataclass(frozen=True)
class Twins(Row):  # type: ignore[misc]
    """A pair. ``factor``: times of B by those of A. ``truly``: who is ahead, "" if they are equal.

    ``told``: A, B, "?", or why there is nothing to compare. ``rates``: what was found of both.
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
class TwinJob(DrawnJob):
    """One pair of a family's system and its twin, each search for at most ``limit_s`` of real time."""

    @property
    def key(self) -> str:
        return f"twins {self.seed} {self.index} {self.run_seed}"

    def row(self) -> dict[str, Any]:
        rng = np.random.default_rng([seed_of(self.seed), self.index, self.run_seed, 3])
        form = FORMS[(self.index + self.run_seed) % len(FORMS)]
        factor = 1.0
        if form == "slower or faster":
            factor = math.exp(math.log1p(MOST) * float(rng.uniform(-1, 1)))
        pair = judge_twins(self.system, form, factor, self.run_seed, self.limit_s)
        row: dict[str, Any] = pair.to_json()
        return row


def slower(system: System, factor: float) -> System:
    batch = system.batch
    if batch is not None:
        batch = replace(batch, **_times(batch, factor, "step_s", "sequence_s", "token_s"))
    return replace(system, batch=batch, **_times(system, factor, "prefill_s", "token_s", "slope_s"))


def _times(of: object, factor: float, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) * factor for name in names}


def judge_twins(system: System, form: Form, factor: float, run_seed: int, limit_s: float) -> Twins:
    """Searches a system and its twin, and asks the product who is ahead."""
    start = time.perf_counter()
    truly = "" if factor == 1.0 else "A" if factor > 1.0 else "B"
    pair = Twins(system.name, system.kinds[0], form, run_seed, factor, truly, "")
    other_seed = run_seed + OTHER_LOAD if form == "equal, other load" else run_seed
    with scratch("kvbench-twins-", parent=fast_folder()) as folder:
        try:
            runs = [
                searched(system, run_seed, folder, limit_s),
                searched(slower(system, factor), other_seed, folder, limit_s, dice=1),
            ]
        except TooLongError:
            told = "too long to simulate"
        except Exception as error:
            told = failure(error)
        else:
            told = who_is_ahead(runs)
            found = [(each.answer or {}).get("max_request_rate") for run in runs for each in run.cells[:1]]
            pair = replace(pair, rates=(found[0], found[1]) if len(found) == 2 else (None, None))
    return replace(pair, told=told, real_s=round(time.perf_counter() - start, 3))


def who_is_ahead(runs: Sequence[RunFolder]) -> str:
    """What the product says of two runs: A, B, "?", or why it compares nothing: ``NO_ANSWER``, ``NO_END``."""
    # Of runs whose load differs in its seed alone it is said so, and they are compared if one asks for it.
    pairs = compared_runs(runs, force=True).searched
    if len(pairs) != 1:
        return NO_ANSWER
    if pairs[0].unconverged:
        return NO_END
    if pairs[0].ratio is None:
        return UNTOLD
    return pairs[0].ahead.rpartition("@")[2]


_COLUMNS: Final[Columns] = {
    "pairs": lambda of: str(of["pairs"]),
    "with two answers": lambda of: counted(of, "answered", "pairs"),
    "in an order": lambda of: counted(of, "ordered", "answered"),
    "in the wrong one": lambda of: counted(of, "wrong", "ordered"),
}


def twin_figures(twins: Sequence[Twins]) -> list[Figures]:
    """Count by form, by kind and overall: pairs, two answers, in an order, and in the wrong one."""

    def counts(kind: str, some: Sequence[Twins]) -> Figures:
        ordered, wrong = sum(each.ordered for each in some), sum(each.wrong for each in some)
        answered = ordered + sum(each.told == UNTOLD for each in some)
        found = {"kind": kind, "pairs": len(some), "answered": answered, "ordered": ordered, "wrong": wrong}
        return {**found, "wrong_share": share(wrong, ordered)}

    names = (*sorted({each.form for each in twins}), *sorted({each.kind for each in twins}))
    groups = ((name, [each for each in twins if name in (each.form, each.kind)]) for name in names)
    return [*(counts(*group) for group in groups), counts(ALL, twins)]


def twin_table(found: Sequence[Figures], about: str) -> str:
    sections = [len({each["kind"] for each in found} & set(FORMS)), len(found) - 1]
    caption = f"{about}; times × 1/{1 + MOST:g} … {1 + MOST:g}"
    return figure_table("kind", _COLUMNS, found, "who is ahead of twins", caption, sections)
