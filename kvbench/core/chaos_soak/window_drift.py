"""Drift over hours: a straight line through a soak's windows, with an interval.

Each session has its own level, all share one slope. The first part is excluded as warm-up. The interval is
widened by the residuals' autocorrelation, because neighbouring windows are correlated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np

from kvbench.core.stats import autocorrelation_time, beta_quantile

WARM_UP: Final = 0.25
"""Share of the windows excluded at the beginning, plus the first window of each later session."""
CONFIDENCE: Final = 0.99
"""Confidence of the interval: with 95 %, a soak of a dozen series would often drift falsely."""
LEAST_WINDOWS: Final = 6
MATTERS: Final = 0.05
"""Smallest relative change over the soak that counts as drift."""

DriftVerdict = Literal["steady", "grows", "falls", "too short"]


@dataclass(frozen=True)
class SoakWindow:
    """Start in seconds of the soak's load, session, and value (None if unknown)."""

    at_s: float
    session: int
    value: float | None


@dataclass(frozen=True)
class Drift:
    """``per_hour`` in the values' unit, with its interval; ``growth``: change over the soak as a share of the
    median. None with too few windows."""

    verdict: DriftVerdict
    windows: int
    median: float | None = None
    first: float | None = None
    last: float | None = None
    per_hour: float | None = None
    lower: float | None = None
    upper: float | None = None
    growth: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drift(windows: Sequence[SoakWindow], least: float = 0.0) -> Drift:
    """Return the drift of one series. ``least``: smallest change that matters, in its unit."""
    kept = settled(windows)
    known = [(span.at_s / 3600, float(span.value), span.session) for span in kept if span.value is not None]
    if len(known) < LEAST_WINDOWS:
        return Drift("too short", len(known))
    hours = np.array([point[0] for point in known])
    values = np.array([point[1] for point in known])
    sessions = [point[2] for point in known]
    middle = float(np.median(values))
    ends = {"median": middle, "first": float(values[0]), "last": float(values[-1])}
    x, y = _center(hours, sessions), _center(values, sessions)
    freedom = len(known) - len(set(sessions)) - 1
    spread = float(x @ x)
    if freedom < 1 or spread <= 0:
        return Drift("too short", len(known), **ends)
    slope = float(x @ y) / spread
    residual = y - slope * x
    error = math.sqrt(float(residual @ residual) / freedom / spread) * math.sqrt(
        autocorrelation_time(residual)
    )
    half = student_t(CONFIDENCE, freedom) * error
    change = slope * (float(hours.max()) - float(hours.min()))
    growth = change / abs(middle) if middle else (math.copysign(math.inf, change) if change else 0.0)
    significant = slope - half > 0 or slope + half < 0
    matters = abs(growth) > MATTERS and abs(change) > least
    verdict: DriftVerdict = ("grows" if slope > 0 else "falls") if significant and matters else "steady"
    return Drift(
        verdict, len(known), **ends, per_hour=slope, lower=slope - half, upper=slope + half,
        growth=growth if math.isfinite(growth) else None,
    )  # fmt: skip


def settled(windows: Sequence[SoakWindow]) -> list[SoakWindow]:
    """Return the windows without warm-up."""
    ordered = sorted(windows, key=lambda window: window.at_s)
    first = ordered[0].session if ordered else 0
    begun: set[int] = {first}
    kept = []
    for index, window in enumerate(ordered):
        new = window.session not in begun
        begun.add(window.session)
        if not new and index >= math.ceil(WARM_UP * len(ordered)):
            kept.append(window)
    return kept


def _center(values: np.ndarray[Any, np.dtype[np.float64]], sessions: Sequence[int]) -> Any:
    means: Mapping[int, float] = {
        session: float(np.mean([v for v, owner in zip(values, sessions, strict=True) if owner == session]))
        for session in set(sessions)
    }
    return np.array([value - means[session] for value, session in zip(values, sessions, strict=True)])


def student_t(confidence: float, freedom: int) -> float:
    """Return the half-width of a two-sided t interval, in standard errors."""
    x = beta_quantile(freedom / 2, 0.5, 1 - confidence)
    return math.sqrt(freedom * (1 / x - 1))
