"""Other tools' rules for the maximum rate, on the same virtual systems.

Each rule runs under the best conditions: the right metric (share of requests within limits, or its
percentile), no client failures, no start-up time, an idle server for each point. Each is written from its
description; MLRsearch (RFC 9971) is the controller of the package of that name.

AIPerf's default is a smooth isotonic search. 1. From 1, double the users up to the first miss, at most 1000.
2. Measure three points in that bracket. 3. Fit the margins of all points isotonically (PAVA), interpolate
them (PCHIP), and measure the root, or the bracket's middle if there is none. Repeat until the bracket is
narrower than 5 %, up to 30 points. Repeats and a guard against cliffs are left out: they are off by default,
or act only on brackets of more than 50 users.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tools.random_systems.roots import Criterion

from .pipeline import NEVER_S, FloatArray, Found, Outcomes, System, arrivals, run_closed, run_open


def pchip_root(x: FloatArray, y: FloatArray, low: float, high: float) -> float:
    """Return the monotone cubic's root (Fritsch-Carlson slopes) between the points ``low`` and ``high``."""
    h, d = np.diff(x), np.diff(y) / np.diff(x)
    slopes = np.empty_like(x)
    slopes[0], slopes[-1] = d[0], d[-1]
    for i in range(1, len(x) - 1):
        if d[i - 1] * d[i] <= 0:
            slopes[i] = 0.0
        else:
            left, right = 2 * h[i] + h[i - 1], h[i] + 2 * h[i - 1]
            slopes[i] = (left + right) / (left / d[i - 1] + right / d[i])
    i = int(np.searchsorted(x, low, side="right")) - 1
    for _ in range(60):
        middle = (low + high) / 2
        t = (middle - x[i]) / h[i]
        value = (
            (1 + 2 * t) * (1 - t) ** 2 * y[i]
            + t * (1 - t) ** 2 * h[i] * slopes[i]
            + t**2 * (3 - 2 * t) * y[i + 1]
            + t**2 * (t - 1) * h[i] * slopes[i + 1]
        )
        low, high = (middle, high) if value <= 0 else (low, middle)
    return low


MOST_USERS: Final = 1000
MOST_POINTS: Final = 30
PRECISION: Final = 0.05
"""Width of the final bracket, relative to the lowest concurrency that missed."""
FEWEST_LEVELS: Final = 3
"""Fewest distinct margins after PAVA; with fewer, or up to 3 points, measure two more, at most twice."""
REFITS: Final = 3
REQUESTS: Final = 1000
WARMUP_S: Final = 60.0
"""Warm-up of each point; its requests do not count."""


def isotonic_fit(values: Sequence[float]) -> FloatArray:
    """Return the least-squares fit that does not descend (pool adjacent violators)."""
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            before, many = blocks.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


