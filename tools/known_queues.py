"""Queues with a known maximum rate, as references for a search.

M/D/1: Poisson arrivals at ``rate``, one server, constant ``service_s``, first come, first served.

Sources. Number in system: the chain embedded at departures (D. G. Kendall, 1951, 1953), solved by balancing
how often it goes up and down across a level, in which all terms are positive; Poisson arrivals meet the same
distribution. Waiting time: G. J. Franx, "A simple solution for the M/D/c waiting time distribution",
Operations Research Letters 29 (2001), with c = 1. Erlang's formula of 1909 is the same function as an
alternating sum, which loses all digits for long waits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbench.errors import InputError

_BISECTIONS: Final = 60


def md1_wait_cdf(rate: float, service_s: float, wait_s: float) -> float:
    """Return P(wait ≤ wait_s), with the wait from arrival to start of service; 0 for an unstable queue.

    Takes O((wait_s / service_s)²) steps. Raises InputError for impossible values.
    """
    load = _load(rate, service_s)
    if wait_s < 0 or load >= 1:
        return 0.0
    # (k − 1)·D ≤ wait < k·D; Franx's sum over the arrivals within the rest of k services.
    k = math.floor(wait_s / service_s) + 1
    mean = rate * (k * service_s - wait_s)
    shares = np.cumsum(md1_in_system(load, k + 1))  # P(at most m in the system), m = 0 … k
    arrivals = _poisson(mean, k)  # j = 0 … k − 1
    # At most m wait if at most m + 1 are in the system.
    return float(min(1.0, np.dot(arrivals, shares[k - np.arange(k)])))


def md1_attainment(rate: float, service_s: float, ttft_s: float) -> float:
    """Return P(wait + service ≤ ttft_s): the share of first tokens in time, if service ends with them."""
    return md1_wait_cdf(rate, service_s, ttft_s - service_s)


def md1_max_rate(service_s: float, ttft_s: float, share: float) -> float:
    """Return the highest rate at which ``share`` of the requests get their first token within ``ttft_s``.

    0 if even a lone request does not. Raises InputError for impossible values.
    """
    if not 0 < share < 1:
        raise InputError(f"share must be between 0 and 1, it is {share}")
    _load(1.0, service_s)
    if ttft_s < service_s:
        return 0.0
    low, high = 0.0, 1.0 / service_s
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if md1_attainment(middle, service_s, ttft_s) >= share:
            low = middle
        else:
            high = middle
    return low


def md1_in_system(load: float, levels: int) -> npt.NDArray[np.float64]:
    """Return P(i in the system) for i = 0 … levels − 1. ``load``: rate × service time, below 1.

    Across the boundary between j and j + 1 the chain at departures goes up as often as down:
    p(j+1)·a(0) = p(0)·A(j) + Σ_{i=1…j} p(i)·A(j − i + 1), with a the Poisson probabilities of the arrivals
    during one service and A(m) = P(more than m arrivals).
    """
    arrivals = _poisson(load, levels + _FURTHER)
    # Summed from the far end, so that small tails keep their digits.
    tails = np.append(np.cumsum(arrivals[::-1])[::-1][1:], 0.0)
    shares = np.empty(levels)
    shares[0] = 1.0 - load
    for j in range(levels - 1):
        up = shares[0] * tails[j] + float(np.dot(shares[1 : j + 1], tails[j:0:-1]))
        shares[j + 1] = up / arrivals[0]
    return shares


_FURTHER: Final = 40
"""A Poisson variable with mean below 1 exceeds this with a probability below 1e-47."""


def _poisson(mean: float, count: int) -> npt.NDArray[np.float64]:
    """Return P(j arrivals) for j = 0 … count − 1, of a Poisson distribution."""
    terms = np.empty(count)
    terms[0] = math.exp(-mean)
    for j in range(1, count):
        terms[j] = terms[j - 1] * mean / j
    return terms


def _load(rate: float, service_s: float) -> float:
    if not rate >= 0 or not service_s > 0:
        raise InputError(f"a queue needs a rate of 0 or more and a service time, not {rate} and {service_s}")
    return rate * service_s
