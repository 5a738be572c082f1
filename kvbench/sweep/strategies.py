"""Strategies by method: which rates a cell tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvbench.core.records import Cell, TrialRecord
from kvbench.core.search.burst import BurstSearch
from kvbench.core.search.data import Probe, Purpose
from kvbench.core.search.search import RateSearch, TrialFigures
from kvbench.core.search.trial_requests import TrialRequests


class Strategy(Protocol):
    """Chooses the rates of a cell from its trials."""

    @property
    def searched(self) -> bool:
        """Whether a trial may end once its verdict is certain; else all of its load is sent."""
        ...

    def ask(self) -> Probe | None: ...
    def tell(self, record: TrialRecord) -> None: ...
    def allow(self, seconds_left: float, precision: float | None = None) -> None:
        """Set the seconds of trials left of a search, and its precision."""
        return

    def answers(self) -> Mapping[str, Mapping[str, Any]]:
        """Return tier → answer as plain data: key "" without tiers, empty if nothing was searched."""
        ...

    def standing(self) -> Standing | None:
        """Current state of the search, or None before a trial or without a search."""
        ...


@dataclass(frozen=True)
class Standing:
    """90 % interval in requests/s, and the probability of the requested precision."""

    lower: float
    upper: float
    confidence: float

    @property
    def width(self) -> float:
        return (self.upper / self.lower - 1) / 2

    def text(self) -> str:
        """``between 58 and 67 req/s``."""
        return f"between {self.lower:.3g} and {self.upper:.3g} req/s"


class RateList(Strategy):
    """Fixed rates, each measured once, without a search."""

    searched = False

    def __init__(self, rates: Sequence[float], purpose: Purpose = "fixed") -> None:
        self._left = [Probe(rate, purpose) for rate in rates]

    def ask(self) -> Probe | None:
        return self._left[0] if self._left else None

    def tell(self, record: TrialRecord) -> None:
        del self._left[:1]

    def answers(self) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def standing(self) -> None:
        """There is no search."""


class OneRate(RateList):
    """Strategy of ``kvbench bench``: one rate, once."""

    def __init__(self, rate: float) -> None:
        super().__init__([rate], "start")


class Burst(Strategy):
    searched = False

    def __init__(self, search: BurstSearch) -> None:
        self._search = search

    def ask(self) -> Probe | None:
        rate = self._search.ask()
        return None if rate is None else Probe(rate, "burst")

    def tell(self, record: TrialRecord) -> None:
        self._search.tell(record.request_rate, record.verdict)

    def answers(self) -> Mapping[str, Mapping[str, Any]]:
        return {"": self._search.answer().to_json()}

    def standing(self) -> None:
        """A bisection has no posterior."""


class Tiered(Strategy):
    """One search per SLO tier ("" without tiers); every search gets every trial. The strictest unfinished
    tier chooses the next rate. Another tier uses the trial's verdict only if the trial was long enough to
    decide that tier."""

    searched = True

    def __init__(
        self,
        searches: Mapping[str, RateSearch],
        requests_of: Callable[[TrialRecord], TrialRequests | None] = lambda record: None,
    ) -> None:
        """``searches``: tier → search, the strictest first. ``requests_of``: stored requests of a trial, or
        None."""
        self._searches = dict(searches)
        self._requests_of = requests_of

    def ask(self) -> Probe | None:
        for tier, search in self._searches.items():
            if (probe := search.ask()) is not None:
                return replace(probe, tier=tier)
        return None

    def tell(self, record: TrialRecord) -> None:
        request = self.ask()
        judged = record.purpose != "ceiling" and record.verdict != "invalid"
        requests = self._requests_of(record) if judged else None
        for tier, search in self._searches.items():
            verdict = record.verdict_of(tier)
            requested = request is not None and request.tier == tier
            if record.purpose == "ceiling":
                # It gives a start and no verdict, so even a disturbed one is not repeated.
                verdict = "undecided"
            if requested or (verdict in ("met", "missed") and search.ask() is not None):
                search.tell(record.request_rate, verdict, measured_of(record, tier), requests)

    def allow(self, seconds_left: float, precision: float | None = None) -> None:
        """Use the precision for a single tier only, since each tier has separate comparisons."""
        for search in self._searches.values():
            search.allow(seconds_left, precision if len(self._searches) == 1 else None)

    def answers(self) -> Mapping[str, Mapping[str, Any]]:
        return {tier: search.answer().to_json() for tier, search in self._searches.items()}

    def standing(self) -> Standing | None:
        probe = self.ask()
        search = self._searches[probe.tier] if probe is not None else list(self._searches.values())[-1]
        found = search.estimate()
        if found is None:
            return None
        return Standing(found.lower, found.upper, found.within(found.median, search.limits.precision))


def common_rates(found: Mapping[Cell, float]) -> dict[tuple[int, int], float]:
    """Return (input, output) length → lowest rate, if at least two connectors have one."""
    rates: dict[tuple[int, int], list[float]] = {}
    for cell, rate in found.items():
        rates.setdefault((cell.input_len, cell.output_len), []).append(rate)
    return {lengths: min(values) for lengths, values in rates.items() if len(values) > 1}


def measured_of(record: TrialRecord, tier: str) -> TrialFigures | None:
    """Figures of a tier for its search, by the live rule; of a ceiling probe the peak output."""
    if record.purpose == "ceiling":
        rate = record.summary.get("completion_rate")
        # The result of a refused one is a start, but no ceiling.
        steady = bool(record.summary.get("completion_steady")) and record.verdict != "invalid"
        measured = TrialFigures(completion_rate=rate, grows=not steady, duration_s=record.duration_s)
        return measured if rate else TrialFigures(duration_s=record.duration_s)
    summary = (record.summary.get("tiers") or {}).get(tier) if tier else record.summary
    live = (summary or {}).get("live")
    return TrialFigures.from_json(live["measured"]) if live else None
