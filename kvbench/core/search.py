"""Finds the highest request rate that meets an SLO: asks for rates, is told verdicts, knows no servers.

The way of it
-------------
1. **Expand** from the start rate: up while trials are met, down while they are missed. From a cold start up
   by × 2, down by ÷ 2, ÷ 4, ÷ 16 (an SLO that nothing can meet shows within a few trials). From a trusted
   hint by × 1.15, × 1.3, then as from a cold start: a good guess costs two trials.
2. **Bisect** between the highest met and the lowest missed rate, at their geometric mean, until
   upper / lower ≤ 1 + precision.
3. **Confirm**: the lower end gets one more, independent trial. If that misses, the rate becomes the upper
   end and the search goes on below it. The same goes for a met ``max_rate`` and for a missed ``min_rate``.

A refused (invalid) trial is no verdict. It is tried again at the same rate, and after ``max_retries``
repetitions the rate is *unusable*: the search stays below it, but it proves nothing about the upper end,
and the answer says "undecided" unless a real miss closes the bracket.

A rate's newest verdict counts. A miss below a met rate is a contradiction (noise, drift, or results
taken over from elsewhere): the bracket reopens, the missed rate is tried once more, and if it misses again
it stands, since a rate is sustained only if all below it are.

The next question depends on nothing but the rates and verdicts told so far, in order: telling a new search
the trials of an interrupted one resumes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from kvbench.core.records import VerdictKind

Purpose = Literal["start", "expand", "bisect", "confirm", "recheck", "retry"]
Status = Literal["converged", "undecided", "exhausted", "slo_unattainable", "censored"]

UP_COLD: Final = (2.0,)
DOWN_COLD: Final = (2.0, 4.0, 16.0)
UP_TRUSTED: Final = (1.15, 1.3, 2.0)
DOWN_TRUSTED: Final = (1.15, 1.3, 2.0, 4.0, 16.0)
"""Factors of the first, second, ... step away from the start; the last one repeats."""

_DIGITS: Final = 4
"""Rates are rounded to so many significant digits: what is asked for is what is printed."""


@dataclass(frozen=True)
class SearchLimits:
    """Where and how long to search. Rates in requests per second; raises ValueError if they make no sense.

    ``precision``: relative width of the bracket to reach, 0.05 for 5 %. ``max_trials`` counts every trial,
    also refused and repeated ones. ``confidence`` is not used by the search itself: it is what trials'
    early verdicts and intervals are to use, kept here so that one value belongs to one search.
    """

    start_rate: float
    min_rate: float
    max_rate: float
    precision: float = 0.05
    max_trials: int = 20
    confidence: float = 0.95
    max_retries: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.min_rate <= self.start_rate <= self.max_rate < math.inf:
            raise ValueError(
                "rates must satisfy 0 < min_rate ≤ start_rate ≤ max_rate, not "
                f"{self.min_rate}, {self.start_rate}, {self.max_rate}"
            )
        if not 0.002 <= self.precision <= 10:
            raise ValueError(f"precision must be between 0.002 and 10, not {self.precision}")
        if self.max_trials < 1 or self.max_retries < 0:
            raise ValueError("max_trials must be at least 1 and max_retries at least 0")
        if not 0 < self.confidence < 1:
            raise ValueError(f"confidence must be between 0 and 1, not {self.confidence}")


@dataclass(frozen=True)
class Hint:
    """A rate from a neighbouring input length or another connector. Trusted: expected within some 20 %."""

    rate: float
    trusted: bool = True


@dataclass(frozen=True)
class Probe:
    """The next trial to run: its rate, and what it is for."""

    rate: float
    purpose: Purpose


@dataclass(frozen=True)
class Told:
    """One trial's outcome, and what it had been asked for; no purpose if it was not asked."""

    rate: float
    verdict: VerdictKind
    purpose: Purpose | Literal[""] = ""


