"""What a trial under way is given and decides: its load, its criteria, its length; a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvbench.core.search.data import TrialFigures

FloatArray = npt.NDArray[np.float64]
Verdict = Literal["met", "missed", "undecided"]
Observation = (
    tuple[int, tuple[float, ...]]
    | tuple[int, tuple[float, ...], tuple[float, ...]]
    | tuple[int, tuple[float, ...], tuple[float, ...], float | None]
)
"""(request's index, one value per criterion), and if known one margin per criterion: the value / its limit
that decided, at most 1 where a share criterion's value is 1. inf for a request that failed or never came.
Then its TTFT in seconds, None while there is none."""

TRIAL_LATENCIES: Final = 10.8
TRIAL_REQUESTS: Final = 600
QUICK_REQUESTS: Final = 2000
LONGEST: Final = 6.0
QUICK_S: Final = 40.0
"""A trial's time is up after so many of its own latencies, but not before so many requests, and where they
come fast not before so many more, or so many seconds: a queue's memory is counted in requests, and where only
a few are under way at once, a dozen latencies show next to nothing."""


def trial_length_s(rate: float, latency_s: float, least_s: float = 0.0) -> float:
    """For how long to plan a trial: twice what it is likely to take, should latencies turn out longer."""
    latencies_s = 2 * TRIAL_LATENCIES * latency_s
    longest_s = LONGEST * max(latencies_s, requests_s(rate))
    return max(latencies_s, min(least_s or requests_s(rate), longest_s))


def requests_s(rate: float) -> float:
    """How long the requests take that a trial needs at least."""
    return max(TRIAL_REQUESTS / rate, min(QUICK_REQUESTS / rate, QUICK_S))


@dataclass(frozen=True)
class CriterionTarget:
    """``share``: values are 1 (kept) or 0, and their true share must be at least ``target``.
    ``mean``: the values' true mean must be at most ``target``. ``wait_limit_s``: the limit of a time that
    waiting is a part of, 0 without one: of TTFT, or ``whole``: of the whole latency, which the margins tell
    then. Raises ValueError for impossible targets."""

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
    """What a trial of sessions is told: at most so many ``requests``; after ``filled_s`` sessions end about
    as fast as they begin; ``dispersion``: variance over mean of the requests in a long time.
    """

    requests: int
    filled_s: float
    dispersion: float


@dataclass(frozen=True)
class LiveConfig:
    """``offsets_s``: planned sends in order. ``rate``: requests per second offered. ``latency_s``: end-to-end
    latency to expect, 0 if unknown; the trial's own takes its place. ``max_s``: when the time is up at the
    latest; by default the last planned send. ``ttft_limit_s``: 0 if TTFT is not limited. ``confidence``: of
    either verdict. ``thorough``: no quick yes, and a quick no only if it is very clear; for trials near the
    answer, whose figures count. ``confirms``: what matters are its figures, as near the answer:
    when its time is up, figures that reach what is asked are a yes, proven or not.
    ``latencies``: the time is up after so many of the trial's own latencies, ``least_s`` at the earliest (0:
    after ``requests_s``).
    ``hopeless_s``: what has been under way for so long has broken a limit for sure.
    ``turns``: of a load of sessions: what it sends comes as answers come, in the order of ``feed``'s offsets.
    """

    offsets_s: Sequence[float] | FloatArray
    rate: float
    latency_s: float = 0.0
    max_s: float | None = None
    ttft_limit_s: float = 0.0
    confidence: float = 0.95
    thorough: bool = False
    confirms: bool = False
    latencies: float = TRIAL_LATENCIES
    least_s: float = 0.0
    hopeless_s: float = math.inf
    turns: TurnsLive | None = None


@dataclass(frozen=True)
class Decision:
    """A verdict, why, at what time of the trial, its steady part, and what was measured until then."""

    verdict: Verdict
    reason: str
    at_s: float
    window_s: tuple[float, float]
    measured: TrialFigures