@dataclass
class SmoothIsotonic:
    """One search. ``margin(users)`` measures a concurrency; below 0 it meets the limits."""

    margin: Callable[[int], float]
    passed: int | None = None
    missed: int | None = None
    points: int = 0
    _margins: dict[int, list[float]] = field(default_factory=dict)

    def run(self) -> int | None:
        """Return the highest number of users that passed; None if a single user missed."""
        users = 1
        while self._measured(users):
            if users >= MOST_USERS:
                return users
            users = min(2 * users, MOST_USERS)
        if self.passed is None:
            return None
        self._narrow(users)
        return self.passed

    def _narrow(self, again: int) -> None:
        """Fit and measure until the bracket is narrow. ``again``: point to measure if there is no new one."""
        queue = self._inside((0.25, 0.5, 0.75))
        fits = 0
        while self.points < MOST_POINTS:
            if queue or not fits:
                self._measured(queue.pop(0) if queue else again)
                if queue:
                    continue
            fits += 1
            candidate = self._root()
            if candidate is None:
                return
            users, levels = self._levels()
            few = len(users) <= FEWEST_LEVELS or len(set(levels.tolist())) < FEWEST_LEVELS
            if fits < REFITS and few:
                queue = self._inside((0.125, 0.625))
                if queue:
                    continue
            if self._gap <= max(1, PRECISION * (self.missed or 0)) or candidate in self._margins:
                return
            queue = [candidate]

    def _measured(self, users: int) -> bool:
        margin = self.margin(users)
        self._margins.setdefault(users, []).append(margin)
        self.points += 1
        if margin < 0:
            if self.missed is None or users < self.missed:
                self.passed = max(users, self.passed or 0)
        elif self.passed is None or users > self.passed:
            self.missed = min(users, self.missed or MOST_USERS)
        return margin < 0

    @property
    def _gap(self) -> int:
        return (self.missed or 0) - (self.passed or 0)

    def _inside(self, shares: Sequence[float]) -> list[int]:
        """Return the points at these shares of the bracket that are not measured yet."""
        low, high = self.passed or 0, self.missed or 0
        points = [min(low + max(1, round(self._gap * share)), high - 1) for share in shares]
        return [point for point in dict.fromkeys(points) if point > low and point not in self._margins]

    def _levels(self) -> tuple[list[int], FloatArray]:
        users = sorted(self._margins)
        return users, isotonic_fit([float(np.mean(self._margins[count])) for count in users])

    def _root(self) -> int | None:
        """Return the curve's root inside the bracket, or the middle; None if no point is inside."""
        low, high = self.passed or 0, self.missed or 0
        if high - low <= 1:
            return None
        users, levels = self._levels()
        at_low, at_high = levels[users.index(low)], levels[users.index(high)]
        if not at_low < 0 < at_high:
            return low + (high - low) // 2
        root = pchip_root(np.array(users, np.float64), levels, float(low), float(high))
        return min(max(round(root), low + 1), high - 1)


PROBE_S: Final = 60.0
MILLION: Final = 1_000_000
Rule = Callable[["Bench"], float | None]


class Offers(ABC):
    """Offer loads to one system, and count trials and seconds from the first request to the last response.

    ``allowed``: share of requests that may miss their limits. ``converged``: whether the rule ended by its
    criterion; False if it reached its limit of points, or gave up.
    """

    idle_s: float
    burstiness: float
    min_rate: float
    max_rate: float
    allowed: float
    criteria: Sequence[Criterion]
    converged = True

    def __init__(self, seed: int) -> None:
        self.trials = 0
        self.measured_s = 0.0
        self.rng = np.random.default_rng([13, seed])

    @abstractmethod
    def serve(self, at: FloatArray) -> Outcomes:
        """Serve requests that arrive at these times."""

    @abstractmethod
    def serve_users(self, concurrency: int, seconds: float, requests: int | None) -> Outcomes:
        """Serve a closed loop, by time or by number."""

    def misses(self, outcomes: Outcomes) -> float:
        """Return the misses of the whole run relative to those allowed."""
        ttft_s = np.where(outcomes.failed, NEVER_S, outcomes.ttft_s)
        return float(max(one.value(ttft_s, outcomes.tpot_s) for one in self.criteria))

    def margin(self, outcomes: Outcomes) -> float:
        """Return the binding metric relative to its limit, minus 1; above 0 is a miss."""
        ttft_s = np.where(outcomes.failed, NEVER_S, outcomes.ttft_s)
        return float(min(max(one.used(ttft_s, outcomes.tpot_s) for one in self.criteria), 1e3)) - 1.0

    def meets_slo(self, outcomes: Outcomes) -> bool:
        return self.misses(outcomes) <= 1.0 + 1e-9

    def requests(self, rate: float, count: int) -> Outcomes:
        """Run an open loop of ``count`` requests; the last one arrives at count / rate (vLLM's rule)."""
        at: FloatArray = np.cumsum(self.rng.gamma(self.burstiness, 1.0, count))
        return self._count(self.serve(at * (count / rate / at[-1])))

    def seconds(self, rate: float, seconds: float) -> Outcomes:
        return self._count(self.serve(arrivals(self.burstiness, rate, seconds, self.rng)))

    def users(
        self, concurrency: int, seconds: float = math.inf, requests: int | None = None
    ) -> tuple[Outcomes, float]:
        """Run a closed loop, by time or by number; return also its requests per second over the whole run."""
        outcomes = self._count(self.serve_users(concurrency, seconds, requests))
        return outcomes, len(outcomes.end_s) / float(outcomes.end_s.max())

    def wait(self, seconds: float) -> None:
        """Add time in which a rule counts no requests."""
        self.measured_s += seconds

    def _count(self, outcomes: Outcomes) -> Outcomes:
        self.trials += 1
        self.measured_s += float(outcomes.end_s[outcomes.end_s < NEVER_S].max(initial=0.0))
        return outcomes


