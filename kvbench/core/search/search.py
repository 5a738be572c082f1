"""Finds the highest request rate that meets an SLO: asks for rates, is told verdicts, knows no servers.

Told verdicts alone
-------------------
1. **Expand** from the start rate: up while trials are met, down while they are missed. From a cold start up
   by × 2, down by ÷ 2, ÷ 4, ÷ 4 (an SLO that nothing can meet shows within a few trials). From a trusted
   hint by × 1.15, × 1.3, then as from a cold start: a good guess costs two trials.
2. **Bisect** between the highest met and the lowest missed rate, at their geometric mean, until
   upper / lower ≤ 1 + precision.
3. **Confirm**: the lower end gets one more, independent trial. If that misses, the rate becomes the upper
   end and the search goes on below it. The same goes for a met ``max_rate`` and for a missed ``min_rate``.

Told what trials measured (``Measured``), too
---------------------------------------------
A yes or no is the least that a trial tells. With the shares of late requests, a posterior of the rate is kept
(``kvbench.core.search.posterior``); each trial goes to its median, so that all of them measure where it
matters:

0. **Ceiling**, if wanted for a cold start: a saturating burst, whose completions per second are the capacity.
1. From 0.9 × the ceiling, a hint, or the start rate: **expand** × 1.15, × 1.3, × 2 or further, if the margins
   say so, but not beyond the capacity, until both a yes and a no, or "cannot tell", were seen.
2. **Bisect**: to the median of the posterior, again and again. There trials are *thorough*: a quick yes comes
   before a queue has built up.
   While all trials are missed, steps down are halves as long as some requests are in time.
3. **Confirm**: a further trial at the median, once that is sharp. If it leaves the median near itself and the
   interval within the precision, and if it is met, or another trial at that rate or up to the precision above
   it was, the search is over and that rate is the answer. Else there is a further trial at the new median. If
   ``max_trials`` comes first, the answer goes down to the highest rate met within the precision below the
   median; without one it is *undecided*.

An *undecided* trial is neither yes nor no. Its share counts like any other: a rate at which it cannot be told
whether the SLO holds is close to the one looked for. Without figures it is tried once more, and then the
rate is left alone, like one whose trials are refused.

A refused (invalid) trial is no verdict. It is tried again at the same rate, and after ``max_retries``
repetitions the rate is *unusable*: the search stays below it, but it proves nothing about the upper end,
and the answer says "undecided" unless a real miss closes the bracket.

A rate's newest verdict counts. A miss below a met rate is a contradiction (noise, drift, or results
taken over from elsewhere): the bracket reopens, the missed rate is tried once more, and if it misses again
it stands, since a rate is sustained only if all below it are. A posterior weighs contradictions by itself: it
moves and widens, and there are more trials.

The next question depends on nothing but what was told so far, in order: telling a new search the trials of
an interrupted one resumes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvbench.core.records import VerdictKind
from kvbench.core.search.data import Answer, Hint, Measured, Probe, Purpose, SearchLimits, Status, Told
from kvbench.core.search.posterior import SATURATED, Point, Root, fit, point_of

__all__ = ["Answer", "Hint", "Measured", "Probe", "RateSearch", "SearchLimits", "Told"]

UP_COLD: Final = (2.0,)
DOWN_COLD: Final = (2.0, 4.0)
UP_TRUSTED: Final = (1.15, 1.3, 2.0)
DOWN_TRUSTED: Final = (1.15, 1.3, 2.0, 4.0)
"""Factors of the first, second, ... step away from the start; the last one repeats."""
DOWN_NEAR: Final = 2.0
"""The longest step down from a trial in which some requests were in time: the rate cannot be far."""

CEILING_FACTOR: Final = 80.0
"""The ceiling probe offers so many times the start rate: with four requests under way there, 320 here."""
CEILING_SHARE: Final = 0.9
CLOSE: Final = 0.75
"""From this share of the capacity on a queue takes its time to build up, and a quick yes is none."""
UP_MOST: Final = 3.0
WIDTH: Final = 1.2
NEAR: Final = 1.7
SHIFT: Final = 0.4
"""In units of the precision: the interval's half-width at the end, and from which on a trial may confirm; how
far the median may move by the trial that confirms."""
CONFIRM_BELOW: Final = 0.1
CONFIRM_STEP: Final = 0.06
CONFIRM_MOST: Final = 0.28
"""In units of the precision: so far below the median a trial is to confirm, or every other one would fail;
so much further for each that has failed; and at most."""
UNSURE_TRIALS: Final = 2

_DIGITS: Final = 4
"""Rates are rounded to so many significant digits: what is asked for is what is printed."""


@dataclass
class _Seen:
    """All that was told of one rate. ``unsure``: undecided trials without figures."""

    mets: int = 0
    misses: int = 0
    last: Literal["met", "missed", ""] = ""
    refused_in_a_row: int = 0
    unsure: int = 0


@dataclass(frozen=True)
class _Bracket:
    """Highest met rate below the lowest missed one. ``ceiling``: the lowest unusable rate between them."""

    lower: float | None
    upper: float | None
    ceiling: float | None
    seen: dict[float, _Seen] = field(default_factory=dict)

    @property
    def top(self) -> float | None:
        """The rate to stay below."""
        return self.ceiling if self.ceiling is not None else self.upper


class RateSearch:
    """One search. ``ask`` until it returns None; ``tell`` each outcome; ``answer`` at any moment."""

    def __init__(self, limits: SearchLimits, hint: Hint | None = None, *, ceiling: bool = False) -> None:
        """``ceiling``: a start without a trusted hint begins with a saturating burst (whose outcome must be
        told with its ``completion_rate``). Raises ValueError for a hint that is not a positive number.
        """
        if hint is not None and not 0 < hint.rate < math.inf:
            raise ValueError(f"a hint must be a positive rate, not {hint.rate}")
        self.limits = limits
        trusted = hint is not None and hint.trusted
        start = limits.start_rate if hint is None else hint.rate
        self._start = self._inside(start)
        self._up = UP_TRUSTED if trusted else UP_COLD
        self._down = DOWN_TRUSTED if trusted else DOWN_COLD
        self._ceiling = ceiling and not trusted
        self._told: list[Told] = []
        self._pending: Probe | None = None
        self._root: tuple[int, Root | None] = (0, None)

    @property
    def history(self) -> tuple[Told, ...]:
        """Everything that was told, in order."""
        return tuple(self._told)

    def ask(self) -> Probe | None:
        """The next trial; the same one until an outcome is told. None when the search is over."""
        if self._pending is None:
            self._pending = self._next()
        return self._pending

    def tell(self, rate: float, verdict: VerdictKind, measured: Measured | None = None) -> None:
        """Take in an outcome, also of a rate that was not asked (a resumed run's, for one).

        A ceiling probe's verdict is not looked at. Raises ValueError for a rate outside the limits or a
        verdict that is none.
        """
        if not self.limits.min_rate * (1 - 1e-9) <= rate <= self.limits.max_rate * (1 + 1e-9):
            raise ValueError(f"a rate must lie within the limits, not {rate}")
        if verdict not in ("met", "missed", "undecided", "invalid"):
            raise ValueError(f"not a verdict: {verdict!r}")
        probe = self.ask()
        purpose: Purpose | Literal[""] = ""
        for known in [probe.rate if probe is not None else rate, *(told.rate for told in self._told)]:
            if math.isclose(rate, known, rel_tol=1e-9):
                rate = known
                break
        if probe is not None and rate == probe.rate:
            purpose = probe.purpose
        self._told.append(Told(rate, verdict, purpose, measured))
        self._pending = None

    def root(self) -> Root | None:
        """The posterior of the rate looked for; None before anything was measured."""
        if self._root[0] != len(self._told):
            points = [
                point for told in self._told if (point := point_of(told, self.limits.attainment)) is not None
            ]
            low, high = self.limits.min_rate / 1.05, self.limits.max_rate * 1.05
            measured = any(told.measured is not None for told in self._told)
            self._root = (len(self._told), fit(points, low, high) if points and measured else None)
        return self._root[1]

    def _points(self) -> list[Point]:
        target = self.limits.attainment
        return [point for told in self._told if (point := point_of(told, target)) is not None]

    def answer(self) -> Answer:
        """The best answer so far; honest, if not sharp, before the end."""
        bracket = self._bracket()
        lower, upper = bracket.lower, bracket.upper
        end = lower if lower is not None else upper
        seen = bracket.seen.get(end, _Seen()) if end is not None else _Seen()
        confirmed = (seen.mets if lower is not None else seen.misses) >= 2
        censored: Literal["", "above", "below"] = ""
        if lower is not None and upper is None:
            censored = "above"
        elif lower is None and upper is not None:
            censored = "below"
        status, reason = self._status(bracket, confirmed)
        root = self.root()
        if root is not None and status not in ("censored", "slo_unattainable"):
            return self._measured_answer(root, bracket)
        return Answer(
            lower, lower, upper, censored, status, confirmed, len(self._told), reason, **self._figures(lower)
        )

    def _figures(self, rate: float | None) -> dict[str, Any]:
        """The curve, and the attainment of the trial that the rate rests on, or else of the newest at it."""
        figures: dict[str, Any] = {"curve": tuple(told.to_json() for told in self._told)}
        if rate is None:
            return figures
        at_rate = (told for told in reversed(self._tried()) if told.rate == rate)
        told = self._support(rate) or next(at_rate, None)
        if told is not None and told.measured is not None and told.measured.n:
            figures.update(
                attainment=told.measured.attainment,
                attainment_lower=told.measured.attainment_lower,
                attainment_upper=told.measured.attainment_upper,
                n=told.measured.n,
            )
        return figures

    def _measured_answer(self, root: Root, bracket: _Bracket) -> Answer:
        settled, agrees = self._settled(root), self._agreement()
        if settled is None:
            settled, agrees = self._fallen_back(root), "the highest rate met: {:g}"
        rate = settled if settled is not None else self._inside(root.median)
        status: Status = "converged"
        reason = agrees.format(rate)
        if settled is None:
            status, reason = self._unsettled(root, bracket)
        tried = self._tried()
        lower, upper = min(root.lower, rate), max(root.upper, rate)
        known: tuple[float | None, float | None, float | None, Literal["", "above", "below"]]
        known = (rate, lower, upper, "")
        if settled is None and all(told.verdict == "missed" for told in tried):
            # Nothing but misses: any rate would be a guess.
            known = (None, None, bracket.upper, "below" if tried else "")
            if tried and len(self._told) >= self.limits.max_trials:
                status, reason = (
                    "exhausted",
                    f"max_trials = {self.limits.max_trials} came before any rate was met",
                )
        elif settled is not None and settled >= self.limits.max_rate:
            status, reason = "censored", f"not missed at {rate:g}, the highest rate allowed: raise max_rate"
            known = (rate, lower, None, "above")
        confirmed, trials = settled is not None, len(self._told)
        found, low, high, censored = known
        figures = self._figures(found)
        return Answer(found, low, high, censored, status, confirmed, trials, reason, **figures)

    def _unsettled(self, root: Root, bracket: _Bracket) -> tuple[Status, str]:
        """Why a search from measurements has no answer that can be relied on."""
        rate, most = self._inside(root.median), self.limits.max_trials
        if len(self._told) < most:
            if self.ask() is not None:
                return "undecided", "the search was not finished"
            return "undecided", f"trials at {bracket.ceiling or rate:g} and around it were refused"
        if root.width <= self.limits.precision * WIDTH:
            return "undecided", (
                f"max_trials = {most} came before a trial at {rate:g} or up to "
                f"{self.limits.precision:.0%} above it was met"
            )
        return "exhausted", f"max_trials = {most} came before the precision asked for"

    def _status(self, bracket: _Bracket, confirmed: bool) -> tuple[Status, str]:
        lower, upper = bracket.lower, bracket.upper
        if confirmed and lower is not None and upper is not None and self._close(lower, upper):
            return "converged", f"met at {lower:g}, missed at {upper:g}"
        if confirmed and lower is not None and upper is None and lower >= self.limits.max_rate:
            return "censored", f"met at {lower:g}, the highest rate allowed: raise max_rate"
        if confirmed and lower is None and upper is not None and upper <= self.limits.min_rate:
            return "slo_unattainable", f"missed at {upper:g} already, the lowest rate allowed"
        if len(self._told) >= self.limits.max_trials:
            return "exhausted", f"max_trials = {self.limits.max_trials} came before the precision asked for"
        if self.ask() is not None:
            return "undecided", "the search was not finished"
        if bracket.ceiling is not None:
            return "undecided", f"trials at {bracket.ceiling:g} and around it were refused"
        return "undecided", "the trials that should have confirmed the answer were refused"

    def _tried(self) -> list[Told]:
        """What was told but ceilings and refusals."""
        return [told for told in self._told if told.purpose != "ceiling" and told.verdict != "invalid"]

    def _next(self) -> Probe | None:
        left = self.limits.max_trials - len(self._told)
        if left <= 0:
            return None
        if not self._told:
            if self._ceiling:
                return Probe(self._inside(self._start * CEILING_FACTOR), "ceiling")
            return Probe(self._start, "start")
        bracket = self._bracket()
        last = self._told[-1]
        if last.purpose == "ceiling":
            return self._after_ceiling(last)
        again = last.verdict == "invalid" or (last.verdict == "undecided" and last.measured is None)
        if again and self._usable(bracket.seen[last.rate]):
            return Probe(last.rate, "retry")
        root = self.root()
        if root is not None and self._tried():
            return self._next_measured(root, bracket)
        return self._next_by_verdicts(bracket, left)

    def _after_ceiling(self, last: Told) -> Probe:
        completed = (last.measured.completion_rate or 0.0) if last.measured is not None else 0.0
        if not completed or last.verdict == "invalid":
            return Probe(self._start, "start")
        if completed > SATURATED * last.rate and last.rate >= self.limits.max_rate:
            return Probe(last.rate, "start")
        rising = last.measured is not None and last.measured.grows
        return Probe(self._inside(completed * CEILING_SHARE), "start", thorough=not rising)

    def _next_measured(self, root: Root, bracket: _Bracket) -> Probe | None:
        if self._settled(root) is not None:
            return None
        tried = self._tried()
        lowest, highest = min(told.rate for told in tried), max(told.rate for told in tried)
        some_good = any(told.verdict != "missed" for told in tried)
        some_bad = any(told.verdict != "met" for told in tried)
        if not some_good and lowest <= self.limits.min_rate:
            return self._below(bracket)
        if not some_bad and highest >= self.limits.max_rate:
            return self._above(bracket, highest)
        capacity, target = self._capacity(), root.median
        if not some_bad:
            step = min(highest * _step(UP_TRUSTED, len(tried)), 0.97 * capacity)
            target = min(max(target, step), highest * UP_MOST)
        elif not some_good:
            near = any(_some_in_time(told) for told in tried if told.rate == lowest)
            step = lowest / (DOWN_NEAR if near else _step(DOWN_COLD, len(tried)))
            target = max(target, step) if near or len(tried) < 3 else step
        unusable = min(
            (rate for rate, seen in bracket.seen.items() if not self._usable(seen)), default=math.inf
        )
        near = root.width <= self.limits.precision * NEAR
        if near and some_good and some_bad:
            target /= 1 + self._aim_below() * self.limits.precision
        target = self._inside(min(target, unusable / (1 + self.limits.precision)))
        if target in bracket.seen and not self._usable(bracket.seen[target]):
            return None
        if unusable < math.inf and sum(told.rate == target for told in tried) >= 2:
            return None
        purpose: Purpose = "confirm" if near else "bisect" if some_good and some_bad else "expand"
        return Probe(target, purpose, thorough=target > CLOSE * capacity or (some_good and some_bad))

    def _aim_below(self) -> float:
        failed = sum(told.purpose == "confirm" and not _kept(told) for told in self._tried())
        return min(CONFIRM_BELOW + CONFIRM_STEP * failed, CONFIRM_MOST)

    def _capacity(self) -> float:
        """The least that a trial saw the system pass on at most; inf if none saw its limit."""
        points = [
            point for told in self._told if (point := point_of(told, self.limits.attainment)) is not None
        ]
        return min((point.capacity for point in points if point.capacity), default=math.inf)

    def _settled(self, root: Root) -> float | None:
        """The rate that a trial of its own has confirmed, if the search is over."""
        last, precision = self._told[-1], self.limits.precision
        if last.purpose != "confirm" or last.verdict not in ("met", "undecided") or last.measured is None:
            return None
        if self._support(last.rate) is None:
            return None
        if all(told.verdict == "met" for told in self._tried()) and self._capacity() == math.inf:
            return None  # nothing bounds it from above
        moved = abs(math.log(self._inside(root.median) / last.rate))
        sharp = root.width <= precision * WIDTH
        return last.rate if sharp and moved <= precision * SHIFT else None

    def _agreement(self) -> str:
        """How the last trial confirms its rate: only one that was met does so by itself."""
        last = self._told[-1]
        support = None if last.verdict == "met" else self._support(last.rate)
        return (
            "a further trial at {:g} agrees"
            if support is None
            else f"met at {support.rate:g}; a further trial at {{:g}} leaves the answer there"
        )

    def _support(self, rate: float) -> Told | None:
        """A trial that was met at that rate or up to the precision above it: the nearest, then the newest."""
        top = rate * (1 + self.limits.precision) * (1 + 1e-9)
        kept = [told for told in reversed(self._tried()) if _kept(told) and rate <= told.rate <= top]
        return min(kept, key=lambda told: told.rate, default=None)

    def _fallen_back(self, root: Root) -> float | None:
        """Out of trials, but the rate is sharp: the highest that was met within the precision below it."""
        if len(self._told) < self.limits.max_trials or root.width > self.limits.precision * WIDTH:
            return None
        median = self._inside(root.median)
        best = max((told.rate for told in self._tried() if _kept(told) and told.rate <= median), default=0.0)
        return best if best * (1 + self.limits.precision) >= median else None

    def _next_by_verdicts(self, bracket: _Bracket, left: int) -> Probe | None:
        doubtful = self._doubtful(bracket)
        if doubtful is not None:
            return Probe(doubtful, "recheck")
        if bracket.lower is None:
            return self._below(bracket)
        if left == 1 and bracket.upper is not None and self._unconfirmed(bracket, bracket.lower):
            return Probe(
                bracket.lower, "confirm"
            )  # a wider answer that is sure, over a sharper one that is not
        if bracket.top is None:
            return self._above(bracket, bracket.lower)
        if not self._close(bracket.lower, bracket.top):
            return Probe(_rounded(math.sqrt(bracket.lower * bracket.top)), "bisect")
        if self._unconfirmed(bracket, bracket.lower):
            return Probe(bracket.lower, "confirm")
        return None

    def _above(self, bracket: _Bracket, lower: float) -> Probe | None:
        if lower >= self.limits.max_rate:
            return Probe(lower, "confirm") if self._unconfirmed(bracket, lower) else None
        steps = sum(seen.last == "met" for seen in bracket.seen.values())
        return Probe(self._inside(lower * _step(self._up, steps)), "expand")

    def _below(self, bracket: _Bracket) -> Probe | None:
        lowest = min(bracket.seen)
        if lowest <= self.limits.min_rate:
            seen = bracket.seen[lowest]
            once = seen.last == "missed" and seen.misses < 2
            return Probe(lowest, "confirm") if once and self._usable(seen) else None
        return Probe(self._inside(lowest / _step(self._down, len(bracket.seen))), "expand")

    def _bracket(self) -> _Bracket:
        seen: dict[float, _Seen] = {}
        for told in self._told:
            if told.purpose == "ceiling":
                continue
            entry = seen.setdefault(told.rate, _Seen())
            if told.verdict == "invalid":
                entry.refused_in_a_row += 1
                continue
            entry.refused_in_a_row = 0
            if told.verdict == "met":
                entry.last, entry.mets = "met", entry.mets + 1
            elif told.verdict == "missed":
                entry.last, entry.misses = "missed", entry.misses + 1
            elif told.measured is None:
                entry.unsure += 1
        upper = min((rate for rate, entry in seen.items() if entry.last == "missed"), default=None)
        below = math.inf if upper is None else upper
        lower = max(
            (rate for rate, entry in seen.items() if entry.last == "met" and rate < below), default=None
        )
        above = 0.0 if lower is None else lower
        unusable = [rate for rate, entry in seen.items() if not self._usable(entry) and above < rate < below]
        return _Bracket(lower, upper, min(unusable, default=None), seen)

    def _doubtful(self, bracket: _Bracket) -> float | None:
        """The lowest rate that was missed, once and only once, below a met one."""
        highest_met = max((rate for rate, seen in bracket.seen.items() if seen.last == "met"), default=0.0)
        return min(
            (
                rate
                for rate, seen in bracket.seen.items()
                if rate < highest_met and seen.last == "missed" and seen.mets + seen.misses == 1
                if self._usable(seen)
            ),
            default=None,
        )

    def _unconfirmed(self, bracket: _Bracket, rate: float) -> bool:
        return bracket.seen[rate].mets < 2 and self._usable(bracket.seen[rate])

    def _usable(self, seen: _Seen) -> bool:
        unsure = seen.unsure >= UNSURE_TRIALS and seen.last == ""
        return seen.refused_in_a_row <= self.limits.max_retries and not unsure

    def _close(self, lower: float, top: float) -> bool:
        middle = _rounded(math.sqrt(lower * top))
        return top <= lower * (1 + self.limits.precision) or not lower < middle < top

    def _inside(self, rate: float) -> float:
        return min(max(_rounded(rate), self.limits.min_rate), self.limits.max_rate)


def _kept(told: Told) -> bool:
    """Whether a trial was met, with a share no smaller than the one asked for where it tells them."""
    measured = told.measured
    if measured is None or measured.target is None or measured.attainment is None:
        return told.verdict == "met"
    return told.verdict == "met" and measured.attainment >= measured.target


def _some_in_time(told: Told) -> bool:
    return told.measured is not None and bool(told.measured.n and told.measured.attainment)


def _step(factors: Sequence[float], taken: int) -> float:
    return factors[min(max(taken, 1), len(factors)) - 1]


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
