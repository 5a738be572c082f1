"""The verdict of a running trial: met, missed, or undecided at its end.

A trial has a longest duration and ends at the first *look* with a significant result. The intervals between
looks grow geometrically; each gets an equal part of the allowed chance of error, and answers three questions:

1. **Does the queue grow?** Judged by the number of requests that wait for their first token longer than
   without a queue, and by the rate of first tokens while it is never empty (``core.metrics.queue_growth``).
2. **Has the system filled?** The steady part begins when the number in flight first reaches its mean over
   the second half of the time so far (Fishman's crossing rule; rules based on latencies, such as MSER, drop
   bad values first, so short trials look too good). It ends one latency before now, since only the fast ones
   among later requests have ended. The load continues until the decision.
3. **Is each criterion met?** A share by an exact binomial bound on the *effective* sample size, or by the
   confidence interval of its margin (the quantile of each request's value / limit) by sections; a mean by the
   t interval of section means. Pending requests of the steady part count against either verdict.

At the wanted rate the true share *equals* the target, so no trial of affordable length can prove either side.
A trial that *confirms* is therefore also met if its measured share, at its end, reaches the target; its
interval is reported with it. Below the target it stays undecided.

The search gets the figures with the verdict: shares, and the **score**, which is 0 where the criterion is
just met, positive at lower rates, and nearly linear in the rate: 1 / margin − 1.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvbench.core.metrics.queue_growth import (
    WALKS_AT_EACH_LOOK,
    QueueGrowth,
    QueueReadings,
    capacity_of,
    dispersion,
    queue_growth,
)
from kvbench.core.search.data import TrialFigures, requests_s
from kvbench.core.search.live_config import (
    CriterionTarget,
    Decision,
    LiveConfig,
    Observation,
    Verdict,
)
from kvbench.core.search.looks import LookResult, Strictness, mean_look, mean_run, share_look
from kvbench.core.search.posterior.queue_model import queue_rate

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

FIRST_LOOK: Final = 2.0
"""Time of the first look at the criteria, in latencies."""
LOOK_FACTOR: Final = 1.25
"""Time of each further look, as a multiple of the last one's."""
MET_AFTER: Final = 4.0
"""Earliest time of "met", in latencies: a queue needs time to build up."""
GROWTH_FIRST: Final = 60
"""Number of arrivals before the first test for a growing queue."""
GROWTH_FACTOR: Final = 1.08
"""Time of each further test, as a multiple of the last one's."""
MIN_REQUESTS: Final = 12
FAST: Final = 0.1
"""Quantile of TTFT that stands for a request without waiting."""
BUSY: Final = 2.0
BUSY_LEAST: Final = 12.0
"""Longest run of late requests that counts as one busy period: the first number times the square of the
requests that arrive within the TTFT headroom, and at least the second. Delays of a queue near its capacity
last as the square of their length. With these, 5 of 360 trials at the root of six queues missed early, 44 of
360 without."""
FILLS: Final = 8.0
"""Length of a load of sessions after it filled, as a multiple of the time that took."""
SECTIONED_REQUESTS: Final = 160
SECTIONS: Final = (4, 8)
"""Sections of the steady part: with fewer requests than that, and with more."""


@dataclass
class _Series:
    times_s: array[float] = field(default_factory=lambda: array("d"))
    waiting: array[float] = field(default_factory=lambda: array("d"))
    in_flight: array[float] = field(default_factory=lambda: array("d"))
    firsts: array[float] = field(default_factory=lambda: array("d"))


