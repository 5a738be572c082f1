"""Load of a trial: which requests at which times, and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import planned_offsets
from kvbench.core.load.traces import TracedRequest, request_rate, scaled
from kvbench.core.plan.plan import trial_seed
from kvbench.core.records import Cell, Method, RequestRecord, TrialRecord
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
    """Closed loop of ``concurrency`` requests, until ``num_requests`` are sent or the time is over."""

    concurrency: int
    num_requests: int
    duration_s: float = 0.0


@dataclass(frozen=True)
class TrialPlan:
    """Load of a trial, and its purpose.

    ``mode``: None is the scenario's. ``twin_of``: number of the trial whose load this one repeats, perhaps
    its own; caches are emptied before. 0: a unique load. ``seed_key``: replaces the cell's lengths in the
    seed. ``searched``: the trial may end once its verdict for ``tier`` is certain. ``latency_s``: of one idle
    request, 0 if unknown. ``thorough``, ``least_s``: as in ``Probe``. ``requests``: replaces the scenario's
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

    @property
    def ceiling(self) -> bool:
        """Whether it measures the highest completion rate."""
        return self.purpose == "ceiling"

    @property
    def confirms(self) -> bool:
        """Whether the search pools it: at its time limit its figures count even if inconclusive."""
        return self.purpose == "confirm" or self.thorough

    def seed(self, seed: int) -> int:
        """Return the trial's seed from the run's; a repeated load has the original's. It does not depend on
        the connector: the n-th trials of all connectors at the same lengths share prompts and arrivals,
        scaled to the rate."""
        return trial_seed(seed, self.seed_key or self.cell.lengths_key, self.twin_of or self.number)


@dataclass(frozen=True)
class Offered:
    """Planned send times in seconds, and the requests, unless all are alike."""

    offsets_s: NDArray[np.float64]
    requests: Sequence[TracedRequest] | None = None
    flood: Flood | None = None
    sessions: SessionLoad | None = None
    """Requests of a session load. ``offsets_s`` are then the starts of sessions."""
    turns: TurnsLive | None = None
    """Expected turns of these sessions."""
    requests_each: float = 1.0
    """Mean number of requests per session."""

    @property
    def n(self) -> int:
        return len(self.offsets_s)

    @property
    def requests_n(self) -> int:
        return self.n if self.sessions is None else self.sessions.requests

    @property
    def length_s(self) -> float:
        return float(self.offsets_s[-1]) if self.n else 0.0


def rate_of(trace: Sequence[TracedRequest]) -> float:
    """Requests per second of a trace; 0 without one, or if all requests come at once."""
    rate = request_rate(trace) if trace else 0.0
    return rate if math.isfinite(rate) else 0.0


def planned(scenario: Scenario, plan: TrialPlan, trace: Sequence[TracedRequest] = ()) -> Offered:
    cell, burstiness, seed = plan.cell, scenario.workload.burstiness, plan.seed(scenario.seed)
    if plan.closed is not None:
        return Offered(np.zeros(plan.closed.num_requests))
    if plan.method == "burst":
        requests = burst_plan(plan.rate, burstiness, seed, (cell.input_len, cell.output_len))
        return Offered(np.array([each.offset_s for each in requests]), requests)
    if plan.ceiling and not trace:
        flood = plan_flood(plan.rate, plan.latency_s, burstiness, seed)
        return Offered(flood.offsets_s, flood=flood)
    n = num_requests(scenario, plan)
    if not trace:
        return Offered(planned_offsets(plan.rate, n, burstiness, seed))
    requests = scaled(trace, request_rate(trace) / plan.rate, n if plan.searched else None)
    offsets = np.array([each.offset_s for each in requests])
    flood_of = Flood(offsets, 0.0, float(offsets[-1]), plan.latency_s, plan.rate) if plan.ceiling else None
    return Offered(offsets, requests, flood_of)


def planned_sessions(scenario: Scenario, plan: TrialPlan, source: SessionSource) -> Offered:
    """Plan a session load; its rate counts requests. It lasts until sessions end as fast as they begin, and
    then a multiple of that, even beyond search.max_requests."""
    search, session_rate = scenario.search, plan.rate / source.requests_each
    filled_s = source.filled_s(plan.latency_s)
    seconds = search.trial_s
    if plan.searched:
        usual_s = trial_length_s(plan.rate, plan.latency_s, plan.least_s)
        seconds = search.max_trial_s or max(seconds, min(usual_s, search.max_requests / plan.rate))
    seconds = filled_s + max(seconds, FILLS * filled_s, search.min_requests / plan.rate)
    count = max(2, math.ceil(session_rate * seconds))
    load = source.load(session_rate, count, scenario.workload.burstiness, plan.seed(scenario.seed))
    turns = TurnsLive(load.requests, filled_s, source.dispersion)
    return Offered(load.session_offsets_s, sessions=load, turns=turns, requests_each=source.requests_each)


def num_requests(scenario: Scenario, plan: TrialPlan) -> int:
    """Requests of a trial; if searched, the most that its verdict may need."""
    search = scenario.search
    if plan.method == "burst":
        return burst_requests(plan.rate)
    seconds = search.trial_s
    if plan.ceiling:
        seconds = max(FLOOD_LEAST_S, FLOOD_LATENCIES * plan.latency_s)
    elif plan.searched:
        seconds = search.max_trial_s or max(seconds, trial_length_s(plan.rate, plan.latency_s, plan.least_s))
    return _within(search, plan.rate * seconds)


def fixed_requests(scenario: Scenario, rate: float) -> int:
    """Requests of a trial that sends all of a rate's load."""
    return _within(scenario.search, rate * scenario.search.trial_s)


