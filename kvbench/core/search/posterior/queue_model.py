"""Waiting times in a busy queue, while it fills and after: a reflected Brownian motion.

Near its capacity a queue's waiting time W behaves like one under any discipline: it drifts by (load − 1)
seconds a second, varies by σ² a second, and cannot fall below 0. Started empty, it has the distribution

    P(W_t > y) = Φ((−y + μt) / σ√t) + exp(2μy / σ²) · Φ((−y − μt) / σ√t),   μ = load − 1

(Harrison, Brownian Motion and Stochastic Flow Systems, 1985, §3.6), whose limit is exp(−2 (1 − load) y / σ²).
This predicts what a short trial cannot show: when a rate above the capacity reaches a limit, and for how long
a queue near it is correlated (σ² / μ²).

Waiting times and times are given in units of the TTFT headroom for waiting, and σ² as the *depth*
2 · headroom / σ², so that P(W > headroom) = exp(−depth · (1 − load)) in the long run.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.core.search.data import MEMORY

FloatArray = npt.NDArray[np.float64]
SingleArray = npt.NDArray[np.float32]

MEAN_NODES: Final = 8
MEAN_SPAN: Final = 4.0
LAST_SPAN: Final = 6.0
"""Number of levels over which a mean is summed, and their range: in standard deviations of the free motion,
or in means of the final distribution."""
FURTHEST: Final = 1e4
"""Largest number of standard deviations."""
LEAST_LOG: Final = -80.0
"""Logarithm of the lowest probability above 0."""
_HART: Final = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
"""Coefficients of the normal tail (Abramowitz and Stegun 26.2.17, error below 1e-7)."""


def log_normal_cdf(z: FloatArray) -> FloatArray:
    """Return ln Φ(z), also far below 0 (to 1 % of the tail), computed in single precision."""
    return np.asarray(_log_normal_cdf(z), np.float64)


def _log_normal_cdf(z: npt.NDArray[np.floating]) -> SingleArray:
    distance: SingleArray = np.minimum(np.abs(z), FURTHEST).astype(np.float32, copy=False)
    t = 1.0 / (1.0 + 0.2316419 * distance)
    total = np.full_like(t, _HART[0])
    for coefficient in _HART[1:]:
        total *= t
        total += coefficient
    total *= t
    distance *= distance
    tail = np.log(total * 0.3989422804014327) - 0.5 * distance
    above = np.log1p(-np.exp(np.clip(tail, LEAST_LOG, -1e-7)))
    return np.asarray(np.where(z > 0, above, tail), np.float32)


def late_share(
    load: FloatArray, depth: FloatArray, time: float | FloatArray, level: float | FloatArray = 1.0
) -> FloatArray:
    """Return P(W > level) at a time since the queue was empty; level and time in headrooms."""
    drift, deep, when, high = (np.asarray(value, np.float32) for value in (load - 1.0, depth, time, level))
    spread, moved = np.sqrt(2.0 * when / deep), drift * when
    log_free = _log_normal_cdf((moved - high) / spread)
    reflected = np.clip(high * deep * drift, -300.0, 300.0) + _log_normal_cdf(-(high + moved) / spread)
    free = np.exp(np.maximum(log_free, LEAST_LOG)) + np.exp(np.clip(reflected, LEAST_LOG, 0.0))
    return np.asarray(np.clip(free, 0.0, 1.0), np.float64)


def mean_wait(load: FloatArray, depth: FloatArray, time: float | FloatArray) -> FloatArray:
    """Return E[W] in headrooms at a time since the queue was empty: ``late_share`` integrated over levels."""
    free = MEAN_SPAN * np.sqrt(2.0 * time / depth)
    at_last = LAST_SPAN / (depth * np.maximum(1.0 - load, 1e-9))
    top = np.maximum((load - 1.0) * time, 0.0) + np.minimum(free, at_last)
    total = np.zeros_like(top)
    for node in range(MEAN_NODES):
        total += late_share(load, depth, time, top * ((node + 0.5) / MEAN_NODES))
    return np.asarray(total * top / MEAN_NODES, np.float64)


def memory(load: FloatArray, depth: FloatArray) -> FloatArray:
    """Return the correlation time of the queue in headrooms: 2 σ² / μ² (the integral of a reflected Brownian
    motion's autocorrelation over both sides; Whitt, Planning queueing simulations, 1989)."""
    return np.asarray(MEMORY / (depth * np.maximum((1.0 - load) ** 2, 1e-6)), np.float64)


# --- arrival variance ------------------------------------------------------------------------------
# Clusters of arrivals cause most of the waiting. The arrivals run through a queue with constant service
# times; the capacity that just keeps the limit, compared with that for resampled gaps, gives the rate that
# these arrivals stand for. The remaining variance is that of the services.

DRAWS: Final = 40
"""Number of arrival sequences with resampled gaps to compare with."""
BISECTION_STEPS: Final = 12
SLOWEST, FASTEST = 0.2, 4.0
"""Range of capacities for the bisection, in units of the rate."""
MAX_CORRECTION: Final = 1.25
FEWEST: Final = 20


def queue_rate(
    offsets_s: FloatArray, rate: float, window_s: tuple[float, float], headroom_s: float, share: float | None
) -> float | None:
    """Return the rate whose average queue equals that of these arrivals; None of too few requests.
    ``offsets_s``: ascending, from 0 on. ``window_s``: requests counted. ``headroom_s``: TTFT headroom that
    ``share`` of them must keep, or if None their mean."""
    arrivals_s = offsets_s[offsets_s <= window_s[1]]
    counted = int((arrivals_s >= window_s[0]).sum())
    if counted < FEWEST or headroom_s <= 0:
        return None
    gaps = np.diff(arrivals_s, prepend=0.0)
    draws = np.random.default_rng(len(arrivals_s)).choice(gaps, (DRAWS, len(arrivals_s)))
    draws *= 1.0 / (rate * gaps.mean())
    # The resampled requests may end before or after the window, so they are counted by index.
    ratio = _capacity(arrivals_s[None, :], rate, counted, headroom_s, share) / _capacity(
        np.cumsum(draws, axis=1), rate, counted, headroom_s, share
    )
    return rate * min(max(ratio, 1 / MAX_CORRECTION), MAX_CORRECTION)


def _capacity(
    offsets_s: FloatArray, rate: float, counted: int, headroom_s: float, share: float | None
) -> float:
    """Return the lowest capacity at which the last ``counted`` of each row together keep the limit."""
    low, high = math.log(SLOWEST * rate), math.log(FASTEST * rate)
    numbers = np.arange(offsets_s.shape[1])[None, :]
    for _ in range(BISECTION_STEPS):
        middle = (low + high) / 2
        ahead = numbers * math.exp(-middle) - offsets_s
        waits = (ahead - np.minimum.accumulate(ahead, axis=1))[:, -counted:]
        kept = waits.mean() <= headroom_s if share is None else (waits <= headroom_s).mean() >= share
        low, high = (low, middle) if kept else (middle, high)
    return math.exp((low + high) / 2)
