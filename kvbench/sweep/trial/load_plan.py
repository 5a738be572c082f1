"""What a trial offers: which requests at which times, and when it has been offered for long enough."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.load.traces import TracedRequest, request_rate, scaled
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Cell, Method, RequestRecord
from kvbench.core.scenario.goals import Search
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.burst import burst_requests
from kvbench.core.search.ceiling import FLOOD_LATENCIES, FLOOD_LEAST_S, Flood, plan_flood
from kvbench.core.search.live_config import (
    CriterionTarget,
    Decision,
    LiveConfig,
    Observation,
    TurnsLive,
    trial_length_s,
)
from kvbench.core.search.sequential_trial import FILLS, LiveTrial
from kvbench.core.sessions.session_load import SessionLoad
from kvbench.core.sessions.session_source import SessionSource
from kvbench.core.slo import Criterion, Slo, latencies_ms
from kvbench.planning.load_files import burst_plan
from kvbench.sweep.trial.loadgen_driver import Progress, Settled

LoadMode = Literal["router", "direct"]


@dataclass(frozen=True)
class ClosedLoad:
    """A closed loop: ``concurrency`` requests at once, until ``num_requests`` are sent or the time is up."""

    concurrency: int
    num_requests: int
    duration_s: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """What a trial is to offer. ``latency_s``: of one request alone, 0 if unknown. ``searched``: it may end
    as soon as its verdict is sure, else all of it is offered. ``ceiling``: it asks what comes out at most.
    """

    cell: Cell
    rate: float
    seed: int
    method: Method = "sustained"
    searched: bool = True
    ceiling: bool = False
    latency_s: float = 0.0
    thorough: bool = False
    """The search leans on this trial's figures: they are to be sharper than its verdict asks for."""
    confirms: bool = False
    """The search pools trials; this one is judged by its figures when its time is up, proven or not."""
    least_s: float = 0.0
    """For how long it goes on at least, as far as a trial may be prolonged."""
    closed: ClosedLoad | None = None


@dataclass(frozen=True)
class TrialPlan:
    """What is to be offered, and by which way: None is the scenario's.

    ``twin_of``: the number of the trial whose load this one repeats, request by request; it may be its own.
    Caches are emptied before such trials, since their prompts come twice. 0: a load like no other.
    ``seed_key``: takes the place of the cell's lengths in the seed.
    ``searched``: the trial may end when its verdict for ``tier`` is sure; else all of it is offered.
    ``latency_s``: of one request alone, 0 if unknown. ``requests``: what is offered instead of the scenario's
    load or trace.
    """

    cell: Cell
    number: int
    rate: float
    purpose: str
    mode: LoadMode | None = None
    twin_of: int = 0
    method: Method = "sustained"
    tier: str = ""
    searched: bool = True
    seed_key: str = ""
    latency_s: float = 0.0
    thorough: bool = False
    least_s: float = 0.0
    requests: tuple[TracedRequest, ...] = ()
    closed: ClosedLoad | None = None

    @property
    def trial_id(self) -> str:
        method = "" if self.method in ("sustained", "trace") else f"{self.method.replace('_', '-')}-"
        return f"{self.cell.key}-{method}{self.number:02d}"

    def seed(self, seed: int) -> int:
        """Return the seed, from the run's: that of the trial whose load it repeats, if it repeats one.

        The connector is not part of it. The n-th trial of every connector at the same lengths has the same
        prompts and the same arrivals, scaled to its rate, so arrival variance does not order connectors.
        """
        return trial_seed(seed, self.seed_key or self.cell.lengths_key, self.twin_of or self.number)

    def wanted(self, seed: int) -> Wanted:
        """What is to be offered, with the trial's own seed from the run's."""
        return Wanted(
            self.cell,
            self.rate,
            self.seed(seed),
            self.method,
            self.searched,
            self.purpose == "ceiling",
            self.latency_s,
            self.thorough,
            self.purpose == "confirm" or self.thorough,
            self.least_s,
            self.closed,
        )


@dataclass(frozen=True)
class Offered:
    """The planned sends in seconds, and the requests themselves where they are not all alike."""

    offsets_s: NDArray[np.float64]
    requests: Sequence[TracedRequest] | None = None
    flood: Flood | None = None
    """Of a ceiling probe."""
    sessions: SessionLoad | None = None
    """Of a load of sessions: its requests. ``offsets_s`` are then when sessions begin."""
    turns: TurnsLive | None = None
    """What is known of these beforehand."""

    @property
    def n(self) -> int:
        return len(self.offsets_s)

    @property
    def requests_n(self) -> int:
        """At most so many requests."""
        return self.n if self.sessions is None else self.sessions.requests

    @property
    def length_s(self) -> float:
        return float(self.offsets_s[-1]) if self.n else 0.0


