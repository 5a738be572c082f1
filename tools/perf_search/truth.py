"""The true maximum rate of each virtual system: by formula, or by long runs with stored results.

``truth.json`` stores each rate under the fingerprint of its system. After a change of a system, compute its
rate again (``python -m tools.perf_search --truth``).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tools.jobs import Row, keep_rows, known_rows
from tools.known_queues import md1_max_rate

from .pipeline import System, offsets, run_open

PATH: Final = Path(__file__).with_name("truth.json")
VERSION: Final = 1
"""Version of the computation. A file with another version is computed again."""
REQUESTS: Final = 250_000
SEEDS: Final = 4
ROUGH_REQUESTS: Final = 40_000
WIDTHS: Final = (0.04, 0.02, 0.015)
"""Relative half-widths of the successive ranges of rates in which misses are fitted."""


@dataclass(frozen=True)
class Truth(Row):  # type: ignore[misc]
    """True rate in requests per second, and median end-to-end latency at that rate in seconds."""

    rate: float
    latency_s: float


def fingerprint(system: System) -> str:
    """Return a hash of everything that affects the rate."""
    return hashlib.sha256(repr(system).encode()).hexdigest()[:16]


def known() -> dict[str, Truth]:
    """Return the kept truths by fingerprint."""
    found: dict[str, Truth] = known_rows(PATH, Truth, VERSION)
    return found


def keep(found: dict[str, Truth]) -> None:
    """Write truths by fingerprint."""
    keep_rows(found, PATH, VERSION)


def compute(system: System) -> Truth:
    """Compute a truth by formula or from runs of a million requests; without a root, it is a rate limit."""
    if system.truth in ("above", "below"):
        return Truth(system.max_rate if system.truth == "above" else system.min_rate, system.idle_s)
    if system.truth == "md1":  # the first token comes one decode step after the service
        rate = md1_max_rate(system.prefill_s, system.ttft_s - system.step(1), system.attainment)
    else:
        rate = _by_runs(system)
    return Truth(rate, attainment(system, rate, ROUGH_REQUESTS, 0)[1])


def attainment(system: System, rate: float, requests: int, seed: int) -> tuple[float, float]:
    """Return (share within the SLO, median end-to-end latency in seconds), without the first 2 %."""
    rng = np.random.default_rng([7, seed])
    outcomes = run_open(system, offsets(system, rate, requests / rate, rng), rng)
    steady = slice(len(outcomes.end_s) // 50, None)
    share = float((outcomes.load(system)[steady] <= 1.0).mean())
    return share, float(np.median(outcomes.e2el_s[steady]))


def _by_runs(system: System) -> float:
    """Return the highest root: bracket it from above, then fit the logarithm of the misses over the rate."""
    step, high = 1.25, system.max_rate
    while attainment(system, high / step, ROUGH_REQUESTS, 1)[0] < system.attainment:
        high /= step
    low = high / step
    while high / low > 1.03:
        middle = math.sqrt(low * high)
        kept = attainment(system, middle, ROUGH_REQUESTS, 1)[0] >= system.attainment
        low, high = (middle, high) if kept else (low, middle)
    centre = math.sqrt(low * high)
    for width in WIDTHS:
        x = np.linspace(1 - width, 1 + width, 5)
        shares = [
            np.mean([attainment(system, centre * at, REQUESTS, 10 + seed)[0] for seed in range(SEEDS)])
            for at in x
        ]
        misses = np.log(np.maximum(1.0 - np.array(shares), 1e-6))
        grid = np.linspace(1 - 2 * width, 1 + 2 * width, 4001)
        over = np.polyval(np.polyfit(x, misses, 2 if width > 0.02 else 1), grid) - math.log(
            1 - system.attainment
        )
        crossing = np.flatnonzero((over[:-1] < 0) & (over[1:] >= 0))
        centre *= float(grid[crossing[0]]) if len(crossing) else 1.0 - math.copysign(2 * width, over[-1])
    return centre
