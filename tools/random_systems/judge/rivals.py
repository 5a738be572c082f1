"""Other tools' rules on the drawn systems, with the windows that they use by default.

The rules are those of ``tools.perf_search.rivals``. They are given their best: the figures that the SLO is
about, no start-up time, each point on an idle server, and all answers waited for.
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
"""What ``kvbench`` looks between by default, too."""
MOST_ANSWERS: Final = 100_000
"""Of a closed loop by time."""


class DrawnBench(Offers):  # type: ignore[misc]
    """A drawn system. ``seed``: of arrivals and work."""

    min_rate, max_rate = LEAST_RATE, MOST_RATE

    def __init__(self, drawn: System, seed: int) -> None:
        super().__init__(seed)
        self.drawn = drawn
        self.idle_s, self.burstiness = latency_s(drawn), drawn.workload.burstiness
        self.noise: list[tuple[float, float]] = []
        self.criteria = criteria(drawn.slo)
        self.allowed = 1.0 - max((each.share for each in self.criteria if each.share), default=0.9)

    def serve(self, at: FloatArray) -> Outcomes:
        load, seed = self.drawn.workload, int(self.rng.integers(2**32))
        lengths = [np.full(len(at), float(each)) for each in (load.input_len, load.output_len)]
        first, last, _ = trial(self.drawn, at, lengths[0], lengths[1], self.measured_s, seed, State())
        return self._outcomes(at, first, last)

    def serve_users(self, concurrency: int, seconds: float, requests: int | None) -> Outcomes:
        work = self.drawn.service.draw(requests or MOST_ANSWERS, self.rng)
        own, begin_s = self.drawn.disturbances, self.measured_s
        if own.noise:
            self.noise.append((begin_s, math.exp(own.noise * float(self.rng.standard_normal()))))
        clock = Clock(own, self.noise)
        begin = float(clock.work(np.array([begin_s]))[0])
        if requests is None:  # no more than can be sent in that time, or than is simulated
            most = int(4 * (seconds + self.idle_s) * min(concurrency / self.idle_s, self.drawn.capacity)) + 10
            work = work[: most + concurrency]
        times = [clock.seconds(begin + each) - begin_s for each in closed(self.drawn, concurrency, work)]
        arrived, first, last = (each[times[0] <= seconds] for each in times)
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
    """What a rule said; ``found`` None: that no rate meets the SLO. ``answered``: within the real time.

    ``converged``: by its own criterion.
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
    """Count a rule's searches, those answered, and where there is a rate those converged, found, and near."""
    answered = [each for each in rows if each.answered]
    possible = [each for each in answered if LEAST_RATE <= each.true <= MOST_RATE]
    ratios = [each.found / each.true for each in possible if each.found]
    return {
        "rule": rule,
        "searches": len(rows),
        "answered": len(answered),
        "converged": sum(each.converged and each.found is not None for each in possible),
        "possible": len(possible),
        "found": len(ratios),
        "near": sum(abs(ratio - 1) <= NEAR for ratio in ratios),
        **ratios_of(ratios),
        **{name: middle_of(getattr(each, name) for each in answered) for name in ("virtual_s", "latencies")},
    }


_COLUMNS: Final[Columns] = {
    "searches": lambda of: str(of["searches"]),
    "answered": lambda of: counted(of, "answered", "searches"),
    "converged": lambda of: counted(of, "converged", "possible"),
    "a rate found": lambda of: counted(of, "found", "possible"),
    "within 5 %": lambda of: counted(of, "near", "possible"),
    "found / true": lambda of: ratio_text(of),
    "seconds": lambda of: number(of["virtual_s"]),
    "latencies": lambda of: number(of["latencies"]),
}


def rules_for(system: System) -> tuple[str, ...]:
    """Those that can be played on a system: closed loops only where they can be simulated."""
    return RULES if can_close(system) else tuple(OPEN)


def rival_figures(rows: Sequence[RivalFound]) -> list[Figures]:
    return [rule_figures(rule, [each for each in rows if each.rule == rule]) for rule in RULES]


def rival_table(found: Sequence[Figures], about: str) -> str:
    caption = f"{about}; closed loops only where they are simulated"
    return figure_table("rule", _COLUMNS, found, "other rules on drawn systems", caption)
