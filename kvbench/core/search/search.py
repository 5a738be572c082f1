"""Search of the highest request rate that meets an SLO: ``ask`` returns a rate, ``tell`` takes its outcome.

Two rules share this interface: ``kvbench.core.search.by_verdicts`` until a trial has reported figures, then
``kvbench.core.search.by_measurements``. A cold start may begin with a *ceiling*: a saturating burst; its
completions per second are the capacity.

An invalid trial is no verdict. It is repeated, and after ``max_retries`` repetitions its rate is *unusable*:
the search stays below it, and the answer is "undecided" unless a real miss bounds it. An undecided trial
without figures is repeated once.

The next trial depends only on the outcomes so far, in order: feeding a new search the trials of an
interrupted one resumes it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, Literal

from kvbench.core.records import VerdictKind
from kvbench.core.search import by_measurements, by_verdicts
from kvbench.core.search.data import (
    Hint,
    Probe,
    Purpose,
    SearchAnswer,
    SearchLimits,
    TrialFigures,
    TrialOutcome,
    requests_s,
)
from kvbench.core.search.posterior.posterior import RateEstimate
from kvbench.core.search.posterior.rate_points import SATURATED
from kvbench.core.search.trial_history import SHORTEST_S, TrialHistory
from kvbench.core.search.trial_requests import Objective, TrialRequests

__all__ = ["Hint", "Probe", "RateSearch", "SearchAnswer", "SearchLimits", "TrialFigures", "TrialOutcome"]

CEILING_FACTOR: Final = 80.0
"""Rate of the ceiling probe, as a multiple of the start rate: 4 requests in flight become 320."""
CEILING_MOST: Final = 1000.0
"""Largest rate of the ceiling probe: beyond it, client and router are the bottleneck."""
CEILING_SHARE: Final = 0.9
"""Rate of the first trial after it, as a share of its completion rate."""
HALF_FROM_S: Final = 20.0
"""Trial length in seconds from which a trial takes at most half of a budget: one alone confirms nothing."""
JUDGED: Final = 1.3
"""Minimum number of misses that the SLO allows in a trial: with fewer than one, gates refuse the trial."""
FORESEEN_AFTER: Final = 3 / 8
"""Share of its trials after which a search forecasts whether it converges; earlier forecasts fail, since the
system's variation is unknown."""
FORESEEN: Final = 2.0
"""Largest half-width of the interval then, as a multiple of the precision, with which convergence is likely:
of 118 searches of random systems 17 of 20 below it converged, and 20 of 98 above it."""


def foreseen_after(max_trials: int) -> int:
    """Return the number of trials after which a search forecasts whether it converges."""
    return math.ceil(FORESEEN_AFTER * max_trials)