def rate_of(trace: Sequence[TracedRequest]) -> float:
    """Requests per second of a trace; 0 without one, or where all its requests come at once."""
    rate = request_rate(trace) if trace else 0.0
    return rate if math.isfinite(rate) else 0.0


def planned(scenario: Scenario, wanted: Wanted, trace: Sequence[TracedRequest] = ()) -> Offered:
    """The load of one trial: a function of the scenario, the CLI options and the trace."""
    cell, burstiness = wanted.cell, scenario.workload.burstiness
    if wanted.closed is not None:
        return Offered(np.zeros(wanted.closed.num_requests))
    if wanted.method == "burst":
        requests = burst_plan(wanted.rate, burstiness, wanted.seed, (cell.input_len, cell.output_len))
        return Offered(np.array([each.offset_s for each in requests]), requests)
    if wanted.ceiling and not trace:
        flood = plan_flood(wanted.rate, wanted.latency_s, burstiness, wanted.seed)
        return Offered(flood.offsets_s, flood=flood)
    if trace:
        most = num_requests(scenario, wanted) if wanted.searched else None
        requests = scaled(trace, request_rate(trace) / wanted.rate, most)
        offsets = np.array([each.offset_s for each in requests])
        own = (
            Flood(offsets, 0.0, float(offsets[-1]), wanted.latency_s, wanted.rate) if wanted.ceiling else None
        )
        return Offered(offsets, requests, own)
    n = num_requests(scenario, wanted)
    return Offered(planned_offsets(wanted.rate, n, burstiness, wanted.seed))


def planned_sessions(scenario: Scenario, wanted: Wanted, source: SessionSource) -> Offered:
    """The load of one trial of sessions. Its rate counts requests: a session brings several, in the mean.

    It is offered until sessions end as fast as they begin, and for some times as long again: for as many
    requests as that takes, be they more than search.max_requests.
    """
    search, session_rate = scenario.search, wanted.rate / source.requests_each
    filled_s = source.filled_s(wanted.latency_s)
    seconds = search.trial_s
    if wanted.searched:
        usual_s = trial_length_s(wanted.rate, wanted.latency_s, wanted.least_s)
        seconds = search.max_trial_s or max(seconds, min(usual_s, search.max_requests / wanted.rate))
    seconds = filled_s + max(seconds, FILLS * filled_s, search.min_requests / wanted.rate)
    count = max(2, math.ceil(session_rate * seconds))
    load = source.load(session_rate, count, scenario.workload.burstiness, wanted.seed)
    turns = TurnsLive(load.requests, filled_s, source.dispersion)
    return Offered(load.session_offsets_s, sessions=load, turns=turns)


def num_requests(scenario: Scenario, wanted: Wanted) -> int:
    """Requests of a trial; of one that is searched as many as its verdict may take at most."""
    search = scenario.search
    if wanted.method == "burst":
        return burst_requests(wanted.rate)
    seconds = search.trial_s
    if wanted.ceiling:
        seconds = max(FLOOD_LEAST_S, FLOOD_LATENCIES * wanted.latency_s)
    elif wanted.searched:
        seconds = search.max_trial_s or max(
            seconds, trial_length_s(wanted.rate, wanted.latency_s, wanted.least_s)
        )
    return _within(search, wanted.rate * seconds)


def fixed_requests(scenario: Scenario, rate: float) -> int:
    """Requests of a trial that offers all of a rate's load."""
    return _within(scenario.search, rate * scenario.search.trial_s)


def _within(search: Search, requests: float) -> int:
    return max(search.min_requests, min(search.max_requests, round(requests)))