def _within(search: Search, requests: float) -> int:
    return max(search.min_requests, min(search.max_requests, round(requests)))


class TrialWatch:
    """Follows a trial by sequential tests (``LiveTrial``), one per SLO tier. ``decisions``: decided tiers.
    The trial ends with the tier it was run for."""

    def __init__(
        self, scenario: Scenario, plan: TrialPlan, offered: Offered, tiers: Mapping[str, Slo] | None = None
    ) -> None:
        tiers = scenario.slo.by_tier() if tiers is None else tiers
        self._tiers = dict(tiers) if plan.searched and not plan.ceiling else {}
        self._asked = plan.tier if plan.tier in self._tiers else next(iter(self._tiers), "")
        self.decisions: dict[str, Decision] = {}
        self._flood = offered.flood
        self._flood_ends_s: NDArray[np.float64] = np.empty(0)
        self._flooded = False
        self.flooded_s = 0.0
        """Duration of a ceiling probe without the grace period."""
        self._trials = {
            name: LiveTrial(
                LiveConfig(
                    offsets_s=offered.offsets_s,
                    rate=plan.rate,
                    latency_s=plan.latency_s,
                    ttft_limit_s=(slo.tightest("ttft_ms") or 0.0) / 1e3,
                    confidence=scenario.search.confidence,
                    thorough=plan.thorough,
                    confirms=plan.confirms,
                    least_s=plan.least_s,
                    hopeless_s=_hopeless_s(slo, plan.cell.output_len) if offered.turns is None else math.inf,
                    turns=offered.turns,
                ),
                [_target(criterion) for criterion in slo.all_criteria()],
            )
            for name, slo in self._tiers.items()
        }

    @property
    def decision(self) -> Decision | None:
        return self.decisions.get(self._asked)

    @property
    def main_decision(self) -> Decision | None:
        """Decision of the strictest tier, which gives the trial's verdict."""
        return self.decisions.get(next(iter(self._tiers), ""))

    def progressed(self, progress: Progress) -> bool:
        """Take progress; return True if the trial may end."""
        for name, live in self._trials.items():
            seen = [
                _observation(self._tiers[name], each)
                for each in progress.settled
                if each.error != "cancelled"
            ]
            decision = live.feed(
                progress.t_s, seen, progress.waiting_first, progress.sent, progress.offsets_s
            )
            if decision is not None:
                self.decisions.setdefault(name, decision)
        if self._flood is not None:
            return self._flood_over(self._flood, progress)
        # Undecided is a decision, too: the time is over.
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
    """A trial with its load, stopping rule, and record so far."""

    plan: TrialPlan
    trace: Sequence[TracedRequest]
    """Source of its requests; empty if all are alike."""
    offered: Offered
    watch: TrialWatch
    begun: TrialRecord

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        plan: TrialPlan,
        trace: Sequence[TracedRequest] = (),
        source: SessionSource | None = None,
        labels: Sequence[str] = (),
    ) -> PlannedTrial:
        """``trace``, ``source``: the scenario's trace or sessions, if any. ``labels``: of the run."""
        trace = plan.requests or trace
        if source is None:
            offered = planned(scenario, plan, trace)
        else:
            offered = planned_sessions(scenario, plan, source)
        begun = new_record(scenario, plan, labels)
        return cls(plan, trace, offered, TrialWatch(scenario, plan, offered), begun)


def new_record(scenario: Scenario, plan: TrialPlan, labels: Sequence[str] = ()) -> TrialRecord:
    return TrialRecord(
        trial_id=plan.trial_id,
        cell=plan.cell,
        request_rate=plan.rate,
        seed=plan.seed(scenario.seed),
        verdict="invalid",
        reason="",
        purpose=plan.purpose,
        started_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        labels=list(labels),
        method=plan.method,
    )


def _target(criterion: Criterion) -> CriterionTarget:
    """Criterion with its limit on TTFT, else on the whole latency; both include waiting."""
    limits = {each.metric: each.limit / 1e3 for each in criterion.limits}
    waits = [limits[each] for each in ("ttft_ms", "first_ttft_ms", "later_ttft_ms") if each in limits]
    wait_s = min(waits, default=None)
    whole = wait_s is None and set(limits) == {"e2el_ms"}
    return CriterionTarget(criterion.kind, criterion.target, wait_s or limits.get("e2el_ms", 0.0), whole)


def _hopeless_s(slo: Slo, output_len: int) -> float:
    """Age at which an unfinished request has certainly missed a limit; infinite if unknown."""
    each = {limit.metric for limit in slo.each}
    certain = len(slo.each) == len(slo.limits) + sum(
        limit is not None for limit in (slo.ttft_ms, slo.tpot_ms)
    ) and ({"ttft_ms", "tpot_ms"} <= each or "e2el_ms" in each)
    return slo.e2el_ms(output_len) / 1e3 if certain else math.inf


def ceiling_figures(records: Sequence[RequestRecord], flood: Flood, until_s: float) -> dict[str, Any]:
    """Completions per second of a ceiling probe, and whether they are its peak, for the summary."""
    ends = [record.last_token_s for record in records if record.ok and record.last_token_s is not None]
    found = flood.measured(ends, until_s)
    if found.completion_rate is None:
        return {}
    return {"completion_rate": found.completion_rate, "completion_steady": not found.grows}


def _observation(slo: Slo, settled: Settled) -> Observation:
    ok = settled.error == ""
    values = latencies_ms(settled.ttft_s, settled.tpot_s, settled.e2el_s, ok, settled.turn, settled.session_s)
    return settled.index, slo.observe(values, ok), slo.margins(values, ok), settled.ttft_s