@dataclass(frozen=True)
class Answer:
    """What is known of the highest rate that meets the SLO.

    ``max_request_rate`` is ``lower``: the highest rate that was met. ``upper``: the lowest that was missed
    above it. ``censored``: "above" if no miss bounds it (read "at least"), "below" if no rate was met
    (read "less than upper"). ``confirmed``: the end that the answer rests on was seen twice. Status:
    "converged"; "censored" (met at max_rate); "slo_unattainable" (missed at min_rate);
    "undecided" (refused trials left an end unproven, or the search was not finished);
    "exhausted" (max_trials came first). The bracket is valid, if wide, in the latter two also.
    """

    max_request_rate: float | None
    lower: float | None
    upper: float | None
    censored: Literal["", "above", "below"]
    status: Status
    confirmed: bool
    trials: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class _Seen:
    """All that was told of one rate."""

    mets: int = 0
    misses: int = 0
    last: Literal["met", "missed", ""] = ""
    refused_in_a_row: int = 0


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

    def __init__(self, limits: SearchLimits, hint: Hint | None = None) -> None:
        """Raises ValueError for a hint that is not a positive number."""
        if hint is not None and not 0 < hint.rate < math.inf:
            raise ValueError(f"a hint must be a positive rate, not {hint.rate}")
        self.limits = limits
        trusted = hint is not None and hint.trusted
        start = limits.start_rate if hint is None else hint.rate
        self._start = self._inside(start)
        self._up = UP_TRUSTED if trusted else UP_COLD
        self._down = DOWN_TRUSTED if trusted else DOWN_COLD
        self._told: list[Told] = []
        self._pending: Probe | None = None

    @property
    def history(self) -> tuple[Told, ...]:
        """Everything that was told, in order."""
        return tuple(self._told)

    def ask(self) -> Probe | None:
        """The next trial; the same one until an outcome is told. None when the search is over."""
        if self._pending is None:
            self._pending = self._next()
        return self._pending

    def tell(self, rate: float, verdict: VerdictKind) -> None:
        """Take in an outcome, also of a rate that was not asked (a resumed run's, for one).

        Raises ValueError for a rate outside the limits or a verdict that is none.
        """
        if not self.limits.min_rate * (1 - 1e-9) <= rate <= self.limits.max_rate * (1 + 1e-9):
            raise ValueError(f"a rate must lie within the limits, not {rate}")
        if verdict not in ("met", "missed", "invalid"):
            raise ValueError(f"not a verdict: {verdict!r}")
        probe = self.ask()
        purpose: Purpose | Literal[""] = ""
        for known in [probe.rate if probe is not None else rate, *(told.rate for told in self._told)]:
            if math.isclose(rate, known, rel_tol=1e-9):
                rate = known
                break
        if probe is not None and rate == probe.rate:
            purpose = probe.purpose
        self._told.append(Told(rate, verdict, purpose))
        self._pending = None

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
        return Answer(lower, lower, upper, censored, status, confirmed, len(self._told), reason)

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

    def _next(self) -> Probe | None:
        left = self.limits.max_trials - len(self._told)
        if left <= 0:
            return None
        if not self._told:
            return Probe(self._start, "start")
        bracket = self._bracket()
        last = self._told[-1]
        if last.verdict == "invalid" and self._usable(bracket.seen[last.rate]):
            return Probe(last.rate, "retry")
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
            entry = seen.setdefault(told.rate, _Seen())
            if told.verdict == "invalid":
                entry.refused_in_a_row += 1
                continue
            entry.refused_in_a_row = 0
            entry.last = told.verdict
            entry.mets += told.verdict == "met"
            entry.misses += told.verdict == "missed"
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
        return seen.refused_in_a_row <= self.limits.max_retries

    def _close(self, lower: float, top: float) -> bool:
        middle = _rounded(math.sqrt(lower * top))
        return top <= lower * (1 + self.limits.precision) or not lower < middle < top

    def _inside(self, rate: float) -> float:
        return min(max(_rounded(rate), self.limits.min_rate), self.limits.max_rate)


def _step(factors: Sequence[float], taken: int) -> float:
    return factors[min(max(taken, 1), len(factors)) - 1]


def _rounded(rate: float) -> float:
    return float(f"{rate:.{_DIGITS}g}")
