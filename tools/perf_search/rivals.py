"""Other tools' rules for the same question, written from their descriptions, on the same virtual systems.

Each is given its best: the right metric (the share of requests within limits, or the percentile that belongs
to it), no failures of its own, no start-up time. What is left is the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from . import isotonic
from .pipeline import FloatArray, Outcomes, System, offsets, run_closed, run_open
from .roots import pchip_root
from .trials import Found

PROBE_S = 60.0
Rule = Callable[["Bench"], float | None]


class Offers(Protocol):
    """What most rules need of a bench; one on other systems has it, too."""

    @property
    def idle_s(self) -> float: ...
    @property
    def min_rate(self) -> float: ...
    @property
    def max_rate(self) -> float: ...
    def requests(self, rate: float, count: int) -> Outcomes: ...
    def seconds(self, rate: float, seconds: float) -> Outcomes: ...
    def users(
        self, concurrency: int, seconds: float = math.inf, requests: int | None = None
    ) -> tuple[Outcomes, float]: ...
    def wait(self, seconds: float) -> None: ...
    def kept(self, outcomes: Outcomes) -> bool: ...
    def margin(self, outcomes: Outcomes) -> float: ...


@dataclass
class Bench:
    """Offers loads to one system and keeps the bill: trials and seconds from first send to last answer."""

    system: System
    seed: int
    trials: int = 0
    measured_s: float = 0.0
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([13, self.seed])

    @property
    def idle_s(self) -> float:
        return self.system.idle_s

    @property
    def min_rate(self) -> float:
        return self.system.min_rate

    @property
    def max_rate(self) -> float:
        return self.system.max_rate

    def requests(self, rate: float, count: int) -> Outcomes:
        """An open loop of so many requests, whose last arrival falls on count / rate (vLLM's rule)."""
        gaps = self.rng.gamma(self.system.burstiness, 1.0, count)
        at: FloatArray = np.cumsum(gaps)
        return self._pay(run_open(self.system, at * (count / rate / at[-1]), self.rng, self.measured_s))

    def seconds(self, rate: float, seconds: float) -> Outcomes:
        """An open loop of so many seconds."""
        return self._pay(
            run_open(self.system, offsets(self.system, rate, seconds, self.rng), self.rng, self.measured_s)
        )

    def users(
        self, concurrency: int, seconds: float = math.inf, requests: int | None = None
    ) -> tuple[Outcomes, float]:
        """A closed loop, by time or by number; also its requests per second over the whole run."""
        outcomes = self._pay(run_closed(self.system, concurrency, seconds, self.rng, requests))
        return outcomes, len(outcomes.end_s) / float(outcomes.end_s.max())

    def wait(self, seconds: float) -> None:
        """Time that a rule takes without counting what it offers then."""
        self.measured_s += seconds

    def _pay(self, outcomes: Outcomes) -> Outcomes:
        self.trials += 1
        self.measured_s += float(outcomes.end_s.max())
        return outcomes

    def kept(self, outcomes: Outcomes) -> bool:
        """Enough requests within limits, over the whole run."""
        return float((outcomes.load(self.system) <= 1.0).mean()) >= self.system.attainment

    def margin(self, outcomes: Outcomes) -> float:
        """The percentile that belongs to the attainment, relative to its limit, less 1: above 0 is a miss."""
        return min(float(np.quantile(outcomes.load(self.system), self.system.attainment)), 1e3) - 1.0


def seed_rule(bench: Bench) -> float | None:
    """n = 5 × rate requests at the rate; the mean of TTFT and of TPOT must keep the limits; bisected."""
    system = bench.system

    def holds(rate: float) -> bool:
        out = bench.requests(rate, max(1, round(5 * rate)))
        return float(out.ttft_s.mean()) <= system.ttft_s and float(out.tpot_s.mean()) <= system.tpot_s

    return _bisect(holds, bench, 0.05)


def plain_rule(bench: Offers) -> float | None:
    """60 s at each rate, the percentile of the whole run, doubling, then bisection to 5 %."""
    return _bisect(lambda rate: bench.kept(bench.seconds(rate, PROBE_S)), bench, 0.05)


def _bisect(holds: Callable[[float], bool], bench: Offers, precision: float) -> float | None:
    """Double or halve from where the search of kvbench starts, then bisect."""
    rate = min(max(4.0 / bench.idle_s, bench.min_rate), bench.max_rate)
    lower: float | None = None
    upper: float | None = None
    while lower is None or upper is None:
        if holds(rate):
            lower = rate
            if rate >= bench.max_rate:
                return rate
            rate = min(2 * rate, bench.max_rate)
        else:
            upper = rate
            if rate <= bench.min_rate:
                return None
            rate = max(rate / 2, bench.min_rate)
        if lower is not None and upper is not None and lower > upper:
            lower, upper = None, lower  # never seen in order: go on downwards
    while upper / lower > 1 + precision:
        middle = math.sqrt(lower * upper)
        lower, upper = (middle, upper) if holds(middle) else (lower, middle)
    return lower


def vllm_rule(bench: Offers) -> float | None:
    """serve_sla (until 2026-02): whole rates from 1 to 65536, PCHIP through the margins of 3 runs of 1000.

    The first points are 65536 and 1; the next is the interpolated root, until the bracket is one wide.
    A run's percentile is taken over all of it.
    """
    seen: dict[int, float] = {}

    def margin(rate: int) -> float:
        if rate not in seen:
            runs = [bench.margin(bench.requests(float(rate), 1000)) for _ in range(3)]
            seen[rate] = float(np.mean(runs))
        return seen[rate]

    if margin(65536) <= 0:
        return 65536.0
    if margin(1) > 0:
        return None
    for _ in range(30):
        lower = max(rate for rate in seen if seen[rate] <= 0)
        above = [rate for rate in seen if seen[rate] > 0 and rate > lower]
        upper = min(above)
        if upper - lower <= 1:
            break
        rates = np.array(sorted(seen), dtype=np.float64)
        root = pchip_root(rates, np.array([seen[int(rate)] for rate in rates]), float(lower), float(upper))
        margin(min(max(round(root), lower + 1), upper - 1))
    return float(max(rate for rate in seen if seen[rate] <= 0))


def isotonic_rule(bench: Offers) -> float | None:
    """AIPerf's default: concurrency by isotonic fits, 60 s of warm-up and 1000 requests at each point."""
    rates: dict[int, float] = {}

    def margin(users: int) -> float:
        bench.wait(isotonic.WARMUP_S)
        outcomes, rates[users] = bench.users(users, requests=isotonic.REQUESTS)
        return bench.margin(outcomes)

    users = isotonic.SmoothIsotonic(margin).run()
    return None if users is None else rates[users]


def aiperf_rule(bench: Offers) -> float | None:
    """Concurrency: doubling to a bracket, then bisection to 5 %, 60 s a point; the rate is the throughput."""
    return _by_concurrency(bench, 1, 0.05, 1 << 12)


def guidellm_rule(bench: Offers) -> float | None:
    """Goodput: concurrency from 4, doubling up to 1024, bisection to 10 %, at most 15 probes of 60 s."""
    return _by_concurrency(bench, 4, 0.10, 1024, most=15)


def _by_concurrency(bench: Offers, start: int, precision: float, limit: int, most: int = 40) -> float | None:
    rates: dict[int, float] = {}

    def holds(users: int) -> bool:
        outcomes, rate = bench.users(users, PROBE_S)
        rates[users] = rate
        return bench.kept(outcomes)

    lower, upper, users = 0, limit + 1, start
    while upper > limit and users <= limit and len(rates) < most:
        if holds(users):
            lower, users = users, 2 * users
        else:
            upper = users
    while upper <= limit and upper - lower > max(1, precision * lower) and len(rates) < most:
        middle = (lower + upper) // 2
        if holds(middle):
            lower = middle
        else:
            upper = middle
    return rates[lower] if lower else None


RULES: dict[str, Rule] = {
    "vLLM serve_sla": vllm_rule,
    "AIPerf smooth isotonic": isotonic_rule,
    "AIPerf bisection": aiperf_rule,
    "GuideLLM goodput": guidellm_rule,
    "60 s bisection": plain_rule,
    "seed (5 s burst)": seed_rule,
}


def run_rule(name: str, system: System, seed: int) -> Found:
    """What that rule finds, and what it costs."""
    bench = Bench(system, seed)
    rate = RULES[name](bench)
    return Found(
        rate, "converged" if rate is not None else "slo_unattainable", bench.trials, bench.measured_s
    )