class Bench(Offers):
    def __init__(self, system: System, seed: int) -> None:
        super().__init__(seed)
        self.system = system
        self.idle_s, self.burstiness = system.idle_s, system.burstiness
        self.min_rate, self.max_rate = system.min_rate, system.max_rate
        self.allowed = 1.0 - system.attainment
        self.criteria = [Criterion(system.attainment, system.ttft_s, system.tpot_s)]

    def serve(self, at: FloatArray) -> Outcomes:
        return run_open(self.system, at, self.rng, self.measured_s)

    def serve_users(self, concurrency: int, seconds: float, requests: int | None) -> Outcomes:
        return run_closed(self.system, concurrency, seconds, self.rng, requests)


def seed_rule(bench: Bench) -> float | None:
    """Bisect the rate; n = 5 × rate requests must meet the limits in mean TTFT and mean TPOT."""
    system = bench.system

    def holds(rate: float) -> bool:
        out = bench.requests(rate, max(1, round(5 * rate)))
        return float(out.ttft_s.mean()) <= system.ttft_s and float(out.tpot_s.mean()) <= system.tpot_s

    return _bisect(holds, bench, 0.05)


def plain_rule(bench: Offers) -> float | None:
    """Double the rate, then bisect to 5 %; 60 s at each rate, with the percentile of the whole run."""
    return _bisect(lambda rate: bench.meets_slo(bench.seconds(rate, PROBE_S)), bench, 0.05)


def _bisect(holds: Callable[[float], bool], bench: Offers, precision: float) -> float | None:
    """Double or halve from the start rate of kvbench's search, then bisect."""
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
            lower, upper = None, lower  # a miss below a pass: continue downwards
    while upper / lower > 1 + precision:
        middle = math.sqrt(lower * upper)
        lower, upper = (middle, upper) if holds(middle) else (lower, middle)
    return lower


def vllm_rule(bench: Offers) -> float | None:
    """Apply serve_sla (until 2026-02): integer rates, 1 to 65536; PCHIP through means of 3 runs of 1000.

    The first points are 65536 and 1; the next is the interpolated root, until the bracket is 1 wide.
    Each percentile covers the whole run.
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
    else:
        bench.converged = False
    return float(max(rate for rate in seen if seen[rate] <= 0))


def isotonic_rule(bench: Offers) -> float | None:
    """Apply AIPerf's default: isotonic fits of concurrency; 60 s of warm-up, 1000 requests per point."""
    rates: dict[int, float] = {}

    def margin(users: int) -> float:
        bench.wait(WARMUP_S)
        outcomes, rates[users] = bench.users(users, requests=REQUESTS)
        return bench.margin(outcomes)

    search = SmoothIsotonic(margin)
    users = search.run()
    bench.converged = search.points < MOST_POINTS
    return None if users is None else rates[users]


def aiperf_rule(bench: Offers) -> float | None:
    """Double the concurrency, then bisect to 5 %, 60 s a point; the rate is the throughput."""
    return _by_concurrency(bench, 1, 0.05, 1 << 12)


def guidellm_rule(bench: Offers) -> float | None:
    """Double the concurrency from 4 up to 1024, then bisect to 10 %; at most 15 probes of 60 s (goodput)."""
    return _by_concurrency(bench, 4, 0.10, 1024, most=15)