class TrialWatch:
    """Follows a trial by the rule of sequential looks (``LiveTrial``), once for each SLO tier.

    ``decisions`` has the tiers that are decided. A trial is over as soon as the tier that it was run for is.
    """

    def __init__(
        self, scenario: Scenario, wanted: Wanted, offered: Offered, tiers: Mapping[str, Slo], tier: str = ""
    ) -> None:
        self._tiers = dict(tiers) if wanted.searched and not wanted.ceiling else {}
        self._asked = tier if tier in self._tiers else next(iter(self._tiers), "")
        self.decisions: dict[str, Decision] = {}
        self._flood = offered.flood
        self._flood_ends_s: NDArray[np.float64] = np.empty(0)
        self._flooded = False
        self.flooded_s = 0.0
        """For how long a ceiling probe went on. What ends in the grace after it is told, too, and is none of
        it: with nothing left under way it would look as if all of the flood had been carried."""
        self._trials = {
            name: LiveTrial(
                LiveConfig(
                    offsets_s=offered.offsets_s,
                    rate=wanted.rate,
                    latency_s=wanted.latency_s,
                    ttft_limit_s=(slo.tightest("ttft_ms") or 0.0) / 1e3,
                    confidence=scenario.search.confidence,
                    thorough=wanted.thorough,
                    confirms=wanted.confirms,
                    least_s=wanted.least_s,
                    hopeless_s=_hopeless_s(slo, wanted.cell.output_len)
                    if offered.turns is None
                    else math.inf,
                    turns=offered.turns,
                ),
                [_target(criterion) for criterion in slo.all_criteria()],
            )
            for name, slo in self._tiers.items()
        }

    @property
    def decision(self) -> Decision | None:
        """That of the tier that the trial was run for."""
        return self.decisions.get(self._asked)

    @property
    def main_decision(self) -> Decision | None:
        """That of the strictest tier, by which the trial's own verdict is given."""
        return self.decisions.get(next(iter(self._tiers), ""))

    def progressed(self, progress: Progress) -> bool:
        """Takes in what became known; True if the trial may end."""
        for name, live in self._trials.items():
            seen = [_observation(self._tiers[name], each) for each in progress.settled if not _stopped(each)]
            decision = live.feed(
                progress.t_s, seen, progress.waiting_first, progress.sent, progress.offsets_s
            )
            if decision is not None:
                self.decisions.setdefault(name, decision)
        if self._flood is not None:
            return self._flood_over(self._flood, progress)
        # Undecided is a decision, too: the time is up.
        return self.decision is not None

    def _flood_over(self, flood: Flood, progress: Progress) -> bool:
        if self._flooded:
            return True
        answered = (each for each in progress.settled if not each.error and each.e2el_s is not None)
        ends = [float(flood.offsets_s[each.index]) + (each.e2el_s or 0.0) for each in answered]
        self._flood_ends_s = np.append(self._flood_ends_s, ends)
        self.flooded_s = progress.t_s
        self._flooded = flood.is_over(self._flood_ends_s, progress.t_s)
        return self._flooded


@dataclass(frozen=True)
class PlannedTrial:
    """A trial with all that is offered in it, and who sees when that was long enough."""

    plan: TrialPlan
    trace: Sequence[TracedRequest]
    """What its requests are taken from; empty where they are all alike."""
    offered: Offered
    watch: TrialWatch

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        plan: TrialPlan,
        trace: Sequence[TracedRequest] = (),
        source: SessionSource | None = None,
    ) -> PlannedTrial:
        """``trace``, ``source``: the scenario's trace or sessions, if it has them."""
        trace, wanted = plan.requests or trace, plan.wanted(scenario.seed)
        if source is None:
            offered = planned(scenario, wanted, trace)
        else:
            offered = planned_sessions(scenario, wanted, source)
        return cls(
            plan, trace, offered, TrialWatch(scenario, wanted, offered, scenario.slo.by_tier(), plan.tier)
        )


def _target(criterion: Criterion) -> CriterionTarget:
    """With its limit on TTFT, or else on the whole latency: waiting is a part of both."""
    limits = {each.metric: each.limit / 1e3 for each in criterion.limits}
    waits = [limits[each] for each in ("ttft_ms", "first_ttft_ms", "later_ttft_ms") if each in limits]
    wait_s = min(waits, default=None)
    whole = wait_s is None and set(limits) == {"e2el_ms"}
    return CriterionTarget(criterion.kind, criterion.target, wait_s or limits.get("e2el_ms", 0.0), whole)


def _hopeless_s(slo: Slo, output_len: int) -> float:
    """After so long a request without an end has broken a limit for sure; inf where that cannot be said."""
    each = {limit.metric for limit in slo.each}
    certain = len(slo.each) == len(slo.limits) + sum(
        limit is not None for limit in (slo.ttft_ms, slo.tpot_ms)
    ) and ({"ttft_ms", "tpot_ms"} <= each or "e2el_ms" in each)
    return slo.e2el_ms(output_len) / 1e3 if certain else math.inf


def ceiling_figures(records: Sequence[RequestRecord], flood: Flood, until_s: float) -> dict[str, Any]:
    """A ceiling probe's completions per second, and whether they are a ceiling, for its trial's summary."""
    ends = [record.last_token_s for record in records if record.ok and record.last_token_s is not None]
    found = flood.measured(ends, until_s)
    if found.completion_rate is None:
        return {}
    return {"completion_rate": found.completion_rate, "completion_steady": not found.grows}


def _stopped(settled: Settled) -> bool:
    return settled.error == "cancelled"


def _observation(slo: Slo, settled: Settled) -> Observation:
    ok = settled.error == ""
    values = latencies_ms(settled.ttft_s, settled.tpot_s, settled.e2el_s, ok, settled.turn, settled.session_s)
    return settled.index, slo.observe(values, ok), slo.margins(values, ok), settled.ttft_s
