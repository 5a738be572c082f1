"""Load of a trial: which requests at which times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvbench.core.load.arrivals import planned_offsets, trial_seed
from kvbench.core.load.traces import TracedRequest, request_rate, scaled
from kvbench.core.records import Cell, Method
from kvbench.core.scenario.goals import Search
from kvbench.core.scenario.scenario import Scenario
from kvbench.core.search.burst import burst_offsets, burst_requests
from kvbench.core.search.ceiling import (
    SATURATION_LATENCIES,
    SATURATION_LEAST_S,
    SaturationProbe,
    plan_saturation,
)
from kvbench.core.search.live_config import TurnsLive, trial_length_s
from kvbench.core.search.sequential_trial import FILLS
from kvbench.core.sessions.session_load import SessionLoad
from kvbench.core.sessions.session_source import SessionSource

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

    ``mode``: None is the scenario's. ``paired_with``: number of the trial whose load it repeats, perhaps
    its own; caches are emptied before. 0: a unique load. ``seed_key``: replaces the cell's lengths in the
    seed. ``searched``: the trial may end once its verdict for ``tier`` is certain. ``latency_s``: of one idle
    request, 0 if unknown. ``full_length``, ``least_s``: as in ``Probe``. ``requests``: replaces the load or
    trace of the scenario.
    """

    cell: Cell
    number: int
    rate: float
    purpose: str
    mode: LoadMode | None = None
    paired_with: int = 0
    method: Method = "sustained"
    tier: str = ""
    searched: bool = True
    seed_key: str = ""
    latency_s: float = 0.0
    full_length: bool = False
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
        return self.purpose == "confirm" or self.full_length

    def seed(self, seed: int) -> int:
        """Return the trial's seed from the run's; a repeated load has the original's. It does not depend on
        the connector: the n-th trials of all connectors at the same lengths share prompts and arrivals,
        scaled to the rate."""
        return trial_seed(seed, self.seed_key or self.cell.lengths_key, self.paired_with or self.number)


@dataclass(frozen=True)
class Offered:
    """Planned send times in seconds, and the requests, unless all are alike."""

    offsets_s: NDArray[np.float64]
    requests: Sequence[TracedRequest] | None = None
    saturation: SaturationProbe | None = None
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
    def length_s(self) -> float:
        return float(self.offsets_s[-1]) if self.n else 0.0


def rate_of(trace: Sequence[TracedRequest]) -> float:
    """Return requests per second of a trace; 0 without one, or if all requests arrive at once."""
    rate = request_rate(trace) if trace else 0.0
    return rate if math.isfinite(rate) else 0.0


def planned(
    scenario: Scenario,
    plan: TrialPlan,
    trace: Sequence[TracedRequest] = (),
    source: SessionSource | None = None,
) -> Offered:
    """Plan a trial's load. ``trace``, ``source``: the scenario's trace or sessions, if any."""
    if source is not None:
        return _planned_sessions(scenario, plan, source)
    cell, burstiness, seed = plan.cell, scenario.workload.burstiness, plan.seed(scenario.seed)
    if plan.closed is not None:
        return Offered(np.zeros(plan.closed.num_requests))
    if plan.method == "burst":
        offsets = burst_offsets(plan.rate, burstiness, seed)
        requests = [TracedRequest(offset, cell.input_len, cell.output_len) for offset in offsets.tolist()]
        return Offered(offsets, requests)
    if plan.ceiling and not trace:
        saturation = plan_saturation(plan.rate, plan.latency_s, burstiness, seed)
        return Offered(saturation.offsets_s, saturation=saturation)
    n = num_requests(scenario, plan)
    if not trace:
        return Offered(planned_offsets(plan.rate, n, burstiness, seed))
    requests = scaled(trace, request_rate(trace) / plan.rate, n if plan.searched else None)
    offsets = np.array([request.offset_s for request in requests])
    saturation_of = (
        SaturationProbe(offsets, 0.0, float(offsets[-1]), plan.latency_s, plan.rate) if plan.ceiling else None
    )
    return Offered(offsets, requests, saturation_of)


def _planned_sessions(scenario: Scenario, plan: TrialPlan, source: SessionSource) -> Offered:
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
        seconds = max(SATURATION_LEAST_S, SATURATION_LATENCIES * plan.latency_s)
    elif plan.searched:
        seconds = search.max_trial_s or max(seconds, trial_length_s(plan.rate, plan.latency_s, plan.least_s))
    return _within(search, plan.rate * seconds)


def fixed_requests(scenario: Scenario, rate: float) -> int:
    """Requests of a trial that sends all of a rate's load."""
    return _within(scenario.search, rate * scenario.search.trial_s)


def _within(search: Search, requests: float) -> int:
    return max(search.min_requests, min(search.max_requests, round(requests)))
