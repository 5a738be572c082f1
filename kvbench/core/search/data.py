"""Input, trials and answer of a search, as plain data. Rates in requests per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from kvbench.core.records import VerdictKind

if TYPE_CHECKING:
    from kvbench.core.search.trial_requests import TrialRequests

Purpose = Literal["ceiling", "start", "expand", "bisect", "confirm", "recheck", "retry", "burst", "fixed"]
Status = Literal["converged", "undecided", "exhausted", "slo_unattainable", "censored"]

TRIAL_LATENCIES: Final = 10.8
"""Length of a trial, in latencies that it measured itself."""
TRIAL_REQUESTS: Final = 600
"""Its minimum number of requests: a queue's memory is counted in requests."""
QUICK_REQUESTS: Final = 2000
QUICK_S: Final = 40.0
"""Minimum number of requests at high rates, or minimum length in seconds, whichever is shorter."""
LONGEST: Final = 6.0
"""Longest trial, as a multiple of the usual one."""
WAITS: Final = 25.0
"""Minimum length of a full-length trial, as a multiple of the TTFT headroom: a queue with 5 % overload
reaches the limit after 20."""
SECONDS: Final = 10.0
"""Minimum length of a full-length trial in seconds, for warm-up and disturbances by other processes."""
MEMORY: Final = 2.5
"""Correlation time of a queue (``queue_model.memory``), in TTFT headrooms · depth · (1 − load)²."""
BURST_S: Final = 5.0
"""Seconds of a burst's arrivals."""


def requests_s(rate: float) -> float:
    """Return the time in seconds for the minimum number of requests of a trial."""
    return max(TRIAL_REQUESTS / rate, min(QUICK_REQUESTS / rate, QUICK_S))


@dataclass(frozen=True)
class SearchLimits:
    """Where and how long to search. Rates in requests per second. Raises ValueError for impossible limits.

    ``precision``: relative width of the bracket to reach, 0.05 for 5 %. ``max_trials`` counts every trial,
    also invalid and repeated ones. ``confidence``: of trials' early verdicts and intervals. ``attainment``:
    the required share of requests, for trials whose ``TrialFigures`` has no target. ``seconds_left``: of
    trials, as a sweep's budget allows (``RateSearch.allow``).
    """

    start_rate: float
    min_rate: float
    max_rate: float
    precision: float = 0.05
    max_trials: int = 20
    confidence: float = 0.95
    max_retries: int = 2
    attainment: float = 0.95
    seconds_left: float = math.inf

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
    """A start rate from another input length or connector. Trusted: expected within about 20 %."""

    rate: float
    trusted: bool = True


@dataclass(frozen=True)
class Probe:
    """The next trial: its rate and purpose. ``full_length``: no early end, since a queue near the answer
    builds up slowly (``LiveConfig.full_length``). ``least_s``: minimum length in seconds. ``tier``: tier of
    the SLO that the trial is run for; "" if there is only one."""

    rate: float
    purpose: Purpose
    full_length: bool = False
    least_s: float = 0.0
    tier: str = ""


@dataclass(frozen=True)
class TrialFigures:
    """The measured figures of a trial; None is unknown. Rates per second, times in seconds.

    ``attainment`` with its 95 % interval belongs to the criterion with the lowest score; ``target`` is its
    required share (None: the criterion is a mean); ``n`` requests count as ``effective_n`` independent ones.
    ``score`` with its standard error is 0 where that criterion is just met, falls with the rate, and is
    nearly linear in it: 1 / margin − 1 (see ``kvbench.core.search.sequential_trial``). ``offered_rate``:
    actual arrivals in the steady part. ``capacity``: first tokens per second while the queue was never empty,
    by ``capacity_n`` of them. ``grows``: the queue grew (in a ceiling probe: completions still increased, so
    the capacity is higher). ``completion_rate``: of a ceiling probe.

    ``ttft_limit_s``: the criterion's limit on TTFT; ``ttft_s``: TTFT at the quantile of the required share;
    ``ttft_fast_s``: the 10 % quantile of TTFT, nearly that of a request that does not wait. ``queue_rate``:
    the rate whose average queue equals that of these arrivals (``queue_rate``). ``criteria``: figures of each
    criterion in order, by the same names, if there are several.
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
    ttft_fast_s: float | None = None
    queue_rate: float | None = None
    criteria: tuple[Mapping[str, float | None], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the known, finite figures."""
        row = {name: value for name, value in asdict(self).items() if name != "criteria" and _known(value)}
        criteria = [
            {name: value if _known(value) else None for name, value in row.items()} for row in self.criteria
        ]
        return {**row, "criteria": criteria} if criteria else row

    def of_criterion(self, index: int) -> TrialFigures:
        """Return the trial's figures by another criterion; itself if there is only one."""
        return self.from_json({**asdict(self), **self.criteria[index]}) if self.criteria else self

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> TrialFigures:
        """Read the known figures and ignore others."""
        known = {item.name: row[item.name] for item in fields(cls) if item.name in row}
        return cls(**{**known, "criteria": tuple(known.get("criteria", ()))})


def _known(value: float | None) -> bool:
    return value is not None and (isinstance(value, bool) or math.isfinite(value))


@dataclass(frozen=True)
class TrialOutcome:
    """One trial's outcome and purpose; "" if the search did not request it. ``requests``: if known."""

    rate: float
    verdict: VerdictKind
    purpose: Purpose | Literal[""] = ""
    measured: TrialFigures | None = None
    full_length: bool = True
    requests: TrialRequests | None = None

    def to_json(self) -> dict[str, Any]:
        row: dict[str, Any] = {"rate": self.rate, "verdict": self.verdict, "purpose": self.purpose}
        if self.measured is not None and self.measured.attainment is not None:
            row["attainment"] = self.measured.attainment
            row["attainment_lower"] = self.measured.attainment_lower
            row["attainment_upper"] = self.measured.attainment_upper
            row["n"] = self.measured.n
        return row


@dataclass(frozen=True)
class SearchAnswer:
    """The highest rate that meets the SLO, as far as known.

    By verdicts alone, ``max_request_rate`` is ``lower``, the highest met rate, and ``upper`` the lowest
    missed one above it. By figures, it is the most likely rate, and [``lower``, ``upper``] contains the true
    one with probability ``level``; a "converged" rate was met in a trial at it, or up to the precision above
    it, with the required share of requests.

    ``status``: "converged"; "censored" (met at max_rate); "slo_unattainable" (missed at min_rate);
    "undecided" (invalid or undecided trials left an end open, no trial at the rate was met, or the search was
    not finished); "exhausted" (stopped by max_trials or a budget). The interval is valid in the last two too.
    ``censored``: "above" if no miss bounds the rate (read "at least"), "below" if no rate was met (read "less
    than upper"). ``confirmed``: a further, independent trial agreed. ``attainment`` with its 95 % interval
    and ``n`` are those of the highest met trial at or below the rate. ``curve``: rate, verdict, purpose and
    attainment of each trial.

    ``posterior``: equally probable rates in order; ``posterior_at_first``: the same for the beginning of a
    search that has ended, since a system may change; ``wanders``: probability that it did.
    ``time_suffices``: forecast whether the trials suffice (``RateSearch.foreseen``). ``replay``: result of
    replaying the requests of a search that has ended (``ReplayResult.to_json``); its ``decides``: the answer
    is the replay's.
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
