"""The true result of a search: the highest rate that meets a drawn system's SLO in steady state.

Definition: Poisson or gamma arrivals that never end; share (or mean) over all requests. **Warm-up**: the rate
after it. **Drift**: the rate at a time (``Truth.at``); a search is judged by the time at which it ends.
**Pauses and co-tenants**: averaged over their phases. **Noise** between trials: the rate of the median trial,
with factor 1. If even a lone request misses the SLO, the rate is 0, and a search should report none.

Source: a formula where there is one, else simulation (roots.py). truth.json stores the rates of the seeds
develop and check by fingerprint; others are computed on request and stored in results/.

Formulas, independent of the simulations and of kvbench. M/G/1: the wait is a sum of a geometric number of
residual services (Pollaczek and Khinchine; Beneš). The sum is taken on a grid of times, by Fourier transform
of a tilted series, which suppresses wrap-around. M/M/c: Erlang's second formula. Processor sharing,
on any number of servers: the mean is insensitive to the distribution of the service (Cohen, 1979), so it is
that of M/M/c.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from tools.jobs import Row, keep_rows, known_rows

from .roots import Criterion, Root, Runs, criteria
from .system import Disturbances, Service, System

GRID: Final = 1 << 15
TILT: Final = 25.0
"""Exponent of e by which the tilt reduces a transform's wrap-around."""
_EVEN_LESS: Final = 1e-9
_BISECTIONS: Final = 50


class Mg1:
    """P(wait + service ≤ limit) of M/G/1 first come first served, for one service and limit, at any load.

    ``limit`` in mean services. The error is that of the grid: below 1e-4 where the service is deterministic,
    far less where it is not.
    """

    def __init__(self, service: Service, limit: float) -> None:
        # The sums end between two grid points; the limit is in their middle.
        step = limit / (GRID - 0.5)
        edges = (np.arange(GRID + 1) - 0.5) * step
        cdf = np.array([service.cdf(edge) for edge in edges.tolist()])
        self._tilt = np.exp(-TILT / (2 * GRID) * np.arange(GRID))
        # The residual service has the density P(service > x): its mass within ± half a step of each point.
        residual = np.diff([service.mean_within(edge) for edge in edges.tolist()])
        self._residual = np.fft.rfft(residual * self._tilt, 2 * GRID)
        self._service = np.fft.rfft(np.diff(cdf) * self._tilt, 2 * GRID)

    def share(self, load: float) -> float:
        """Return P(wait + service ≤ limit) at that load; 0 for loads from 1 on."""
        if load >= 1:
            return 0.0
        whole = np.fft.irfft((1 - load) * self._service / (1 - load * self._residual), 2 * GRID)
        return float(min(1.0, np.sum(whole[:GRID] / self._tilt)))


def mg1_mean_wait(service: Service, load: float) -> float:
    """Mean wait of M/G/1 first come first served, in mean services (Pollaczek and Khinchine)."""
    return math.inf if load >= 1 else load * service.second_moment / (2 * (1 - load))


def erlang_c(servers: int, load: float) -> float:
    """P(a request has to wait) in M/M/c; ``load``: rate × mean service, all servers together."""
    if load >= servers:
        return 1.0
    blocked = 1.0  # Erlang's first formula, by its recursion
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def mmc_mean(servers: int, load: float) -> float:
    return math.inf if load >= servers else 1 + erlang_c(servers, load) / (servers - load)


def mmc_share(servers: int, load: float, limit: float) -> float:
    """P(wait + service ≤ limit) of M/M/c, ``limit`` in mean services."""
    if load >= servers:
        return 0.0
    waits, pace = erlang_c(servers, load), servers - load
    if abs(pace - 1) < _EVEN_LESS:
        late = (1 + limit) * math.exp(-limit)
    else:
        late = (pace * math.exp(-limit) - math.exp(-pace * limit)) / (pace - 1)
    return 1 - (1 - waits) * math.exp(-limit) - waits * late


def highest(used: Callable[[float], float], most: float) -> float:
    """Return the highest load up to ``most`` with ``used(load)`` ≤ 1, or 0; bisects the logarithm."""
    low, high = most * 1e-12, most
    if used(low) > 1.0:
        return 0.0
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if used(middle) <= 1.0 else (low, middle)
    return low


PATH: Final = Path(__file__).with_name("truth.json")
COMMITTED: Final = ("develop", "check")
VERSION: Final = 1
"""Version of the computation. A file with another version is computed again."""
STEEPEST: Final = 1e6
"""The slope of a cliff."""
_ALONE: Final = 1e-9
"""Load below which a queue counts as empty."""


