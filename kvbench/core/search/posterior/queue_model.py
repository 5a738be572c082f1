"""How long requests wait in a busy queue, while it fills and after: a reflected Brownian motion.

Whatever the discipline, near its capacity a queue's waiting time W behaves like one: it drifts by (load − 1)
seconds a second, varies by σ² a second, and cannot fall below 0. Started empty, it has the distribution

    P(W_t > y) = Φ((−y + μt) / σ√t) + exp(2μy / σ²) · Φ((−y − μt) / σ√t),   μ = load − 1

(Harrison, Brownian Motion and Stochastic Flow Systems, 1985, §3.6), whose limit is exp(−2 (1 − load) y / σ²).
What a short trial cannot show yet follows from it: how late a limit is reached by a rate above the capacity,
and for how long a queue near it remembers (σ² / μ²).

Here a waiting time is told as a share of the *slack*, the time that a TTFT limit leaves for waiting; times in
slacks, too; and σ² by the *depth* 2 · slack / σ², so that P(W > slack) = exp(−depth · (1 − load)) at last.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
SingleArray = npt.NDArray[np.float32]

MEMORY: Final = 2.5
MEAN_NODES: Final = 8
MEAN_SPAN: Final = 4.0
LAST_SPAN: Final = 6.0
"""Levels at which a mean is summed, up to so many standard deviations of the free motion, or last means."""
FURTHEST: Final = 1e4
"""Standard deviations; and the logarithm of the least probability that is told from none."""
LEAST_LOG: Final = -80.0
_HART: Final = (1.330274429, -1.821255978, 1.781477937, -0.356563782, 0.319381530)
"""Coefficients of the normal tail (Abramowitz and Stegun 26.2.17, error below 1e-7)."""


def log_normal_cdf(z: FloatArray) -> FloatArray:
    """ln Φ(z), also far below 0 (to 1 % of the tail); in single precision, which is finer than that."""
    return np.asarray(_log_normal_cdf(z), np.float64)


def _log_normal_cdf(z: npt.NDArray[np.floating]) -> SingleArray:
    far: SingleArray = np.minimum(np.abs(z), FURTHEST).astype(np.float32, copy=False)
    t = 1.0 / (1.0 + 0.2316419 * far)
    total = np.full_like(t, _HART[0])
    for coefficient in _HART[1:]:
        total *= t
        total += coefficient
    total *= t
    far *= far
    tail = np.log(total * 0.3989422804014327) - 0.5 * far
    above = np.log1p(-np.exp(np.clip(tail, LEAST_LOG, -1e-7)))
    return np.asarray(np.where(z > 0, above, tail), np.float32)


def late_share(
    load: FloatArray, depth: FloatArray, time: float | FloatArray, level: float | FloatArray = 1.0
) -> FloatArray:
    """P(W > level) at a time since the queue was empty, the level and the time in slacks."""
    drift, deep, when, high = (np.asarray(each, np.float32) for each in (load - 1.0, depth, time, level))
    spread, moved = np.sqrt(2.0 * when / deep), drift * when
    log_free = _log_normal_cdf((moved - high) / spread)
    reflected = np.clip(high * deep * drift, -300.0, 300.0) + _log_normal_cdf(-(high + moved) / spread)
    free = np.exp(np.maximum(log_free, LEAST_LOG)) + np.exp(np.clip(reflected, LEAST_LOG, 0.0))
    return np.asarray(np.clip(free, 0.0, 1.0), np.float64)


def mean_wait(load: FloatArray, depth: FloatArray, time: float | FloatArray) -> FloatArray:
    """E[W] in slacks at a time since the queue was empty: the integral of ``late_share`` over all levels."""
    free = MEAN_SPAN * np.sqrt(2.0 * time / depth)
    at_last = LAST_SPAN / (depth * np.maximum(1.0 - load, 1e-9))
    top = np.maximum((load - 1.0) * time, 0.0) + np.minimum(free, at_last)
    total = np.zeros_like(top)
    for node in range(MEAN_NODES):
        total += late_share(load, depth, time, top * ((node + 0.5) / MEAN_NODES))
    return np.asarray(total * top / MEAN_NODES, np.float64)


def memory(load: FloatArray, depth: FloatArray) -> FloatArray:
    """For how long, in slacks, one state of the queue counts: 2 σ² / μ² (the integral of a reflected
    Brownian motion's autocorrelation over both sides; Whitt, Planning queueing simulations, 1989)."""
    return np.asarray(MEMORY / (depth * np.maximum((1.0 - load) ** 2, 1e-6)), np.float64)