def _by_concurrency(bench: Offers, start: int, precision: float, limit: int, most: int = 40) -> float | None:
    rates: dict[int, float] = {}

    def holds(users: int) -> bool:
        outcomes, rate = bench.users(users, PROBE_S)
        rates[users] = rate
        return bench.meets_slo(outcomes)

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
    bench.converged = len(rates) < most
    return rates[lower] if lower else None


def mlr_rule(bench: Offers) -> float | None:
    """Apply MLRsearch with RFC 9971's goal from ETSI TST009, 5 % wide. A late request counts as lost.

    A load is a bound after 120 s of trials of 60 s, half of which may be bad, or as soon as further trials
    cannot change the result. The highest load is twice the throughput of 1000 simultaneous requests.
    """
    from MLRsearch import AbstractMeasurer, Config, MeasurementResult, MultipleLossRatioSearch, SearchGoal

    class Measurer(AbstractMeasurer):  # type: ignore[misc]
        def measure(self, intended_duration: float, intended_load: float) -> MeasurementResult:
            outcomes = bench.seconds(intended_load, intended_duration)
            lost = bench.misses(outcomes) * bench.allowed if len(outcomes.end_s) else 0.0
            counts = {"offered_count": MILLION, "loss_count": round(min(lost, 1.0) * MILLION)}
            return MeasurementResult(intended_duration, intended_load, **counts)

    burst = bench.requests(65536.0, 1000).end_s
    highest = min(2 * 1000 / float(burst[burst < NEVER_S].max()), bench.max_rate)
    goal = SearchGoal(
        loss_ratio=round(bench.allowed, 6),
        exceed_ratio=0.5,
        relative_width=0.05,
        initial_trial_duration=PROBE_S,
        final_trial_duration=PROBE_S,
        duration_sum=2 * PROBE_S,
        fail_fast=False,
    )
    config = Config([goal], min(bench.min_rate, highest / 2), highest, math.inf, None)
    found = MultipleLossRatioSearch(config).search(Measurer())[goal].relevant_lower_bound
    return None if found is None else float(found)


WINDOW_S: Final = 30.0
STEP: Final = 0.05
"""Step relative to the rate (``step_percent``, 25 % by default); here the precision of the other rules."""


def adaptive_rule(bench: Offers) -> float | None:
    """Apply AIPerf 0.13's adaptive_scale: raise the rate from 1 in whole steps until a 30 s window misses.

    Then sustain the last rate that passed for two windows (as in its guide; there is no default). After a
    miss, go down a step; give up if the next window misses, too.
    """

    def passes(rate: float) -> bool:
        while not len((outcomes := bench.seconds(rate, WINDOW_S)).end_s):
            pass
        return bench.meets_slo(outcomes)

    def step(rate: float) -> int:
        return max(1, math.ceil(rate * STEP))

    rate, passed = 1.0, 0.0
    while passes(rate):
        passed = rate
        if rate >= bench.max_rate:
            return rate
        rate = min(rate + step(rate), bench.max_rate)
    rate, again, windows = passed, False, 0
    while rate:
        windows += 1
        if passes(rate):
            passed, again = rate, False
            if windows >= 2:
                break
        elif again or rate <= 1.0:
            bench.converged = False
            break
        else:
            rate, again = max(1.0, rate - step(rate)), True
    return passed or None


RULES: dict[str, Rule] = {
    "vLLM serve_sla": vllm_rule,
    "AIPerf smooth isotonic": isotonic_rule,
    "AIPerf adaptive_scale": adaptive_rule,
    "AIPerf bisection": aiperf_rule,
    "GuideLLM goodput": guidellm_rule,
    "MLRsearch": mlr_rule,
    "60 s bisection": plain_rule,
    "seed (5 s burst)": seed_rule,
}


def run_rule(name: str, system: System, seed: int) -> Found:
    bench = Bench(system, seed)
    rate = RULES[name](bench)
    status = "slo_unattainable" if rate is None else "converged" if bench.converged else "exhausted"
    return Found(rate, status, bench.trials, bench.measured_s)