@dataclass(frozen=True)
class Truth(Row):  # type: ignore[misc]
    """``rates[i]``: requests per second, or 0, when the system is ``slowness[i]`` times slower than at first.

    ``error``: relative standard error of the first rate; ``slope``: d ln misses / d ln rate there.
    """

    how: str
    slowness: tuple[float, ...]
    rates: tuple[float, ...]
    error: float
    slope: float
    drift: float
    drift_most: float
    requests: int
    seconds: float

    @property
    def exists(self) -> bool:
        return self.rates[0] > 0

    def at(self, virtual_s: float) -> float:
        """Return the rate at that time of the virtual clock, in requests per second, or 0."""
        slow = Disturbances(drift=self.drift, drift_most=self.drift_most).drift_factor(virtual_s)
        if slow in self.slowness:
            return self.rates[self.slowness.index(slow)]
        if not all(self.rates):
            return float(np.interp(slow, self.slowness, self.rates))
        # A cubic fits the logarithms of the five rates, which are known to 0.5 % and nearly in line.
        x = np.log(self.slowness)
        return float(np.exp(np.polyval(np.polyfit(x, np.log(self.rates), 3), math.log(slow))))


def compute(system: System) -> Truth:
    start = time.perf_counter()
    disturbances = system.disturbances
    steady = replace(system, disturbances=replace(disturbances, warmup_factor=1.0, drift=0.0, noise=0.0))
    slowness = tuple(np.linspace(1.0, disturbances.drift_most, 5).tolist()) if disturbances.drift else (1.0,)
    roots, hows = list[Root](), list[str]()
    for slow in slowness:
        if (known := by_formula(steady, slow)) is not None:
            roots.append(Root(known[1], 0.0, 0, known[2]))
        else:
            roots.append(Runs(steady, slow).root())
        hows.append(known[0] if known else "simulation")
    rates = tuple(float(f"{root.rate:.7g}") for root in roots)
    return Truth(
        hows[0] if rates[0] else "none",
        slowness,
        rates,
        float(f"{max(root.error for root in roots):.3g}"),
        min(float(f"{roots[0].slope:.3g}"), STEEPEST),
        disturbances.drift,
        disturbances.drift_most,
        sum(root.requests for root in roots),
        round(time.perf_counter() - start, 1),
    )


def by_formula(system: System, slow: float = 1.0) -> tuple[str, float, float] | None:
    """Return (name of the formula, rate, slope) of a system that is ``slow`` times slower, or None."""
    changes, burstiness = system.disturbances, system.workload.burstiness
    if system.batch or changes.pause_s or changes.tenants or burstiness != 1.0 or system.slope_s:
        return None
    service_s = system.prefill_s * slow
    found: list[tuple[str, float, float]] = []
    for criterion in criteria(system.slo):
        # All requests have the same TPOT, so its limit holds for all or for none.
        limit_s = criterion.tpot_s
        if limit_s is not None and system.workload.output_len > 1 and system.token_s * slow > limit_s:
            return "none", 0.0, 0.0
        if criterion.ttft_s is None:
            continue
        used = _used(system, criterion, criterion.ttft_s / service_s)
        if used is None:
            return None
        name, function = used
        load = highest(function, float(system.servers))
        found.append((name, load / service_s, _slope(function, load)))
    return min(found, key=lambda result: result[1]) if found else None


def _used(system: System, criterion: Criterion, limit: float) -> tuple[str, Callable[[float], float]] | None:
    """Return (formula, load → used share of the allowance) for a limit in mean services."""
    service, servers = system.service, system.servers
    markov = service.form == "exponential" and len(service.mixture) == 1
    if criterion.share is None:
        if system.discipline == "sharing" or markov:
            name = "processor sharing, mean" if system.discipline == "sharing" else "M/M/c, mean"
            return name, lambda load: mmc_mean(servers, load) / limit
        if servers == 1:
            return "Pollaczek-Khinchine", lambda load: (1 + mg1_mean_wait(service, load)) / limit
        return None
    allowed = 1 - criterion.share
    if system.discipline == "sharing":
        return None
    if markov:
        return "M/M/c", lambda load: (1 - mmc_share(servers, load, limit)) / allowed
    if servers > 1:
        return None
    queue = Mg1(service, limit)
    # The grid's error must not decide whether a lone request is in time.
    alone = (1 - service.cdf(limit)) / allowed
    return "M/G/1", lambda load: alone if load < _ALONE else (1 - queue.share(load)) / allowed


def _slope(used: Callable[[float], float], load: float) -> float:
    if not load > 0:
        return 0.0
    low, high = (max(used(load * (1 + side)), 1e-12) for side in (-1e-3, 1e-3))
    return math.log(high / low) / 2e-3


def path_of(seed: str) -> Path:
    """Return the file of a seed's truths: in the repository only for seeds that anyone may examine."""
    return (
        PATH
        if seed in COMMITTED
        else Path(__file__).resolve().parents[2] / "results" / f"random-systems-{seed}.json"
    )


def known(path: Path = PATH) -> dict[str, Truth]:
    """Return the kept truths by fingerprint."""
    found: dict[str, Truth] = known_rows(path, Truth, VERSION)
    return found


def keep(truths: Mapping[str, Truth], path: Path = PATH) -> None:
    """Write truths by fingerprint."""
    keep_rows(truths, path, VERSION)
