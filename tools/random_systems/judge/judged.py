"""What one search said of a drawn system, beside the truth."""

from __future__ import annotations

import csv
import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvbench.files import scratch
from kvbench.report.tables.result import summary_table
from kvbench.results.run import RunFolder, load_run

from ..simulate import latency_s
from ..system import System
from ..truth import Truth
from .search import TooLongError, carried_out, command_of, failure, fast_folder, searched

WITHIN: Final = 0.05
TOO_LONG: Final = "too long to simulate"
PROMISE: Final = "time_suffices"
"""Where a search says of its time that it suffices: in its answer, or in the run's plan."""


@dataclass(frozen=True)
class Judged:
    """One search. ``true``: of a system that drifts the rate at the search's end; 0: there is none.

    ``outcome`` is the search's (``converged``, ``exhausted``, …), or why there was no answer; ``said`` that
    of the result table (``found``, ``at_least``, ``none``, …). ``virtual_s``: the virtual clock at the end;
    ``offered_s``: the trials alone; ``latencies``: the former in end-to-end latencies of a request alone.
    ``promised``: whether the plan said that the time suffices; None where it says nothing.
    """

    name: str
    kinds: tuple[str, ...]
    run_seed: int
    outcome: str
    said: str
    true: float
    true_at_first: float
    found: float | None = None
    lower: float | None = None
    upper: float | None = None
    trials: int = 0
    void: int = 0
    virtual_s: float = 0.0
    offered_s: float = 0.0
    latencies: float = 0.0
    promised: bool | None = None
    real_s: float = 0.0

    @property
    def kind(self) -> str:
        return self.kinds[0]

    @property
    def converged(self) -> bool:
        return self.outcome == "converged"

    @property
    def ratio(self) -> float | None:
        return self.found / self.true if self.found and self.true else None

    @property
    def near(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= WITHIN

    @property
    def interval(self) -> tuple[float, float] | None:
        """What the answer allows: ``≥ x`` everything from there on, ``none (< x)`` everything up to there."""
        if self.said == "none" or self.outcome == "slo_unattainable":
            return 0.0, 0.0 if self.upper is None else self.upper
        lower = self.lower if self.lower is not None else self.found
        if lower is None:
            return None
        return lower, math.inf if self.upper is None else self.upper

    @property
    def holds(self) -> bool | None:
        """Whether the interval holds the truth; None without one, or where it is rightly said that no rate
        meets the SLO.
        """
        if self.interval is None or (not self.true and not self.found):
            return None
        return self.interval[0] <= self.true <= self.interval[1]

    @property
    def holds_some(self) -> bool | None:
        """Of a system that drifts: whether the interval holds a rate that was true at some time."""
        if self.interval is None or (not self.true and not self.found):
            return None
        low, high = sorted((self.true, self.true_at_first))
        return self.interval[0] <= high and low <= self.interval[1]

    @property
    def half_width(self) -> float | None:
        """Relative, of an interval with two ends."""
        if not self.found or self.interval is None or math.isinf(self.interval[1]):
            return None
        return (self.interval[1] - self.interval[0]) / 2 / self.found

    @property
    def wrong_none(self) -> bool:
        """``none`` was said of a system that holds a rate which that excludes."""
        return not self.found and self.holds is False

    @property
    def wrong_least(self) -> bool:
        """``≥ x`` was said, and x is more than there is."""
        return bool(self.found) and self.upper is None and self.holds is False

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "kinds": list(self.kinds)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Judged:
        known = {each.name: row[each.name] for each in dataclasses.fields(cls) if each.name in row}
        return cls(**{**known, "kinds": tuple(row["kinds"])})


def judge(system: System, true: Truth, run_seed: int, limit_s: float, sets: tuple[str, ...] = ()) -> Judged:
    """Searches one system in this process, for at most ``limit_s`` of real time. ``sets``: of a scenario."""
    start = time.perf_counter()
    with scratch("kvbench-judge-", parent=fast_folder()) as folder:
        try:
            run = searched(system, run_seed, folder, limit_s, sets=sets)
        except TooLongError:
            found = unanswered(system, true, run_seed, TOO_LONG)
        except Exception as error:
            found = unanswered(system, true, run_seed, failure(error))
        else:
            found = judged_run(system, true, run_seed, run)
    return replace(found, real_s=round(time.perf_counter() - start, 3))


def judge_command(
    system: System, true: Truth, run_seed: int, limit_s: float, place: tuple[str, int]
) -> Judged:
    """The same by the command. ``place``: family's seed and index, by which its process draws the system."""
    start = time.perf_counter()
    with scratch("kvbench-judge-") as folder:
        command = command_of(system, *place, run_seed, folder)
        if not carried_out(command, limit_s):
            return unanswered(system, true, run_seed, TOO_LONG)
        tables = list(folder.glob("*/tables/summary.csv"))
        if not tables:
            return unanswered(system, true, run_seed, "failed: the command wrote no table")
        (row,) = csv.DictReader(tables[0].read_text().splitlines())
        found = judged_run(system, true, run_seed, load_run(tables[0].parents[1]))
    rates = {
        name: float(row[key]) if row[key] else None
        for name, key in (("found", "max_request_rate"), ("lower", "lower"), ("upper", "upper"))
    }
    return replace(found, **rates, real_s=round(time.perf_counter() - start, 3))  # type: ignore[arg-type]


def unanswered(system: System, true: Truth, run_seed: int, why: str) -> Judged:
    """A search of which there is no answer."""
    return Judged(system.name, system.kinds, run_seed, why, "failed", true.rates[0], true.rates[0])


def judged_run(system: System, true: Truth, run_seed: int, run: RunFolder) -> Judged:
    """What a run folder says of a system."""
    rows = summary_table(run)
    if len(rows) != 1:
        return unanswered(system, true, run_seed, "failed: no trial")
    (row,) = rows
    ends = [float(each.engine.get("starts_at_s") or 0.0) + each.duration_s for each in run.trials]
    virtual_s = max(ends, default=0.0)
    return Judged(
        name=system.name,
        kinds=system.kinds,
        run_seed=run_seed,
        outcome=row.search or row.outcome,
        said=row.outcome,
        true=true.at(virtual_s) if true.exists else 0.0,
        true_at_first=true.rates[0],
        found=row.answer.max_request_rate,
        lower=row.answer.lower,
        upper=row.answer.upper,
        trials=row.trials,
        void=sum(each.verdict == "invalid" for each in run.trials),
        virtual_s=virtual_s,
        offered_s=sum(each.duration_s for each in run.trials),
        latencies=virtual_s / latency_s(system),
        promised=promised(run),
    )


def promised(run: RunFolder) -> bool | None:
    """Whether a search's plan said that its time suffices; None where it says nothing of it."""
    answers = [each.answer or {} for each in run.cells]
    said = [place[PROMISE] for place in (*answers, run.plan) if isinstance(place.get(PROMISE), bool)]
    return bool(said[0]) if said else None