class LiveTrial:
    """One running trial: ``feed`` it observations in any order until it decides."""

    def __init__(self, config: LiveConfig, criteria: Sequence[CriterionTarget]) -> None:
        """Raises ValueError without criteria or arrivals."""
        turns = config.turns
        self._offsets = (
            np.asarray(config.offsets_s, dtype=np.float64)
            if turns is None
            else np.full(turns.requests, np.inf)
        )
        if not criteria or not len(self._offsets):
            raise ValueError("a trial needs at least one criterion and one planned request")
        self.config = config
        self.criteria = tuple(criteria)
        n = len(self._offsets)
        self._due_s: list[float] = self._offsets.tolist()
        self._values = np.full((n, len(criteria)), np.nan)
        self._margins = np.full((n, len(criteria)), np.nan)
        self._settled_s = np.full(n, np.nan)
        self._ttft_s = np.full(n, np.nan)
        self._count = self._hopeless = 0
        self._series = _Series()
        planned = np.asarray(config.offsets_s, dtype=np.float64)
        self._max_s = float(planned[-1]) if config.max_s is None else config.max_s
        self._filled_s = 0.0 if turns is None else turns.filled_s
        self._dispersion = dispersion(planned) if turns is None else turns.dispersion
        first = GROWTH_FIRST / config.rate if turns is not None else planned[min(GROWTH_FIRST, n) - 1]
        self._next_growth_s = self._filled_s + float(first)
        self._sent = 0
        self._next_look_s = FIRST_LOOK * config.latency_s
        self._latency_n = 0
        self._latency = config.latency_s
        self._up_s = self._up(config.latency_s)
        self._decision: Decision | None = None

    def feed(
        self,
        t_s: float,
        observations: Sequence[Observation],
        waiting_first: int,
        sent: int,
        offsets_s: Sequence[float] = (),
    ) -> Decision | None:
        """Record observations up to ``t_s`` (seconds since the trial's start); return the decision if any.

        ``waiting_first``: requests sent or due without a first token; ``sent``: requests sent so far. A
        request may be reported again with more data (first as a miss, then with its margin). ``offsets_s``:
        for sessions, due times of the requests sent since the last call, in order. Further calls return the
        same decision. Raises ValueError for an index that was not planned.
        """
        self._offsets[self._sent : self._sent + len(offsets_s)] = offsets_s
        for due_s in offsets_s:  # ascending, for the binary search in _give_up
            self._due_s[self._sent] = max(due_s, self._due_s[self._sent - 1] if self._sent else due_s)
            self._sent += 1
        for observation in observations:
            index = observation[0]
            if not 0 <= index < len(self._offsets):
                raise ValueError(f"no request {index} was planned")
            self._settle(index, t_s)
            self._values[index] = observation[1]
            if len(observation) > 2:
                self._margins[index] = observation[2]
            if len(observation) > 3 and observation[3] is not None:
                self._ttft_s[index] = observation[3]
        series = self._series
        series.times_s.append(t_s)
        series.waiting.append(float(waiting_first))
        series.in_flight.append(float(sent - self._count))
        series.firsts.append(float(sent - waiting_first))
        if self._decision is None:
            self._give_up(t_s)
            self._decision = self._look(t_s)
        return self._decision

    def _settle(self, index: int, t_s: float) -> None:
        if math.isnan(self._settled_s[index]):
            self._settled_s[index] = t_s
            self._count += 1

    def _give_up(self, t_s: float) -> None:
        """Count requests in flight that can no longer keep their limits as misses."""
        due = bisect_left(self._due_s, t_s - self.config.hopeless_s, self._hopeless)
        for index in range(self._hopeless, due):
            if math.isnan(self._settled_s[index]):
                self._settle(index, t_s)
                self._values[index] = [0.0 if goal.kind == "share" else math.inf for goal in self.criteria]
                self._margins[index] = math.inf
        self._hopeless = due

    # -- looks ------------------------------------------------------------------------------------

    def _look(self, t_s: float) -> Decision | None:
        latency_s = self._latency_s()
        last = t_s >= self._up_s or self._count == len(self._offsets)
        if t_s < self._filled_s and not last:
            return None
        if t_s >= self._next_growth_s or last:
            self._next_growth_s = t_s * GROWTH_FACTOR
            growth = queue_growth(self._readings(t_s), walks=WALKS_AT_EACH_LOOK)
            if growth is not None:
                window = self._window(t_s)
                found = window, self._judge(window, t_s, last)
                return self._decide("missed", _growth_text(growth, self.config.rate), t_s, found, grows=True)
        if not last and (t_s < self._next_look_s or t_s < FIRST_LOOK * latency_s or not self._count):
            return None
        self._next_look_s = t_s * LOOK_FACTOR
        window = self._window(t_s)
        looks = self._judge(window, t_s, last)
        found = window, looks
        early = t_s < MET_AFTER * latency_s
        missed = next((look for look in looks if look.verdict == "missed"), None)
        if missed is not None and (last or not (self.config.full_length and early)):
            return self._decide("missed", missed.text, t_s, found)
        met = bool(looks) and all(look.verdict == "met" for look in looks)
        if met and (last or not (self.config.full_length or early)):
            return self._decide("met", "; ".join(look.text for look in looks), t_s, found)
        if last and self.config.confirms and looks and all(look.reached for look in looks):
            why = "; ".join(look.text for look in looks)
            return self._decide("met", f"target reached in a confirming trial: {why}", t_s, found)
        if last:
            why = "; ".join(look.text for look in looks) or "too few requests ended"
            return self._decide("undecided", f"inconclusive after {t_s:.1f} s: {why}", t_s, found)
        return None

    def _up(self, latency_s: float) -> float:
        """Return the end of the trial by its own latency, within the planned length."""
        wanted = max(self.config.latencies * latency_s, FIRST_LOOK * self.config.latency_s)
        usual = max(wanted, self.config.least_s or requests_s(self.config.rate))
        return min(self._max_s, self._filled_s + max(usual, FILLS * self._filled_s))

    def _alpha(self) -> float:
        """Return the chance of error of one look, for either side."""
        first = max(FIRST_LOOK * max(self._latency_s(), 1e-9), self._filled_s)
        looks = 1 + max(0.0, math.ceil(math.log(max(self._max_s / first, 1.0)) / math.log(LOOK_FACTOR)))
        return (1.0 - self.config.confidence) / looks

    def _latency_s(self) -> float:
        """Return the median end-to-end latency; the expected one before any request ended."""
        if self._count >= max(5.0, 1.02 * self._latency_n):
            known = self._settled_s - self._offsets
            self._latency_n, self._latency = self._count, float(np.median(known[~np.isnan(known)]))
            self._up_s = self._up(self._latency)
        return self._latency

    def _readings(self, t_s: float) -> QueueReadings:
        series, config = self._series, self.config
        readings = QueueReadings(
            rate=config.rate,
            idle_latency_s=config.latency_s,
            latency_s=self._latency_s(),
            ttft_limit_s=config.ttft_limit_s,
            dispersion=self._dispersion,
            offsets_s=self._offsets,
            settled_s=self._settled_s,
            ttft_s=self._ttft_s,
            times_s=np.array(series.times_s),
            waiting=np.array(series.waiting),
            firsts=np.array(series.firsts),
            unbroken=t_s < MET_AFTER * config.latency_s and not self._any_broken(),
        )
        return readings.since(self._filled_s) if self._filled_s else readings

    def _any_broken(self) -> bool:
        return any(
            bool((column < 1.0).any() if criterion.kind == "share" else (column > criterion.target).any())
            for criterion, column in zip(self.criteria, self._values.T, strict=True)
        )

    # -- criteria ---------------------------------------------------------------------------------

    def _window(self, t_s: float) -> tuple[float, float]:
        """Return begin and end of the steady part so far."""
        times, in_flight = np.array(self._series.times_s), np.array(self._series.in_flight)
        if self.config.turns is not None:
            filled_s, late = self._filled_s, in_flight[:0]
        else:
            filled_s, late = 0.0, in_flight[times >= t_s / 2]
        # Counts are whole: with 0.4 requests in flight on average, an empty system counts as filled.
        if len(late):
            filled_s = float(times[np.argmax(in_flight >= math.floor(late.mean()))])
        start_s = filled_s if self.config.turns is not None else min(filled_s, t_s / 2)
        known = self._settled_s - self._offsets
        known = known[~np.isnan(known)]
        lag_s = 1.1 * float(np.quantile(known, 0.95)) if len(known) else 0.0
        return start_s, max(start_s, t_s - lag_s)

    def _judge(self, window: tuple[float, float], t_s: float, last: bool) -> list[LookResult]:
        """Judge each criterion; return nothing while there are too few requests."""
        inside = (self._offsets >= window[0]) & (self._offsets <= window[1])
        known = inside & ~np.isnan(self._settled_s)
        n = int(known.sum())
        if n < MIN_REQUESTS:
            return []
        early = self.config.full_length and not last
        how = Strictness(SECTIONS[n >= SECTIONED_REQUESTS], self._alpha(), 0.0, int(inside.sum()) - n)
        looks = []
        for column, criterion in enumerate(self.criteria):
            counted = known & self._counts(column)
            if counted.sum() < MIN_REQUESTS:
                return []
            pending = math.ceil(how.pending * float(counted.sum()) / n)
            clump = self._clump(counted, column) if early else 0.0
            strictness, values = replace(how, pending=pending, clump=clump), self._values[counted, column]
            looks.append(
                mean_look(values, criterion.target, strictness)
                if criterion.kind == "mean"
                else share_look(values, self._margins[counted, column], criterion.target, strictness)
            )
        return looks

    def _clump(self, counted: BoolArray, column: int) -> float:
        """Return how many requests count as one before a full-length trial may end early: those of half a
        latency, and successive ones that waited too long, as many as one busy period can delay."""
        limit_s, latency_s = self.criteria[column].wait_limit_s, self._latency_s()
        clump = max(1.0, self.config.rate * latency_s / 2)
        if not limit_s:
            return clump
        waited = np.nan_to_num(self._waited(column), nan=math.inf)
        # The fastest request of the trial, which began without a queue, stands for one without waiting.
        headroom_s = max(limit_s - float(waited.min()), 0.0)
        longest = max(BUSY_LEAST, BUSY * (self.config.rate * headroom_s) ** 2)
        return max(clump, min(mean_run(waited[counted] > limit_s), longest))

    def _waited(self, column: int) -> FloatArray:
        """Return each request's TTFT, or its latency if that is limited, in seconds; nan if not known."""
        criterion = self.criteria[column]
        return self._margins[:, column] * criterion.wait_limit_s if criterion.whole else self._ttft_s

    def _counts(self, column: int) -> BoolArray:
        """Return which requests a criterion applies to: those with a value, and those in flight. In sessions
        it may apply to some only, so that those in flight are left out."""
        counts: BoolArray = ~np.isnan(self._values[:, column])
        return counts if self.config.turns is not None else counts | np.isnan(self._settled_s)

    def _decide(
        self,
        verdict: Verdict,
        reason: str,
        t_s: float,
        found: tuple[tuple[float, float], list[LookResult]],
        grows: bool = False,
    ) -> Decision:
        (start, end), looks = found
        measured = TrialFigures(duration_s=t_s, grows=grows)
        if (capacity := capacity_of(self._readings(t_s))) is not None:
            per_s, error, n = capacity
            measured = replace(measured, capacity=per_s, capacity_error=error, capacity_n=n)
        if looks:
            worst = min(range(len(looks)), key=lambda index: looks[index].score)
            inside = (self._offsets >= start) & (self._offsets <= end)
            figures = [self._figures(index, look, inside, (start, end)) for index, look in enumerate(looks)]
            n = int(inside.sum())
            measured = replace(
                measured,
                n=n,
                offered_rate=n / (end - start) if end > start else None,
                **figures[worst],
                criteria=tuple(figures) if len(figures) > 1 else (),
            )
        return Decision(verdict, reason, t_s, (start, end), measured)

    def _figures(
        self, index: int, look: LookResult, inside: BoolArray, window_s: tuple[float, float]
    ) -> dict[str, Any]:
        """Return one criterion's figures by the names of ``TrialFigures``."""
        criterion = self.criteria[index]
        inside = inside & self._counts(index)
        limit_s, share = criterion.wait_limit_s, criterion.target if criterion.kind == "share" else None
        # Pending and failed requests count as the longest waits.
        waited = np.sort(np.nan_to_num(self._waited(index)[inside], nan=math.inf))
        known = bool(limit_s and len(waited))
        kept = 0.5 if share is None else share
        usual_s, fast_s = (
            float(waited[min(int(at * len(waited)), len(waited) - 1)]) if known else math.inf
            for at in (kept, FAST)
        )
        headroom_s = limit_s - fast_s if math.isfinite(fast_s) else 0.0
        equivalent_rate = None
        if self.config.turns is None:
            headroom_s = max(headroom_s, 0.02 * limit_s)
            equivalent_rate = queue_rate(self._offsets, self.config.rate, window_s, headroom_s, share)
        return {
            "queue_rate": equivalent_rate,
            "attainment": look.share,
            "attainment_lower": look.lower,
            "attainment_upper": look.upper,
            "effective_n": look.effective_n,
            "target": share,
            "score": look.score,
            "score_error": look.error,
            "ttft_limit_s": limit_s or None,
            "ttft_s": usual_s if math.isfinite(usual_s) else None,
            "ttft_fast_s": fast_s if math.isfinite(fast_s) else None,
        }


def _growth_text(growth: QueueGrowth, rate: float) -> str:
    if growth.capacity is None:
        return f"the queue grows at {rate:.4g} req/s offered"
    return f"{growth.capacity:.4g} first tokens/s while the queue was never empty, {rate:.4g} req/s offered"
