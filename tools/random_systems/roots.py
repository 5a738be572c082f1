"""Find the highest rate that meets an SLO in steady state, by long simulations.

1. Common random numbers: a replication draws work and arrivals once; the rate only scales the arrival times.
2. Bracket and bisect the root with few requests, then interpolate it in a narrow range of rates with many.
3. Add requests until the jackknife standard error over the replications is small enough, or up to a limit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from .simulate import Jobs, run
from .system import Clock, FloatArray, Slo, System

REPLICATIONS: Final = 8
FIRST_REQUESTS: Final = 10_000
"""Requests of a replication; more if misses must be rare or several pauses must occur."""
GOOD_ERROR: Final = 0.004
"""Relative standard error of the rate below which no requests are added."""
MIN_EFFECTIVE: Final = 0.6 * REPLICATIONS
"""Smallest effective number of replications; below it, few of them hold most misses: no valid error."""
DISCARDED: Final = 0.15
"""Share of a replication's requests that is discarded at its start."""
AFFORDED: Final = {"fifo": 1_000_000, "sharing": 250_000, "batching": 100_000}
AFFORDED_LINE: Final = 4_000_000
"""Most requests of a replication, by discipline; ``AFFORDED_LINE`` for one FIFO server."""
RELAXED: Final = 20.0
"""Minimum length of a replication, in relaxation times."""
LIMITS: Final = 100
"""Minimum length of a replication, in TTFT limits."""
CLIFF: Final = 1.006
"""Ratio of a bracket's ends at which the bisection ends, if no request misses at the lower rate."""
LEAST_SHARE: Final = 1e-4
"""Lowest rate searched, as a share of the capacity."""
PERIODS: Final = 3  # of pauses, in a replication
_LIMIT: Final = re.compile(r"(ttft|tpot)_ms (mean|p([\d.]+)) <= ([\d.e+-]+)")


@dataclass(frozen=True)
class Criterion:
    """Limits in seconds for a ``share`` of the requests; with None, one limit for the mean."""

    share: float | None
    ttft_s: float | None = None
    tpot_s: float | None = None

    def value(self, ttft: FloatArray, tpot: FloatArray) -> float:
        """Return misses / allowed misses, or mean / limit."""
        if self.share is None:
            return float(
                np.mean(ttft / self.ttft_s if self.ttft_s is not None else tpot / (self.tpot_s or 1))
            )
        late = np.zeros(len(ttft), np.bool_)
        for values, limit_s in ((ttft, self.ttft_s), (tpot, self.tpot_s)):
            if limit_s is not None:
                late |= values > limit_s
        return float(np.mean(late)) / (1.0 - self.share)

    def used(self, ttft: FloatArray, tpot: FloatArray) -> float:
        """Return the mean or percentile of a request's worst value relative to its limit."""
        load: FloatArray = np.zeros(len(ttft))
        for values, limit_s in ((ttft, self.ttft_s), (tpot, self.tpot_s)):
            if limit_s is not None:
                load = np.maximum(load, values / limit_s)
        return float(load.mean() if self.share is None else np.quantile(load, self.share))


def criteria(slo: Slo) -> list[Criterion]:
    if not slo.limits:
        ttft, tpot = (None if limit is None else limit / 1e3 for limit in (slo.ttft_ms, slo.tpot_ms))
        return [Criterion(slo.attainment, ttft, tpot)]
    found = []
    for limit in slo.limits:
        match = _LIMIT.fullmatch(limit)
        if match is None:
            raise ValueError(f"unknown limit {limit!r}")
        seconds = float(match[4]) / 1e3
        share = None if match[2] == "mean" else float(match[3]) / 100
        found.append(Criterion(share, **{f"{match[1]}_s": seconds}))
    return found


@dataclass(frozen=True)
class Root:
    """Highest rate that meets the SLO, 0 if none does, and its relative standard error.

    ``slope``: d ln(value of the binding criterion) / d ln(rate) at that rate.
    """

    rate: float
    error: float
    requests: int
    slope: float


@dataclass(frozen=True)
class Fit:
    """``centre``: ln of the root; ``effective``: effective number of replications."""

    centre: float
    error: float
    slope: float
    effective: float


