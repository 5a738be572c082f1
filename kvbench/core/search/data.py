"""What a search is given, asks, is told, and answers: plain data. Rates in requests per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from kvbench.core.records import VerdictKind

if TYPE_CHECKING:
    from kvbench.core.search.trial_requests import TrialRequests

Purpose = Literal["ceiling", "start", "expand", "bisect", "confirm", "recheck", "retry", "burst", "fixed"]
Status = Literal["converged", "undecided", "exhausted", "slo_unattainable", "censored"]


@dataclass(frozen=True)
class SearchLimits:
    """Where and how long to search. Rates in requests per second; raises ValueError if they make no sense.

    ``precision``: relative width of the bracket to reach, 0.05 for 5 %. ``max_trials`` counts every trial,
    also refused and repeated ones. ``confidence`` is not used by the search itself: it is what trials'
    early verdicts and intervals are to use, kept here so that one value belongs to one search.
    ``attainment``: the share asked for, of trials whose ``TrialFigures`` does not have it.
    """

    start_rate: float
    min_rate: float
    max_rate: float
    precision: float = 0.05
    max_trials: int = 20
    confidence: float = 0.95
    max_retries: int = 2
    attainment: float = 0.95

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
        if not 0 < self.attainment <= 1:
            raise ValueError(f"attainment must be above 0 and at most 1, not {self.attainment}")


@dataclass(frozen=True)
class Hint:
    """A rate from a neighbouring input length or another connector. Trusted: expected within some 20 %."""

    rate: float
    trusted: bool = True


@dataclass(frozen=True)
class Probe:
    """The next trial to run: its rate, and what it is for.

    ``thorough``: near the answer, so it is to run its full length; a quick yes would come before a queue had
    time to build up (``LiveConfig.thorough``). ``least_s``: for how long at least, in seconds. ``tier``: of
    the SLO, which the trial is run for; "" if there is one.
    """

    rate: float
    purpose: Purpose
    thorough: bool = False
    least_s: float = 0.0
    tier: str = ""


@dataclass(frozen=True)
class TrialFigures:
    """What a trial measured beside its verdict; None is unknown. Rates per second, times in seconds.

    ``attainment`` with its 95 % interval is that of the criterion that comes off worst, whose share asked
    for is ``target`` (None: it is a mean), of ``n`` requests worth ``effective_n`` independent ones.
    ``score`` with its standard error is 0 where that criterion is just kept, falls with the rate, and is
    nearly linear in it: 1 / margin − 1 (see ``kvbench.core.search.sequential_trial``). ``offered_rate``:
    arrivals that really fell into the steady part. ``capacity``: first tokens per second while the queue was
    never empty, by ``capacity_n`` of them. ``grows``: the queue grew (of a ceiling probe: the completions
    did, so the capacity is higher). ``completion_rate``: of a ceiling probe.

    ``ttft_limit_s``: the criterion's limit on TTFT, None without one; ``ttft_s``: the TTFT that the share
    asked for stayed within; ``ttft_attainment``: the share whose TTFT kept the limit, whatever else they
    broke; ``ttft_fast_s``: the one that a tenth did, nearly that of a request that does not
    wait. ``latency_s``: the median of whole requests. ``queue_rate``: what the arrivals stood for, if a queue
    it is (``queue_rate``), of whose gaps ``gap_variation`` is the squared coefficient of variation.
    ``criteria``: where there are several, the figures of each in order, by the names used here.
    """

    attainment: float | None = None
    attainment_lower: float = 0.0
    attainment_upper: float = 1.0
    n: int = 0
    effective_n: float = 0.0
    target: float | None = None
    score: float | None = None
    score_error: float | None = None
    offered_rate: float | None = None
    capacity: float | None = None
    capacity_error: float | None = None
    capacity_n: float = 0.0
    duration_s: float = 0.0
    grows: bool = False
    completion_rate: float | None = None
    ttft_limit_s: float | None = None
    ttft_s: float | None = None
    ttft_attainment: float | None = None
    ttft_fast_s: float | None = None
    latency_s: float = 0.0
    queue_rate: float | None = None
    gap_variation: float = 1.0
    criteria: tuple[Mapping[str, float | None], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """What is known, as finite numbers; what is not is left out."""
        row = {name: value for name, value in asdict(self).items() if name != "criteria" and _known(value)}
        each = [
            {name: value if _known(value) else None for name, value in row.items()} for row in self.criteria
        ]
        return {**row, "criteria": each} if each else row

    def of_criterion(self, index: int) -> TrialFigures:
        """The same trial by another of its criteria; itself where there is one only."""
        return self.from_json({**asdict(self), **self.criteria[index]}) if self.criteria else self

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TrialFigures:
        """Takes the figures it knows and leaves the others."""
        known = {item.name: row[item.name] for item in fields(cls) if item.name in row}
        return cls(**{**known, "criteria": tuple(known.get("criteria", ()))})


def _known(value: float | None) -> bool:
    return value is not None and (isinstance(value, bool) or math.isfinite(value))


@dataclass(frozen=True)
class TrialOutcome:
    """One trial's outcome, and what it had been asked for; no purpose if it was not asked.

    ``requests``: each of its requests, where they are known.
    """

    rate: float
    verdict: VerdictKind
    purpose: Purpose | Literal[""] = ""
    measured: TrialFigures | None = None
    thorough: bool = True
    requests: TrialRequests | None = None

    def to_json(self) -> dict[str, Any]:
        """One point of the curve."""
        row: dict[str, Any] = {"rate": self.rate, "verdict": self.verdict, "purpose": self.purpose}
        if self.measured is not None and self.measured.attainment is not None:
            row["attainment"] = self.measured.attainment
            row["attainment_lower"] = self.measured.attainment_lower
            row["attainment_upper"] = self.measured.attainment_upper
            row["n"] = self.measured.n
        return row


@dataclass(frozen=True)
class SearchAnswer:
    """What is known of the highest rate that meets the SLO.

    By verdicts alone, ``max_request_rate`` is ``lower``: the highest rate that was met, and ``upper`` the
    lowest that was missed above it. From what the trials measured, it is the most likely rate, and ``lower``
    and ``upper`` hold it with a probability of 90 %; if it "converged", a trial at it or up to the precision
    above it was met, with a share of requests within the SLO that reaches the one asked for.
    ``censored``: "above" if no miss bounds it (read "at least"), "below" if no rate was met (read "less
    than upper"). ``confirmed``: a further, independent trial agreed. Status: "converged"; "censored" (met
    at max_rate); "slo_unattainable" (missed at min_rate); "undecided" (refused or undecided trials left
    an end unproven, no trial at the rate was met, or the search was not finished); "exhausted"
    (max_trials came first). The interval is valid, if wide, in the latter two also. ``attainment`` with
    its 95 % interval and ``n`` are those of the trial that the rate rests on, or else of the newest one
    at it. ``curve``: each trial's rate, verdict, purpose, and attainment if it was measured.

    ``level``: how probable it is that the interval holds the rate; None where it is not known. ``posterior``:
    equally probable rates, in order; ``posterior_at_first``: the same of the beginning of a search that has
    ended, since a system may wander; ``wanders``: how probable that is by the last trials' posterior.
    ``time_suffices``: whether the trials seemed to be enough when some were done (``RateSearch.foreseen``).
    ``replay``: result of replaying the requests of a search that has ended (``ReplayResult.to_json``), and
    whether the answer is by it (``decides``).
    """

    max_request_rate: float | None
    lower: float | None
    upper: float | None
    censored: Literal["", "above", "below"]
    status: Status
    confirmed: bool
    trials: int
    reason: str
    attainment: float | None = None
    attainment_lower: float | None = None
    attainment_upper: float | None = None
    n: int = 0
    curve: tuple[Mapping[str, Any], ...] = ()
    level: float | None = None
    posterior: tuple[float, ...] = ()
    wanders: float | None = None
    posterior_at_first: tuple[float, ...] = ()
    time_suffices: bool | None = None
    replay: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        row = asdict(self)
        row["curve"] = [dict(point) for point in self.curve]
        return row
