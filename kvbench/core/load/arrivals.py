"""When to send: planned offsets of an open-loop load."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import InputError

_STREAM: Final = 1
"""Sets the arrivals' random numbers apart from the prompts', so that neither moves the other."""


def planned_offsets(
    request_rate: float, num_requests: int, burstiness: float, seed: int
) -> NDArray[np.float64]:
    """Seconds from the trial's start to each planned send, ascending; the first comes after a first gap.

    Gaps are gamma distributed with shape ``burstiness`` and mean 1 / request_rate: 1 is a Poisson
    process, below 1 burstier, infinite a constant gap. They are not stretched so that the last one
    falls on num_requests / request_rate: that would take the variation of a Poisson count away. An
    infinite rate plans everything for the start. Raises InputError for impossible values.
    """
    if num_requests < 0:
        raise InputError(f"num_requests must not be negative, it is {num_requests}")
    if not request_rate > 0:
        raise InputError(f"request_rate must be above 0, it is {request_rate}")
    if not burstiness > 0:
        raise InputError(f"burstiness must be above 0, it is {burstiness}")
    if math.isinf(request_rate):
        return np.zeros(num_requests)
    if math.isinf(burstiness):
        return np.arange(1, num_requests + 1) / request_rate
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([_STREAM, seed])))
    gaps = random.gamma(burstiness, 1.0 / (request_rate * burstiness), num_requests)
    return np.cumsum(gaps)
