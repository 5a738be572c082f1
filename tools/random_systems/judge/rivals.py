"""Apply other tools' rules to the drawn systems, with their default windows.

The rules are those of ``tools.perf_search.rivals``, under the best conditions: the SLO's metrics, no start-up
time, an idle server for each point, and no cut-off of late responses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tools.bench import NEAR
from tools.jobs import Row
from tools.perf_search.pipeline import NEVER_S, Outcomes
from tools.perf_search.rivals import (
    Offers,
    adaptive_rule,
    guidellm_rule,
    isotonic_rule,
    mlr_rule,
    plain_rule,
    vllm_rule,
)

from ..queues import can_close, closed
from ..roots import criteria
from ..simulate import State, latency_s, trial
from ..system import Clock, FloatArray, System
from .figures import Columns, Figures, counted, figure_table, middle_of, number, ratio_text, ratios_of
from .search import DrawnJob, TooLongError, at_most

OPEN: Final[Mapping[str, Callable[[Offers], float | None]]] = {
    "vLLM serve_sla": vllm_rule,
    "60 s bisection": plain_rule,
    "MLRsearch": mlr_rule,
    "AIPerf adaptive_scale": adaptive_rule,
}
CLOSED: Final[Mapping[str, Callable[[Offers], float | None]]] = {
    "AIPerf smooth isotonic": isotonic_rule,
    "GuideLLM goodput": guidellm_rule,
}
RULES: Final = (*OPEN, *CLOSED)
LEAST_RATE: Final = 0.01
MOST_RATE: Final = 10_000.0
"""Range of rates, equal to the default of ``kvbench``."""
MOST_ANSWERS: Final = 100_000
"""Most requests simulated in a closed loop with a time limit."""


class DrawnBench(Offers):  # type: ignore[misc]
    """A drawn system under load. ``seed``: seed of arrivals and work."""

    min_rate, max_rate = LEAST_RATE, MOST_RATE

    def __init__(self, drawn: System, seed: int) -> None:
        super().__init__(seed)
        self.drawn = drawn
        self.idle_s, self.burstiness = latency_s(drawn), drawn.workload.burstiness
        self.noise: list[tuple[float, float]] = []
        self.criteria = criteria(drawn.slo)
        self.allowed = 1.0 - max((one.share for one in self.criteria if one.share), default=0.9)

    def serve(self, at: FloatArray) -> Outcomes:
        load, seed = self.drawn.workload, int(self.rng.integers(2**32))
        lengths = [np.full(len(at), float(length)) for length in (load.input_len, load.output_len)]
        first, last, _ = trial(self.drawn, at, lengths[0], lengths[1], self.measured_s, seed, State())
        return self._outcomes(at, first, last)

    def serve_users(self, concurrency: int, seconds: float, requests: int | None) -> Outcomes:
        work = self.drawn.service.draw(requests or MOST_ANSWERS, self.rng)
        changes, begin_s = self.drawn.disturbances, self.measured_s
        if changes.noise:
            self.noise.append((begin_s, math.exp(changes.noise * float(self.rng.standard_normal()))))
        clock = Clock(changes, self.noise)
        begin = float(clock.work(np.array([begin_s]))[0])
        if requests is None:  # no more than users can send in that time
            most = int(4 * (seconds + self.idle_s) * min(concurrency / self.idle_s, self.drawn.capacity)) + 10
            work = work[: most + concurrency]
        times = [clock.seconds(begin + done) - begin_s for done in closed(self.drawn, concurrency, work)]
        arrived, first, last = (values[times[0] <= seconds] for values in times)
        return self._outcomes(arrived, first, last)

    def _outcomes(self, arrived: FloatArray, first: FloatArray, last: FloatArray) -> Outcomes:
        never = np.isnan(last)
        first, last = np.where(never, NEVER_S, first), np.where(never, NEVER_S, last)
        return Outcomes(arrived, first, last, never, self.drawn.workload.output_len)


@dataclass(frozen=True)
class RivalJob(DrawnJob):
    """One search by another tool's rule."""

    rule: str

    @property
    def key(self) -> str:
        return f"rival {self.seed} {self.index} {self.run_seed} {self.rule}"

    def row(self) -> dict[str, Any]:
        start, system = time.perf_counter(), self.system
        bench, found, answered = DrawnBench(system, self.run_seed), None, True
        try:
            with at_most(self.limit_s):
                found = {**OPEN, **CLOSED}[self.rule](bench)
        except TooLongError:
            answered = False
        true = self.true.at(bench.measured_s) if self.true.exists else 0.0
        spent = (bench.trials, bench.measured_s, bench.measured_s / bench.idle_s)
        real_s = round(time.perf_counter() - start, 3)
        about = (system.name, system.kinds[0], self.rule)
        row: dict[str, Any] = RivalFound(
            *about, answered, true, found, *spent, real_s, answered and bench.converged
        ).to_json()
        return row


@dataclass(frozen=True)
class RivalFound(Row):  # type: ignore[misc]
    """A rule's result. ``found``: rate, None if no rate meets the SLO. ``answered``: within the real time.

    ``converged``: whether the rule ended by its criterion.
    """

    name: str
    kind: str
    rule: str
    answered: bool
    true: float
    found: float | None
    trials: int
    virtual_s: float
    latencies: float
    real_s: float
    converged: bool = True

    def __str__(self) -> str:
        ratio = f"{self.found / self.true:.3f} of the truth" if self.found and self.true else "none"
        return f"{self.name} {self.kind} {self.rule}: {ratio}"


def rule_figures(rule: str, rows: Sequence[RivalFound]) -> Figures:
    """Count a rule's searches and answers; for systems with a rate, the converged, found and near ones."""
    answered = [row for row in rows if row.answered]
    possible = [row for row in answered if LEAST_RATE <= row.true <= MOST_RATE]
    ratios = [row.found / row.true for row in possible if row.found]
    return {
        "rule": rule,
        "searches": len(rows),
        "answered": len(answered),
        "converged": sum(row.converged and row.found is not None for row in possible),
        "possible": len(possible),
        "found": len(ratios),
        "near": sum(abs(ratio - 1) <= NEAR for ratio in ratios),
        **ratios_of(ratios),
        **{name: middle_of(getattr(row, name) for row in answered) for name in ("virtual_s", "latencies")},
    }


_COLUMNS: Final[Columns] = {
    "searches": lambda row: str(row["searches"]),
    "answered": lambda row: counted(row, "answered", "searches"),
    "converged": lambda row: counted(row, "converged", "possible"),
    "a rate found": lambda row: counted(row, "found", "possible"),
    "within 5 %": lambda row: counted(row, "near", "possible"),
    "found / true": lambda row: ratio_text(row),
    "seconds": lambda row: number(row["virtual_s"]),
    "latencies": lambda row: number(row["latencies"]),
}


def rules_for(system: System) -> tuple[str, ...]:
    """Return the rules that apply to a system; closed loops only if they can be simulated."""
    return RULES if can_close(system) else tuple(OPEN)


def rival_figures(rows: Sequence[RivalFound]) -> list[Figures]:
    return [rule_figures(rule, [row for row in rows if row.rule == rule]) for rule in RULES]


def rival_table(found: Sequence[Figures], about: str) -> str:
    caption = f"{about}; closed loops only where they are simulated"
    return figure_table("rule", _COLUMNS, found, "other rules on drawn systems", caption)