class Runs:
    """Replications of a system without warm-up, drift and noise, ``slowness`` times slower than drawn."""

    def __init__(self, system: System, slowness: float = 1.0) -> None:
        self._system = system
        self._slowness = slowness
        # A uniformly slower system equals the drawn one with tighter limits on a slower clock.
        self._criteria = [
            Criterion(
                drawn.share,
                None if drawn.ttft_s is None else drawn.ttft_s / slowness,
                None if drawn.tpot_s is None else drawn.tpot_s / slowness,
            )
            for drawn in criteria(system.slo)
        ]
        self._clock = Clock(system.disturbances)
        self.simulated = 0

    def values(self, rate: float, requests: int) -> FloatArray:
        """Return each Criterion.value, shape (REPLICATIONS, criteria); ``rate`` on the undisturbed clock."""
        return np.array([self._one(rate, requests, replication) for replication in range(REPLICATIONS)])

    def _one(self, rate: float, requests: int, replication: int) -> list[float]:
        system, load = self._system, self._system.workload
        pauses = system.disturbances
        rng = np.random.default_rng([31, replication])
        begins = float(rng.random()) * pauses.pause_every_s if pauses.pause_s else 0.0
        work = system.service.draw(requests, np.random.default_rng([37, replication]))
        shape = load.burstiness
        at = begins + np.cumsum(rng.gamma(shape, 1 / shape, requests)) / rate
        jobs = Jobs.identical(at, work, load)
        first, last = run(system, self._clock, jobs, salt=replication)
        self.simulated += requests
        steady = self._steady(at)
        ttft = (first - at)[steady]
        tpot = ((last - first) / max(load.output_len - 1, 1))[steady]
        return [criterion.value(ttft, tpot) for criterion in self._criteria]

    def _steady(self, at: FloatArray) -> slice:
        """Return the requests after the start; with pauses, of a whole number of periods if possible."""
        begin = int(DISCARDED * len(at))
        pauses = self._system.disturbances
        if not pauses.pause_s:
            return slice(begin, None)
        periods = math.floor((float(at[-1]) - float(at[begin])) / pauses.pause_every_s)
        if periods < 1:
            return slice(begin, None)
        stop = int(np.searchsorted(at, float(at[begin]) + periods * pauses.pause_every_s))
        return slice(begin, stop)

    def score(self, values: FloatArray, requests: int) -> float:
        """ln of the worst criterion's value, pooled over replications; 0 is the limit."""
        return max(math.log(max(float(values.mean(axis=0).max()), 1e-99)), self._floor(requests))

    def most(self) -> float:
        """Return the rate from which on there is no steady state; inf if unknown."""
        changes = self._system.disturbances
        if self._system.batch is not None:
            return math.inf
        return self._system.capacity * (1 - changes.pause_s / changes.pause_every_s - changes.tenants)

    def afforded(self) -> int:
        system = self._system
        if system.discipline == "fifo" and not system.slope_s and not system.disturbances.tenants:
            return AFFORDED_LINE if system.servers == 1 else AFFORDED["fifo"]
        most = AFFORDED["sharing" if system.slope_s else system.discipline]
        return most // 2 if system.disturbances.tenants and system.discipline != "fifo" else most

    def least(self, rate: float) -> int:
        """Return the fewest requests of a replication that can resolve the criteria, at about that rate."""
        rare = max([40 / (1 - one.share) for one in self._criteria if one.share is not None], default=0.0)
        pauses = self._system.disturbances
        paused = PERIODS * pauses.pause_every_s * rate / (1 - DISCARDED) if pauses.pause_s else 0.0
        # A slowly growing queue shows only after many times the limit.
        longest = max(criterion.ttft_s or 0.0 for criterion in self._criteria)
        grown = LIMITS * longest * rate
        return int(min(max(FIRST_REQUESTS, rare, paused, grown), self.afforded()))

    def root(self) -> Root:
        """Return the root, in requests per second of the slowed clock."""
        low, high = self._bracket()
        if low == 0.0:
            return Root(0.0, 0.0, self.simulated, 0.0)
        requests, most = self.least(high), self.afforded()
        missed = self._log_used(low, requests) > self._floor(requests)
        while high / low > 1.1 or (not missed and high / low > CLIFF):
            middle = math.sqrt(low * high)
            used = self._log_used(middle, requests)
            low, high = (middle, high) if used <= 0 else (low, middle)
            missed |= self._floor(requests) < used <= 0
        centre, wide = math.log(low * high) / 2, math.log(high / low)
        if not missed:  # a cliff: no request misses at one end, all do at the other
            return Root(math.exp(centre) / self._slowness, wide / math.sqrt(12), self.simulated, math.inf)
        width = min(0.03, wide)
        # Relaxation time near the capacity: about 1 / (1 - load)² services.
        free = max(1 - math.exp(centre) / self.most(), 0.01)
        requests = min(max(requests, round(RELAXED / free**2)), most)
        while True:
            fit = self._fit(centre, width, requests)
            centre, width = fit.centre, min(max(0.25 / max(fit.slope, 1e-3), 0.001), 0.1)
            valid = fit.effective >= MIN_EFFECTIVE
            if (valid and fit.error <= GOOD_ERROR) or requests >= most:
                error = fit.error if valid else max(fit.error, 1 / (math.sqrt(fit.effective) * fit.slope))
                return Root(math.exp(centre) / self._slowness, error, self.simulated, fit.slope)
            more = (fit.error / GOOD_ERROR) ** 2 * 1.2 if valid else 4
            requests = int(min(requests * min(max(more, 2), 12), most))

    def _log_used(self, rate: float, requests: int) -> float:
        return self.score(self.values(rate, requests), requests)

    def _floor(self, requests: int) -> float:
        return math.log(0.5 / (requests * REPLICATIONS))

    def _bracket(self) -> tuple[float, float]:
        """Return (a rate that meets the SLO, one that does not); (0, 0) if none does."""
        high = min(self.most(), 1.3 * self._system.capacity)
        while high < self.most() and self._log_used(high, self.least(high)) <= 0:
            high *= 1.5
        low = high / 2
        while low > LEAST_SHARE * self._system.capacity:
            if self._log_used(low, self.least(low)) <= 0:
                return low, high
            low, high = low / 2, low
        return 0.0, 0.0

    def _fit(self, centre: float, width: float, requests: int) -> Fit:
        top = math.log(self.most())
        for _ in range(4):
            # Above the stable rates, the misses depend on the run's length.
            width = min(width, max((top - centre) / 1.5, 0.001))
            centre = min(centre, top - width)
            x = centre + width * np.array([-1.0, 0.0, 1.0])
            table = [self.values(math.exp(at), requests) for at in x.tolist()]
            root, slope = self._curve(x, table, requests)
            if slope > 0 and abs(root - centre) <= 1.2 * width:
                break
            centre = min(max(root, centre - 4 * width), centre + 4 * width) if slope > 0 else centre
            width = width if slope > 0 else 2 * width
        without = [
            self._curve(x, [np.delete(values, out, axis=0) for values in table], requests)[0]
            for out in range(REPLICATIONS)
        ]
        error = math.sqrt(float(np.var(without)) * (REPLICATIONS - 1))
        binding = table[1][:, int(table[1].mean(axis=0).argmax())]
        effective = float(binding.sum() ** 2 / max((binding**2).sum(), 1e-99))
        return Fit(min(root, top), error, slope, max(effective, 1.0))

    def _curve(self, x: FloatArray, table: list[FloatArray], requests: int) -> tuple[float, float]:
        """Return (nearest root of the parabola through the three points, slope of the chord)."""
        y = np.array([self.score(values, requests) for values in table])
        step = float(x[1] - x[0])
        slope = float(y[2] - y[0]) / (2 * step)
        if slope <= 0:
            return float(x[1]), slope
        bend = float(y[0] - 2 * y[1] + y[2]) / (2 * step**2) if y[0] > self._floor(requests) else 0.0
        inside = max(slope**2 - 4 * bend * float(y[1]), 0.0)
        return float(x[1] - 2 * y[1] / (slope + math.sqrt(inside))), slope
