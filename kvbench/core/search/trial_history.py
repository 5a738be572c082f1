"""The trials of a search so far, and the values that both rules derive from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal

from kvbench.core.search.data import Probe, SearchLimits, TrialOutcome
from kvbench.core.search.posterior.posterior import RateEstimate, fit
from kvbench.core.search.posterior.rate_points import RatePoint, Waiting, point_of, waiting_of
from kvbench.core.search.replay.replay import ReplayResult, never_better, replayed
from kvbench.core.search.trial_requests import Objective

UP_COLD: Final = (2.0,)
DOWN_COLD: Final = (2.0, 4.0)
UP_TRUSTED: Final = (1.15, 1.3, 2.0)
DOWN_TRUSTED: Final = (1.15, 1.3, 2.0, 4.0)
"""Factors of the first, second, ... step away from the start; the last one repeats."""
UNSURE_TRIALS: Final = 2
"""Number of undecided trials without figures after which a rate is not tried again."""
BELOW_LOWEST: Final = 10.0
"""The posterior begins this factor below min_rate, since the wanted rate may be lower."""
VAGUE: Final = 0.25
"""Largest relative standard error of a replayed rate: beyond it, the other posterior is as precise."""
EARLY_S: Final = 120.0
"""Seconds of trials that a replay leaves out if only they contradict it, as a warm-up does."""
SHORTEST_S: Final = 5.0
"""Seconds of a budget below which no further trial starts."""
_DIGITS: Final = 4
"""Significant digits of rates, so that the printed rate is the offered one."""


@dataclass
class RateTally:
    """All outcomes of one rate. ``unsure``: undecided trials without figures."""

    mets: int = 0
    misses: int = 0
    last: Literal["met", "missed", ""] = ""
    refused_in_a_row: int = 0
    unsure: int = 0


@dataclass(frozen=True)
class Bracket:
    """Highest met rate below the lowest missed one. ``unusable``: the lowest unusable rate between them."""

    lower: float | None
    upper: float | None
    unusable: float | None
    tallies: dict[float, RateTally] = field(default_factory=dict)

    @property
    def top(self) -> float | None:
        """The rate to stay below."""
        return self.unusable if self.unusable is not None else self.upper


@dataclass(frozen=True)
class TrialHistory:
    """The outcomes of one search in order, and the limits that it keeps to."""

    limits: SearchLimits
    outcomes: tuple[TrialOutcome, ...] = ()
    objective: Objective | None = None
    """The SLO of each request; None if trials cannot be replayed."""

    @property
    def trials_left(self) -> int:
        """Number of further trials; 0 once the time is used, but a first one always runs."""
        used = bool(self.tried) and self.limits.seconds_left < SHORTEST_S
        return 0 if used else self.limits.max_trials - len(self.outcomes)

    @property
    def end_text(self) -> str:
        """Limit that ended the search."""
        by_trials = len(self.outcomes) >= self.limits.max_trials
        return f"max_trials = {self.limits.max_trials}" if by_trials else "the cell's part of search.budget_s"

    @cached_property
    def tried(self) -> list[TrialOutcome]:
        """Outcomes without ceilings and invalid trials."""
        return [
            outcome
            for outcome in self.outcomes
            if outcome.purpose != "ceiling" and outcome.verdict != "invalid"
        ]

    @cached_property
    def binding(self) -> tuple[TrialOutcome, ...]:
        """All outcomes by the criterion that most often had the lowest score in missed trials."""
        known = [
            outcome for outcome in self.outcomes if outcome.measured is not None and outcome.measured.criteria
        ]
        if not known:
            return self.outcomes
        scores = [[row["score"] or 0.0 for row in run.measured.criteria] for run in known if run.measured]
        broken = [score for score in scores if min(score) < 0] or scores
        index = Counter(score.index(min(score)) for score in broken).most_common(1)[0][0]
        return tuple(
            replace(outcome, measured=outcome.measured.of_criterion(index)) if outcome.measured else outcome
            for outcome in self.outcomes
        )

    @cached_property
    def points(self) -> list[RatePoint]:
        """Evidence of each trial, without capacities that a full-length trial exceeded: some systems complete
        fewer requests when they are overloaded."""
        found = [point_of(outcome, self.limits.attainment) for outcome in self.binding]
        met = max(
            (trial.rate for trial in self.tried if trial.verdict == "met" and trial.full_length), default=0.0
        )
        return [replace(point, capacity=point.capacity_above(met)) for point in found if point is not None]

    @cached_property
    def waiting(self) -> Waiting:
        return waiting_of(self.binding)

    @cached_property
    def estimate(self) -> RateEstimate | None:
        """Posterior of the rate, by the replay where it is trusted; None before anything was measured."""
        return self.by_verdicts if self.trusted_replay is None else self.trusted_replay.estimate

    @cached_property
    def by_verdicts(self) -> RateEstimate | None:
        """Posterior of the rate by the figures of whole trials."""
        if not self.points or all(outcome.measured is None for outcome in self.outcomes):
            return None
        return self._fitted(self.points)

    @cached_property
    def replay(self) -> ReplayResult | None:
        """Replay of the requests of all trials; None without them, or if no model explains them. If they
        contradict every model, those of the first two minutes are left out unless they were better than later
        ones indicate: the system may have warmed up."""
        known = tuple(trial.requests for trial in self.tried if trial.requests is not None)
        if self.objective is None or not known or len(known) < len(self.tried):
            return None
        found = replayed(known, self.objective)
        began_s = accumulate((requests.end_s for requests in known[:-1]), initial=0.0)
        early = sum(time_s < EARLY_S for time_s in began_s)
        if found is None or not found.objections or early == len(known):
            return found
        later = replayed(known[early:], self.objective)
        if later is None or later.objections or not never_better(later, known[:early], self.objective):
            return found
        return replace(later, left_out=early)

    @cached_property
    def trusted_replay(self) -> ReplayResult | None:
        """The replay; None if it is imprecise, a trial contradicts it, or all met rates are above it."""
        replay = self.replay
        if replay is None or replay.objections or replay.error > VAGUE:
            return None
        met = [trial.rate for trial in self.tried if trial.verdict == "met"]
        return None if met and min(met) > replay.estimate.upper else replay

    @cached_property
    def estimate_at_first(self) -> RateEstimate | None:
        """Posterior at the beginning of the search: the trials in reverse order."""
        if self.estimate is None or self.trusted_replay is not None:
            return self.estimate
        return self._fitted(self.points[::-1])

    def _fitted(self, points: Sequence[RatePoint]) -> RateEstimate:
        return fit(points, self.limits.min_rate / BELOW_LOWEST, self.limits.max_rate * 1.05, self.waiting)

    @cached_property
    def bracket(self) -> Bracket:
        """Bracket by verdicts alone. A rate's newest verdict counts."""
        tallies: dict[float, RateTally] = {}
        for outcome in self.outcomes:
            if outcome.purpose == "ceiling":
                continue
            tally = tallies.setdefault(outcome.rate, RateTally())
            if outcome.verdict == "invalid":
                tally.refused_in_a_row += 1
                continue
            tally.refused_in_a_row = 0
            if outcome.verdict == "met":
                tally.last, tally.mets = "met", tally.mets + 1
            elif outcome.verdict == "missed":
                tally.last, tally.misses = "missed", tally.misses + 1
            elif outcome.measured is None:
                tally.unsure += 1
        upper = min((rate for rate, tally in tallies.items() if tally.last == "missed"), default=None)
        below = math.inf if upper is None else upper
        lower = max(
            (rate for rate, tally in tallies.items() if tally.last == "met" and rate < below), default=None
        )
        above = 0.0 if lower is None else lower
        unusable = [rate for rate, row in tallies.items() if not self.usable(row) and above < rate < below]
        return Bracket(lower, upper, min(unusable, default=None), tallies)

    def usable(self, tally: RateTally) -> bool:
        """Return whether the rate may be tried again."""
        unsure = tally.unsure >= UNSURE_TRIALS and tally.last == ""
        return tally.refused_in_a_row <= self.limits.max_retries and not unsure

    def unconfirmed(self, rate: float) -> bool:
        """Return whether a met rate was met only once and can be tried again."""
        tally = self.bracket.tallies[rate]
        return tally.mets < 2 and self.usable(tally)

    def confirm_highest(self, rate: float) -> Probe | None:
        """Return the further trial that a met max_rate needs, or None."""
        return Probe(rate, "confirm") if self.unconfirmed(rate) else None

    def confirm_lowest(self) -> Probe | None:
        """Return the further trial that a missed min_rate needs, or None."""
        lowest = min(self.bracket.tallies)
        tally = self.bracket.tallies[lowest]
        once = tally.last == "missed" and tally.misses < 2
        return Probe(lowest, "confirm") if once and self.usable(tally) else None

    def confirming(self, rate: float) -> TrialOutcome | None:
        """Return the nearest, then newest met trial at the rate or up to the precision above it."""
        top = rate * (1 + self.limits.precision) * (1 + 1e-9)
        met = [trial for trial in reversed(self.tried) if reached_target(trial) and rate <= trial.rate <= top]
        return min(met, key=lambda trial: trial.rate, default=None)

    def supporting(self, rate: float) -> TrialOutcome | None:
        """Return the highest, then newest met trial at or below the rate."""
        top = rate * (1 + 1e-9)
        met = [trial for trial in reversed(self.tried) if trial.verdict == "met" and trial.rate <= top]
        return max(met, key=lambda trial: trial.rate, default=None)

    def figures(self, rate: float | None) -> dict[str, Any]:
        """Return the curve, and the attainment of the trial that supports the rate."""
        figures: dict[str, Any] = {"curve": tuple(trial.to_json() for trial in self.outcomes)}
        outcome = None if rate is None else self.supporting(rate)
        if outcome is not None and outcome.measured is not None and outcome.measured.n:
            figures.update(
                attainment=outcome.measured.attainment,
                attainment_lower=outcome.measured.attainment_lower,
                attainment_upper=outcome.measured.attainment_upper,
                n=outcome.measured.n,
            )
        return figures

    def inside(self, rate: float) -> float:
        return min(max(rounded(rate), self.limits.min_rate), self.limits.max_rate)


def reached_target(outcome: TrialOutcome) -> bool:
    """Return whether a trial was met with at least the required share, if both are known."""
    measured = outcome.measured
    if measured is None or measured.target is None or measured.attainment is None:
        return outcome.verdict == "met"
    return outcome.verdict == "met" and measured.attainment >= measured.target


def step_factor(factors: Sequence[float], taken: int) -> float:
    """Return the factor of the next step. ``taken``: number of steps so far."""
    return factors[min(max(taken, 1), len(factors)) - 1]


def rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
