"""One look at a criterion: met, missed or still undecided after the requests so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from kvbench.core.stats import (
    design_effect,
    lower_bound,
    sectioned,
    share_interval,
    t_quantile,
    upper_bound,
)

FloatArray = npt.NDArray[np.float64]
Verdict = Literal["met", "missed", "undecided"]

MET_REQUESTS: Final = 40
TAIL_REQUESTS: Final = 1.25
"""Minimum expected number of requests in the tail that may exceed a limit: one, and some for the gates'
shorter window."""
PENDING: Final = 0.02
"""Largest share of pending requests with which a margin's quantile is known."""
MAX_SCORE: Final = 20.0
LATE: Final = 1e3
"""Largest margin used: inf (a failed request) would spoil the sections' arithmetic."""
UNKNOWN_CLUMP: Final = 2.5
"""Number of successive requests that count as one if neither misses nor margins show it."""
DEPENDENT: Final = 1.5
"""Factor for the correlation of a trial's sections, which makes clumps and variances look smaller."""
SHARE_SCALE: Final = 3.0


@dataclass(frozen=True)
class LookResult:
    """Result of one look. ``share`` within limits has its 95 % interval, for ``effective_n`` requests."""

    verdict: Verdict
    score: float
    error: float
    share: float
    lower: float
    upper: float
    effective_n: float
    text: str
    reached: bool = False
    """Whether the figure reaches the target, significant or not; pending requests count as missed."""


@dataclass(frozen=True)
class Strictness:
    """Parameters of a look. ``alpha``: chance of error on either side; ``clump``: minimum number of
    successive requests that count as one, for an early end of a full-length trial (otherwise 0);
    ``pending``: requests of the same time without a result."""

    sections: int
    alpha: float
    clump: float
    pending: int


def share_look(values: FloatArray, margins: FloatArray, target: float, how: Strictness) -> LookResult:
    """Judge a share criterion. ``values``: 1 (met) or 0; ``margins``: value / limit or nan; by arrival."""
    n = len(values)
    good = float((values >= 0.5).sum())
    share = good / n
    known = not np.isnan(margins).any()
    score, error = math.nan, math.inf
    flags = (values < 0.5).astype(np.float64)
    if known:
        late = np.minimum(margins, LATE)
        margin, margin_error = sectioned(late, how.sections, target)
        score, error = _score(margin, margin_error)
        # Late requests come in clumps, which show at the criterion's own quantile even if none is too late.
        above = (late > margin).astype(np.float64)
        flags = above if above.any() else flags
    clump = design_effect(flags, how.sections) if known or 0 < good < n else UNKNOWN_CLUMP
    effective = n / max(DEPENDENT * clump if clump > 1.0 else 1.0, how.clump)
    certainty, whole = 1.0 - how.alpha / 2, n + how.pending
    lower = lower_bound(good / whole * effective, effective, certainty)
    upper = upper_bound((good + how.pending) / whole * effective, effective, certainty)
    reach = _reach(certainty, how.sections, error) if known else math.inf
    by_margin = how.pending <= PENDING * n and n >= MET_REQUESTS and not how.clump
    verdict: Verdict = "undecided"
    # Without a request in the tail, margins prove nothing: the gates refuse that (too_few_requests)
    seen = target == 1.0 or n * (1.0 - target) >= TAIL_REQUESTS
    if n >= MET_REQUESTS and (lower >= target or (by_margin and seen and share >= target and score > reach)):
        verdict = "met"
    elif upper < target or (by_margin and share < target and score < -reach):
        verdict = "missed"
    if not known:
        score, error = _score_of_share(share, target, effective)
    interval = share_interval(share * effective, effective, 0.95)
    text = (
        f"{good:.0f} of {n} requests ({share:.1%}) within the SLO, target {target:.1%}; "
        f"stopping interval {interval[0]:.1%} to {interval[1]:.1%}"
    )
    reached = good >= target * whole and (target == 1.0 or n * (1.0 - target) >= 1.0 - 1e-9)
    return LookResult(verdict, score, error, share, *interval, effective, text, reached)


def mean_look(values: FloatArray, target: float, how: Strictness) -> LookResult:
    """Judge a mean criterion by the t interval of the sections' means. An infinite value misses it."""
    share, n = float((values <= target).mean()), float(len(values))
    mean, error = sectioned(values, how.sections, None) if np.isfinite(values).all() else (math.inf, 0.0)
    reach = _reach(1.0 - how.alpha, how.sections, error)
    verdict: Verdict = "undecided"
    if n >= MET_REQUESTS and mean + reach <= target and how.pending <= PENDING * n:
        verdict = "met"
    elif mean - reach > target:
        verdict = "missed"
    score, score_error = _score(mean / target, error / target)
    text = f"mean {mean:.4g} ± {error:.2g}, limit {target:.4g}"
    reached = mean <= target and how.pending <= PENDING * n
    return LookResult(verdict, score, score_error, share, 0.0, 1.0, n, text, reached)


def mean_run(flags: npt.NDArray[np.bool_]) -> float:
    """Return the mean length of the runs of True, weighted by their length; 0 without one."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    lengths = np.diff(edges)[::2].astype(np.float64)
    return float((lengths**2).sum() / lengths.sum()) if len(lengths) else 0.0


def _reach(certainty: float, sections: int, error: float) -> float:
    """Return the half-width of the confidence interval of a figure with a standard error by sections."""
    return t_quantile(certainty, sections - 1) * math.sqrt(DEPENDENT) * error


def _score(margin: float, error: float) -> tuple[float, float]:
    """Return the score and its standard error for a margin and its standard error."""
    if not math.isfinite(margin) or margin >= LATE:
        return -1.0, 0.1
    if margin <= 1 / (1 + MAX_SCORE):
        return MAX_SCORE, 0.1 * MAX_SCORE
    return 1 / margin - 1, error / margin**2


def _score_of_share(share: float, target: float, effective: float) -> tuple[float, float]:
    """Return a score by a share alone: allowed over actual misses, logarithmic. Its scale differs from that
    of a margin, but it is 0 at the target and falls with the rate as well."""
    least = 0.5 / max(effective, 1.0)
    allowed, missed = max(1.0 - target, least), max(1.0 - share, least)
    error = math.sqrt(max(1.0 - missed, 0.0) / (missed * max(effective, 1.0)))
    return math.log(allowed / missed) / SHARE_SCALE, error / SHARE_SCALE
