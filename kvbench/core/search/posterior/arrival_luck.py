"""What chance did to a trial's arrivals, as a queue feels it.

Arrivals are known to the last one, and in a queue their clusters make most of the waiting. So they are sent
through a queue that serves each in the same time, and the capacity is sought at which that one just keeps the
limit. Had they come as they do on average, another capacity would do: the ratio is the trial's luck, and the
rate that it really stood for is the planned one times it. It is a control variate: what remains of the chance
is that of the services alone.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

DRAWS: Final = 40
"""Arrivals with the same gaps in another order, and other ones of them, that say what is usual."""
STEPS: Final = 12
SLOWEST, FASTEST = 0.2, 4.0
"""Capacities that are tried, in units of the rate."""
MOST: Final = 1.25
FEWEST: Final = 20


def queue_rate(
    offsets_s: FloatArray, rate: float, window_s: tuple[float, float], slack_s: float, share: float | None
) -> float | None:
    """The rate in requests per second that these arrivals stand for; None if that cannot be said.

    ``offsets_s``: ascending, from 0 on. ``window_s``: between which of them requests are counted.
    ``slack_s``: what the limit leaves for waiting. ``share`` of them must be within it; None: their mean.
    """
    own = offsets_s[offsets_s <= window_s[1]]
    counted = int((own >= window_s[0]).sum())
    if counted < FEWEST or slack_s <= 0:
        return None
    gaps = np.diff(own, prepend=0.0)
    draws = np.random.default_rng(len(own)).choice(gaps, (DRAWS, len(own)))
    draws *= 1.0 / (rate * gaps.mean())
    # As many requests as came may reach beyond the window, or end before it: it is counted by its place.
    ratio = _capacity(own[None, :], rate, counted, slack_s, share) / _capacity(
        np.cumsum(draws, axis=1), rate, counted, slack_s, share
    )
    return rate * min(max(ratio, 1 / MOST), MOST)


def _capacity(offsets_s: FloatArray, rate: float, counted: int, slack_s: float, share: float | None) -> float:
    """The least capacity at which the last ``counted`` of each row, all together, keep the limit."""
    low, high = math.log(SLOWEST * rate), math.log(FASTEST * rate)
    places = np.arange(offsets_s.shape[1])[None, :]
    for _ in range(STEPS):
        middle = (low + high) / 2
        ahead = places * math.exp(-middle) - offsets_s
        waits = (ahead - np.minimum.accumulate(ahead, axis=1))[:, -counted:]
        kept = waits.mean() <= slack_s if share is None else (waits <= slack_s).mean() >= share
        low, high = (low, middle) if kept else (middle, high)
    return math.exp((low + high) / 2)
