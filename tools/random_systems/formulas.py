"""What queueing theory knows: M/G/1, M/M/c, processor sharing. Independent of the simulations and of kvbench.

M/G/1: the wait is a sum of a geometric number of residual services (Pollaczek and Khinchine; Beneš). The sum
is taken on a grid of times, by Fourier transform of a tilted series, so that what wraps around is nothing.
M/M/c: Erlang's second formula. Processor sharing, on any number of servers: the mean is insensitive to the
distribution of the service (Cohen, 1979), so it is that of M/M/c.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from .system import Service

GRID: Final = 1 << 15
TILT: Final = 25.0
"""What wraps around a transform is smaller by e to this power."""
_EVEN_LESS: Final = 1e-9
_BISECTIONS: Final = 50


class Mg1:
    """P(wait + service ≤ limit) of M/G/1 first come first served, for one service and limit, at any load.

    ``limit`` in mean services. The error is that of the grid: below 1e-4 where the service is deterministic,
    far less where it is not.
    """

    def __init__(self, service: Service, limit: float) -> None:
        # The limit is in the middle of two points of the grid, at which the sums are cut.
        step = limit / (GRID - 0.5)
        edges = (np.arange(GRID + 1) - 0.5) * step
        cdf = np.array([service.cdf(edge) for edge in edges.tolist()])
        self._tilt = np.exp(-TILT / (2 * GRID) * np.arange(GRID))
        # The residual service has the density P(service > x): its mass within ± half a step of each point.
        residual = np.diff([service.mean_within(edge) for edge in edges.tolist()])
        self._residual = np.fft.rfft(residual * self._tilt, 2 * GRID)
        self._service = np.fft.rfft(np.diff(cdf) * self._tilt, 2 * GRID)

    def share(self, load: float) -> float:
        """P(wait + service ≤ limit) at that load; 0 from 1 on."""
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
    for each in range(1, servers + 1):
        blocked = load * blocked / (each + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def mmc_mean(servers: int, load: float) -> float:
    """Mean time from arrival to the end of service in M/M/c, in mean services."""
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


def highest(kept: Callable[[float], bool], most: float) -> float:
    """The highest load up to ``most`` at which ``kept`` is true, by bisection of its logarithm; or 0."""
    low, high = most * 1e-12, most
    if not kept(low):
        return 0.0
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low