class RateSearch:
    """One search. ``ask`` until it returns None; ``tell`` each outcome; ``answer`` at any moment."""

    def __init__(
        self,
        limits: SearchLimits,
        hint: Hint | None = None,
        *,
        ceiling: bool = False,
        objective: Objective | None = None,
    ) -> None:
        """``ceiling``: a start without a trusted hint begins with a saturating burst (its outcome needs a
        ``completion_rate``). ``objective``: the SLO of requests, if they can be replayed. Raises ValueError
        for a hint that is not a positive number."""
        if hint is not None and not 0 < hint.rate < math.inf:
            raise ValueError(f"a hint must be a positive rate, not {hint.rate}")
        self._trusted = hint is not None and hint.trusted
        self._history = TrialHistory(limits, objective=objective)
        self._start = self._history.inside(limits.start_rate if hint is None else hint.rate)
        self._ceiling = ceiling and not self._trusted
        self._pending: Probe | None = None
        self._foreseen: bool | None = None

    @property
    def limits(self) -> SearchLimits:
        return self._history.limits

    @property
    def history(self) -> tuple[TrialOutcome, ...]:
        return self._history.outcomes

    def ask(self) -> Probe | None:
        """Return the next trial, the same one until ``tell`` is called, or None to end the search."""
        if self._pending is None and (found := self._next()) is not None:
            self._pending = replace(found, least_s=self._least_s(found))
        return self._pending

    def _least_s(self, probe: Probe) -> float:
        """Return the minimum length in seconds: enough to judge the SLO, if the time left allows it."""
        left_s, usual_s = self.limits.seconds_left, requests_s(probe.rate)
        allowed = 1.0 - self.limits.attainment
        judged_s = JUDGED / allowed / probe.rate if allowed > 0 else 0.0
        least_s = max(probe.least_s, judged_s if judged_s > usual_s else 0.0)
        if left_s == math.inf:
            return least_s
        return min(least_s or usual_s, max(left_s / 2, min(left_s, HALF_FROM_S), SHORTEST_S))

    def allow(self, seconds_left: float, precision: float | None = None) -> None:
        """Set the seconds of trials left, which also end a search, and the precision to reach."""
        limits = replace(self.limits, seconds_left=seconds_left, precision=precision or self.limits.precision)
        if limits.precision != self.limits.precision:
            self._pending = None
        if limits != self.limits:
            self._history = replace(self._history, limits=limits)

    def tell(
        self,
        rate: float,
        verdict: VerdictKind,
        measured: TrialFigures | None = None,
        requests: TrialRequests | None = None,
    ) -> None:
        """Record an outcome, also of a rate that was not requested (for example of a resumed run). A ceiling
        probe's verdict is ignored. Raises ValueError for a rate outside the limits or an unknown verdict."""
        if not self.limits.min_rate * (1 - 1e-9) <= rate <= self.limits.max_rate * (1 + 1e-9):
            raise ValueError(f"a rate must be within the limits, not {rate}")
        if verdict not in ("met", "missed", "undecided", "invalid"):
            raise ValueError(f"unknown verdict: {verdict!r}")
        probe = self.ask()
        purpose: Purpose | Literal[""] = ""
        for known in [probe.rate if probe is not None else rate, *(trial.rate for trial in self.history)]:
            if math.isclose(rate, known, rel_tol=1e-9):
                rate = known
                break
        full_length = True
        if probe is not None and rate == probe.rate:
            purpose, full_length = probe.purpose, probe.full_length
        outcome = TrialOutcome(rate, verdict, purpose, measured, full_length, requests)
        self._history = replace(self._history, outcomes=(*self.history, outcome))
        self._pending = None
        if len(self.history) == foreseen_after(self.limits.max_trials):
            found = self.estimate()
            self._foreseen = found is not None and found.width <= FORESEEN * self.limits.precision

    def estimate(self) -> RateEstimate | None:
        """Return the posterior of the wanted rate, or None before any figures."""
        return self._history.estimate

    @property
    def foreseen(self) -> bool | None:
        """Whether max_trials probably suffice for the precision; None before the forecast."""
        return self._foreseen

    def answer(self) -> SearchAnswer:
        found = self._answer()
        sooner = True if found.status == "converged" else None
        suffices = sooner if self._foreseen is None else self._foreseen
        replay = self._history.replay if self.ask() is None else None
        decides = self._history.trusted_replay is not None
        shown = None if replay is None else {**replay.to_json(), "decides": decides}
        return replace(found, time_suffices=suffices, replay=shown)

    def _answer(self) -> SearchAnswer:
        history, finished = self._history, self.ask() is None
        answer = by_verdicts.answer(history, finished=finished)
        if history.estimate is None or answer.status in ("censored", "slo_unattainable"):
            return answer
        return by_measurements.answer(history, history.estimate, finished=finished)

    def _next(self) -> Probe | None:
        history = self._history
        if history.trials_left <= 0:
            return None
        if not history.outcomes:
            if self._ceiling:
                most = max(CEILING_MOST, self._start)
                return Probe(history.inside(min(self._start * CEILING_FACTOR, most)), "ceiling")
            return Probe(self._start, "start", full_length=self._trusted)
        last = history.outcomes[-1]
        if last.purpose == "ceiling":
            return self._after_ceiling(last)
        again = last.verdict == "invalid" or (last.verdict == "undecided" and last.measured is None)
        if again and history.usable(history.bracket.tallies[last.rate]):
            return Probe(last.rate, "retry")
        if history.estimate is not None and history.tried:
            return by_measurements.next_probe(history, history.estimate)
        return by_verdicts.next_probe(history, trusted=self._trusted)

    def _after_ceiling(self, last: TrialOutcome) -> Probe:
        completed = (last.measured.completion_rate or 0.0) if last.measured is not None else 0.0
        if not completed or last.verdict == "invalid":
            return Probe(self._start, "start")
        if completed > SATURATED * last.rate and last.rate >= self.limits.max_rate:
            return Probe(last.rate, "start")
        # A replay can use a short trial; the other posterior needs queues that had time to build up.
        return Probe(
            self._history.inside(completed * CEILING_SHARE),
            "start",
            full_length=self._history.objective is None,
        )
