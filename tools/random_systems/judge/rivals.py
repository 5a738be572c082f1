"""Other tools' rules on the drawn systems, with the windows that they use by default.

The rules are those of ``tools.perf_search.rivals``. They are given their best: the figures that the SLO is
about, no start-up time, each point on an idle server, and all answers waited for.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

import numpy as np
from rich.table import Table

from tools.perf_search.pipeline import Outcomes
from tools.perf_search.rivals import Offers, guidellm_rule, isotonic_rule, plain_rule, vllm_rule

from ..clock import Clock
from ..family import draw, seed_of
from ..roots import criteria
from ..simulate import State, latency_s, trial
from ..system import FloatArray, System
from ..truth import Truth
from .closed import can_close, closed
from .figures import NOTHING, counted
from .judged import WITHIN
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


@dataclass
class DrawnBench:
    """Offers loads to a drawn system one by one, and keeps the bill. ``seed``: of arrivals and work."""

    drawn: System
    seed: int
    trials: int = 0
    measured_s: float = 0.0
    min_rate: float = LEAST_RATE
    max_rate: float = MOST_RATE
    rng: np.random.Generator = field(init=False)
    noise: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([13, self.seed])

    @property
    def idle_s(self) -> float:
        return latency_s(self.drawn)

    def requests(self, rate: float, count: int) -> Outcomes:
        """An open loop of so many requests, whose last arrival falls on count / rate (vLLM's rule)."""
        shape = self.drawn.workload.burstiness
        at: FloatArray = np.cumsum(self.rng.gamma(shape, 1.0, count))
        return self._offer(at * (count / rate / at[-1]))

    def seconds(self, rate: float, seconds: float) -> Outcomes:
        """An open loop of so many seconds."""
        shape = self.drawn.workload.burstiness
        count = math.ceil(rate * seconds + 8 * math.sqrt(rate * seconds / shape) + 10)
        at: FloatArray = np.cumsum(self.rng.gamma(shape, 1 / (rate * shape), count))
        return self._offer(at[: max(2, int(np.searchsorted(at, seconds)))])

    def users(
        self, concurrency: int, seconds: float = math.inf, requests: int | None = None
    ) -> tuple[Outcomes, float]:
        """A closed loop, by time or by number; also its requests per second over the whole run."""
        work = self.drawn.service.draw(requests or MOST_ANSWERS, self.rng)
        clock, begin_s = self._clock(), self.measured_s
        begin = float(clock.work(np.array([begin_s]))[0])
        if requests is None:  # no more than can be sent in that time, or than is simulated
            most = int(4 * (seconds + self.idle_s) * min(concurrency / self.idle_s, self.drawn.capacity)) + 10
            work = work[: most + concurrency]
        times = [clock.seconds(begin + each) - begin_s for each in closed(self.drawn, concurrency, work)]
        arrived, first, last = (each[times[0] <= seconds] for each in times)
        outcomes = self._paid(arrived, first, last)
        return outcomes, len(arrived) / float(last.max())

    def wait(self, seconds: float) -> None:
        """Time that a rule takes without counting what it offers then."""
        self.measured_s += seconds

    def kept(self, outcomes: Outcomes) -> bool:
        """Whether the SLO is kept over the whole run."""
        return all(
            each.value(outcomes.ttft_s, self._tpot(outcomes)) <= 1.0 for each in criteria(self.drawn.slo)
        )

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

    def _offer(self, at: FloatArray) -> Outcomes:
        load, seed = self.drawn.workload, int(self.rng.integers(2**32))
        lengths = [np.full(len(at), float(each)) for each in (load.input_len, load.output_len)]
        first, last, _ = trial(self.drawn, at, lengths[0], lengths[1], self.measured_s, seed, State())
        return self._paid(at, first, last)

    def _clock(self) -> Clock:
        own = self.drawn.disturbances
        if own.noise:
            factor = math.exp(own.noise * float(self.rng.standard_normal()))
            self.noise.append((self.measured_s, factor))
        return Clock(own, self.noise)

    def _paid(self, arrived: FloatArray, first: FloatArray, last: FloatArray) -> Outcomes:
        self.trials += 1
        self.measured_s += float(np.nanmax(last, initial=0.0))
        never = np.isnan(last)
        first, last = np.where(never, 1e9, first), np.where(never, 1e9, last)
        return Outcomes(arrived, first, last, never, self.drawn.workload.output_len)


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
        """``RivalFound`` as JSON."""
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
        ends = [ratios[round(q * (len(ratios) - 1))] if ratios else None for q in (0.05, 0.95)]
        near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
        return cls(
            rule,
            len(rows),
            len(answered),
            len(possible),
            len(ratios),
            near,
            ends[0],
            median(ratios) if ratios else None,
            ends[1],
            median(each.virtual_s for each in answered) if answered else None,
            median(each.latencies for each in answered) if answered else None,
        )

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def rules_for(system: System) -> tuple[str, ...]:
    """Those that can be played on a system: closed loops only where they can be simulated."""
    return RULES if can_close(system) else tuple(OPEN)


def rival_table(found: Sequence[RivalFigures], caption: str) -> Table:
    """A row a rule."""
    table = Table(title="other rules on drawn systems", caption=caption)
    table.add_column("rule", no_wrap=True)
    for name in (
        "searches",
        "answered",
        "a rate found",
        "within 5 %",
        "found / true",
        "virtual s",
        "latencies",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        ratios = [f"{ratio:.3f}" for ratio in (each.low, each.middle, each.high) if ratio is not None]
        spent = [NOTHING if value is None else f"{value:.0f}" for value in (each.virtual_s, each.latencies)]
        shares = (counted(each.found, each.possible), counted(each.near, each.possible))
        answered = counted(each.answered, each.searches)
        table.add_row(each.rule, str(each.searches), answered, *shares, " ".join(ratios) or NOTHING, *spent)
    return table
