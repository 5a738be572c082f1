"""Other tools' rules on the drawn systems, with the windows that they use by default.

The rules are those of ``tools.perf_search.rivals``. They are given their best: the figures that the SLO is
about, no start-up time, each point on an idle server, and all answers waited for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tools.bench import NEAR, table
from tools.perf_search.pipeline import NEVER_S, Outcomes
from tools.perf_search.rivals import Offers, guidellm_rule, isotonic_rule, plain_rule, vllm_rule

from ..family import draw, seed_of
from ..queues import can_close, closed
from ..roots import criteria
from ..simulate import State, latency_s, trial
from ..system import Clock, FloatArray, System
from ..truth import Truth
from .figures import counted, middle_of, number, quantile, ratio_text
from .search import TooLongError, at_most

OPEN: Final[Mapping[str, Callable[[Offers], float | None]]] = {
    "vLLM serve_sla": vllm_rule,
    "60 s bisection": plain_rule,
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

    def kept(self, outcomes: Outcomes) -> bool:
        limits = criteria(self.drawn.slo)
        return all(each.value(outcomes.ttft_s, self._tpot(outcomes)) <= 1.0 for each in limits)

    def margin(self, outcomes: Outcomes) -> float:
        """Mean or percentile of what binds, relative to its limit, less 1: above 0 is a miss."""
        found, tpot_s = [], self._tpot(outcomes)
        for each in criteria(self.drawn.slo):
            load: FloatArray = np.zeros(len(tpot_s))
            for values, limit_s in ((outcomes.ttft_s, each.ttft_s), (tpot_s, each.tpot_s)):
                if limit_s is not None:
                    load = np.maximum(load, values / limit_s)
            found.append(float(load.mean() if each.share is None else np.quantile(load, each.share)))
        return min(max(found), 1e3) - 1.0

    def _tpot(self, outcomes: Outcomes) -> FloatArray:
        decode_s: FloatArray = outcomes.end_s - outcomes.first_s
        return decode_s / max(self.drawn.workload.output_len - 1, 1)


@dataclass(frozen=True)
class RivalJob:
    """One search of a family's system by another tool's rule, for at most ``limit_s`` of real time."""

    seed: str
    index: int
    true: Truth
    run_seed: int
    limit_s: float
    rule: str

    @property
    def key(self) -> str:
        return f"rival {self.seed} {self.index} {self.run_seed} {self.rule}"

    def row(self) -> dict[str, Any]:
        start, system = time.perf_counter(), draw(seed_of(self.seed), self.index)
        bench, found, answered = DrawnBench(system, self.run_seed), None, True
        try:
            with at_most(self.limit_s):
                found = {**OPEN, **CLOSED}[self.rule](bench)
        except TooLongError:
            answered = False
        true = self.true.at(bench.measured_s) if self.true.exists else 0.0
        spent = (bench.trials, bench.measured_s, bench.measured_s / bench.idle_s)
        real_s = round(time.perf_counter() - start, 3)
        return dataclasses.asdict(
            RivalFound(system.name, system.kinds[0], self.rule, answered, true, found, *spent, real_s)
        )


@dataclass(frozen=True)
class RivalFound:
    """What a rule said; ``found`` None: that no rate meets the SLO. ``answered``: within the real time."""

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

    def __str__(self) -> str:
        ratio = f"{self.found / self.true:.3f} of the truth" if self.found and self.true else "none"
        return f"{self.name} {self.kind} {self.rule}: {ratio}"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RivalFound:
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class RivalFigures:
    """Of one rule: searches, those answered; of systems with a rate: those with an answer, and within 5 %."""

    rule: str
    searches: int
    answered: int
    possible: int
    found: int
    near: int
    low: float | None
    middle: float | None
    high: float | None
    virtual_s: float | None
    latencies: float | None

    @classmethod
    def of(cls, rule: str, rows: Sequence[RivalFound]) -> RivalFigures:
        answered = [each for each in rows if each.answered]
        possible = [each for each in answered if LEAST_RATE <= each.true <= MOST_RATE]
        ratios = sorted(each.found / each.true for each in possible if each.found)
        return cls(
            rule,
            len(rows),
            len(answered),
            len(possible),
            found=len(ratios),
            near=sum(abs(ratio - 1) <= NEAR for ratio in ratios),
            low=quantile(ratios, 0.05),
            middle=middle_of(ratios),
            high=quantile(ratios, 0.95),
            virtual_s=middle_of(each.virtual_s for each in answered),
            latencies=middle_of(each.latencies for each in answered),
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def rules_for(system: System) -> tuple[str, ...]:
    """Those that can be played on a system: closed loops only where they can be simulated."""
    return RULES if can_close(system) else tuple(OPEN)


def rival_figures(rows: Sequence[RivalFound]) -> list[RivalFigures]:
    return [RivalFigures.of(rule, [each for each in rows if each.rule == rule]) for rule in RULES]


def rival_table(found: Sequence[RivalFigures], about: str) -> str:
    rows = [
        [
            each.rule,
            str(each.searches),
            counted(each.answered, each.searches),
            counted(each.found, each.possible),
            counted(each.near, each.possible),
            ratio_text(each.low, each.middle, each.high),
            number(each.virtual_s),
            number(each.latencies),
        ]
        for each in found
    ]
    titles = "searches|answered|a rate found|within 5 %|found / true|virtual s|latencies"
    caption = f"{about}; closed loops only where they are simulated"
    text: str = table("rule", titles, rows, "other rules on drawn systems", caption)
    return text
