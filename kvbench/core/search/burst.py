"""The burst method, often used by hand; reported next to the sustained rate for comparison.

A trial offers n = 5 × rate requests within five seconds and compares the *means* of TTFT and TPOT with the
limits. The rate is doubled or halved until one trial is within the limits and one is not, then bisected. If
requests take longer than five seconds, none ends before the last one arrives: the result is then the size of
one batch that fits, not a rate that can be sustained.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.records import VerdictKind
from kvbench.core.search.data import BURST_S

RETRIES: Final = 1
_DIGITS: Final = 4


def burst_requests(rate: float) -> int:
    return max(1, round(BURST_S * rate))


def burst_offsets(rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Return planned sends, stretched so that the last is at n / rate, as ``vllm bench serve`` does."""
    n = burst_requests(rate)
    offsets = planned_offsets(rate, n, burstiness, seed)
    stretched: NDArray[np.float64] = offsets * (n / rate / offsets[-1])
    return stretched


@dataclass(frozen=True)
class BurstAnswer:
    """The highest rate whose burst was within the limits; never a sustained rate. ``status``: "converged",
    "censored" (within the limits at the highest rate allowed), "slo_unattainable" (beyond them at the
    lowest), "exhausted" (stopped by max_trials), "undecided" (invalid trials)."""

    max_request_rate: float | None
    lower: float | None
    upper: float | None
    censored: Literal["", "above", "below"]
    status: str
    confirmed: bool
    trials: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class BurstSearch:
    """Doubling, then bisection at the arithmetic middle. Trials are not repeated, as by hand."""

    def __init__(
        self, start_rate: float, min_rate: float, max_rate: float, precision: float, max_trials: int
    ) -> None:
        """Rates in requests per second; ``precision``: relative width of the bracket. Raises ValueError."""
        if not 0 < min_rate <= start_rate <= max_rate < math.inf:
            raise ValueError(f"rates must satisfy 0 < {min_rate} ≤ {start_rate} ≤ {max_rate}")
        self._start, self._min, self._max = start_rate, min_rate, max_rate
        self._precision, self._max_trials = precision, max_trials
        self._lower: float | None = None
        self._upper: float | None = None
        self._trials = self._refused = 0

    def ask(self) -> float | None:
        """Return the next rate, or None when the search is over."""
        if self._trials >= self._max_trials or self._refused > RETRIES:
            return None
        if self._lower is None and self._upper is None:
            return _round(self._start)
        if self._upper is None:
            assert self._lower is not None
            return None if self._lower >= self._max else min(_round(2 * self._lower), self._max)
        if self._lower is None:
            return None if self._upper <= self._min else max(_round(self._upper / 2), self._min)
        middle = _round((self._lower + self._upper) / 2)
        return middle if not self._close and self._lower < middle < self._upper else None

    def tell(self, rate: float, verdict: VerdictKind) -> None:
        """Record the outcome of the last requested rate."""
        self._trials += 1
        self._refused = self._refused + 1 if verdict not in ("met", "missed") else 0
        if verdict == "met":
            self._lower = rate
        elif verdict == "missed":
            self._upper = rate

    @property
    def _close(self) -> bool:
        return bool(
            self._lower and self._upper and self._upper <= self._lower * (1 + self._precision) * (1 + 1e-9)
        )

    def answer(self) -> BurstAnswer:
        lower, upper = self._lower, self._upper
        censored: Literal["", "above", "below"] = ""
        if upper is None and lower is not None:
            censored = "above"
        elif lower is None and upper is not None:
            censored = "below"
        status, reason = self._status()
        return BurstAnswer(lower, lower, upper, censored, status, False, self._trials, reason)

    def _status(self) -> tuple[str, str]:
        lower, upper = self._lower, self._upper
        if self._refused > RETRIES:
            return "undecided", "trials were invalid"
        if lower is not None and upper is not None and (self._close or self.ask() is None):
            if self._trials < self._max_trials or self._close:
                return "converged", f"means within the limits at {lower:g}, not at {upper:g}"
        elif lower is not None and lower >= self._max:
            return "censored", f"means within the limits at {lower:g}, the highest rate allowed"
        elif upper is not None and upper <= self._min:
            return "slo_unattainable", f"means beyond the limits at {upper:g} already"
        if self._trials >= self._max_trials:
            return "exhausted", f"stopped after max_trials = {self._max_trials}; the precision is not reached"
        return "undecided", "the search was not finished"


def _round(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
