"""Input and decision of a running trial: load, criteria and length; verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvbench.core.search.data import LONGEST, TRIAL_LATENCIES, TrialFigures, requests_s

FloatArray = npt.NDArray[np.float64]
Verdict = Literal["met", "missed", "undecided"]
Observation = (
    tuple[int, tuple[float, ...]]
    | tuple[int, tuple[float, ...], tuple[float, ...]]
    | tuple[int, tuple[float, ...], tuple[float, ...], float | None]
)
"""Request index; one value per criterion; one margin per criterion (value / limit of the metric that decided,
at most 1 where a share criterion's value is 1; inf for a failed request); TTFT in seconds. The last two are
left out while unknown."""


def trial_length_s(rate: float, latency_s: float, least_s: float = 0.0) -> float:
    """Return the planned length of a trial: twice the expected one, since latencies may be longer."""
    latencies_s = 2 * TRIAL_LATENCIES * latency_s
    longest_s = LONGEST * max(latencies_s, requests_s(rate))
    return max(latencies_s, min(least_s or requests_s(rate), longest_s))


@dataclass(frozen=True)
class CriterionTarget:
    """``share``: values are 1 (within the limits) or 0, and their true share must be at least ``target``.
    ``mean``: their true mean must be at most ``target``. ``wait_limit_s``: limit on TTFT, or if ``whole`` on
    the end-to-end latency (read from the margins); 0 without one. Raises ValueError for bad targets."""

    kind: Literal["share", "mean"]
    target: float
    wait_limit_s: float = 0.0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.kind == "share" and not 0.0 < self.target <= 1.0:
            raise ValueError(f"a share must be above 0 and at most 1, not {self.target}")
        if self.kind == "mean" and not 0.0 < self.target < math.inf:
            raise ValueError(f"a mean's limit must be above 0, not {self.target}")


@dataclass(frozen=True)
class TurnsLive:
    """A load of sessions: at most ``requests``; after ``filled_s`` sessions end about as fast as they begin;
    ``dispersion``: variance over mean of the number of requests in a long time."""

    requests: int
    filled_s: float
    dispersion: float


@dataclass(frozen=True)
class LiveConfig:
    """The load and length of a running trial.

    ``offsets_s``: planned sends in order. ``rate``: requests per second offered. ``latency_s``: expected
    end-to-end latency until one was measured, 0 if unknown. ``max_s``: latest end, by default that of the
    sends. ``ttft_limit_s``: 0 if TTFT is not limited. ``confidence``: of either verdict. ``full_length``: no
    early "met", and an early "missed" only if it is very clear. ``confirms``: at its end the measured share
    alone decides "met", significant or not. ``latencies``: length in latencies that it measured; ``least_s``:
    minimum length (0: ``requests_s``). ``hopeless_s``: a request in flight for longer has broken a limit.
    ``turns``: for a load of sessions, whose sends follow responses, in the order of ``feed``'s offsets.
    """

    offsets_s: Sequence[float] | FloatArray
    rate: float
    latency_s: float = 0.0
    max_s: float | None = None
    ttft_limit_s: float = 0.0
    confidence: float = 0.95
    full_length: bool = False
    confirms: bool = False
    latencies: float = TRIAL_LATENCIES
    least_s: float = 0.0
    hopeless_s: float = math.inf
    turns: TurnsLive | None = None


@dataclass(frozen=True)
class Decision:
    """Verdict, reason and time in the trial, with its steady part and figures."""

    verdict: Verdict
    reason: str
    at_s: float
    window_s: tuple[float, float]
    measured: TrialFigures
